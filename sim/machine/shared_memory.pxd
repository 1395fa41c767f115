cimport cython
from sim.machine.price cimport Operation, Price
from sim.policy.tickets cimport Ticket

cdef int _KEPT
cdef double _INF

@cython.final
cdef class GpuMemory:
    cdef readonly double capacity_per_s, left_per_s, least_per_s, up_term, down_term
    @cython.locals(duration_s=double, draws_per_s=double, up=double, down=double)
    cpdef void slow(self, Operation operation, Price price) noexcept

@cython.final
cdef class Lately:
    cdef double[::1] start_s, end_s, draws_per_s
    cdef readonly long long n
    cdef public double owed_s, owed_bytes
    cdef readonly double last_s
    @cython.locals(at=int)
    cpdef void note(self, double start_s, double end_s, double draws_per_s) noexcept
    @cython.locals(at=int, back=int)
    cdef double drawn(self, double time_s) noexcept
    @cython.locals(at=int, back=int, found_s=double)
    cdef double changes_s(self, double time_s) noexcept

@cython.final
cdef class HostMemory:
    cdef readonly double capacity_per_s, cpu_term, link_term
    cdef readonly int n_links, n_lanes
    cdef readonly bint has_drive
    cdef readonly list lanes
    cdef double[::1] _draws
    cdef list _done, _back
    @cython.locals(at=int, told=Ticket)
    cpdef awaits(self, Ticket done, Ticket back)
    @cython.locals(own=Lately, free_s=double, added_s=double, beside_s=double, at=int, done=Ticket, told=Ticket,
                   share=double)
    cpdef delay(self, double start_s, double end_s)
    @cython.locals(own=Lately, now_s=double, left_s=double, until_s=double, stretch=double, stop_s=double, ends=bint,
                   slowed=bint)
    cpdef double place(self, int lane, double start_s, double duration_s, double draws_per_s) except? -1.0
    @cython.locals(own=Lately, owed_s=double, draws_per_s=double)
    cpdef double paid_s(self, int lane, double free_s) except? -1.0
    @cython.locals(until_s=double, changes_s=double, at=int, other=Lately)
    cdef double _look(self, int lane, double now_s) except? -1.0
    @cython.locals(term=double, beside=bint, n=int, at=int, asked_per_s=double)
    cdef double _stretch(self, int lane, int new, double draws_per_s) noexcept
    @cython.locals(at=int, before=double, after=double, owed_s=double, other=Lately)
    cdef void _charge(self, int lane, double draws_per_s, double seconds) noexcept
