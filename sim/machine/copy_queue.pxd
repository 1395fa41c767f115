cimport cython
from sim.machine.copies cimport Copy, copy_of
from sim.machine.stream cimport Stream, progress
from sim.machine.meter cimport Meter, Seconds
from sim.machine.runs cimport Paths, Runs
from sim.machine.shared_memory cimport HostMemory
from sim.policy.pieces cimport Piece
from sim.policy.tickets cimport Ticket

cdef int _HOST

@cython.final
cdef class CopyQueue:
    cdef readonly object name
    cdef list streams
    cdef readonly Runs runs
    cdef public int stream_lane
    cdef Stream stream
    cdef bint alone
    cdef public double free_s, lag_s
    cdef double start_s
    cdef bint starts_demand
    cdef public long long last_bytes
    cdef public double last_s
    cdef public int last_length
    cdef readonly Seconds seconds
    cdef public long long n_copies, copied_bytes
    cdef list queued
    cdef readonly int n_queued, n_demanded
    cdef readonly list finished
    cdef public object spans
    cdef public bint report
    cdef public list slows
    cdef public int n_slows, lane
    cdef public bint back
    cdef public HostMemory memory
    cdef public double slowed_s
    @cython.locals(end_s=double, shared_s=double, at=int, stream=Stream)
    cdef double runs_s(self, double start_s, double duration_s, double n_bytes) except? -1.0
    @cython.locals(paid_s=double)
    cpdef pay(self)
    cdef double _paid_s(self, double start_s) except? -1.0
    cpdef serve_now(self, Piece piece, double start_s, double duration_s, int length)
    cpdef void served(self, int n, double free_s) noexcept
    @cython.locals(start_s=double, copy=Copy)
    cpdef Copy demand(self, Piece piece, double duration_s, int length, double now_s, double ready_s, tuple after)
    @cython.locals(ready_s=double)
    cpdef submit(self, Copy copy, double now_s)
    cdef _queue(self, Copy copy)
    @cython.locals(at=int)
    cdef _unqueue(self, Copy copy)
    @cython.locals(at=int)
    cdef bint _holds(self, Copy copy) noexcept
    @cython.locals(at_s=double, at=int, best=Copy, copy=Copy, ready_s=double)
    cdef _settle_demand(self, double now_s)
    @cython.locals(best=Copy)
    cpdef advance(self, double now_s)
    @cython.locals(best=Copy)
    cpdef bint settle_next(self) except -1
    cpdef double next_start_s(self) except? -2.0
    @cython.locals(best=Copy, copy=Copy, at=int, ready_s=double, earliest_s=double, at_s=double)
    cdef Copy _next(self)
    @cython.locals(ticket=Ticket)
    cdef _serve(self, Copy copy, double start_s)
    cpdef bint cancel(self, Copy copy, double now_s) except -1
    cpdef promote(self, Copy copy, double now_s)
    @cython.locals(copy=Copy, n=int)
    cpdef list completions(self, double now_s)
