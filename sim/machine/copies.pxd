cimport cython
from sim.policy.pieces cimport Piece
from sim.policy.tickets cimport Ticket

cdef int _CPU, _H2D, _HOST

@cython.final
cdef class Copy(Ticket):
    cdef public object op
    cdef public int layer, expert, length, submit_lane
    cdef public long long n_bytes
    cdef public double duration_s, submit_s, start_s
    cdef public bint demanded, cancelled, carries
    cdef public tuple after
    cdef public Piece piece
    @cython.locals(ready_s=double, ticket=Ticket)
    cpdef double ready_s(self) noexcept
    @cython.locals(ready_s=double, lane=int, ticket=Ticket)
    cdef int waited_for(self) noexcept

@cython.locals(copy=Copy)
cpdef Copy copy_of(Piece piece, str op, double duration_s, int length, bint demanded, double submit_s, tuple after)

@cython.locals(copy=Copy)
cpdef Copy result_of(int layer, int expert, long long n_bytes, double duration_s, int length, double submit_s, Ticket done)
