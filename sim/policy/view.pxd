cimport cython
from sim.engine.pending_experts cimport PendingExperts
from sim.engine.residency cimport Residency
from sim.policy.pieces cimport Piece, Pieces

@cython.final
cdef class View:
    cdef readonly object _policy, _copies, _machine, _arrays, _future
    cdef readonly Residency _residency
    cdef readonly PendingExperts _pending
    cdef readonly Pieces _pieces
    cdef readonly object model_name, prices
    cdef readonly int n_layers, n_experts, n_gpus, top_k, hidden_size
    cdef readonly long long expert_bytes
    cdef public int layer
    cdef public object phase
    cdef bint _timing
    cdef const long long[::1] _waiting
    @cython.locals(one=Piece)
    cpdef bint evictable(self, object piece) except -1
    cpdef object first_evictable(self, object pieces)
    cpdef bint holds(self, object piece) except -1
    cpdef bint arrived(self, object piece) except -1
