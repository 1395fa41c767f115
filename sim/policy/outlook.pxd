cimport cython
from sim.policy.path_search cimport PathSearch
from sim.policy.wishes cimport Wishes

cdef int FEW

@cython.final
cdef class Outlook:
    cdef readonly int n_layers, n_experts, distance, reach
    cdef readonly bint to_last
    cdef double[::1] rank
    cdef unsigned char[::1] bar_of
    cdef unsigned char bar
    cdef bint ranks
    cdef long long[::1] n_chosen, chosen, heap
    cdef double[::1] shares, believed_shares, visits
    cdef double[::1] row
    cdef unsigned char[::1] is_chosen, believed, expected
    cdef readonly Wishes wishes
    cdef readonly int n_fresh
    cdef long long[::1] indices
    cdef double[::1] priorities
    cdef readonly long long needed, named, right
    @cython.locals(m=int, i=int)
    cpdef choose(self, int first, const double[:, ::1] rows, const double[::1] similarities, int least, bint threshold, bint joins=*)
    cpdef choose_found(self, PathSearch search, int first, int m, int least, bint threshold, bint joins=*)
    cpdef choose_path(self, PathSearch search, int slot, double similarity, int first, int m, int least, bint threshold, bint joins=*)
    @cython.locals(n_layers=int, i=int)
    cdef _choose_stored(self, PathSearch search, int first, int m, int least, bint threshold, bint joins, int slot, double similarity)
    @cython.locals(n_experts=int, base=int, heap=cython.longlong[::1], shares=double[::1], total=double, expert=int, share=double, goal=double, at=int, reached=double, left=int, few=bint, best=int)
    cdef void _choose_row(self, int layer, const double[::1] row, double similarity, int least, bint threshold, bint joins) noexcept
    @cython.locals(base=int, at=int)
    cdef void _begin(self, int layer, bint joins) noexcept
    @cython.locals(at=int)
    cdef void _join(self, int layer, int expert) noexcept
    @cython.locals(heap=cython.longlong[::1], expert=int, score=double, below=int, lower=int, other=int)
    cdef void _sink(self, const double[::1] row, int at, int n) noexcept
    cdef int _base(self, int layer) except -1
    @cython.locals(base=int, expected=bint, expert=int, at=int)
    cpdef visit(self, int layer, dict experts)
    @cython.locals(left=double)
    cpdef uncount(self, int index, double n)
    @cython.locals(base=int, at=int, share=double)
    cpdef believe(self, int layer)
    @cython.locals(layer=int)
    cpdef foresee(self, int now)
    @cython.locals(base=int, at=int)
    cpdef forget(self, int layer)
    @cython.locals(n=int)
    cpdef ahead(self, int now, tuple after)
    @cython.locals(n=int, fresh=int, gap=int, layer=int, base=int, place=int, at=int)
    cpdef int look_ahead(self, int now) except -1
    @cython.locals(base=int, place=int)
    cpdef list named_of(self, int layer)
