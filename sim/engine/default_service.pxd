cimport cython
from sim.engine.by_expert cimport ByExpert
from sim.engine.copies cimport Copies
from sim.engine.counts cimport HitCounts, Tally
from sim.engine.layer cimport Layer
from sim.engine.pending_experts cimport PendingExperts
from sim.engine.residency cimport Residency
from sim.engine.victims cimport InTurn, Victims
from sim.machine.protocol cimport Machine
from sim.machine.turn cimport Turn
from sim.policy.pieces cimport Piece, Pieces

cdef int _HIT, _MISS, _DEMAND, _EXCHANGED

@cython.final
cdef class Service:
    cdef readonly object policy
    cdef public object log, view
    cdef readonly Machine machine
    cdef readonly Pieces pieces
    cdef readonly Residency residency
    cdef readonly PendingExperts pending
    cdef readonly Copies copies
    cdef readonly Layer layer
    cdef readonly Tally tally
    cdef bint tells_accessed, ordered, single, in_a_row
    cdef double now_s
    cdef int n_experts, n_whole, n_missing, n_known, stays
    cdef object _accessed
    cdef long long[::1] missing
    cdef readonly Turn turn
    cdef InTurn order
    cdef ByExpert by_expert
    cdef long long[::1] counts
    cpdef take_hooks(self)
    @cython.locals(at=int)
    cpdef serve_chosen(self, HitCounts counts, double now_s)
    @cython.locals(residency=Residency, pending=PendingExperts, turn=Turn, n_here=cython.Py_ssize_t,
                   n_missing=cython.Py_ssize_t, n_tokens=cython.longlong, at=cython.Py_ssize_t, expert=cython.Py_ssize_t,
                   index=cython.Py_ssize_t, here=int, arrived_s=double, late=bint)
    cdef bint _look(self, HitCounts counts, double now_s) except -1
    @cython.locals(residency=Residency, pending=PendingExperts, copies=Copies, turn=Turn, n_here=int, n_missing=int, at=int,
                   expert=int, index=int)
    cpdef serve(self)
    @cython.locals(copies=Copies, turn=Turn, n_missing=int, n_later=int, at=int, expert=int, piece=Piece)
    cdef _finish(self, bint to_count)
    @cython.locals(by_expert=ByExpert, turn=Turn, at=int, index=int)
    cdef void _count_missing(self, int n_missing) noexcept
    cdef _serve_mixed(self)
    @cython.locals(copies=Copies, turn=Turn, queued=bint, n_later=int, at=int, expert=int, piece=Piece)
    cdef int _demand_each(self, int n_missing) except -1
    @cython.locals(residency=Residency, order=InTurn, turn=Turn, n_bytes=cython.longlong, free_bytes=cython.longlong,
                   now_s=double, n_leaving=cython.Py_ssize_t, n_staying=int,
                   at=cython.Py_ssize_t, index=cython.Py_ssize_t, expert=cython.Py_ssize_t)
    cdef bint _exchange(self, int n_missing) except -1
    @cython.locals(residency=Residency, order=InTurn, turn=Turn, by_expert=ByExpert, together=bint, at=int,
                   pass_n=cython.longlong, column=int)
    cdef _replace_and_run(self, int n_missing, bint to_count)
    @cython.locals(residency=Residency, order=InTurn, turn=Turn, by_expert=ByExpert, pass_n=cython.longlong, column=int)
    cdef _replace(self, int n_missing)
    @cython.locals(turn=Turn, tally=Tally, n_leaving=int, at=int)
    cdef _count_exchanged(self, int n_missing)
    @cython.locals(residency=Residency, order=InTurn, turn=Turn, at=int, left=int, gone=Piece)
    cdef _replace_in_turn(self, int n_new, int column, long long pass_n)
    @cython.locals(turn=Turn, residency=Residency, pending=PendingExperts, victims=Victims, at=int, expert=int, index=int)
    cdef bint _run_together(self) except -1
    @cython.locals(turn=Turn, residency=Residency, pending=PendingExperts, at=cython.Py_ssize_t,
                   expert=cython.Py_ssize_t, index=cython.Py_ssize_t)
    cdef _ran(self, int start, int stop)
