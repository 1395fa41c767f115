cimport cython
from sim.policy.decisions cimport Evict, Fetch, Foresee, Predict, Prefetch, RunGpu, Serve, Wait
from sim.policy.pieces cimport Piece
from sim.policy.tickets cimport Ticket, all_tickets, ends_at
from sim.workload.gate cimport gate_of

# Records of an array, each with the comments that `core.py` has on them.
cdef struct row_t:  # one expert, a line of a processor's cache; the first four are written by `Lanes`
    double arrive  # end of its copy; -1.0: `coming` names the ticket
    double busy  # end of what reads or writes its room last; -1.0: `reading` names the ticket
    int coming, reading
    int prev  # its neighbours in the order of leaving
    int next
    int mark  # the layer that asks for it and has not run it yet, as `Core.tick` counts them
    int left_in  # the pass in which it left last
    int came  # the how manieth of all that came
    int ran  # since `Core.end_phase`: how often it ran,
    int again  # was missing though it had been there before,
    int demanded  # and was demanded
    short here
    short origin  # why it came: 0 demanded, 1 prefetched, 2 placed
    short unused  # prefetched, and not used since
cdef struct op_t:  # an operation's costs, and how often it ran in this iteration
    double first, all, dur, tail, tail_frac
    double slow  # what it takes longer beside a copy
    double slack  # what it leaves to fill of its group's floor
    int launch
    int priced  # the counter of its seconds by figure,
    int length  # and by duration
    int next  # the operation of an expert for one token that joins its group after it; -1: not priced yet
    int n
cdef struct kind_t:  # copies that cost the same
    double dur, launch
    double share  # of an expert
    long long n_bytes
    int calls
    long long n
cdef struct copy_t:  # queued on the link
    double ready
    int lane, after, key, demanded, ticket
cdef struct late_t:  # launched on the stream, and not settled
    double first, last, dur, tail, slow, arrive
    int cause  # of `arrive`
    int lane, spec, after, ticket, key
    int row  # of waits, when it was launched
    int op, layer, n_tokens
cdef struct node_t:  # one of several tickets that something waits for
    int ticket, next
cdef struct room_t:
    double ready
    long long n_bytes
    int lane, after
cdef struct end_t:
    double at
    int lane, cause, spec, copies
cdef struct stretch_t:
    double since
    int after
cdef struct event_t:
    int kind, key
cdef struct span_t:
    double start, end
    long long n_bytes
    int lane, op, layer, expert, n_tokens
cdef struct fate_t:  # of a prefetch, by who was prefetched, or gave room to one
    int issue, late, harmful, gone_in, gone_for
cdef struct wish_t:
    double pri, after
    long long asked
    int lane, waits

cdef int GPU, H2D, HOST, SIDE, IDLE, KINDS, LATE_PREFETCH, N_LANES, N_RESOURCES
cdef int ATTENTION, GATE, SHARED, HEAD, DENSE, PREDICT, N_BLOCKS, EXPERT, DEMAND_COPY
cdef int PREFETCH_COPY, SYNC, OWED, LAUNCH, NOTED, RECENCY, INSERTION, RANKS, ASKED
cdef int HIT, LATE, MISS, CAPACITY, EVICTED_UNUSED, WRONG_PREDICTION, TOO_LATE, DEMANDED, ISSUED
cdef int ISSUED_WHOLE, ISSUED_BYTES, CANCEL, CANCEL_WHOLE, CANCELLED, CANCELLED_BYTES, REFUSED, FATE, FATE_BYTES
cdef int HELD, INSTEAD, N_COLUMNS, USEFUL, LATE_USE, WASTED, HARMFUL, MOST, LEFT
cdef int FETCHED, RAN, HANDED, WITHDRAWN
cdef double INF

@cython.final
cdef class Lanes:
    cdef readonly double now
    cdef double begin_s, sync_s, kernel_s
    cdef readonly long long n_syncs
    cdef readonly long long n_calls  # that launched copies
    cdef readonly double experts_copied, free
    cdef double[::1] gaps  # by cause
    cdef double charged_host, charged_copy
    cdef double[::1] waited  # by phase, layer and kind
    cdef int w_first  # where the phase's begin
    cdef int w_row  # where the layer's do
    cdef int w_between
    cdef double run_s  # of operations
    cdef late_t[::1] late
    cdef int l_first, l_mask, n_late, n_layers, n_experts
    cdef readonly double link
    cdef copy_t[::1] q
    cdef int n_q, n_demanded
    cdef double start_s  # of the copy that `next_copy` has found
    cdef kind_t[::1] kinds
    cdef int[::1] kind_of  # by key
    cdef int[::1] kind_order
    cdef int n_kinds_met
    cdef readonly long long n_copies, copied_bytes
    cdef end_t[::1] ends
    cdef int t_mask, n_tickets
    cdef node_t[::1] node
    cdef int free_node
    cdef dict told  # of tickets that a policy has and nobody has settled
    cdef int n_told
    cdef readonly double side, side_busy
    cdef readonly bint shares
    cdef bint remembers
    cdef double copied  # until when copies run
    cdef double owed  # what the stream owes to copies that were settled later
    cdef readonly double slowed
    cdef double[::1] noted
    cdef int n_noted
    cdef object prices  # `sim.core.prices.Prices`
    cdef op_t[::1] ops
    cdef int n_ops
    cdef bint has_shared
    cdef int[::1] n_before  # dense layers before each layer, and before the head
    cdef readonly int n_tokens  # of the iteration
    cdef double[::1] parts  # GPU 0's time line, by cause
    cdef bint grouped
    cdef bint g_open  # others may join the group of experts launched last
    cdef double g_launched, g_slack
    cdef int g_op
    cdef tuple g_waits  # what its first was told to wait for, None: nothing
    cdef int lead  # the operation of one token that begins a group, or runs by itself
    cdef int[::1] met
    cdef int n_met
    cdef long long[::1] uses  # by launch
    cdef double[::1] p_dur
    cdef int[::1] p_for, p_n, p_order
    cdef int n_priced
    cdef double[::1] l_dur
    cdef int[::1] l_n, l_order
    cdef int n_lengths
    cdef dict priced_at, length_at
    cdef double[::1] side_spent, host_spent
    cdef double[::1] spent  # by figure
    cdef stretch_t[::1] stretch
    cdef int s_room  # stretches of each lane
    cdef int[::1] s_n, based
    cdef double[::1] base
    cdef int[::1] walk_at, kept
    cdef double[::1] kept_s, path
    cdef int[::1] resource
    cdef span_t[::1] spans
    cdef int n_spans, span_cap
    cdef row_t[::1] row
    @cython.locals(o=int)
    cpdef put_op(self, object place, object launch, object host, object price, object slack_s)
    cdef int put_seconds(self, int o, object duration_s, object figure) except -1
    @cython.locals(k=int)
    cpdef put_kind(self, object kind, object duration_s, object launch_s, object share, object n_bytes, object calls)
    cdef void use(self, int o) noexcept
    @cython.locals(i=int, o=int, p=int, n_p=int, n_l=int)
    cdef void tell_uses(self) noexcept
    @cython.locals(i=int)
    cdef void span(self, int lane, int op, int layer, int expert, int n_tokens, long long n_bytes, double start, double end) noexcept
    @cython.locals(i=int)
    cpdef tell_spans(self, object told)
    @cython.locals(n=int)
    cdef void began(self, int lane, double since, int after) noexcept
    @cython.locals(lane=int, i=int, old=int)
    cdef void widen(self) noexcept
    @cython.locals(i=int, first=int, since=double)
    cdef void walk(self, int lane, double time, double start) noexcept
    @cython.locals(lane=int, i=int, n=int, until=double)
    cdef void settle_path(self) noexcept
    @cython.locals(first=int, own=int, r=int, i=int)
    cdef void keep(self, int lane) noexcept
    cdef void charge(self) noexcept
    cdef void wait(self, int w, int cause, bint spec, double gap) noexcept
    @cython.locals(i=int)
    cdef double beside(self, double start, double end, double slow) noexcept
    @cython.locals(i=int, b=int, both=double)
    cdef void copies(self, double start, double end) noexcept
    @cython.locals(free=double)
    cdef void pay(self) noexcept
    @cython.locals(end=double)
    cdef double place(self, int w, double start, int cause, int lane, bint spec, double last, double dur, double tail, double slow) noexcept
    @cython.locals(host=double, end=double)
    cdef double block(self, int o, int layer) noexcept
    @cython.locals(i=int, t=int)
    cdef int put_late(self, int o, int told, int layer, int k, int n_tokens, double host, double arrive, int cause, int lane, bint spec, int after) noexcept
    @cython.locals(i=int, j=int, k=int, t=int, cause=int, lane=int, row=int, spec=bint, start=double, e=double)
    cdef void progress(self) noexcept
    @cython.locals(t=int)
    cdef int ticket(self) noexcept
    cdef void settle(self, int t, double end, int lane, int cause, bint spec) noexcept
    cdef void tell(self, int t) noexcept
    @cython.locals(i=int, j=int)
    cdef int add_node(self, int first, int t) noexcept
    @cython.locals(i=int)
    cdef void drop_nodes(self, int first) noexcept
    cdef numbers_of(self, int first)
    @cython.locals(t=int)
    cdef int number_of(self, object ticket) except -2
    @cython.locals(j=int, r=double, e=double)
    cdef double ready_of(self, int i) noexcept
    @cython.locals(j=int, r=double, lane=int)
    cdef int waited_for(self, int i) noexcept
    @cython.locals(c=int, end=double)
    cdef double carry(self, int k, double start, int lane, int op) noexcept
    @cython.locals(t=int, k=int, spec=bint, e=double)
    cdef void serve_copy(self, int i, double start) noexcept
    cdef void unqueue(self, int i) noexcept
    cdef void move(self, int i, int j) noexcept
    @cython.locals(i=int)
    cdef void queue_copy(self, int k, double ready, int lane, int after, int demanded, int t) noexcept
    @cython.locals(best=int, i=int, r=double, first=double)
    cdef int next_copy(self) noexcept
    @cython.locals(i=int)
    cdef void advance(self) noexcept
    @cython.locals(i=int, best=int, r=double, t=double)
    cdef void settle_demand(self) noexcept
    @cython.locals(i=int)
    cdef bint settle_next(self) noexcept
    @cython.locals(c=int, host=double)
    cdef void launch_copy(self, int k) noexcept
    @cython.locals(t=int)
    cdef void demand(self, int k, double ready, int lane, int after) noexcept
    @cython.locals(t=int)
    cdef int speculate(self, int k, double ready, int lane, int after) noexcept
    @cython.locals(t=int, i=int)
    cdef bint promote(self, int k) noexcept
    @cython.locals(last=int)
    cdef void put_last(self, int i) noexcept
    @cython.locals(t=int, i=int)
    cdef bint withdraw(self, int k) noexcept
    @cython.locals(arrive=double)
    cdef bint has_arrived(self, int k) noexcept
    @cython.locals(o=int)
    cdef int expert_op(self, int n, bint joins) except -1
    @cython.locals(host=double, start=double, arrive=double, end=double, cause=int, after=int, o=int, t=int)
    cdef int expert(self, int k, int n) except -1
    @cython.locals(o=int, host=double, start=double, arrive=double, cause=int, lane=int, spec=bint, joins=bint, chain=int, t=int, ticket=Ticket)
    cdef int expert_after(self, int k, int n, object arrival, tuple after) except -1
    @cython.locals(host=double)
    cdef void sync(self, double end, int lane, int cause, bint spec) noexcept
    cdef int settle_until(self, int t) except -1
    cdef void idle_until(self, double time, int cause, bint spec) noexcept
    @cython.locals(t=int)
    cdef int read(self, double end) except -1
    @cython.locals(o=int)
    cdef int begin_alone(self, int context) except -1
    @cython.locals(i=int, t=int, gate=double)
    cdef int to_gate(self, int layer) except -1
    @cython.locals(i=int)
    cdef int head(self) except -1
    @cython.locals(figure=int, host=double)
    cpdef predict(self, double duration_s, object lane, bint blocking, object basis)
    @cython.locals(host=double, end=double)
    cdef predict_on_gpu(self, int o, int figure)
    @cython.locals(t=int)
    cpdef ticket_of(self, object number)
    @cython.locals(i=int)
    cpdef attention(self, object layer)
    @cython.locals(gate=double, t=int)
    cpdef gate(self, object layer)
    cpdef int sync_ticket(self, object ticket) except -1
    @cython.locals(i=int)
    cpdef parts_s(self)
    @cython.locals(i=int)
    cdef void settle_parts(self) noexcept
    @cython.locals(i=int)
    cpdef path_s(self)
    @cython.locals(i=int, by_s=dict, c=int)
    cpdef busy_s(self)
    @cython.locals(i=int)
    cpdef by_figure_s(self)
    @cython.locals(i=int)
    cpdef waits_s(self)
    @cython.locals(i=int)
    cpdef uses_of(self, object launch)

@cython.final
cdef class Core:
    cdef readonly Lanes lanes
    cdef int L, E
    cdef long long size  # bytes of an expert
    cdef row_t[::1] row
    cdef unsigned char[::1] flags  # `Row.here`, side by side
    cdef readonly long long budget, taken, peak
    cdef bint divided
    cdef long long[::1] layer_budget, layer_taken
    cdef long long clean  # that nobody has or reads
    cdef room_t[::1] rooms
    cdef int r_first, r_mask, n_rooms
    cdef double ready_s  # of the room taken last: when its readers end, on which lane, and who is not settled
    cdef int ready_lane, ready_after, n_came
    cdef int[::1] left  # who left for the prefetch that is handed over
    cdef int n_left_for, order
    cdef bint per_layer
    cdef double[::1] rank
    cdef unsigned char[::1] bar
    cdef bint spares_unused, guarded
    cdef int[::1] res  # residents in any order, and where each stands among them
    cdef int[::1] stands, tie
    cdef int n_res
    cdef readonly int layer
    cdef int entered  # the same, and between iterations the last
    cdef int tick, n_want
    cdef readonly int n_left
    cdef object block  # of decode rows, and the experts that they choose
    cdef long long[::1] ids
    cdef int[::1] want  # in the order of the gate
    cdef int[::1] asked  # tokens of each
    cdef int[::1] tokens  # by expert; 0: not asked for, or it ran
    cdef int[::1] turn, lack
    cdef readonly int depth  # -1: no line
    cdef wish_t[::1] wishes
    cdef bint waits_after  # who is demanded next waits for what its wish says
    cdef object asked_from  # numbers of a policy's that wishes are read from
    cdef double w_after  # what wishes wait for that are noted now
    cdef int w_lane
    cdef tuple w_tickets
    cdef long long[::1] w_key
    cdef double[::1] w_pri
    cdef dict arrivals  # tickets of copies that a policy was given, by key
    cdef dict wish_after  # tickets of wishes that wait for one which nobody has settled
    cdef int[::1] line
    cdef readonly int n_line
    cdef long long n_asked
    cdef int[::1] fly, fly_in, fly_ticket
    cdef int n_fly
    cdef double quiet  # until when none of them can end
    cdef double checked  # when that was found out
    cdef double[::1] after_ready  # what the room of a prefetched expert waited for
    cdef int[::1] after_lane
    cdef dict after_tickets
    cdef fate_t[::1] fate
    cdef bint predicts
    cdef int[::1] wanted_for  # by expert and by layer, the pass for which it was predicted last
    cdef int[::1] predicted_for
    cdef int spoken  # the last layer of which the gate has spoken in this pass
    cdef readonly int phase
    cdef int by_first, pass_n
    cdef long long[::1] by  # [columns, phases, experts]
    cdef double[::1] sums  # of a stride, as `sim.engine.run_loop.Clockwork.decoding` has them
    cdef long long[::1] n_class  # [phase, class, (experts, tokens)]
    cdef long long[::1] n_aside  # [phase, class]: how those were found that serve in another's place
    cdef long long[::1] n_prefetched  # hits on unused prefetches, by phase
    cdef long long[::1] n_fate
    cdef long long n_issued, n_cancelled, n_dropped
    cdef readonly long long n_unused
    cdef long long n_demand, n_evicted, n_executed
    cdef event_t[::1] events
    cdef int n_events, log_cap
    cdef list pieces
    cdef object view
    cdef object judge  # refuses what is illegal
    cdef bint tells_accessed, tells_evicted, tells_placed
    cdef object on_accessed, on_evicted, on_placed, on_victim
    cdef bint assigns  # it changes the routing
    cdef object on_layer_enter, on_gate_input, on_gate_done, on_layer_done
    @cython.locals(k=int)
    cpdef bind(self, object budget, object layer_budgets, object depth, object order, object per_layer, object ranks=*, object bars=*, object options=*)
    @cython.locals(k=int)
    cpdef put(self, object key)
    cdef void more(self, int column, int k, long long n) noexcept
    cdef void note(self, int kind, int k) noexcept
    @cython.locals(i=int)
    cpdef tell_log(self, object log)
    @cython.locals(k=int)
    cpdef begin(self, object phase)
    @cython.locals(k=int)
    cpdef end_phase(self)
    @cython.locals(left=int)
    cdef void missed(self, int k) noexcept
    cdef int ring(self, int k) noexcept
    @cython.locals(before=int, after=int)
    cdef void cut(self, int k) noexcept
    @cython.locals(end=int, last=int)
    cdef void push(self, int k) noexcept
    cdef void come(self, int k) noexcept
    @cython.locals(last=int)
    cdef void gone(self, int k) noexcept
    cdef void touch(self, int k) noexcept
    @cython.locals(v=int, e=int, one=Piece)
    cdef int leaver(self, int k, bint speculative) except -2
    @cython.locals(best=int, best_bar=int, best_rank=double, most=double, i=int, v=int, b=int, r=double, first=int)
    cdef int least(self, int k, bint speculative) noexcept
    cdef bint fits(self, int k) noexcept
    cdef void add(self, int k, int origin) noexcept
    cdef void take_off(self, int k) noexcept
    @cython.locals(i=int)
    cdef void give(self, long long n_bytes, double ready, int lane, int after) noexcept
    @cython.locals(j=int, e=double)
    cdef bint is_over(self, int i, double now) noexcept
    @cython.locals(i=int, j=int, more=cython.longlong, lacks=cython.longlong)
    cdef void take(self, long long n_bytes, double now) noexcept
    @cython.locals(v=int)
    cdef int make_room(self, int k, bint speculative) except -1
    @cython.locals(after=int, lane=int, ready=double)
    cdef int evict(self, int v) except -1
    @cython.locals(ready=double, lane=int, after=int, now=double)
    cdef int demand(self, int k) except -1
    @cython.locals(i=int)
    cdef void enter(self, int layer) noexcept
    @cython.locals(k=int)
    cdef void ask(self, int expert, int n_tokens) noexcept
    @cython.locals(by=int)
    cdef int find(self, int k) noexcept
    @cython.locals(i=int, c=int)
    cdef void classify(self) noexcept
    @cython.locals(i=int, k=int, c=int, first=int)
    cpdef classify_asked(self, object asked)
    @cython.locals(i=int, k=int, n=int, n_missing=int, n_later=int, early=bint)
    cdef int serve(self) except -1
    cdef int fetch(self, int k) except -1
    cdef int run(self, int k) except -1
    @cython.locals(expert=int, n=int)
    cdef int run_after(self, int k, tuple after) except -1
    cdef void count_fate(self, int k, int fate) noexcept
    cdef void becomes(self, int k, int fate) noexcept
    @cython.locals(layer=int, aim=int)
    cdef void predicted(self, int k) noexcept
    @cython.locals(i=int)
    cdef void unfly(self, int k) noexcept
    cdef void promote(self, int k) noexcept
    @cython.locals(after=int)
    cdef int withdrawn(self, int k) except -1
    @cython.locals(i=int, t=int, ready=double, lane=int, after=int, now=double, tickets=tuple)
    cdef int hand_over(self, int k) except -1
    @cython.locals(i=int, k=int, n=int, e=double, quiet=double)
    cdef void forget_ended(self) noexcept
    @cython.locals(k=int)
    cdef int pump(self) except -1
    cpdef poll(self)
    @cython.locals(ticket=Ticket)
    cdef wait_for(self, tuple after)
    cdef int wish(self, int k, double pri, bint waits) except -1
    cdef int wish_for(self, int k, double pri, tuple after) except -1
    @cython.locals(i=int, o=int)
    cdef void join_line(self, int k) noexcept
    @cython.locals(i=int)
    cdef bint leave_line(self, int k) noexcept
    @cython.locals(i=int)
    cdef void clear_line(self) noexcept
    cpdef prefetch(self, int k, double pri, tuple after)
    @cython.locals(i=int, k=int, stop=int, aimed=bint)
    cpdef int withdraw_up_to(self, int layer) except -1
    cpdef int cancel(self, int k) except -1
    @cython.locals(i=int, n=int, stop=int)
    cpdef drop_line(self, object up_to)
    cdef int begin_line(self, object up_to) except -1
    @cython.locals(k=int)
    cpdef requeue(self, object wanted, object up_to)
    @cython.locals(i=int, k=int)
    cpdef requeue_from(self, object wishes, int start, int stop, int fresh, tuple after, object up_to, int most)
    @cython.locals(i=int)
    cpdef waiting(self)
    @cython.locals(t=int)
    cpdef arrival(self, int k)
    @cython.locals(k=int)
    cpdef int key(self, object piece) except -1
    @cython.locals(n=int)
    cpdef obey(self, object said, object hook)
    @cython.locals(k=int, run=RunGpu, fetch=Fetch, leaving=Evict, ask=Prefetch, wait=Wait)
    cdef apply(self, object decision, bint asked)
    cdef predict(self, Predict asked)
    @cython.locals(predict=object)
    cdef foresee(self, Foresee asked)
    cdef fetch_after(self, int k, tuple after, bint asked)
    @cython.locals(k=int)
    cdef run_gpu(self, object expert, tuple after, bint asked)
    @cython.locals(i=int)
    cpdef ask_row(self, object block, int at, int n)
    @cython.locals(layer=int)
    cpdef decode(self, object block, int at, int n)
    @cython.locals(i=int, j=int, width=int, start=double, s=double[::1])
    cpdef stride(self, object block, object top_k, object n, object context, object sums)
    @cython.locals(layer=int)
    cpdef run_layers(self, object iteration, object arrays, object future)
    cdef int run_layer(self, object iteration, int layer, object row, object arrays) except -1
    @cython.locals(k=int)
    cpdef finish(self)
    cpdef holds(self, int k)
    @cython.locals(i=int)
    cpdef experts(self)
    cpdef pending_of(self, int layer, int expert)
    @cython.locals(k=int)
    cpdef residents(self)
    @cython.locals(i=int)
    cpdef counts(self)

@cython.final
cdef class View:
    cdef Core core
    cdef object _policy, _pieces
    cdef list _all
    cdef object _arrays, _future, _room
    cdef readonly object model_name, prices
    cdef readonly int n_layers, n_experts, n_gpus, top_k, hidden_size
    cdef readonly long long expert_bytes
    cdef public object phase
    @cython.locals(one=Piece)
    cpdef first_evictable(self, object pieces)
    @cython.locals(one=Piece)
    cpdef evictable(self, object piece)
    @cython.locals(k=int)
    cpdef arrived(self, object piece)
