cimport cython

@cython.final
cdef class Turn:
    cdef public int n, layer
    cdef public bint all_known, all_single
    cdef public long long[::1] experts, tokens
    cdef public double[::1] arrived_s, ends_s
    cpdef void begin(self, int layer) noexcept
