cimport cython
from sim.engine.by_expert cimport ByExpert
from sim.engine.flying cimport Flying
from sim.engine.residency cimport Residency
from sim.policy.decisions cimport Prefetch
from sim.policy.pieces cimport Piece
from sim.policy.tickets cimport all_tickets
from sim.policy.wishes cimport Wishes

@cython.final
cdef class PrefetchQueue:
    cdef Residency residency
    cdef ByExpert by_expert
    cdef readonly int n_waiting
    cdef int n_links, n_known
    cdef int[::1] lines
    cdef long long[::1] n_in
    cdef unsigned char[::1] waits
    cdef double[::1] priority
    cdef long long[::1] asked
    cdef readonly list after
    cdef long long n_asked
    cpdef push(self, Piece piece, double priority, tuple after)
    @cython.locals(piece=Piece, ask=Prefetch)
    cpdef replace(self, object wanted)
    @cython.locals(at=int, index=cython.longlong, n_pieces=int, piece=Piece)
    cpdef take(self, Wishes wishes, int start, int stop, int fresh, tuple after, int most)
    cdef _join(self, Piece piece, double priority, tuple after)
    cdef _sort(self)
    @cython.locals(index=int, value=double)
    cdef _note(self, Piece piece, double priority, tuple after)
    @cython.locals(lines=cython.int[::1], place=int, at=int)
    cdef void _insert(self, Piece piece) noexcept
    @cython.locals(lines=cython.int[::1], index=int, priority=double, asked=cython.longlong, low=int, high=int, middle=int,
                   other=int)
    cdef int _place(self, Piece piece) noexcept
    @cython.locals(index=int, piece=Piece)
    cpdef Piece pop(self, int link=*)
    @cython.locals(link=int, found=int, first=int, index=int)
    cpdef int best(self, Flying flying, int depth) except -2
    cpdef bint remove(self, Piece piece) except -1
    cdef bint _awaits(self, Piece piece) noexcept
    @cython.locals(lines=cython.int[::1], place=int, stop=int, at=int)
    cdef void _leave(self, Piece piece) noexcept
    @cython.locals(link=int, first=int, at=int)
    cpdef clear(self)
    @cython.locals(piece=Piece)
    cpdef drop(self, int up_to_layer)
    @cython.locals(link=int, at=int, index=int)
    cpdef list pieces(self)
    @cython.locals(lines=cython.int[::1], link=int, at=int)
    cdef _grow(self)
