cimport cython

@cython.final
cdef class Turn:
    cdef public int n, layer
    cdef public long long[::1] experts
    cdef public double[::1] arrived_s, ends_s
    cpdef void begin(self, int layer) noexcept
