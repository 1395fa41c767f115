cimport cython
from sim.policy.wide cimport moesim_is_wide, most_of_both

@cython.locals(n=int, i=int, at=int, most=double, m0=double, m1=double, m2=double, m3=double, m4=double, m5=double, m6=double, m7=double)
cdef int largest(const double[::1] values) noexcept

@cython.locals(slot=int)
cpdef int most_alike(const double[::1] one, const double[::1] other, double share) except -1
@cython.locals(rest=double, at=int)
cdef int _most_alike(const double[::1] one, const double[::1] other, double share, double[::1] score)

@cython.locals(n=int, rest=double, n_taken=int, i=int, at=int, slot=cython.longlong, length=double, length2=double, best=cython.longlong)
cdef void _in_turn(double[:, ::1] products, double[::1] norms, double[:, ::1] among, double[::1] own, double[:, ::1] products2, double[::1] norms2, double[:, ::1] among2, double[::1] own2, double share, long long[::1] slots, double[::1] score, long long[::1] taken, long long[::1] holder)
