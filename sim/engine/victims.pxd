cimport cython
from sim.engine.owed cimport Owed
from sim.engine.residency cimport Residency
from sim.policy.pieces cimport Piece

cdef class Victims:
    cdef public bint touches
    cpdef void placed(self, int index)
    cpdef void touched(self, int index) noexcept
    cpdef void left(self, int index) noexcept
    cpdef int victim(self, Piece piece, bint speculative)

cdef class InTurn(Victims):
    cdef Residency residency
    cdef Owed owed
    cdef bint per_layer
    cdef int n_rings, n_known
    cdef long long[::1] next, prev
    cdef void _grow(self)
    cdef int _ring(self, Piece piece) noexcept
    @cython.locals(piece=Piece)
    cpdef void placed(self, int index)
    @cython.locals(piece=Piece)
    cpdef void touched(self, int index) noexcept
    @cython.locals(last=int)
    cdef void _append(self, int at, int ring) noexcept
    @cython.locals(at=int, before=int, after=int)
    cpdef void left(self, int index) noexcept
    @cython.locals(at=int, index=int, candidate=Piece)
    cpdef int victim(self, Piece piece, bint speculative)

cdef class Ranked(Victims):
    cdef Residency residency
    cdef Owed owed
    cdef object order
    cdef double[::1] ranks
    cdef unsigned char[::1] bars
    cdef bint per_layer, by_expert, guarded, spares_unused
    cdef int n_whole
    @cython.locals(best=int)
    cpdef int victim(self, Piece piece, bint speculative)
    @cython.locals(residency=Residency, n_experts=int, n_gpus=int, first=int, at=int, owed_from=int, best=int,
                   best_bar=int, best_rank=double, index=int, expert=int, bar=int, rank=double)
    cdef int _find(self, Piece piece, bint speculative)
    cdef bint _before(self, int index, int other)
    cdef int _bar(self, int index)
