cimport cython
@cython.final
cdef class Wishes:
    cdef readonly long long[::1] indices
    cdef readonly double[::1] priorities
