cimport cython

cdef class _Stack:
    cdef public long n, most
    cdef long long[::1] _changes
    cpdef list hits(self, long kind)

@cython.final
cdef class RecencyStack(_Stack):
    cdef long _n_seen, _n_groups, _groups
    cdef long long[::1] _tree, _count, _last, _group, _before, _behind, _least, _from, _marks
    cdef long long[::1] _new_least, _new_from, _new_marks, _place
    @cython.locals(changes='long long[::1]', row=long, i=long, size=long)
    cpdef visit(self, const long long[::1] ids, long at, long n, long first, long kind)
    @cython.locals(group=long, newer=long, n=long, member=long, j=long, room=long, left=long, missed=long)
    cdef void _look_up(self, long piece, long i) noexcept
    cdef long _was_there(self, long piece, long size) noexcept
    @cython.locals(group=long, before=long, behind=long)
    cdef void _leave(self, long piece) noexcept
    @cython.locals(group=long, before=long, mark=long)
    cdef void _join(self, long piece, long i) noexcept
    cdef void _add(self, long group, long n) noexcept
    @cython.locals(total=long)
    cdef long _up_to(self, long group) noexcept
    @cython.locals(n_groups=long, group=long, member=long)
    cdef void _renumber(self) noexcept

@cython.final
cdef class RankStack(_Stack):
    cdef long _base, _n_seen, _n_visits, _n_heap, _n_apart, _n_marks
    cdef long long[::1] _ties, _stack, _asked, _heap, _apart, _own, _n_own, _marks, _later
    @cython.locals(changes='long long[::1]', row=long, i=long, size=long, n_hits=long)
    cpdef visit(self, const long long[::1] ids, long at, long n, long first, long kind, const double[::1] rank)
    @cython.locals(n_found=long, place=long, piece=long, i=long)
    cdef void _restack(self, const long long[::1] ids, long at, long n, long first, long row, const double[::1] rank) noexcept
    @cython.locals(other=long)
    cdef void _count(self, long size, long row) noexcept
    @cython.locals(place=long)
    cdef void _part(self, long size) noexcept
    @cython.locals(own='long long[::1]', start=long, now=long, here=long, n_hits=long, n_later=long, place=long, others=long, i=long, piece=long)
    cdef long _exchange(self, long size, const long long[::1] ids, long at, long n, long first, const double[::1] rank) noexcept
    @cython.locals(found=long, place=long, piece=long)
    cdef long _least(self, long start, long n, long but, const double[::1] rank) noexcept
    @cython.locals(place=long)
    cdef bint _is_prefix(self, long size) noexcept
    @cython.locals(mine=double, its=double)
    cdef bint _is_less(self, long piece, long other, const double[::1] rank) noexcept
    @cython.locals(heap='long long[::1]', at=long, above=long)
    cdef void _push(self, long piece, const double[::1] rank) noexcept
    @cython.locals(best=long)
    cdef long _pop(self, const double[::1] rank) noexcept
    @cython.locals(heap='long long[::1]', n=long, at=long, piece=long, below=long)
    cdef void _sink(self, const double[::1] rank) noexcept
