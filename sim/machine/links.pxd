cimport cython
from sim.machine.copies cimport Copy
from sim.machine.copy_queue cimport CopyQueue
from sim.policy.tickets cimport Ticket

@cython.final
cdef class Links:
    cdef readonly list h2d, settled
    cdef readonly CopyQueue first, write_backs, p2p_out, p2p_in, drive
    cdef readonly int n
    cdef advance(self, double now_s)
    cdef settle(self, Ticket ticket)
    cdef bint settle_next(self) except -1
    @cython.locals(queue=CopyQueue, found=CopyQueue, first_s=double, start_s=double)
    cdef CopyQueue _next(self)
    cdef CopyQueue settle_write_backs(self)
    @cython.locals(queue=CopyQueue)
    cdef bint promote(self, Copy copy, double now_s) except -1
    @cython.locals(queue=CopyQueue)
    cdef bint cancel(self, Copy copy, double now_s) except -1
    @cython.locals(pieces=list, done=list, copy=Copy, queue=CopyQueue)
    cdef list completions(self, double now_s)
    cdef bint ended(self, Ticket ticket, double now_s) except -1
    cdef double ends_after_s(self, Ticket ticket) noexcept
    @cython.locals(queue=CopyQueue)
    cdef pay(self)
