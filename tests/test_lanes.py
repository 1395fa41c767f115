"""Lanes as arithmetic equal the same lanes as SimPy processes, to the last bit, on random scripts."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import simpy_oracle
from hypothesis import given, settings
from lane_scripts import scripts
from simpy_oracle import Observed

from sim.machine.copies import Copy
from sim.machine.copy_queue import CopyQueue
from sim.machine.lanes import CAUSES, GPU, H2D, HOST, SerialLane
from sim.machine.price import Launch, Price
from sim.machine.protocol import DEMAND, SPECULATIVE
from sim.machine.several import ALONE
from sim.machine.simulated import SimulatedMachine
from sim.machine.stream import Launched, Stream
from sim.policy.pieces import Piece
from sim.policy.tickets import UNKNOWN_S, Ticket
from sim.workload.iterations import PREFILL, Iteration, Range, RequestInfo

QUICK = settings(max_examples=200, deadline=None, derandomize=True)
REQUEST = RequestInfo(0, 0, 1, 2, "", None)


class Knobs(SimpleNamespace):
    """Stands for `Cost` and its `copies`: every price is what the script says."""

    several = ALONE
    sharing = SimpleNamespace(on=False)

    @property
    def copies(self) -> Knobs:
        return self

    def h2d_s(self, seconds: int) -> float:
        return float(seconds)

    def expert_s(self, seconds: int, frac: float) -> float:
        return float(seconds)

    def d2h_s(self, seconds: float) -> float:
        return self.down_s

    def p2p_s(self, n_bytes: int) -> float:
        return 0.0

    def activation_bytes(self, n_tokens: int) -> int:
        return int(self.up_s)

    def attention(self, iteration: Any) -> Price:
        return Price(self.seconds, 0)

    def gate(self, n_tokens: int) -> Price:
        return Price(0.0, 0)

    def expert(self, n_tokens: int, precision: str, frac: float, kernels_frac: float) -> Price:
        return Price(self.seconds, 0)

    def expert_cpu(self, n_tokens: int) -> Price:
        return Price(self.seconds, 0)

    expert_cpu_joined = expert_cpu


def knobs() -> Knobs:
    made = Knobs(
        figures=SimpleNamespace(entries=[()]),
        launches=SimpleNamespace(
            grouped=False, sync_s=0.0, copy_s=0.0, begin_s=0.0, kernel_s=0.0, cpu_s=0.0, gate=Launch(0, 0.0, 0.0)
        ),
        precision="bf16",
        q_predictor={"assumed": 0},
        up_s=0.0,
        has_shared=False,
        drive=None,
        has_dense=False,
        n_dense_before=[0, 0],
        n_hops_before=[0, 0],
        gpu_of=[0, 0],
    )
    made.launches.copy_part_s = lambda frac: made.up_launch_s
    made.launches.calls = lambda frac: 1
    made.launches.hybrid_layer_s = 0.0
    return made


def launch(first: float, whole: float) -> Launch:
    made = Launch(4, 0.0, 0.0)  # four kernels: the last one takes a quarter of the time
    made.first_s, made.all_s = first, whole
    return made


def replay(script: list[tuple[Any, ...]], two: bool = True) -> tuple[Observed, SimulatedMachine]:
    """The script on the real machine, told of ends as an engine tells them: what is known as a number."""
    seen = Observed()

    def spans(lane: str, *rest: Any) -> None:
        start, end = rest[-2:]
        if lane != "host":
            name = lane if lane[-1].isdigit() or lane in ("d2h", "cpu") else f"{lane}0"
            seen.spans.append((name, start, end))

    cost = knobs()
    cost.launches.cpu_s = next((launch_s for op, launch_s, *_ in script if op == "cpu"), 0.0)
    machine = SimulatedMachine(cost, 2 if two else 1, spans)
    tickets: list[Ticket] = []
    numbers: set[Ticket] = set()  # those that the machine answered None for

    def note(ticket: Ticket | None) -> None:
        tickets.append(Ticket(machine.ends_s, machine.cause) if ticket is None else ticket)
        if ticket is None:
            numbers.add(tickets[-1])

    def told(after: list[int], *causes: int) -> tuple[float, tuple[Ticket, ...]]:
        """The end of what is known among these, and the tickets of the others."""
        known = [t for t in (tickets[i] for i in after) if t in numbers and t.cause in causes]
        return max([t.end_s for t in known], default=0.0), tuple(tickets[i] for i in after if tickets[i] not in known)

    for op, *rest in script:
        if op == "host":
            machine.predict(rest[0], "host", False, "assumed")
        elif op == "run":
            gpu, first, whole, cost.seconds, after = rest
            cost.launches.expert = launch(first, whole)
            piece = Piece(0, 0, 0.0, 1.0, "bf16", gpu, 0, len(tickets))
            arrived_s, waits = told(after, H2D)
            n_tokens = len(tickets) + 1  # never the same again: each has a price of its own
            note(machine.expert(piece, n_tokens, arrived_s, waits, ()))
        elif op == "block":
            first, whole, cost.seconds = rest
            cost.launches.attention = launch(first, whole)
            n_tokens = len(tickets) + 1  # nor are blocks priced alike
            machine.begin(Iteration(0, [Range(REQUEST, 0, n_tokens, PREFILL, 0)], None))
            machine.attention(0)
            stream = machine.stream
            tickets.append(stream.pending[-1] if stream.n_pending else Ticket(stream.free_s, stream.blame))
        elif op == "copy":
            gpu, cost.up_launch_s, seconds, demand, after = rest
            share = 1 / (len(tickets) + 2)  # never the same again: launching has a price of its own
            piece = Piece(0, 0, 0.0, share, "bf16", gpu, int(seconds), len(tickets))
            ready_s, waits = told(after, H2D, GPU, HOST)
            note(machine.copy(piece, DEMAND if demand else SPECULATIVE, ready_s, waits))
        elif op == "cpu":
            launch_s, cost.down_s, cost.seconds, cost.up_s = rest
            assert launch_s == cost.launches.cpu_s, "a machine asks for it once"
            tickets.append(machine.cpu_expert(0, 0, len(tickets) + 1))  # priced by its tokens, too
        elif op == "join":
            machine.join(tickets[rest[0]])
        elif op == "sync":
            machine.sync(tickets[rest[0]])
        elif op == "promote":
            if tickets[rest[0]] not in numbers:  # a number is over, or under way
                machine.promote(tickets[rest[0]])
        elif op == "cancel":
            seen.answers.append(("cancel", tickets[rest[0]] not in numbers and machine.cancel(tickets[rest[0]])))
        elif op == "look":
            ticket = tickets[rest[0]]
            seen.answers.append(("look", machine.ended(ticket) and not getattr(ticket, "cancelled", False)))
    seen.host_s = machine.now_s
    machine.drain()
    seen.ends = [None if getattr(t, "cancelled", False) else t.end_s for t in tickets]
    seen.spans.sort()
    return seen, machine


def agree(script: list[tuple[Any, ...]], two: bool) -> SimulatedMachine:

    mine, machine = replay(script, two)
    oracle = simpy_oracle.replay(script)
    assert mine.answers == oracle.answers
    assert mine.ends == oracle.ends
    assert mine.spans == oracle.spans
    assert mine.host_s == oracle.host_s
    return machine


@QUICK
@given(scripts(gpus=1))
def test_one_gpu_equals_simpy(script):
    agree(script, two=False)


@QUICK
@given(scripts(gpus=2))
def test_two_gpus_equal_simpy(script):
    agree(script, two=True)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(scripts(gpus=2))
def test_no_lane_overlaps_itself_and_all_time_is_accounted_for(script):
    seen, machine = replay(script)
    by_lane: dict[str, list[tuple[float, float]]] = {}
    for lane, start, end in seen.spans:
        by_lane.setdefault(lane, []).append((start, end))
    for spans in by_lane.values():
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    for stream in machine.streams:
        assert sum(stream.parts_s) == stream.free_s  # busy or waiting for a named cause, at every moment
        assert stream.busy_s == sum(end - start for start, end in by_lane.get(stream.name, ()))
        assert stream.parts_s[0] >= stream.busy_s  # waiting for another GPU is GPU time too
        assert not stream.pending
    assert len(machine.streams[0].parts_s) == len(CAUSES)
    asked = Counter(op[0] for op in script)
    withdrawn = sum(answer for kind, answer in seen.answers if kind == "cancel")
    assert sum(up.n_copies for up in machine.h2d) == asked["copy"] + asked["cpu"] - withdrawn
    assert not any(up.n_queued for up in machine.h2d)


# -- rules of one lane, by hand -------------------------------------------------------------------------------------


def link() -> CopyQueue:
    return CopyQueue("h2d", [Stream("gpu")])


def asked(lane: CopyQueue, seconds: float, priority: int, at: float, *after: Ticket) -> Copy:
    """A copy that the lane has been asked for."""
    length = lane.seconds.meter.at(seconds)
    copy = Copy("x", 0, 0, int(seconds), seconds, length, priority == DEMAND, at, after, None, H2D)
    lane.submit(copy, at)
    return copy


def test_demand_first_then_order_of_asking():
    lane = link()
    first, second, third = (asked(lane, 10, SPECULATIVE, 0.0) for _ in range(3))
    demand = asked(lane, 10, DEMAND, 1.0)
    assert (first.start_s, demand.start_s) == (0, 10)  # settled: nothing can overtake them any more
    assert second.start_s == UNKNOWN_S
    assert lane.next_start_s() == 20
    lane.advance(20.0)
    assert second.start_s == UNKNOWN_S  # starts at 20, not before 20: can still be overtaken
    lane.advance(20.5)
    assert second.start_s == 20
    lane.advance(99.0)
    assert third.start_s == 30
    assert lane.busy_s == 40


def test_a_demand_that_is_not_ready_lets_others_pass():
    lane = link()
    waits = asked(lane, 10, DEMAND, 0.0, Ticket(7.0, 0))
    other = asked(lane, 10, DEMAND, 1.0)
    assert (other.start_s, waits.start_s) == (1, 11)


def test_a_demand_that_nothing_can_overtake_ends_at_a_number():
    lane, piece = link(), Piece(0, 0, 0.0, 1.0, "bf16", 0, 10, 0)
    length = lane.seconds.meter.at(10.0)
    speculative = asked(lane, 10, SPECULATIVE, 0.0)
    assert lane.demand(piece, 10.0, length, 0.0, 0.0, ()) is None
    assert lane.free_s == 10  # asked in the same moment, it goes first
    assert lane.demand(piece, 10.0, length, 5.0, 8.0, ()) is None  # its room is ready before its turn
    assert lane.free_s == 20
    waits = lane.demand(piece, 10.0, length, 5.0, 25.0, ())  # not so: others may pass until 25
    assert waits.end_s == UNKNOWN_S
    assert lane.demand(piece, 10.0, length, 6.0, 0.0, ()).end_s == 30
    assert waits.end_s == 40
    assert lane.settle_next()
    assert speculative.start_s == 40
    assert (lane.n_copies, lane.copied_bytes, lane.busy_s) == (5, 50, 50)


def test_a_demand_is_not_withdrawn():
    lane = link()
    waits = asked(lane, 10, SPECULATIVE, 0.0, Ticket(7.0, 0))
    lane.promote(waits, 1.0)
    assert not lane.cancel(waits, 2.0)
    assert lane.settle_next()
    assert waits.start_s == 7


def test_a_copy_is_cancelled_only_before_it_starts():
    lane = link()
    first, second = asked(lane, 10, SPECULATIVE, 0.0), asked(lane, 10, SPECULATIVE, 0.0)
    assert lane.cancel(first, 0.0)  # would start exactly now
    assert not lane.cancel(second, 0.5)  # has started at 0
    assert lane.completions(10.0) == []  # nobody asked for reports
    assert lane.n_copies == 1


def test_completions_are_reported_once_in_order():
    lane = link()
    lane.report = True
    first, second = asked(lane, 10, DEMAND, 0.0), asked(lane, 5, DEMAND, 0.0)
    assert lane.completions(9.9) == []
    assert lane.completions(10.0) == [first]
    assert lane.completions(99.0) == [second]


def test_serial_lane():
    lane = SerialLane("cpu")
    assert lane.use("x", 0, 0, 1, 3.0, 2.0) == 5
    assert lane.use("x", 0, 0, 1, 1.0, 2.0) == 7  # in order of asking, though it was ready before
    assert lane.busy_s == 4


def placed(
    stream: Stream, first_s: float, last_s: float, seconds: float, after: tuple[Ticket, ...] = (), numbers: bool = False
) -> tuple[float, int]:
    """End and blame of work whose start is known at once; `numbers`: ends of copies are told as one."""
    arrived_s = 0.0
    if numbers:
        arrived_s = max([ticket.end_s for ticket in after if ticket.cause == H2D], default=0.0)
        after = tuple(ticket for ticket in after if ticket.cause != H2D)
    length = stream.seconds.meter.at(seconds)
    assert stream.run("x", 0, 0, 1, first_s, last_s, seconds, length, arrived_s, after) is None
    return stream.free_s, stream.blame


@pytest.mark.parametrize("numbers", [False, True])
def test_stream_charges_a_wait_to_what_came_last(numbers):
    stream = Stream("gpu")
    placed(stream, 1.0, 1.0, 2.0)  # host until 1, busy 1..3
    placed(stream, 2.0, 2.0, 2.0, (Ticket(9.0, H2D),), numbers)  # waits for a copy 3..9, busy 9..11
    placed(stream, 10.0, 14.0, 2.0)  # busy 11..13, its last kernel ends at 14
    assert stream.parts_s == [6, 6, 2, 0, 0, 0, 0]
    assert stream.free_s == 14


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize(
    ("first_s", "after", "cause"),
    [
        (100.0, (Ticket(99.0, GPU),), GPU),  # idle for long, but launched as soon as its input was there
        (100.0, (Ticket(99.0, GPU), Ticket(120.0, H2D)), H2D),  # the copy took longer than the work
        (100.0, (Ticket(99.0, GPU), Ticket(103.0, H2D)), GPU),  # the copy came a little after the launch
        (100.0, (Ticket(110.0, H2D), Ticket(120.0, H2D)), H2D),  # two copies together
        (100.0, (Ticket(80.0, GPU), Ticket(70.0, H2D)), HOST),  # launched long after all was there
    ],
)
def test_work_is_late_by_what_kept_it_from_starting_sooner(first_s, after, cause, numbers):
    assert placed(Stream("gpu1"), first_s, first_s, 5.0, after, numbers)[1] == cause


def test_work_that_waits_for_what_is_not_settled_says_so_by_a_ticket():
    stream = Stream("gpu1")
    length, copy = stream.seconds.meter.at(5.0), Ticket(UNKNOWN_S, H2D)
    work = stream.run("x", 0, 0, 1, 1.0, 1.0, 5.0, length, 3.0, (copy,))
    behind = stream.run("x", 0, 0, 1, 2.0, 2.0, 5.0, length, 0.0, ())  # nothing to wait for but its turn
    assert (work.end_s, behind.end_s, stream.progress()) == (UNKNOWN_S, UNKNOWN_S, False)
    copy.end_s = 9.0
    assert stream.progress()
    assert (work.end_s, work.cause, behind.end_s) == (14, H2D, 19)
    assert stream.parts_s == [10, 9, 0, 0, 0, 0, 0]


def test_tickets_do_not_chain_through_the_run(tmp_path):
    """A run keeps a bounded number of copies alive, however long it is."""
    import gc

    from easy_numbers import execute_easy, setup
    from test_timeline_copies import Placed
    from tiny_traces import tiny_trace

    from traces.format.reader import Trace

    class Ahead(Placed):
        def layer_enter(self, layer, view):
            if layer + 1 < view.n_layers:
                from sim.policy.decisions import Prefetch

                return [Prefetch(view.piece(layer + 1, expert)) for expert in range(2)]
            return None

        def victim(self, piece, speculative, view):
            return next((p for p in view.residents() if view.evictable(p) and p.layer != piece.layer), None) or next(
                (p for p in view.residents() if view.evictable(p) and not speculative), None
            )

    counts = []
    for outputs in (20, 80):
        path = tiny_trace(tmp_path / f"t{outputs}", 4, 4, 2, n_requests=2, outputs=outputs, levels=())
        with Trace(path) as trace:
            run = execute_easy(setup(Ahead(), trace, 6))
            gc.collect()
            kinds = (Copy, Launched)
            counts.append(sum(type(o) in kinds for o in gc.get_objects()))  # isinstance would wake foreign objects
            assert run.machine.h2d[0].n_copies > 3 * outputs
            del run
    assert counts[1] <= counts[0] + 8


def test_a_demand_keeps_its_place_while_another_link_decides_when_it_is_ready():
    # Link 0 is busy 0..20. The demand of ticket 4 waits for a block that waits for GPU 1 and its prefetch: ready at 8.
    script = [
        ("copy", 0, 0.0, 20.0, True, []),
        ("copy", 1, 0.0, 5.0, False, []),
        ("run", 1, 0.0, 0.0, 1.0, [1]),
        ("block", 0.0, 0.0, 2.0),
        ("copy", 0, 0.0, 3.0, True, [3]),
        ("copy", 0, 0.0, 3.0, True, []),
    ]
    agree(script, two=True)
    assert replay(script)[0].ends == [20, 5, 6, 8, 23, 26]


def test_waiting_for_one_link_settles_nothing_that_starts_later_on_another():
    # The host waits for GPU 1 until 4; ticket 1 would start at 5 on link 0, and is overtaken by the demand asked at 4.
    script = [
        ("copy", 0, 0.0, 5.0, False, []),
        ("copy", 0, 0.0, 5.0, False, []),
        ("copy", 1, 0.0, 3.0, False, []),
        ("run", 1, 0.0, 0.0, 1.0, [2]),
        ("sync", 3),
        ("copy", 0, 0.0, 2.0, True, []),
    ]
    agree(script, two=True)
    assert replay(script)[0].ends == [5, 12, 3, 4, 7]


def test_work_on_one_gpu_may_wait_for_work_on_another_and_that_for_the_first():
    # 0: copy 0..1. 1: GPU 0 1..2. 2: GPU 1 waits for it: 2..3. 3: GPU 0 for that: 3..4; 4: GPU 1: 4..5, and a copy.
    script = [
        ("copy", 0, 0.0, 1.0, False, []),
        ("run", 0, 0.0, 0.0, 1.0, [0]),
        ("run", 1, 0.0, 0.0, 1.0, [1]),
        ("run", 0, 0.0, 0.0, 1.0, [2]),
        ("run", 1, 0.0, 0.0, 1.0, [3]),
        ("copy", 1, 0.0, 1.0, True, [4]),
        ("sync", 5),
    ]
    agree(script, two=True)
    assert replay(script)[0].ends == [1, 2, 3, 4, 5, 6]


def test_who_waits_for_a_copy_that_is_withdrawn_goes_on():
    # The second copy would start at 5; withdrawn at 2, it lets the computation begin there.
    script = [
        ("copy", 0, 0.0, 5.0, True, []),
        ("copy", 0, 0.0, 5.0, False, []),
        ("run", 0, 0.0, 0.0, 1.0, [1]),
        ("host", 2.0),
        ("cancel", 1),
        ("sync", 2),
    ]
    for two in (False, True):
        agree(script, two)
        assert replay(script, two)[0].ends == [5, None, 3]


def test_a_demand_that_takes_no_time_is_over_at_the_instant_it_starts():
    # Its computation ends at 4; the host looks at 4. Speculation that would start at 4 can still be overtaken.
    script = [
        ("run", 0, 0.0, 0.0, 4.0, []),
        ("copy", 0, 0.0, 9.0, False, [0]),
        ("copy", 1, 0.0, 0.0, True, [0]),
        ("host", 4.0),
        ("look", 2),
        ("look", 1),
        ("copy", 0, 0.0, 5.0, True, []),
    ]
    agree(script, two=True)
    assert replay(script)[0].answers == [("look", True), ("look", False)]
    assert replay(script)[0].ends == [4, 18, 4, 9]


@pytest.mark.parametrize("op", ["promote", "cancel"])
def test_what_has_started_is_left_alone(op):
    script = [("copy", 0, 0.0, 5.0, False, []), ("host", 1.0), (op, 0), ("copy", 0, 0.0, 5.0, True, [])]
    agree(script, two=False)


@pytest.mark.parametrize("numbers", [False, True])
def test_waiting_for_an_expert_elsewhere_is_waiting_for_its_copy(numbers):
    stream = Stream("gpu1")
    # Free at 0, waits 0..9 for a copy, runs 9..11; then waits 11..12, runs 12..16: mostly computing.
    assert placed(stream, 1.0, 1.0, 2.0, (Ticket(9.0, H2D),), numbers) == (11, H2D)
    assert placed(stream, 1.0, 1.0, 4.0, (Ticket(12.0, H2D),), numbers) == (16, GPU)
