cimport cython
from sim.machine.copies cimport Copy
from sim.machine.copy_queue cimport CopyQueue
from sim.machine.host cimport Host
from sim.machine.stream cimport Stream
from sim.machine.price cimport Operation
from sim.machine.runs cimport Runs
from sim.policy.pieces cimport Piece
from sim.policy.tickets cimport Ticket, ends_at

@cython.final
cdef class Peers:
    cdef object _cost, _exchange
    cdef Host _host
    cdef Runs _wire
    cdef list _streams, _gpu_s
    cdef readonly bint gathers
    cdef bint _meets
    cdef readonly int n_away
    cdef public Ticket gate
    @cython.locals(first_s=double, last_s=double)
    cdef Ticket run(self, Piece piece, int n_tokens, Operation operation, double host_s, double arrived_s, tuple after)
    @cython.locals(stream=Stream, duration_s=double)
    cdef Ticket _launched(self, Piece piece, int n_tokens, Operation operation, double peer_s, double first_s,
                          double last_s, double arrived_s, tuple after)
    @cython.locals(gpu=int)
    cdef dispatch(self, int layer, list n_tokens)
    cdef _send(self, int layer, int gpu, int n_tokens)
    @cython.locals(ticket=Ticket, gpu=int)
    cdef Ticket _with_the_others(self, Piece piece, int n_tokens, Operation operation, double first_s, double last_s,
                                 double arrived_s, tuple after)
    cdef combine(self)
    @cython.locals(host=Host, n_bytes=cython.longlong, seconds=double, length=int, copy=Copy)
    cdef Copy _cross(self, str op, int layer, int n_tokens, CopyQueue port, tuple after)
