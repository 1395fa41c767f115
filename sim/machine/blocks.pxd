cimport cython
from sim.machine.experts cimport Experts
from sim.machine.host cimport Host
from sim.machine.stream cimport Launched, Stream
from sim.machine.operations cimport Operations, Places
from sim.machine.peers cimport Peers
from sim.machine.price cimport Launch, Operation, Price
from sim.policy.tickets cimport Ticket, ends_at
from sim.workload.iterations cimport Iteration, Range

cdef int _GPU, _H2D, _HOST, _KINDS

@cython.final
cdef class Blocks:
    cdef object _cost
    cdef Host _host
    cdef list _streams
    cdef Stream _stream
    cdef Operations _operations
    cdef Experts _experts
    cdef Peers _peers
    cdef readonly object together
    cdef bint _has_dense, _in_turn, _leaves_unread
    cdef list _n_hops_before, _unread
    cdef double _begin_s
    cdef readonly int n_tokens
    cdef readonly Places in_a_row
    cdef readonly Operation of_shared, dense
    cdef dict _attentions
    cdef Operation _attention, _gate, _head, _handed
    cdef int _n_out, _n_heads
    @cython.locals(anew=bint)
    cdef begin(self, Iteration iteration)
    @cython.locals(operations=Operations, price=Price, alone=Range, known=Operation)
    cdef _price_attention(self, Iteration iteration, bint anew)
    @cython.locals(operation=Operation)
    cdef meet(self)
    cdef forget(self)
    cdef attention(self, int layer)
    cdef leave_unread(self, object layers)
    cdef _hand_over(self, int at, int layer)
    cdef _dense_layers(self, int n, int layer)
    cdef Ticket gate(self, int layer)
    cdef shared(self, int layer)
    @cython.locals(n_layers=int)
    cdef Ticket head(self)
    @cython.locals(host=Host, stream=Stream, host_s=double, launched_s=double, after=tuple, work=Launched)
    cdef Ticket _launch(self, str op, int layer, Operation operation)
    @cython.locals(host=Host, first=Stream, stream=Stream, one=Stream, host_s=double, launch=Launch, price=Price,
                   operation=Operation, after=tuple, work=Launched, ticket=Ticket, gpu=int)
    cdef Ticket _on_all(self, list steps, int layer)
    @cython.locals(gate=Ticket)
    cdef double _to_gate_one_by_one(self, int layer) except? -1.0
    @cython.locals(stream=Stream, host=Host, row=Places, place=cython.Py_ssize_t, costs=cython.Py_ssize_t, now_s=double,
                   slowed_s=double, free_s=double, gate_s=double, since_s=double, gate_since_s=double,
                   start_s=double, last_s=double, starved_s=double, waited_s=double, copied_s=double, at=int)
    cdef double to_gate(self, int layer) except? -1.0
