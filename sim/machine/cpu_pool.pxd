cimport cython
from sim.machine.copies cimport Copy, result_of
from sim.machine.copy_queue cimport CopyQueue
from sim.machine.host cimport Host
from sim.machine.lanes cimport SerialLane
from sim.machine.links cimport Links
from sim.machine.shared_memory cimport HostMemory
from sim.policy.tickets cimport Ticket, ends_at

cdef int _BACK, _CPU

@cython.final
cdef class CpuPool:
    cdef object _cost
    cdef Host _host
    cdef readonly SerialLane d2h, lane
    cdef readonly long long d2h_bytes
    cdef readonly list busy_s
    cdef readonly int n_hybrid
    cdef double _launch_s, _hybrid_s
    cdef bint _shares
    cdef int _n_begun
    cdef list _hybrid_in, _gpu_of
    cdef dict _first, _joined
    cdef _share(self)
    cdef void begin(self) noexcept
    @cython.locals(host=Host, lane=SerialLane, links=Links, n_bytes=cython.longlong, there_s=double, back_s=double,
                   length=int, duration_s=double, attributed_to=int, arrived_s=double, back=Copy, done=Ticket,
                   joins=bint, by_tokens=dict, memory=HostMemory, draws_per_s=double, read=Ticket, waited_for=int,
                   ended_s=double,
                   link=CopyQueue, gpu=int)
    cdef Ticket run(self, int layer, int expert, int n_tokens, tuple after, int n_all)
    @cython.locals(host=Host)
    cdef _begin_layer(self, int layer, int n_all)
    cdef tuple _work(self, int n_tokens, bint joins)
