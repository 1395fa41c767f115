cimport cython
from sim.policy.wide cimport add_pairs, as_shorts, first_largest, fits_pairs, moesim_is_wide, most_of_both, put_pairs, root, short_dots

@cython.locals(n=int, i=int, at=int, most=double, m0=double, m1=double, m2=double, m3=double, m4=double, m5=double, m6=double, m7=double)
cdef int largest(const double[::1] values) noexcept

@cython.final
cdef class PathSearch:
    cdef readonly int n_layers, n_width, n_stored
    cdef readonly object paths
    cdef object arrays
    cdef readonly bint is_single
    cdef float[:, :, ::1] single
    cdef double[:, :, ::1] double
    cdef public bint wide
    cdef object pair_array
    cdef short[:, :, :, ::1] pairs
    cdef float[::1] products
    cdef double[::1] dots
    cdef double[:, ::1] inverse_norms, alike
    cdef object alike_array, norm_array
    cdef readonly object slot_array, similarity_array, whole_array, own_array
    cdef long long[::1] slots
    cdef double[::1] similarities, whole, own
    cpdef bint find(self, const double[:, ::1] rows, int n) except -1
    @cython.locals(n_layers=int, n_stored=int, dots=double[::1], norms=double[:, ::1], alike=double[:, ::1], places=cython.longlong[::1], last=int, slot=int, wide=bint, square=double, i=int, layer=int, at=int)
    cpdef bint along(self, const double[:, ::1] rows, int n, long long[::1] slots, double[::1] similarities, double[::1] whole, double[::1] own) except -1
    @cython.locals(paths=float[:, :, ::1], dots=double[::1], v0=float, v1=float, v2=float, v3=float, v4=float, v5=float, v6=float, v7=float, low=float, top=float, i=int)
    cdef void _add_eight(self, int layer, const double[:, ::1] rows, int n) noexcept
    @cython.locals(paths=float[:, :, ::1], products=float[::1], dots=double[::1], v0=float, v1=float, v2=float, v3=float, low=float, i=int, at=int, four=int)
    cdef void _add_single(self, int layer, const double[:, ::1] rows, int n) noexcept
    @cython.locals(paths=double[:, :, ::1], dots=double[::1], v0=double, v1=double, v2=double, v3=double, low=double,
                   value=double, i=int, at=int, four=int)
    cdef void _add_double(self, int layer, const double[:, ::1] rows, int n) noexcept
    @cython.locals(n_layers=int, m=int, i=int)
    cpdef rows(self, int first, const long long[::1] slots, double[:, ::1] out)
    @cython.locals(at=int)
    cdef void read(self, int layer, int slot, double[::1] row) noexcept
    @cython.locals(n_layers=int, n_width=int, layer=int, at=int)
    cpdef put(self, int slot, const double[:, ::1] rows, const double[::1] inverse_norms)
    @cython.locals(most=double, square=double, layer=int, at=int)
    cdef double _largest(self, const double[:, ::1] rows) noexcept

@cython.locals(n=int, rest=double, n_taken=int, i=int, at=int, slot=cython.longlong, length=double, length2=double, best=cython.longlong)
cdef void _in_turn(double[:, ::1] products, double[::1] norms, double[:, ::1] among, double[::1] own, double[:, ::1] products2, double[::1] norms2, double[:, ::1] among2, double[::1] own2, double share, long long[::1] slots, double[::1] score, long long[::1] taken, long long[::1] holder)

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

@cython.locals(slot=int)
cpdef int most_alike(const double[::1] one, const double[::1] other, double share) except -1
@cython.locals(rest=double, at=int)
cdef int _most_alike(const double[::1] one, const double[::1] other, double share, double[::1] score)
