cdef class Ticket:
    cdef public double end_s
    cdef public int cause, lane
    cdef public bint speculative

cimport cython

@cython.locals(ticket=Ticket)
cpdef Ticket ends_at(double end_s, int cause, int lane)

cpdef tuple all_tickets(object after)
