cimport cython
from sim.machine.shared_memory cimport HostMemory, Lately

@cython.final
cdef class SerialLane:
    cdef readonly object name
    cdef readonly double free_s, busy_s, slowed_s
    cdef public HostMemory memory
    cdef public object spans
    @cython.locals(memory=HostMemory, cpu=Lately, start_s=double, paid_s=double, alone_s=double)
    cpdef double use(self, object op, int layer, int expert, int n_tokens, double ready_s, double duration_s,
                     double draws_per_s=*)
