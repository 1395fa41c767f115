cimport cython
@cython.final
cdef class Meter:
    cdef readonly list keys
    cdef long long[::1] n, order
    cdef readonly int n_met
    cdef dict _at
    cpdef int at(self, object key)
    cpdef void add(self, int at, long long n) noexcept
    cpdef list read(self)

@cython.final
cdef class Seconds:
    cdef readonly Meter meter
    cdef double spent_s
    cpdef double total_s(self)
