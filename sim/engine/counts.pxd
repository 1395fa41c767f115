cimport cython
from sim.engine.by_expert cimport ByExpert
from sim.policy.pieces cimport Piece

cdef int _USEFUL, _LATE, _WASTED, _HARMFUL

@cython.final
cdef class HitCounts:
    cdef readonly long long[::1] n_experts, n_tokens, n_aside
    cdef public long long prefetched
    cpdef void count(self, int kind, int n_tokens) noexcept
    @cython.locals(kind=int)
    cpdef take_in(self, HitCounts other)

@cython.final
cdef class PrefetchTally:
    cdef ByExpert by_expert
    cdef readonly long long[::1] n_of, bytes_of
    cdef public long long n_issued, n_cancelled, n_dropped, issued_bytes, cancelled_bytes, n_unused
    cdef int n_known
    cdef long long[::1] _issue, _bytes, _row, _late, _harmful, _gone_in, _gone_for
    @cython.locals(victim=Piece, index=int)
    cpdef issue(self, Piece piece, list victims)
    cpdef asked_while_late(self, Piece piece)
    @cython.locals(by=int)
    cpdef asked_but_absent(self, Piece piece)
    cpdef used(self, Piece piece)
    cpdef gone(self, Piece piece)
    cpdef cancelled(self, Piece piece)
    cpdef finish(self)
    cpdef forget(self, Piece piece)
    @cython.locals(fate=int)
    cpdef take_in(self, PrefetchTally other)
    cdef bint _closes(self, Piece piece) noexcept
    @cython.locals(n_bytes=cython.longlong, row=int)
    cdef void _count(self, int fate, int index) noexcept
    cdef _grow(self, int n)

@cython.final
cdef class Loss:
    cdef public long long activations, changed, dropped, lowered
    cdef public double mass_before, mass_kept
    cpdef take_in(self, Loss other)

@cython.final
cdef class Tally:
    cdef readonly dict hits, n_iterations
    cdef readonly PrefetchTally prefetch
    cdef readonly ByExpert by_expert
    cdef readonly Loss loss
    cdef public long long n_demand, n_evicted, demand_bytes, n_executed
    cpdef take_in(self, Tally other)
