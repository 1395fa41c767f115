cimport cython
from sim.machine.runs cimport is_stream
from sim.policy.tickets cimport Ticket

@cython.final
cdef class Freed:
    cdef int size, first
    cdef readonly int n
    cdef long long[::1] n_bytes
    cdef double[::1] ready_s
    cdef dict readers
    @cython.locals(at=int)
    cpdef append(self, long long n_bytes, double ready_s, tuple readers)
    cpdef drop(self)
    @cython.locals(reader=Ticket)
    cpdef bint over(self, double now_s) except -1
    @cython.locals(i=int, at=int)
    cdef _grow(self)

@cython.final
cdef class Rooms:
    cdef readonly long long[::1] clean_bytes
    cdef readonly list freed
    cdef readonly double ready_s
    cdef readonly tuple waits
    @cython.locals(reader=Ticket, waits=tuple, freed=Freed)
    cpdef give(self, int gpu, long long n_bytes, double ready_s, tuple readers, double now_s)
    cdef int n_freed
    cpdef take(self, int gpu, long long n_bytes, double now_s)
    @cython.locals(freed=Freed, more_bytes=cython.longlong, lacks_bytes=cython.longlong, n_before=int)
    cdef _take_freed(self, int gpu, long long n_bytes, double now_s)
