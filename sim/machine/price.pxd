cimport cython

@cython.final
cdef class Price:
    cdef readonly double duration_s, n_bytes
    cdef readonly int attributed_to

@cython.final
cdef class Launch:
    cdef public double all_s, extra_s, first_s, kernels_s, launch_s, n_kernels, tail_frac
    cdef public long long n

@cython.final
cdef class Operation:
    cdef readonly Launch launch
    cdef readonly double all_s, duration_s, first_s, tail_s
    cdef readonly int length, priced
    cdef public long long n
    cdef public double slack_s, slowed_s, more_s
    cdef public Operation next
    cdef public int place
    cdef void cost(self, double duration_s, int length, int priced) noexcept
