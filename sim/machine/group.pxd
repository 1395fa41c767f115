cimport cython
from sim.machine.price cimport Operation

@cython.final
cdef class Group:
    cdef public bint open
    cdef public double launched_s, slack_s
    cdef public str precision
    cdef public Operation last

cpdef double beyond_s(double work_s, double slack_s) noexcept
cpdef double left_s(double work_s, double slack_s) noexcept
