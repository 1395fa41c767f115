cimport cython
from sim.workload.iterations cimport Range

@cython.final
cdef class Running:
    cdef readonly object request
    cdef public int row
    cdef readonly int stop_row

cdef class Scheduler:
    cdef readonly object waiting, profiled
    cdef readonly int n_running, batch
    cdef bint _open_loop
    cdef object _split, _later, _to_come
    cdef list _running
    cdef int _n_later
    @cython.locals(running=Running, row=int, over=bint)
    cpdef list decode(self)
    cpdef next(self, double now_s)
    cdef list _passes(self, list ranges)
