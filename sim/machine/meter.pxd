cimport cython

@cython.final
cdef class Meter:
    cdef double[::1] duration_s
    cdef long long[::1] attributed_to, n, order
    cdef readonly int n_known, n_met
    cdef dict _at
    @cython.locals(known=dict, at=int)
    cpdef int at(self, double duration_s, int attributed_to=*)
    cpdef void add(self, int at, long long n) noexcept
    @cython.locals(at=int, index=int)
    cpdef spend(self, list spent_s)
    cpdef forget(self)

@cython.final
cdef class Seconds:
    cdef readonly Meter meter
    cdef double spent_s
    @cython.locals(meter=Meter, at=int, index=int)
    cpdef double total_s(self)
