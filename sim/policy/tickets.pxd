cdef class Ticket:
    cdef public double end_s
    cdef public int cause

cpdef tuple all_tickets(object after)
