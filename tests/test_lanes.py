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

from sim.machine.copy_queue import Copy, CopyLane
from sim.machine.lanes import CAUSES, GPU, H2D, HOST, SerialLane, Stream
from sim.machine.price import Launch, Price
from sim.machine.protocol import DEMAND, SPECULATIVE, UNKNOWN_S, Ticket
from sim.machine.simulated import SimulatedMachine
from sim.policy.pieces import Piece

QUICK = settings(max_examples=400, deadline=None, derandomize=True)


class Knobs(SimpleNamespace):
    """Stands for `Cost`: every price is what the script says."""

    def copy_s(self, seconds: float) -> float:
        return seconds

    def back_s(self, seconds: float) -> float:
        return self.down_s

    def peer_s(self, n_bytes: int) -> float:
        return 0.0

    def activation_bytes(self, n_tokens: int) -> float:
        return self.up_s

    def expert(self, n_tokens: int, precision: str, frac: float, kernels_frac: float) -> Price:
        return Price(self.seconds, 0)

    def expert_cpu(self, n_tokens: int) -> Price:
        return Price(self.seconds, 0)


def launch(first: float, whole: float) -> Launch:
    made = Launch(4, 0.0, 0.0)  # four kernels: the last one takes a quarter of the time
    made.first_s, made.all_s = first, whole
    return made


def replay(script: list[tuple[Any, ...]], two: bool = True) -> tuple[Observed, SimulatedMachine]:
    """The script on the real machine."""
    seen = Observed()

    def spans(lane: str, *rest: Any) -> None:
        start, end = rest[-2:]
        if lane != "host":
            name = lane if lane[-1].isdigit() or lane in ("d2h", "cpu") else f"{lane}0"
            seen.spans.append((name, start, end))

    cost = Knobs(attributed_to=[()], grouped=False, q_predictor={"assumed": 0}, sync_s=0.0, copy_launch_s=0.0, up_s=0.0)
    machine = SimulatedMachine(cost, 2 if two else 1, spans)
    tickets: list[Ticket] = []
    for op, *rest in script:
        if op == "host":
            machine.predict(rest[0], "host", False, "assumed")
        elif op == "run":
            gpu, first, whole, cost.seconds, after = rest
            cost.launch_expert = launch(first, whole)
            piece = Piece(0, 0, 0.0, 1.0, "bf16", gpu, 0, 0)
            tickets.append(machine.expert(piece, 1, tuple(tickets[t] for t in after)))
        elif op == "block":
            first, whole, seconds = rest
            cost.launch_gate, machine._gate_price = launch(first, whole), Price(seconds, 0)
            tickets.append(machine.gate(0))
            machine._gate = None  # the way to a second GPU is not part of these scripts
        elif op == "copy":
            gpu, cost.copy_launch_s, seconds, demand, after = rest
            piece = Piece(0, 0, 0.0, 1.0, "bf16", gpu, seconds, 0)
            priority = DEMAND if demand else SPECULATIVE
            tickets.append(machine.copy(piece, priority, tuple(tickets[t] for t in after)))
        elif op == "cpu":
            cost.cpu_launch_s, cost.down_s, cost.seconds, cost.up_s = rest
            tickets.append(machine.cpu_expert(0, 0, 1))
        elif op == "join":
            machine.join(tickets[rest[0]])
        elif op == "sync":
            machine.sync(tickets[rest[0]])
        elif op == "promote":
            machine.promote(tickets[rest[0]])
        elif op == "cancel":
            seen.answers.append(("cancel", machine.cancel(tickets[rest[0]])))
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


@settings(max_examples=150, deadline=None, derandomize=True)
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
    assert not any(up.queue for up in machine.h2d)


# -- rules of one lane, by hand -------------------------------------------------------------------------------------


def copy(seconds: float, priority: int, at: float, *after: Ticket) -> Copy:
    return Copy("x", 0, 0, int(seconds), seconds, priority, at, after)


def test_demand_first_then_order_of_asking():
    lane = CopyLane("h2d")
    first, second, third = (copy(10, SPECULATIVE, 0.0) for _ in range(3))
    for one in (first, second, third):
        lane.submit(one, 0.0)
    demand = copy(10, DEMAND, 1.0)
    lane.submit(demand, 1.0)
    assert (first.start_s, demand.start_s) == (0, 10)  # settled: nothing can overtake them any more
    assert second.start_s == UNKNOWN_S
    assert lane.next_start_s() == 20
    lane.advance(20.0)
    assert second.start_s == UNKNOWN_S  # starts at 20, not before 20: can still be overtaken
    lane.advance(20.5)
    assert second.start_s == 20


def test_a_demand_that_is_not_ready_lets_others_pass():
    lane = CopyLane("h2d")
    waits = copy(10, DEMAND, 0.0, Ticket(7.0, 0))
    lane.submit(waits, 0.0)
    other = copy(10, DEMAND, 1.0)
    lane.submit(other, 1.0)
    assert (other.start_s, waits.start_s) == (1, 11)


def test_a_demand_is_not_withdrawn():
    lane = CopyLane("h2d")
    waits = copy(10, SPECULATIVE, 0.0, Ticket(7.0, 0))
    lane.submit(waits, 0.0)
    lane.promote(waits, 1.0)
    assert not lane.cancel(waits, 2.0)
    assert lane.settle_next()
    assert waits.start_s == 7


def test_a_copy_is_cancelled_only_before_it_starts():
    lane = CopyLane("h2d")
    first, second = copy(10, SPECULATIVE, 0.0), copy(10, SPECULATIVE, 0.0)
    lane.submit(first, 0.0)
    lane.submit(second, 0.0)
    assert lane.cancel(first, 0.0)  # would start exactly now
    assert not lane.cancel(second, 0.5)  # has started at 0
    assert lane.completions(10.0) == []  # nobody asked for reports
    assert lane.n_copies == 1


def test_completions_are_reported_once_in_order():
    lane = CopyLane("h2d")
    lane.report = True
    first, second = copy(10, DEMAND, 0.0), copy(5, DEMAND, 0.0)
    lane.submit(first, 0.0)
    lane.submit(second, 0.0)
    assert lane.completions(9.9) == []
    assert lane.completions(10.0) == [first]
    assert lane.completions(99.0) == [second]


def test_serial_lane():
    lane = SerialLane("cpu")
    assert lane.use("x", 0, 0, 1, 3.0, 2.0) == 5
    assert lane.use("x", 0, 0, 1, 1.0, 2.0) == 7  # in order of asking, though it was ready before
    assert lane.busy_s == 4


def test_stream_charges_a_wait_to_what_came_last():
    stream = Stream("gpu")
    stream.run("a", 0, 0, 1, 1.0, 1.0, 2.0, ())  # host until 1, busy 1..3
    stream.run("b", 0, 0, 1, 2.0, 2.0, 2.0, (Ticket(9.0, 1),))  # waits for a copy 3..9, busy 9..11
    stream.run("c", 0, 0, 1, 10.0, 14.0, 2.0, ())  # busy 11..13, its last kernel ends at 14
    assert stream.parts_s == [6, 6, 2, 0, 0, 0]
    assert stream.free_s == 14


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
def test_work_is_late_by_what_kept_it_from_starting_sooner(first_s, after, cause):
    stream = Stream("gpu1")
    assert stream.run("expert", 0, 0, 1, first_s, first_s, 5.0, after).cause == cause


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
            counts.append(sum(type(o) is Copy for o in gc.get_objects()))  # isinstance would wake foreign objects
            assert run.outcome.machine.h2d[0].n_copies > 3 * outputs
            del run
    assert counts[1] <= counts[0] + 8


def test_a_demand_keeps_its_place_while_another_link_decides_when_it_is_ready():
    # Link 0 is busy 0..20. The demand of ticket 4 waits for a block that waits for GPU 1 and its prefetch: ready at 8.
    script = [("copy", 0, 0.0, 20.0, True, []), ("copy", 1, 0.0, 5.0, False, []), ("run", 1, 0.0, 0.0, 1.0, [1]),
              ("block", 0.0, 0.0, 2.0), ("copy", 0, 0.0, 3.0, True, [3]), ("copy", 0, 0.0, 3.0, True, [])]  # fmt: skip
    agree(script, two=True)
    assert replay(script)[0].ends == [20, 5, 6, 8, 23, 26]


def test_waiting_for_one_link_settles_nothing_that_starts_later_on_another():
    # The host waits for GPU 1 until 4; ticket 1 would start at 5 on link 0, and is overtaken by the demand asked at 4.
    script = [("copy", 0, 0.0, 5.0, False, []), ("copy", 0, 0.0, 5.0, False, []), ("copy", 1, 0.0, 3.0, False, []),
              ("run", 1, 0.0, 0.0, 1.0, [2]), ("sync", 3), ("copy", 0, 0.0, 2.0, True, [])]  # fmt: skip
    agree(script, two=True)
    assert replay(script)[0].ends == [5, 12, 3, 4, 7]


def test_work_on_one_gpu_may_wait_for_work_on_another_and_that_for_the_first():
    # 0: copy 0..1. 1: GPU 0 1..2. 2: GPU 1 waits for it: 2..3. 3: GPU 0 for that: 3..4; 4: GPU 1: 4..5, and a copy.
    script = [("copy", 0, 0.0, 1.0, False, []), ("run", 0, 0.0, 0.0, 1.0, [0]), ("run", 1, 0.0, 0.0, 1.0, [1]),
              ("run", 0, 0.0, 0.0, 1.0, [2]), ("run", 1, 0.0, 0.0, 1.0, [3]), ("copy", 1, 0.0, 1.0, True, [4]),
              ("sync", 5)]  # fmt: skip
    agree(script, two=True)
    assert replay(script)[0].ends == [1, 2, 3, 4, 5, 6]


def test_who_waits_for_a_copy_that_is_withdrawn_goes_on():
    # The second copy would start at 5; withdrawn at 2, it lets the computation begin there.
    script = [("copy", 0, 0.0, 5.0, True, []), ("copy", 0, 0.0, 5.0, False, []), ("run", 0, 0.0, 0.0, 1.0, [1]),
              ("host", 2.0), ("cancel", 1), ("sync", 2)]  # fmt: skip
    for two in (False, True):
        agree(script, two)
        assert replay(script, two)[0].ends == [5, None, 3]


@pytest.mark.parametrize("op", ["promote", "cancel"])
def test_what_has_started_is_left_alone(op):
    script = [("copy", 0, 0.0, 5.0, False, []), ("host", 1.0), (op, 0), ("copy", 0, 0.0, 5.0, True, [])]
    agree(script, two=False)


def test_waiting_for_an_expert_elsewhere_is_waiting_for_its_copy():
    stream = Stream("gpu1")
    late = stream.run("a", 0, 0, 1, 1.0, 1.0, 2.0, (Ticket(9.0, 1),))  # free at 0, waits 0..9 for a copy, runs 9..11
    assert (late.end_s, late.cause) == (11, 1)
    soon = stream.run("b", 0, 0, 1, 1.0, 1.0, 4.0, (Ticket(12.0, 1),))  # waits 11..12, runs 12..16: mostly computing
    assert (soon.end_s, soon.cause) == (16, 0)
