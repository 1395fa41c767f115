cimport cython
from sim.workload.batching cimport Batching
from sim.workload.iterations cimport Feed, Iteration, Range

cdef int _H2D, _NVME, _N_RESOURCES

@cython.final
cdef class Spent:
    cdef readonly double prefill_s, prefill_copies_s, prefill_drive_s, decode_copies_s, decode_drive_s
    cdef Spent since(self, Spent before)
    cdef add(self, Spent other)

@cython.final
cdef class RequestTimes:
    cdef public object request
    cdef readonly double start_s, begun_s
    cdef public double first_token_s, last_token_s
    cdef readonly Spent until_begun, until_first, until_last
    cdef public object n_preemptions
    cdef readonly double away_s, away_before_first_s
    cdef double left_s
    cdef bint answered
    cdef Spent until_left, away
    cdef int last_row

@cython.final
cdef class PhaseTimes:
    cdef readonly long long n_iterations, n_tokens
    cdef readonly double time_s
    cdef double[::1] spent_s, charged_s

@cython.final
cdef class Step:
    cdef readonly Iteration iteration
    cdef readonly double start_s, end_s

@cython.final
cdef class Clockwork:
    cdef readonly list requests
    cdef readonly dict phases
    cdef readonly long long n_put_out, n_decoded
    cdef public object kv, drafted
    cdef public object scheduler_stats
    cdef dict _open
    cdef int _n_away
    cdef double[::1] _before_s, _charged_s
    @cython.locals(times=RequestTimes)
    cdef leave(self, object request, double now_s)
    @cython.locals(r=Range, times=RequestTimes)
    cdef _come_back(self, Iteration iteration, double now_s)
    @cython.locals(spent=Spent)
    cdef Spent _spent_on(self, RequestTimes times)
    @cython.locals(r=Range, times=RequestTimes)
    cdef begin(self, Iteration iteration, double now_s, bint open_loop)
    @cython.locals(phase=PhaseTimes, cause=int, resource=int, after_s=double, complete=list, r=Range, times=RequestTimes,
                   n_taken=int)
    cdef list end(self, Iteration iteration, double start_s, double end_s, list parts_s, double[::1] path_s)
    @cython.locals(phase=PhaseTimes, spent=list)
    cdef list decoding(self)
    @cython.locals(phase=PhaseTimes, times=RequestTimes, cause=int, resource=int, n_causes=int)
    cdef decoded(self, object request, int n, list sums, double end_s)
    @cython.locals(prefill=PhaseTimes, decode=PhaseTimes, mixed=PhaseTimes)
    cdef Spent _spent(self)
    @cython.locals(cause=int, resource=int)
    cdef skip(self, list parts_s, double[::1] path_s)

@cython.final
cdef class Loop:
    cdef readonly object engine, machine  # today's, or the core's
    cdef readonly Batching batching
    cdef readonly object trace
    cdef readonly Clockwork clockwork
    cdef readonly double end_s
    cdef bint _open_loop, _strides
    cdef object _compose, _on_step, _on_stride
    cdef Feed _feed
    cdef int _index
    cdef dict _n_iterations
    cpdef next(self)
    cpdef bint stride(self) except -1
    @cython.locals(clockwork=Clockwork, iteration=Iteration, start_s=double, end_s=double, complete=list)
    cpdef list run(self, list ranges)
    cpdef wait(self, double until_s)
    cdef _make_room(self, object kv, double now_s)
    cpdef finish(self)

@cython.locals(composed=object)
cpdef drive(Loop loop)
