cimport cython
from sim.policy.tickets cimport Ticket

@cython.final
cdef class Rooms:
    cdef readonly long long[::1] clean_bytes, n_freed
    cdef readonly list freed
    cdef readonly double ready_s
    cdef readonly tuple waits
    @cython.locals(reader=Ticket, waits=tuple)
    cpdef void give(self, int gpu, long long n_bytes, double ready_s, tuple readers, double now_s)
    cpdef void take(self, int gpu, long long n_bytes, double now_s)
    @cython.locals(clean_bytes=cython.longlong, lacks_bytes=cython.longlong, more_bytes=cython.longlong,
                   ready_s=double, readers=tuple)
    cdef void _take_freed(self, int gpu, long long n_bytes, double now_s)

@cython.locals(ready_s=double, reader=Ticket, readers=tuple)
cdef bint _over(tuple room, double now_s)
