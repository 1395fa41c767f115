cimport cython
from sim.policy.wide cimport add_pairs, fits_pairs, moesim_is_wide, put_pairs, root

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
