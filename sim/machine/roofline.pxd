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
    @cython.locals(n_bytes=double, flops=double, kept=double, keys=double, price=Price, n_kernels=double, seen=double, n_tokens=int, n_early=int, r=Range)
    cpdef Price price(self, Iteration iteration)
