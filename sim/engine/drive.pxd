cimport cython

@cython.final
cdef class Step:
    cdef readonly object iteration
    cdef readonly double start_s, end_s

cdef class Clockwork:
    cdef readonly list requests
    cdef readonly dict phases
    cdef dict _open
    cdef list _before_s
