cimport cython
from sim.engine.replay cimport Player, Tape
from sim.machine.forwarding cimport ForwardingMachine
from sim.machine.turn cimport Turn
from sim.policy.pieces cimport Piece, Pieces
from sim.policy.tickets cimport Ticket
from sim.workload.iterations cimport Iteration

cdef int _BEGIN, _GATE, _LEAVE, _COME, _RUN, _TURN, _END, _DEMAND, _MOST

cdef class Recorder(ForwardingMachine):
    cdef readonly Pieces pieces
    cdef readonly Tape tape
    cdef readonly str spoilt
    cdef readonly Player player
    cdef int n_whole, n_under_way, taken, start, n_leaving, n_coming, n_ran, n_gates
    cdef bint begun, is_plain
    cdef unsigned char[::1] under_way
    cdef long long[::1] came, came_as
    cpdef spoil(self, str why)
    cdef _close(self)
    cpdef place(self, Piece piece)
    @cython.locals(tape=Tape)
    cpdef begin(self, Iteration iteration)
    cpdef double to_gate(self, int layer) except? -1.0
    cpdef end(self)
    @cython.locals(index=int)
    cpdef release(self, Piece piece)
    @cython.locals(index=int, known=bint)
    cpdef bint demand(self, Piece piece, double ready_s) except -1
    cpdef bint demand_turn(self, Turn turn) except -1
    @cython.locals(index=int, ticket=Ticket)
    cpdef Ticket copy(self, Piece piece, int priority, double ready_s, tuple after)
    @cython.locals(player=Player)
    cdef _take(self, int index, double ready_s, tuple after)
    cdef _comes(self, int index, Ticket ticket)
    @cython.locals(index=int, arrival=Ticket, ticket=Ticket)
    cpdef Ticket expert(self, Piece piece, int n_tokens, double arrived_s, tuple after, object parts)
    cdef _ran(self, int index, Ticket ticket, double ends_s)
    @cython.locals(n_here=int, at=int, index=int, coming=bint)
    cpdef bint run_turn(self, Turn turn) except -1
    cpdef attention(self, int layer)
    cpdef sync(self, Ticket ticket)
    @cython.locals(ended=bint)
    cpdef bint ended(self, Ticket ticket) except -1
    cpdef Ticket cpu_expert(self, int layer, int expert, int n_tokens, tuple after=*)
    cpdef join(self, Ticket ticket)
    cpdef Ticket copy_back(self, Piece piece, double ready_s, tuple after)
    cpdef bint promote(self, Ticket ticket) except -1
    cpdef bint cancel(self, Ticket ticket) except -1
    cpdef Ticket predict(self, double duration_s, str lane, bint blocking, object basis)
    cpdef list poll(self)
    cpdef wait_until(self, double time_s)
    cpdef dispatch(self, int layer, list n_tokens)
    cpdef Ticket read(self, int layer, int expert, long long n_bytes, int priority)
    cpdef move_kv(self, int n_pages, long long page_bytes, bint down)
