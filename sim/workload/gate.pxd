cimport cython

@cython.final
cdef class Gate:
    cdef public int layer
    cdef public object iteration, phase
    cdef public dict needs, asked, precision
    cdef Arrays _arrays

@cython.locals(gate=Gate)
cpdef Gate gate_of(int layer, object iteration, dict needs, Arrays arrays)

cdef class Arrays:
    cdef readonly object trace, needs
    cdef object _iteration, _lists
    cdef dict _cache, _answers, _blocks, _ahead
    cdef public bint hides_later
    cdef public int n_at_once
    cdef int _block_rows
    cpdef begin(self, object iteration)
    cpdef list scores_of_token(self)
    cpdef at_once(self, object work, int layer, object reads=*)
    cpdef by_layer(self, object work, int layer, object reads=*)
