cimport cython
from sim.machine.price cimport Operation

@cython.final
cdef class Group:
    cdef public bint open
    cdef public double launched_s, slack_s
    cdef public str precision
    cdef public Operation last
