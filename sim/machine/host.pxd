cimport cython
from sim.machine.stream cimport Stream
from sim.machine.links cimport Links
from sim.machine.runs cimport Runs
from sim.policy.tickets cimport Ticket

cdef int _H2D, _HOST, _CPU, _NVME

@cython.final
cdef class Host:
    cdef public double now_s
    cdef readonly Stream stream
    cdef readonly Runs runs
    cdef readonly Links links
    cdef readonly object spans
    cdef readonly double sync_s
    cdef public long long n_syncs, n_copies
    cdef public double experts_copied
    cdef readonly list predict_s
    @cython.locals(begun_s=double)
    cdef spend(self, str op, int layer, int expert, int n_tokens, long long n_bytes, double seconds)
    cdef look(self)
    @cython.locals(stream=Stream, host_s=double, waited=bint)
    cdef sync(self, Ticket ticket)
    cdef void keep_waiting(self) except *
    cdef void wait_until(self, double time_s) except *
