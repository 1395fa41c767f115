cimport cython
from sim.engine.by_expert cimport ByExpert
from sim.engine.flying cimport Flying
from sim.engine.residency cimport Residency
from sim.policy.pieces cimport Piece
from sim.policy.tickets cimport all_tickets
from sim.policy.wishes cimport Wishes

@cython.final
cdef class PrefetchQueue:
    cdef Residency residency
    cdef ByExpert by_expert
    cdef readonly int n_waiting
    cdef list lines
    cdef int n_known
    cdef unsigned char[::1] waits
    cdef double[::1] priority
    cdef long long[::1] asked
    cdef readonly list after
    cdef long long n_asked
    @cython.locals(line=list)
    cpdef push(self, Piece piece, double priority, tuple after)
    @cython.locals(piece=Piece)
    cpdef replace(self, object wanted)
    @cython.locals(at=int, index=cython.longlong, n_pieces=int, piece=Piece)
    cpdef take(self, Wishes wishes, int start, int stop, int fresh, tuple after, int most)
    @cython.locals(line=list)
    cdef _join(self, Piece piece, double priority, tuple after)
    cdef _sort(self)
    @cython.locals(index=int, value=double)
    cdef list _note(self, Piece piece, double priority, tuple after)
    @cython.locals(priority=double, asked=cython.longlong, low=int, high=int, middle=int, other=int)
    cdef int _place(self, list line, int index)
    @cython.locals(line=list, index=int)
    cpdef Piece pop(self, int link=*)
    @cython.locals(link=int, found=int, first=int, index=int, line=list)
    cpdef int best(self, Flying flying, int depth) except -2
    cpdef bint remove(self, Piece piece) except -1
    cdef bint _awaits(self, Piece piece) except -1
    @cython.locals(line=list)
    cdef _leave(self, Piece piece)
    @cython.locals(line=list, index=int)
    cpdef clear(self)
    @cython.locals(piece=Piece)
    cpdef drop(self, int up_to_layer)
    cpdef list pieces(self)
    cdef _grow(self)
