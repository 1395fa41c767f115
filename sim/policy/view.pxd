cimport cython
from sim.policy.pieces cimport Piece, Pieces

@cython.final
cdef class View:
    cdef readonly object _policy, _residency, _owed, _copies, _machine, _arrays, _future
    cdef readonly Pieces _pieces
    cdef readonly object model_name, prices
    cdef readonly int n_layers, n_experts, n_gpus, top_k, hidden_size
    cdef readonly long long expert_bytes
    cdef public int layer
    cdef public object phase
    cdef bint _timing
