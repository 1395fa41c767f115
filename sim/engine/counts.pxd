cimport cython
from sim.policy.pieces cimport Piece

@cython.final
cdef class HitCounts:
    cdef long long[::1] n_experts, n_tokens, n_aside
    cdef public long long prefetched
    cpdef void count(self, int kind, int n_tokens) noexcept

@cython.final
cdef class Prefetched:
    cdef public long long n_bytes
    cdef public bint harmful, late, open

@cython.final
cdef class PrefetchTally:
    cdef readonly dict n, n_bytes, pending
    cdef public long long n_issued, n_cancelled, n_dropped, issued_bytes, cancelled_bytes
    cdef dict _evicted_for
    @cython.locals(record=Prefetched)
    cpdef issue(self, Piece piece, list victims)
    @cython.locals(record=Prefetched)
    cpdef asked_while_late(self, Piece piece)
    @cython.locals(record=Prefetched)
    cpdef asked_but_absent(self, Piece piece)
    @cython.locals(record=Prefetched)
    cpdef used(self, Piece piece)
    @cython.locals(record=Prefetched)
    cpdef gone(self, Piece piece)
    @cython.locals(record=Prefetched)
    cpdef cancelled(self, Piece piece)
    cpdef forget(self, Piece piece)
    cdef _count(self, str kind, Prefetched record)

@cython.final
cdef class Tally:
    cdef readonly dict hits, n_iterations
    cdef readonly PrefetchTally prefetch
    cdef readonly object loss
    cdef public long long n_demand, n_evicted, demand_bytes, n_executed
