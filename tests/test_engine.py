"""What the engine refuses, with the reason and the way out; what it counts by its own rules."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from easy_numbers import run
from test_timeline_copies import Placed

from sim.base.errors import IllegalDecision
from sim.policy.api import Policy
from sim.policy.decisions import Cancel, DropQueue, Evict, Fetch, Prefetch, RunCpu, RunGpu, RunPart, Serve
from sim.policy.tickets import Ticket
from sim.policy.view import View

ROWS = [[[0, 1], [0, 1]]]


def deciding(*decisions, traits=(), there=((0, 0), (0, 1), (1, 0), (1, 1))):
    """A policy that says this when layer 0's gate has spoken, and serves layer 1."""

    class Says(Placed):
        name = "says"

        def gate_done(self, gate, view: View):
            if gate.layer == 0:
                for decision in decisions:
                    yield decision(view) if callable(decision) else decision
            else:
                yield Serve()

    Says.traits = frozenset(traits)
    return Says(there)


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_decisions_yielded_at_once_give_the_ticket_of_each(kind, tmp_path):
    class AtOnce(Placed):
        name = "at_once"

        def gate_done(self, gate, view: View):
            tickets = yield kind([Fetch(view.piece(gate.layer, expert)) for expert in gate.needs])
            assert [type(ticket) for ticket in tickets] == [Ticket, Ticket]
            given.append([ticket.end_s for ticket in tickets])
            none, *runs = yield kind([DropQueue(), *(RunGpu(expert, tuple(tickets)) for expert in gate.needs)])
            assert none is None
            given.append([ticket.end_s for ticket in runs])
            assert (yield kind([])) == []

    given: list[list[float]] = []
    run(AtOnce(()), tmp_path, ROWS, room=4)
    # Layer 0: attention 0..1, both copies from there, 10 s each; an expert takes 2 s, and waits for both.
    assert given[:2] == [[11.0, 21.0], [23.0, 25.0]]


class Relay(Generator):
    """A generator of another type than Python's, as a compiled policy's are."""

    def __init__(self, steps):
        self.steps = steps

    def send(self, answer):
        return self.steps.send(answer)

    def throw(self, *error):
        return self.steps.throw(*error)


def test_a_generator_of_any_type_is_given_its_tickets(tmp_path):
    class Compiled(Placed):
        name = "compiled"

        def gate_done(self, gate, view: View):
            return Relay(self.steps(gate, view))

        def steps(self, gate, view: View):
            for expert in gate.needs:
                ticket = yield Fetch(view.piece(gate.layer, expert))
                ends_s.append(ticket.end_s)
                yield RunGpu(expert, (ticket,))

    ends_s: list[float] = []
    run(Compiled(()), tmp_path, ROWS, room=4)
    assert ends_s[:2] == [11.0, 21.0]  # attention 0..1, then 10 s each


def left(view):
    return view.part(0, 0, 0.0, 0.5)


def quarters(v):
    """The right half of expert 0, in two slices."""
    return v.part(0, 0, 0.5, 0.75), v.part(0, 0, 0.75, 1.0)


def begun():
    """The left half of expert 0 comes and runs."""
    return [lambda v: Fetch(left(v)), lambda v: RunPart(left(v))]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (deciding(lambda v: RunPart(v.piece(0, 3))), "RunPart of .*: layer 0 does not owe it; run each part once"),
        (deciding(lambda v: RunPart(v.piece(1, 0))), "layer 0 does not owe it"),
        (deciding(RunGpu(0), lambda v: RunPart(v.piece(0, 0))), "layer 0 does not owe it"),
        (deciding(lambda v: RunPart(left(v))), "not on the GPU, or not in a precision that serves; Fetch it"),
        (deciding(*begun(), RunGpu(1)), r"layer 0 of says: experts \[0\] were not executed"),
        (deciding(*begun(), lambda v: RunPart(left(v))), "have run; run no column twice"),
        (
            deciding(
                *(lambda v, i=i: Fetch(v.matrices(0, 0, 3)[i]) for i in range(3)),
                lambda v: RunPart(v.matrices(0, 0, 3)[1]),
            ),
            "a matrix needs what those before it come to",
        ),
        (deciding(*begun(), lambda v: RunPart(v.piece(0, 0))), "have run; run no column twice"),
        (
            deciding(*begun(), lambda v: RunPart(v.part(0, 0, 0.5, 1.0), (), quarters(v))),
            "not on the GPU, or not in a precision that serves; Fetch it",
        ),
        (
            deciding(
                *begun(),
                lambda v: Fetch(quarters(v)[0]),
                lambda v: Fetch(quarters(v)[1]),
                lambda v: RunPart(v.piece(0, 0), (), quarters(v)),
            ),
            "are not all of it in columns; name those that are",
        ),
        (
            deciding(
                lambda v: Fetch(v.matrices(0, 0, 2)[0]),
                lambda v: Fetch(v.matrices(0, 0, 2)[1]),
                lambda v: RunPart(v.piece(0, 0), (), tuple(v.matrices(0, 0, 2))),
            ),
            "are not all of it in columns",
        ),
        (
            deciding(*begun()[:1], lambda v: RunPart(v.matrices(0, 0, 2)[0], (), (left(v),))),
            "are not all of it in columns",
        ),
        (deciding(*begun(), RunGpu(0)), r"RunGpu\(0\): layer 0's expert is not on the GPU"),
        (deciding(*begun(), lambda v: Evict(left(v))), "layer 0 still needs it"),
        (deciding(*begun(), RunCpu(0), traits={"cpu"}), r"RunCpu\(0\): a part of it has run on the GPU"),
        (
            deciding(
                lambda v: Fetch(v.part(0, 0, 0.0, 0.5, "int4")), lambda v: RunPart(v.part(0, 0, 0.0, 0.5, "int4"))
            ),
            "not in a precision that serves",
        ),
        (
            deciding(
                *begun(),
                lambda v: Fetch(v.part(0, 0, 0.5, 0.75)),
                lambda v: Fetch(v.part(0, 0, 0.75, 1.0)),
                RunGpu(0, joined=True),
            ),
            "not all of the expert in columns",
        ),
        (
            deciding(
                *(lambda v, at=at: Fetch(v.matrices(0, 0, 3)[at]) for at in range(3)), RunGpu(0, joined=True), there=()
            ),
            "not all of the expert in columns of the serving precision; leave `joined` out",
        ),
        (deciding(RunGpu(0)), r"layer 0 of says: experts \[1\] were not executed"),
        (deciding(RunGpu(0), RunGpu(0)), r"RunGpu\(0\): layer 0 does not owe it"),
        (deciding(RunGpu(3)), "does not owe it"),
        (deciding(RunGpu(1), there=()), "is not on the GPU; Fetch it first"),
        (deciding(lambda v: Evict(v.piece(0, 1))), "layer 0 still needs it"),
        (deciding(lambda v: Evict(v.piece(0, 3))), "it is not resident"),
        (deciding(RunCpu(0)), "needs the trait 'cpu'"),
        (deciding(RunCpu(2), traits={"cpu"}), "does not owe it"),
        (deciding(RunCpu(0, join_layer=2), traits={"cpu"}), "join at this layer or a later one"),
        (
            deciding(lambda v: Fetch(v.piece(1, 2)), lambda v: Fetch(v.piece(1, 3))),
            "no room and says.victim named nothing",
        ),
        (deciding(lambda v: Cancel(v.piece(1, 0))), "Cancel of says: it depends on time"),
        (deciding(DropQueue()), "DropQueue of says: it depends on time"),
        (deciding("fetch"), "not a decision"),
        (deciding(lambda v: v.future), "view.future of says: needs the trait 'oracle'"),
        (deciding(lambda v: v.arrived(v.piece(0, 0))), "view.arrived of says: needs the trait 'timing'"),
        (deciding(lambda v: v.queued()), "view.queued of says: needs the trait 'timing'"),
    ],
)
def test_illegal_decisions_are_refused(policy, message, tmp_path):
    with pytest.raises(IllegalDecision, match=message):
        run(policy, tmp_path, ROWS, room=5, n_experts=4)


def test_hooks_that_follow_the_clock_need_the_trait(tmp_path):
    class Listener(Policy):
        name = "listener"

        def copy_done(self, piece, view): ...

    class Queuer(Policy):
        name = "queuer"
        prefetch_depth = 1

    for policy in (Listener(), Queuer()):
        with pytest.raises(IllegalDecision, match="declare the trait 'timing'"):
            run(policy, tmp_path, ROWS, room=4)


def test_a_hook_may_return_a_list_or_nothing_or_yield(tmp_path):
    tickets = []

    class Mixed(Placed):
        def iteration_start(self, iteration, view):
            return [Prefetch(view.piece(1, 0))]

        def layer_enter(self, layer, view):
            return None

        def gate_input(self, layer, view):
            if layer == 0:
                tickets.append((yield Prefetch(view.piece(1, 1))))
                tickets.append((yield Prefetch(view.piece(1, 1))))  # on its way: left alone

    seen = run(Mixed([(0, 0), (0, 1)]), tmp_path, ROWS, room=4)
    assert seen.prefetched()["issued"] == 2
    assert (tickets[0].end_s, tickets[1]) == (20, None)


def test_completions_name_their_piece_and_leave_activations_out(tmp_path):
    told = []

    class Listener(Placed):
        traits = frozenset({"timing", "cpu"})

        def copy_done(self, piece, view):
            told.append((view.layer, piece.layer, piece.expert, piece.stop_frac))

        def request_start(self, request, view):
            return [Prefetch(view.part(1, 1, 0.0, 0.5))]

        def gate_done(self, gate, view):
            if gate.layer == 0:
                yield RunCpu(1)
            else:
                yield Fetch(view.part(1, 1, 0.5, 1.0))
                yield RunGpu(0)
                yield RunGpu(1)
                return
            yield Serve()

    # The half is copied 0..5; the CPU's result is up at 8 (down 2, CPU 7); layer 1's gate is read at 9: both are over,
    # one is told. The other half: 9..14; told at the end of the iteration.
    run(Listener([(0, 0), (1, 0)]), tmp_path, ROWS, room=4)
    assert told == [(1, 1, 1, 0.5), (1, 1, 1, 1.0)]


def test_partial_hit_and_hit_by_parts(tmp_path):
    class Halves(Placed):
        def initial(self, view):
            return [view.part(0, 0, 0.0, 0.5), view.part(0, 1, 0.0, 0.5), view.part(0, 1, 0.5, 1.0)]

        def gate_done(self, gate, view):
            yield Fetch(view.part(0, 0, 0.5, 1.0))
            yield RunGpu(0)
            yield RunGpu(1)

    seen = run(Halves(), tmp_path, [[[0, 1]]], room=2)
    assert seen.classes("prefill") == {"hit": 1, "partial": 1}
