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

@cython.final
cdef class Members:
    cdef list operations
    cdef int n, n_met
    cdef double[::1] costs_s
    cdef long long[::1] n_used
    @cython.locals(at=int)
    cdef add(self, Operation operation)
    @cython.locals(place=int, operation=Operation)
    cdef void tell(self) noexcept
    cdef forget(self)

cpdef double beyond_s(double work_s, double slack_s) noexcept
cpdef double left_s(double work_s, double slack_s) noexcept
