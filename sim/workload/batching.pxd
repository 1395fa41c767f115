cimport cython
from sim.workload.iterations cimport Range
from sim.workload.scheduler cimport Scheduler

@cython.final
cdef class Running:
    cdef readonly object request
    cdef public int row
    cdef readonly int prompt_stop, stop_row
    cpdef start_over(self)

@cython.final
cdef class Batching:
    cdef readonly Scheduler scheduler
    cdef readonly int n_running, batch
    cdef object _later
    cdef readonly object kv
    cdef list _running, _ending
    cdef int _n_later
    cdef bint _shares_out
    cdef readonly bint listens
    cdef public double owed_s
    cpdef next(self, double now_s)
    cdef list _prefill(self, Running one)
    @cython.locals(running=Running, row=int, over=bint)
    cdef list _decode(self)
    cdef list _first_pass(self, list ranges)
