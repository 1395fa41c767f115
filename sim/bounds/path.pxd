cimport cython
from sim.machine.price cimport Launch

@cython.final
cdef class Clocks:
    cdef public double host_s, free_s
    @cython.locals(start_s=double, last_s=double)
    cpdef void launch(self, Launch launch, double duration_s) noexcept

@cython.final
cdef class Experts:
    cdef readonly object cost
    cdef readonly bint grouped
    cdef readonly Launch first, next
    cdef double[::1] whole_s, work_s
    cdef long long[::1] tokens
    cdef int n_known, n_at_most
    @cython.locals(whole_s=double)
    cpdef ask(self, int n_tokens)
    cpdef double work_of(self, int n_tokens) except? -1.0
    @cython.locals(n=int, at=int, n_tokens=int, place=int, work_s=double, slack_s=double)
    cpdef run(self, Clocks clocks, long long[::1] tokens, int start, int stop)

@cython.final
cdef class Layers:
    cdef readonly object cost
    cdef readonly Launch attention, gate, shared, dense, head
    cdef readonly double attention_s, gate_s, shared_s, dense_s, head_s, sync_s
    cdef readonly double met_attention_s, met_head_s
    cdef double[::1] met_gate_s, met_experts_s, handed_s
    cdef readonly bint has_shared, has_dense, reads
    @cython.locals(total_s=double, ahead_s=double, gate_s=double, there_s=double, layer=int, start=int, stop=int, clocks=Clocks, n_dense_before=list)
    cpdef double through(self, Experts experts, long long[::1] tokens, long long[::1] stops, object elsewhere, object away_s) except? -1.0
