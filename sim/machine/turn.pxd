cimport cython

@cython.final
cdef class Turn:
    cdef readonly int layer, first
    cdef readonly long long n_bytes
    cdef public int n, n_here, n_leaving
    cdef public long long[::1] experts, leaving
    cdef public double[::1] arrived_s, ends_s
    cdef int _n_experts
    cpdef void begin(self, int layer) noexcept
