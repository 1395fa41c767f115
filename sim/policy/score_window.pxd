cimport cython

@cython.final
cdef class ScoreWindow:
    cdef double[::1] means, sums, ring
    cdef readonly long long n, n_experts, n_all, n_seen
    @cython.locals(means='double[::1]', sums='double[::1]', ring='double[::1]', n=cython.longlong, at=cython.longlong,
                   oldest=cython.longlong, expert=cython.longlong, score=double, total=double)
    cpdef observe(self, long long layer, list scores)
    cpdef end(self)
