cimport cython
from sim.policy.tickets cimport Ticket

@cython.final
cdef class Ring:
    cdef int n_rings
    cdef int[::1] next, prev
    cpdef grow(self, int n)
    @cython.locals(at=int, last=int)
    cdef void append(self, int index, int ring) noexcept
    @cython.locals(at=int, before=int, after=int)
    cdef void unlink(self, int index) noexcept

@cython.final
cdef class Flying:
    cdef readonly int n_links
    cdef readonly long long[::1] n
    cdef long long[::1] there
    cdef Ring ring
    cdef int n_known
    cdef readonly list tickets
    cpdef add(self, int index, int link, Ticket ticket)
    cpdef drop(self, int index, int link)
    cpdef bint holds(self, int index) noexcept
    @cython.locals(at=int)
    cpdef int after(self, int link, int index=*) noexcept
    cdef _grow(self, int n)
