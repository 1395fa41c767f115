cimport cython
from sim.policy.wide cimport as_shorts, first_largest, moesim_is_wide, short_dots

cpdef object scaled(const double[::1] values)
@cython.locals(most=double, scale=double, value=double, to_whole=double, at=int)
cdef void _scale(const double[::1] values, double[::1] whole)

@cython.final
cdef class VectorSearch:
    cdef readonly int capacity, n_values
    cdef readonly object vectors, inverse_norms
    cdef readonly bint wide
    cdef object shorts
    cdef double[:, ::1] double
    cdef double[::1] norms
    cdef short[:, ::1] short
    cdef short[::1] asked
    @cython.locals(at=int)
    cpdef put(self, int slot, const double[::1] vector)
    @cython.locals(own=double)
    cpdef object cosines(self, const double[::1] vector, int n)
    @cython.locals(slot=int)
    cpdef int nearest(self, const double[::1] vector, int n) except -1
    cdef readonly object alike_array
    cdef double[::1] alike
    @cython.locals(i=int)
    cdef void _fill(self, const double[::1] vector, int n, double own, double[::1] room)
    @cython.locals(square=double, value=double, most=double, to_whole=double, wrong=bint, at=int)
    cdef double _inverse_norm(self, const double[::1] vector) except -1.0
