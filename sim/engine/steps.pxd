# A generator's next step, where the engine is compiled: a return is an answer, not an exception that is raised to be caught.

cdef extern from *:
    """
    /* What a generator yields, given an answer; the generator itself where it has come to its end. */
    static PyObject* moesim_step(PyObject* steps, PyObject* answer) {
        PyObject* said = NULL;
        switch (PyIter_Send(steps, answer, &said)) {
            case PYGEN_NEXT: return said;
            case PYGEN_RETURN: Py_DECREF(said); return Py_NewRef(steps);
            default: return NULL;
        }
    }
    """
    object moesim_step(object steps, object answer)
