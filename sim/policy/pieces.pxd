cimport cython
@cython.final
cdef class Piece:
    cdef readonly int layer, expert, gpu, index
    cdef readonly double start_frac, stop_frac, kernels_frac
    cdef readonly str precision
    cdef readonly long long n_bytes
    cdef readonly bint serving

@cython.final
cdef class Pieces:
    cdef readonly int n_layers, n_experts, n_gpus
    cdef readonly object precision
    cdef readonly list whole, all
    cdef object _expert_bytes, _homes
    cdef dict _parts, _sizes
