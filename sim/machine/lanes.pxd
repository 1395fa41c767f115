cimport cython
from sim.machine.runs cimport Paths, Runs
from sim.machine.shared_memory cimport HostMemory, Lately

cpdef int cause_of(int resource, int cause) noexcept

@cython.final
cdef class SerialLane:
    cdef readonly object name
    cdef readonly double free_s, busy_s, slowed_s
    cdef readonly Runs runs
    cdef public HostMemory memory
    cdef public object spans
    @cython.locals(memory=HostMemory, cpu=Lately, start_s=double, paid_s=double, alone_s=double)
    cpdef double use(self, object op, int layer, int expert, int n_tokens, double ready_s, double duration_s,
                     double draws_per_s=*, int lane=*)
