cimport cython
from sim.machine.price cimport Price
from sim.workload.iterations cimport Iteration, Range

@cython.final
cdef class Roofline:
    cdef readonly double floor_s, bandwidth, flops, as_weights
    cdef readonly int q_floor, q_bandwidth, q_flops
    cdef readonly bint adds
    @cython.locals(best_s=double, sum_s=double, attributed_to=int)
    cpdef Price price(self, double n_kernels, double n_bytes, double flops)

@cython.final
cdef class Attention:
    cdef readonly Roofline roofline
    cdef readonly double n_kernels, prompt_kernels, n_bytes, token_bytes, key_bytes, params, key_flops, most_context
    cdef readonly double window_key_bytes, window_key_flops
    cdef readonly int window
    cdef readonly object beyond
    cdef double _n_bytes, _flops, _kept
    @cython.locals(n_kernels=double, r=Range)
    cpdef Price price(self, Iteration iteration)
    cpdef Price of_one(self, int context)
    cdef void _begin(self, int n_tokens) noexcept
    @cython.locals(keys=double, n_early=int, seen=double)
    cdef bint _add(self, int n_tokens, int context) except -1
    @cython.locals(price=Price)
    cdef Price _end(self, double n_kernels)
