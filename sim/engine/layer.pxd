cimport cython
from sim.engine.by_expert cimport ByExpert
from sim.engine.copies cimport Copies
from sim.engine.counts cimport HitCounts, Tally
from sim.engine.pending_experts cimport PendingExperts
from sim.engine.residency cimport Residency, side_by_side, tiling
from sim.engine.victims cimport Victims
from sim.machine.protocol cimport Machine
from sim.policy.pieces cimport Piece, Pieces
from sim.policy.tickets cimport Ticket, ends_at

cdef int _GPU, _HIT, _MISS

@cython.final
cdef class Layer:
    cdef readonly object policy
    cdef public object log, view
    cdef readonly Machine machine
    cdef readonly Pieces pieces
    cdef readonly Residency residency
    cdef readonly PendingExperts pending
    cdef readonly Copies copies
    cdef readonly Tally tally
    cdef int n_experts
    cdef bint has_cpu
    cdef long long[::1] kinds, columns
    cdef ByExpert by_expert
    cdef readonly list ran_on_cpu
    cdef readonly dict joins, ahead, begun
    cdef public dict lower
    @cython.locals(residency=Residency, pending=PendingExperts, first=int, at=int, expert=int, index=int, kind=int, now_s=double,
                   prefetched=bint)
    cpdef classify(self, int layer, HitCounts counts)
    @cython.locals(residency=Residency, arrival=Ticket, there=bint)
    cdef int _arrived(self, int index, HitCounts counts) except -1
    @cython.locals(first=int, index=int, expert=int, kind=int, n_tokens=int)
    cpdef classify_asked(self, object gate, HitCounts counts)
    @cython.locals(index=int, column=int)
    cdef void _note(self, int layer, int expert, int kind) noexcept
    @cython.locals(piece=Piece)
    cdef int _found(self, int index) except -1
    @cython.locals(piece=Piece, residency=Residency, part=Piece, parts=list, enough=list, n_here=int)
    cdef int _classify_parts(self, int index, HitCounts counts) except -1
    @cython.locals(piece=Piece, expert=int, n_tokens=int)
    cpdef run_whole(self, int index)
    @cython.locals(layer=int, pending=PendingExperts, residency=Residency, n_tokens=int, index=int, piece=Piece, ticket=Ticket)
    cpdef Ticket run_gpu(self, int expert, tuple after=*, bint joined=*)
    cdef Ticket _run_pieces(self, Piece whole, int n_tokens, tuple after, bint joined)
    cdef Ticket _settled(self, Ticket ticket)
    @cython.locals(expert=int, layer=int, n_tokens=int, ticket=Ticket, other=Piece, one=Piece, done_frac=double,
                   whole=bint, serves=bint, begun=list)
    cpdef Ticket run_part(self, Piece piece, tuple after=*, object slices=*)
    @cython.locals(residency=Residency, index=int, arrival=Ticket, arrived_s=double, ticket=Ticket)
    cdef Ticket _launch(self, Piece piece, int n_tokens, tuple after)
    @cython.locals(residency=Residency, victims=Victims)
    cdef _used(self, int index, Ticket ticket, double ends_s)
    @cython.locals(one=Piece, residency=Residency, arrival=Ticket, arrived_s=double, ticket=Ticket, arrivals=list)
    cdef Ticket _launch_joined(self, Piece piece, object slices, int n_tokens, tuple after)
    cdef _ran(self, int expert, int n_tokens, object parts)
    cdef _done(self, int expert, int n_tokens)
    @cython.locals(layer=int, n_tokens=int)
    cpdef Ticket run_cpu(self, int expert, object join_layer=*)
    @cython.locals(expert=int, kind=int, n_tokens=int, index=int)
    cpdef count_on_cpu(self, int layer, dict asked, HitCounts counts)
    cpdef join(self, int layer)
