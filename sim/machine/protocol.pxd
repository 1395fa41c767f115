from sim.machine.turn cimport Turn
from sim.policy.pieces cimport Piece
from sim.policy.tickets cimport Ticket
from sim.workload.iterations cimport Iteration

cdef class Machine:
    cdef public double ends_s
    cdef public int cause
    cdef public bint keeps_pieces, gathers
    cpdef double now(self) except? -1.0
    cpdef begin(self, Iteration iteration)
    cpdef attention(self, int layer)
    cpdef Ticket gate(self, int layer)
    cpdef shared(self, int layer)
    cpdef sync(self, Ticket ticket)
    cpdef double to_gate(self, int layer) except? -1.0
    cpdef leave_unread(self, object layers)
    cpdef dispatch(self, int layer, list n_tokens)
    cpdef Ticket expert(self, Piece piece, int n_tokens, double arrived_s, tuple after, object parts)
    cpdef bint run_turn(self, Turn turn) except -1
    cpdef Ticket cpu_expert(self, int layer, int expert, int n_tokens, tuple after=*)
    cpdef join(self, Ticket ticket)
    cpdef bint demand(self, Piece piece, double ready_s) except -1
    cpdef bint demand_turn(self, Turn turn) except -1
    cpdef Ticket copy(self, Piece piece, int priority, double ready_s, tuple after)
    cpdef Ticket read(self, int layer, int expert, long long n_bytes, int priority)
    cpdef Ticket copy_back(self, Piece piece, double ready_s, tuple after)
    cpdef move_kv(self, int n_pages, long long page_bytes, bint down)
    cpdef bint promote(self, Ticket ticket) except -1
    cpdef bint cancel(self, Ticket ticket) except -1
    cpdef place(self, Piece piece)
    cpdef release(self, Piece piece)
    cpdef route(self, int layer, object ids, object weights)
    cpdef Ticket predict(self, double duration_s, str lane, bint blocking, object basis)
    cpdef list poll(self)
    cpdef bint ended(self, Ticket ticket) except -1
    cpdef double ends_after_s(self, Ticket ticket) except? -1.0
    cpdef end(self)
    cpdef wait_until(self, double time_s)
    cpdef list parts_s(self)
    cpdef double[::1] path_s(self)
    cpdef drain(self)
