cimport cython
from sim.policy.wide cimport next_at_most
from sim.engine.pending_experts cimport PendingExperts
from sim.engine.residency cimport Residency
from sim.machine.turn cimport Turn
from sim.policy.pieces cimport Piece

cdef class Victims:
    cdef public bint touches
    cpdef placed(self, int index)
    cpdef void touched(self, int index) noexcept
    cpdef void left(self, int index) noexcept
    cpdef void touch(self, Turn turn, int start, int stop) noexcept
    cpdef int victim(self, Piece piece, bint speculative) except -2

@cython.final
cdef class Line:
    cdef Residency residency
    cdef int[::1] first, last
    @cython.locals(residency=Residency, last=int)
    cdef void append(self, int index, int line) noexcept
    @cython.locals(residency=Residency, last=int, index=int, at=cython.Py_ssize_t)
    cdef void extend(self, Turn turn, int start, int stop, int line) noexcept
    @cython.locals(residency=Residency, before=int, after=int)
    cdef void unlink(self, int index) noexcept
    cdef void cut(self, int line, int stays) noexcept

cdef class InTurn(Victims):
    cdef Residency residency
    cdef PendingExperts pending
    cdef bint per_layer
    cdef int n_lines, n_whole, n_experts
    cdef Line line
    @cython.locals(piece=Piece)
    cdef int _cache(self, int index) noexcept
    cpdef placed(self, int index)
    cpdef void touched(self, int index) noexcept
    cpdef void left(self, int index) noexcept
    @cython.locals(line=Line, first=int, at=int)
    cpdef void touch(self, Turn turn, int start, int stop) noexcept
    cpdef void come(self, Turn turn, int start, int stop) noexcept
    @cython.locals(at=int)
    cpdef void leave(self, Turn turn, int start, int stop) noexcept
    @cython.locals(line=Line, first=int, cache=int, start=int, at=int)
    cdef void exchange(self, Turn turn, bint in_a_row, int stays) noexcept
    @cython.locals(first=int, index=int, whole=int)
    cpdef int victim(self, Piece piece, bint speculative) except -2
    @cython.locals(piece=Piece)
    cdef int _whole(self, int index) noexcept

cdef class Ranked(Victims):
    cdef Residency residency
    cdef PendingExperts pending
    cdef object order
    cdef double[::1] ranks
    cdef unsigned char[::1] bars
    cdef bint per_layer, by_expert, guarded, spares_unused
    cdef int n_whole, n_here
    cdef long long[::1] resident, stands
    cdef readonly object homes
    cpdef placed(self, int index)
    @cython.locals(last=cython.longlong)
    cpdef void left(self, int index) noexcept
    @cython.locals(best=int)
    cpdef int victim(self, Piece piece, bint speculative) except -2
    @cython.locals(residency=Residency, ranks=double[::1], resident=cython.longlong[::1], per_layer=bint, n_experts=int,
                   n_gpus=int, first=int, at=int, n=int, pending_from=int, best=int,
                   best_bar=int, best_rank=double, other=Piece, most=double, index=int, expert=int, bar=int, rank=double)
    cdef int _find(self, Piece piece, bint speculative) noexcept
    cdef bint _before(self, int index, int other) noexcept
    cdef int _bar(self, int index) noexcept
