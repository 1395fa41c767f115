cimport cython
from sim.machine.price cimport Operation
from sim.policy.tickets cimport Ticket

@cython.final
cdef class Group:
    cdef public bint open
    cdef public double launched_s, slack_s
    cdef public str precision
    cdef public Operation last
    cdef public tuple waits
    @cython.locals(one=Ticket)
    cdef bint awaits(self, Ticket ticket) noexcept

cpdef double beyond_s(double work_s, double slack_s) noexcept
cpdef double left_s(double work_s, double slack_s) noexcept
