cimport cython
from sim.workload.iterations cimport Range
from sim.workload.scheduler cimport Scheduler

@cython.final
cdef class Running:
    cdef readonly object request
    cdef public int row
    cdef readonly int prompt_stop, stop_row, n_drafted
    cpdef start_over(self)
    @cython.locals(row=int, first=int, stop=int)
    cdef Range part(self, int most)

@cython.final
cdef class Batching:
    cdef readonly Scheduler scheduler
    cdef readonly int n_running, batch
    cdef object _later
    cdef readonly object kv
    cdef set _picked_before
    cdef list _running, _prompts, _ending
    cdef int _n_later, _most_tokens, _n_drafted
    cdef readonly object drafts
    cdef bint _shares_out, _static
    cdef readonly bint listens
    cdef public double owed_s
    cpdef next(self, double now_s)
    @cython.locals(running=Running, row=int, alone=bint)
    cpdef rest(self)
    cdef Running _started(self, double now_s, int n_there)
    @cython.locals(one=Running, anew=bint)
    cdef list _whole(self, double now_s)
    @cython.locals(n_there=int, left=int, one=Running, part=Range, r=Range)
    cdef list _in_parts(self, double now_s)
    @cython.locals(running=Running, row=int, over=bint, found=list)
    cdef list _decode(self)
    cdef list _passes(self, list ranges)
