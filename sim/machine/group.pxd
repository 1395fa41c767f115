cimport cython
@cython.final
cdef class Group:
    cdef public bint open
    cdef public double launched_s, slack_s
    cdef public object precision
    cdef public int place
