cimport cython
from sim.engine.run_loop cimport Clockwork
from sim.engine.rooms cimport Rooms
from sim.machine.plain_layers cimport plain_layers
from sim.machine.protocol cimport Machine
from sim.machine.simulated cimport SimulatedMachine
from sim.machine.turn cimport Turn
from sim.policy.pieces cimport Piece, Pieces
from sim.policy.tickets cimport Ticket
from sim.workload.iterations cimport Iteration

cdef int _BEGIN, _GATE, _PLAIN, _LEAVE, _COME, _RUN, _TURN, _DEMAND, _VERB, _VERB_BITS, _MANY, _MANY_BITS

@cython.final
cdef class Tape:
    cdef long long[::1] codes
    cdef readonly int n
    cdef readonly list iterations, placed
    cdef public long long budget_bytes
    cpdef put(self, long long code)
    cpdef says(self, int verb, long long about)
    cpdef plain(self, int start, long long n_here, long long n_coming, long long n_leaving)

@cython.final
cdef class Player:
    cdef readonly SimulatedMachine machine
    cdef readonly Rooms rooms
    cdef readonly int n_experts
    cdef readonly list pieces, arrival, busy
    cdef readonly Turn turn
    cdef readonly double[::1] arrived_s, busy_s
    cdef long long[::1] here, coming
    @cython.locals(piece=Piece, busy=Ticket, now_s=double)
    cpdef leave(self, int index)
    @cython.locals(piece=Piece)
    cpdef take(self, int index)
    cpdef come(self, int index, Ticket arrival, double arrived_s)
    cpdef ran(self, int index, Ticket ticket, double ends_s)
    @cython.locals(rooms=Rooms, machine=Machine, piece=Piece, ticket=Ticket)
    cdef _demand(self, int index)
    @cython.locals(machine=Machine, piece=Piece, arrival=Ticket, ticket=Ticket, after=tuple)
    cdef _run(self, int index, int n_tokens)
    @cython.locals(turn=Turn, settled=bint, i=int, index=int)
    cdef _run_turn(self, Tape tape, int at, int n, int layer)
    @cython.locals(n=int, about=cython.longlong, n_coming=cython.longlong, i=int)
    cdef int _plain_layers(self, Tape tape, int at, int layer) except -1
    @cython.locals(machine=Machine, turn=Turn, i=int, one=Piece)
    cdef _plain(self, int layer, int n_here, int n_coming)
    @cython.locals(machine=Machine, iterations=list, n_begun=int, at=int, code=cython.longlong, verb=int, about=cython.longlong, n=int,
                   layer=int, iteration=Iteration, start_s=double)
    cpdef play(self, Tape tape, Clockwork clockwork)
