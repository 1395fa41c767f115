cimport cython
from sim.engine.copies cimport Copies
from sim.engine.counts cimport HitCounts, Tally
from sim.engine.layer cimport Layer
from sim.engine.pending_experts cimport PendingExperts
from sim.engine.residency cimport Residency
from sim.engine.default_service cimport Service
from sim.machine.protocol cimport Machine
from sim.policy.decisions cimport (
    Cancel, DropQueue, Evict, Fetch, Foresee, Predict, Prefetch, Requeue, RequeueFrom, RunCpu, RunCpuAhead, RunGpu,
    RunPart, Serve, Wait, WriteBack
)
from sim.policy.outlook cimport Outlook
from sim.policy.pieces cimport Piece, Pieces
from sim.policy.tickets cimport Ticket, all_tickets
from sim.policy.view cimport View
from sim.workload.gate cimport Arrays, Gate, gate_of
from sim.workload.iterations cimport Iteration, Row

@cython.final
cdef class Engine:
    cdef readonly object policy, cost, future
    cdef public object kept
    cdef readonly Arrays arrays
    cdef readonly Machine machine
    cdef readonly Residency residency
    cdef readonly Pieces pieces
    cdef readonly Tally tally
    cdef readonly PendingExperts pending
    cdef readonly Copies copies
    cdef readonly Layer layer
    cdef readonly Service service
    cdef readonly View view
    cdef HitCounts counts
    cdef set _begun
    cdef object _layer_enter, _gate_input, _gate_done, _layer_done, _steps
    cpdef take_hooks(self)
    cdef public object drafts
    cdef readonly bint on_drafting
    cdef readonly bint on_request_start, on_iteration_start, on_layer_enter, on_gate_input, on_assign, on_gate_done
    cdef readonly bint on_layer_done, on_iteration_end, on_request_end, on_idle
    @cython.locals(n=int, most=int, tickets=list)
    cpdef obey(self, object decisions, str hook)
    cdef bint _are_steps(self, object decisions) except -1
    @cython.locals(ticket=Ticket, run=RunGpu, fetch=Fetch, evict=Evict, ask=Prefetch, part=RunPart, on_cpu=RunCpu, wait=Wait,
                   queue=Requeue, line=RequeueFrom, after=tuple, leaving=Piece)
    cpdef Ticket apply(self, object decision, bint asked=*)
    @cython.locals(withdrawn=Cancel)
    cdef Ticket _apply_seldom(self, object decision)
    @cython.locals(plain=bint)
    cdef Ticket _predict(self, Predict asked)
    @cython.locals(outlook=Outlook, layer=int, after=tuple)
    cdef _foresee(self, Foresee asked)
    cpdef begin(self, Iteration iteration)
    cdef _draft(self, Iteration iteration)
    @cython.locals(layer=int)
    cpdef run_layers(self, Iteration iteration)
    @cython.locals(view=View, machine=Machine, pending=PendingExperts, copies=Copies, now_s=double)
    cdef run_layer(self, Iteration iteration, int layer)
    @cython.locals(row=Row)
    cdef _owe(self, Iteration iteration, int layer)
    @cython.locals(first=int, expert=int, n_tokens=list, piece=Piece)
    cdef _dispatch(self, int layer)
    cdef _serve_chosen(self, Iteration iteration, int layer, double now_s)
    @cython.locals(server=Layer, plain=bint, gate=Gate)
    cdef _serve_gate(self, Iteration iteration, int layer)
