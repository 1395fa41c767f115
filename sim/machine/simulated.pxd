cimport cython
from sim.machine.copy_queue cimport Copy, CopyQueue, copy_of, result_of
from sim.machine.group cimport Group, Members
from sim.machine.lanes cimport SerialLane, Stream, Launched
from sim.machine.meter cimport Meter
from sim.machine.price cimport Launch, Operation, Price
from sim.machine.protocol cimport Machine
from sim.machine.shared_memory cimport GpuMemory, HostMemory
from sim.machine.turn cimport Turn
from sim.machine.waiting cimport Waiting
from sim.policy.pieces cimport Piece
from sim.policy.tickets cimport Ticket, ends_at
from sim.workload.iterations cimport Iteration, Range

cdef int _H2D, _HOST, _CPU, _NVME, _KINDS

cdef class SimulatedMachine(Machine):
    cdef readonly object cost
    cdef public double now_s
    cdef readonly object spans
    cdef readonly int n_gpus, n_links
    cdef readonly list streams, h2d, links
    cdef readonly Stream stream
    cdef readonly CopyQueue write_backs, p2p_out, p2p_in, drive
    cdef readonly object exchange, together
    cdef int _n_away
    cdef CopyQueue _link
    cdef readonly SerialLane d2h, cpu, side
    cdef public long long d2h_bytes, written_back_bytes, kv_out_bytes, kv_in_bytes, n_kv_out, n_copy_launches, n_syncs
    cdef public double kv_out_s
    cdef public double experts_launched
    cdef readonly list gpu_s, cpu_s, side_s, host_predict_s
    cdef double _begin_s, _sync_s, _copy_launch_s, _hybrid_s
    cdef bint _has_dense
    cdef readonly int n_hybrid
    cdef int _n_begun, _copy_calls
    cdef list _hybrid_in
    cdef Meter _prices
    cdef dict _predicted_by, _attentions, _experts, _grouped_experts, _on_cpu, _joined_on_cpu
    cdef list _copies, _part_launches, _alone_of, _used, _groups, _blocks
    cdef int _n_used
    cdef Operation _leader
    cdef Members _members
    cdef Group _group
    cdef GpuMemory _gpu_memory
    cdef bint _grouped
    cdef str _precision
    cdef tuple _waits
    cdef Ticket _gate
    cdef int _n_tokens, _n_out, _n_heads, _n_layers
    cdef Operation _attention, _gate_block, _shared, _dense, _head
    cdef _forget(self)
    @cython.locals(n_tokens=int, price=Price, alone=Range, attention=Operation)
    cpdef begin(self, Iteration iteration)
    @cython.locals(operation=Operation)
    cdef Operation _operation(self, Price price, Launch launch)
    @cython.locals(length=int)
    cdef _reprice(self, Operation operation, Price price)
    @cython.locals(host_s=double, launched_s=double)
    cdef Ticket _launch(self, str op, int layer, Operation operation, tuple after=*)
    @cython.locals(host_s=double, launched_s=double, first_s=double, last_s=double, duration_s=double, length=int,
                   stream=Stream, work=Launched, ticket=Ticket, after=tuple, launch=Launch, price=Price,
                   beside=Operation)
    cdef Ticket _on_all(self, list steps, int layer)
    @cython.locals(stream=Stream, ticket=Ticket)
    cdef list _ends(self)
    cdef void _count_use(self, Operation operation) noexcept
    @cython.locals(operation=Operation, at=int)
    cdef void _count_uses(self) noexcept
    cdef _note_use(self, Operation operation)
    @cython.locals(group=Group)
    cdef void _close_groups(self) noexcept
    cdef Ticket _settled(self)
    @cython.locals(stream=Stream, operation=Operation, now_s=double, free_s=double, gate_s=double, start_s=double,
                   last_s=double, starved_s=double, waited_s=double, copied_s=double, at=int, open_ends=bint)
    cpdef double to_gate(self, int layer) except? -1.0
    @cython.locals(host_s=double)
    cpdef sync(self, Ticket ticket)
    @cython.locals(stream=Stream, group=Group, members=Members, place=cython.Py_ssize_t, costs=cython.Py_ssize_t, told=bint,
                   ran=bint, begins=bint, n=cython.Py_ssize_t, at=cython.Py_ssize_t, now_s=double, free_s=double,
                   slowed_s=double, more_s=double, launched_s=double, waited_s=double, starved_s=double, arrived_s=double,
                   host_s=double, start_s=double, end_s=double, last_s=double, copied_s=double)
    cpdef bint run_turn(self, Turn turn) except -1
    @cython.locals(stream=Stream, queue=CopyQueue, group=Group, members=Members, operation=Operation, place=int,
                   costs=int, slowed_s=double, more_s=double, now_s=double,
                   free_s=double, link_s=double, launched_s=double, waited_s=double, starved_s=double, joins=bint,
                   n_copies=int, layer=int, row=int, gate_s=double, start_s=double, last_s=double, n_here=int,
                   n_coming=int, at=int, arrived_s=double, copied_s=double)
    cpdef bint plain_layers(self, int first, int n, long long[::1] here, long long[::1] coming, Turn turn) except -1
    @cython.locals(operation=Operation, stream=Stream, host_s=double, launched_s=double, work=Launched, group=Group)
    cpdef Ticket expert(self, Piece piece, int n_tokens, double arrived_s, tuple after, object parts)
    @cython.locals(stream=Stream, ticket=Ticket)
    cdef Ticket _elsewhere(self, Piece piece, int n_tokens, Operation operation, double host_s, double arrived_s,
                           tuple after)
    cpdef dispatch(self, int layer, list n_tokens)
    cdef _send(self, int layer, int gpu, int n_tokens)
    @cython.locals(stream=Stream, ticket=Ticket, length=int, gpu=int)
    cdef Ticket _with_the_others(self, Piece piece, int n_tokens, Operation operation, double first_s, double last_s,
                                 double arrived_s, tuple after)
    cdef _combine(self)
    @cython.locals(n_bytes=cython.longlong, seconds=double, host_s=double, length=int, copy=Copy)
    cdef Copy _cross(self, str op, int layer, int n_tokens, CopyQueue port, tuple after)
    @cython.locals(of_index=list, index=int, operation=Operation)
    cdef Operation _alone(self, Piece piece, int n_tokens)
    @cython.locals(operation=Operation)
    cdef Operation _alone_by_size(self, Piece piece, int n_tokens)
    @cython.locals(group=Group, joins=bint, plain=bint, ticket=Ticket, last=Operation)
    cdef Operation _join_group(self, Piece piece, int n_tokens, double arrived_s, tuple after)
    @cython.locals(frac=double, by_kind=dict, found=tuple, joined=Operation)
    cdef Operation _in_group(self, Group group, double slack_s, Piece piece, int n_tokens)
    @cython.locals(n_bytes=cython.longlong, there_s=double, back_s=double, length=int, duration_s=double,
                   attributed_to=int, host_s=double, arrived_s=double, queue=CopyQueue, back=Copy, done=Ticket,
                   joins=bint, by_tokens=dict, memory=HostMemory, draws_per_s=double, read=Ticket, cause=int)
    cpdef Ticket cpu_expert(self, int layer, int expert, int n_tokens, tuple after=*)
    @cython.locals(host_s=double)
    cdef _begin_hybrid(self, int layer)
    cdef tuple _cpu_work(self, int n_tokens, bint joins)
    @cython.locals(pieces=list, done=list, copy=Copy, queue=CopyQueue)
    cpdef list poll(self)
    cdef Operation _lead(self)
    cdef Operation _member(self, Operation last)
    @cython.locals(members=Members, last=Operation)
    cdef _note_member(self, int place)
    @cython.locals(operation=Operation)
    cdef Operation _place(self, Launch launch, object priced)
    @cython.locals(queue=CopyQueue, now_s=double, start_s=double)
    cpdef bint demand(self, Piece piece, double ready_s) except -1
    @cython.locals(queue=CopyQueue, now_s=double, free_s=double, copy_s=double, launch_s=double, launched=double, shares=bint,
                   told=bint, slows_until_s=double, begun_s=double, start_s=double, at=cython.Py_ssize_t)
    cpdef bint demand_turn(self, Turn turn) except -1
    @cython.locals(launch_s=double, calls=int, index=int, known=tuple)
    cdef double _enqueue(self, Piece piece)
    @cython.locals(launch=tuple, of_index=list)
    cdef tuple _part_launch(self, Piece piece)
    @cython.locals(of_index=list, index=int, timed=tuple)
    cdef _time(self, Piece piece, CopyQueue queue)
    @cython.locals(now_s=double, queue=CopyQueue, duration_s=double, length=int, settled=Copy, copy=Copy, parts_differ=bint)
    cpdef Ticket copy(self, Piece piece, int priority, double ready_s, tuple after)
    @cython.locals(queue=CopyQueue, duration_s=double, length=int, demanded=bint, read=Copy)
    cpdef Ticket read(self, int layer, int expert, long long n_bytes, int priority)
    @cython.locals(queue=CopyQueue, duration_s=double, begun_s=double, n_bytes=cython.longlong, length=int, copy=Copy)
    cpdef move_kv(self, int n_pages, long long page_bytes, bint down)
    @cython.locals(queue=CopyQueue)
    cpdef bint promote(self, Ticket ticket) except -1
    @cython.locals(queue=CopyQueue)
    cpdef bint cancel(self, Ticket ticket) except -1
    @cython.locals(queue=CopyQueue)
    cpdef bint ended(self, Ticket ticket) except -1
    cpdef double ends_after_s(self, Ticket ticket) except? -1.0
    @cython.locals(queue=CopyQueue)
    cdef _advance(self)
    @cython.locals(queue=CopyQueue, found=CopyQueue, first_s=double, start_s=double)
    cdef CopyQueue _next_link(self)
    @cython.locals(queue=CopyQueue)
    cdef bint _settle_next(self) except -1
    cdef _settle(self, Ticket ticket)
    @cython.locals(attributed_to=int, ticket=Ticket, length=int)
    cpdef Ticket predict(self, double duration_s, str lane, bint blocking, object basis)
