"""Experts computed in parts, worked out by hand and at random. Numbers of `easy_numbers`: half an expert is copied in
5 s and, being two smaller kernels, computed in 2 s; attention and head 1 s."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import msgspec
import pytest
from easy_numbers import EXPERT_BYTES, execute_easy, figure, run, setup
from tiny_traces import from_rows

from policies.lru import Lru
from sim.conformance import safety
from sim.conformance.world import World
from sim.machine.cost import Cost
from sim.policy.api import Policy
from sim.policy.decisions import Evict, Fetch, Prefetch, RunGpu, RunPart
from sim.policy.view import Prices
from sim.results.metrics import hit_rates
from traces.format.reader import Trace


class Halves(Policy):
    """Expert 0's left half and expert 1's right half are there; what runs when is said by `script`."""

    name = "halves"
    script = ()

    def initial(self, view):
        return [view.part(0, 0, 0.0, 0.5), view.part(0, 1, 0.5, 1.0)]

    def gate_done(self, gate, view):
        yield Fetch(view.part(0, 0, 0.5, 1.0))
        yield Fetch(view.part(0, 1, 0.0, 0.5))
        for say in self.script:
            yield say(view)


def there_first():
    return (
        lambda v: RunPart(v.part(0, 0, 0.0, 0.5)),
        lambda v: RunPart(v.part(0, 1, 0.5, 1.0)),
        lambda v: RunGpu(0),
        lambda v: RunGpu(1),
    )


# Attention 0..1; copies 1..6 and 6..11.
@pytest.mark.parametrize(
    ("script", "parts", "log"),
    [
        # What is there at 1 and 3, the rest as it arrives.
        (there_first(), [(1, 3), (3, 5), (6, 8), (11, 13)], ["part 0", "part 1", "gpu 0", "gpu 1"]),
        # The last part completes its expert, in whichever order.
        (
            (lambda v: RunPart(v.part(0, 1, 0.5, 1.0)), lambda v: RunPart(v.part(0, 1, 0.0, 0.5)), lambda v: RunGpu(0)),
            [(1, 3), (11, 13), (13, 15), (15, 17)],
            ["part 1", "gpu 1", "gpu 0"],
        ),
        # Side by side, once the last of them is there: one expert of 2 s.
        (
            (lambda v: RunGpu(0, joined=True), lambda v: RunPart(v.part(0, 1, 0.5, 1.0)), lambda v: RunGpu(1)),
            [(6, 8), (8, 10), (11, 13)],
            ["gpu 0", "part 1", "gpu 1"],
        ),
        # Expert by expert, in order of columns: 0's left half, its right half; 1's left half is there last.
        ((lambda v: RunGpu(0), lambda v: RunGpu(1)), [(1, 3), (6, 8), (11, 13), (13, 15)], ["gpu 0", "gpu 1"]),
    ],
)
def test_parts_by_hand(tmp_path, script, parts, log):
    policy = Halves()
    policy.script = script
    seen = run(policy, tmp_path, [[[0, 1]]], room=2)
    assert seen.lane("h2d") == [("demand 0.0", 1, 6), ("demand 0.1", 6, 11)]
    assert [(start_s, end_s) for what, start_s, end_s in seen.lane("gpu") if what.startswith("expert")] == parts
    assert [f"{kind} {expert}" for kind, _, expert in seen.log if kind != "fetch"] == log
    assert seen.end_s == parts[-1][1] + 1
    assert seen.outcome.report.counts.tally.n_executed == 2


class Quarters(Policy):
    """Half of an expert is there; the other half comes in two copies and is computed as one."""

    name = "quarters"

    def initial(self, view):
        return [view.part(0, 0, 0.0, 0.5)]

    def gate_done(self, gate, view):
        slices = view.part(0, 0, 0.5, 0.75), view.part(0, 0, 0.75, 1.0)
        for piece in slices:
            yield Fetch(piece)
        yield RunPart(view.part(0, 0, 0.0, 0.5))
        yield RunPart(view.part(0, 0, 0.5, 1.0), (), slices[::-1])  # whatever their order


def test_slices_are_computed_as_the_part_they_make_up(tmp_path):
    seen = run(Quarters(), tmp_path, [[[0]]], room=1, n_experts=2)
    assert seen.lane("h2d") == [("demand 0.0", 1, 3.5), ("demand 0.0", 3.5, 6)]
    assert seen.lane("gpu") == [("attention 0", 0, 1), ("expert 0.0", 1, 3), ("expert 0.0", 6, 8), ("head", 8, 9)]
    assert [kind for kind, _, _ in seen.log] == ["fetch", "fetch", "part", "gpu"]
    assert seen.outcome.report.counts.tally.n_executed == 1


class Remainder(Policy):
    """Expert 0 is computed, leaves, and both halves of expert 1 come into its room."""

    name = "remainder"

    def initial(self, view):
        return [view.piece(0, 0)]

    def gate_done(self, gate, view):
        yield RunGpu(0)
        yield Evict(view.piece(0, 0))
        for piece in (view.part(0, 1, 0.0, 0.5), view.part(0, 1, 0.5, 1.0)):
            yield Fetch(piece)
        yield RunGpu(1, joined=True)


def test_what_a_small_piece_leaves_of_a_room_waits_for_its_readers_too(tmp_path):
    """Expert 0 is read until 3 s: neither half may be written before."""
    seen = run(Remainder(), tmp_path, [[[0, 1]]], room=1, n_experts=2)
    assert seen.lane("h2d") == [("demand 0.1", 3, 8), ("demand 0.1", 8, 13)]
    assert [span[1:] for span in seen.lane("gpu") if span[0].startswith("expert")] == [(1, 3), (13, 15)]


class OutOfTurn(Policy):
    """Experts 0 and 1 are there, and leave the other way round; 2 and 3 come into their rooms."""

    name = "out_of_turn"

    def initial(self, view):
        return [view.piece(0, 0), view.piece(0, 1)]

    def gate_done(self, gate, view):
        runs, evicts = [RunGpu(e) for e in (0, 1)], [Evict(view.piece(0, e)) for e in (1, 0)]
        return [*runs, *evicts, *(Fetch(view.piece(0, e)) for e in (2, 3)), RunGpu(2), RunGpu(3)]


@pytest.mark.parametrize("more_bytes", [0, EXPERT_BYTES // 2])
def test_rooms_of_equal_pieces_are_slots_whatever_the_budget_leaves_over(tmp_path, more_bytes):
    """0 is read until 3 s and 1 until 5 s: 2 waits for the one freed first, 3 for the other alone."""
    with Trace(from_rows(tmp_path / "t", [[[0, 1, 2, 3]]], 4)) as trace:
        made = setup(OutOfTurn(), trace, room=2, copy_s=1.0)
        made = replace(made, memory=msgspec.structs.replace(made.memory, expert_bytes=(2 * EXPERT_BYTES + more_bytes,)))
        assert execute_easy(made).lane("h2d") == [("demand 0.3", 3, 4), ("demand 0.2", 5, 6)]


class HalfAhead(Policy):
    """Expert 0 and half of expert 1 are there; the other half is prefetched at once."""

    name = "half_ahead"

    def initial(self, view):
        return [view.piece(0, 0), view.part(0, 1, 0.0, 0.5)]

    def request_start(self, request, view):
        return [Prefetch(view.part(0, 1, 0.5, 1.0))]

    def gate_done(self, gate, view):
        return [RunGpu(expert) for expert in gate.needs]


def test_an_expert_is_cached_only_if_no_part_of_it_came_ahead(tmp_path):
    # A token takes 4 s and the prefetch 5: it is there when the third token's gate asks for expert 1.
    seen = run(HalfAhead(), tmp_path, [[[0]], [[0]], [[1]]], room=2, lengths=[(1, 3)])
    tally = seen.outcome.report.counts.tally
    assert seen.classes("decode") == {"hit": 2}
    assert hit_rates(tally, "gate").hit == hit_rates(tally, "room").hit == 1
    assert (hit_rates(tally, "cached").hit, hit_rates(tally, "cached").miss) == (0.5, 0.5)


class Shuffled(Policy):
    """Cuts experts where chance will have it and computes the parts in any order, of all experts at once."""

    name = "shuffled"
    title = "any parts in any order"
    source = "this test's file"
    cuts = turns = 0  # seeds

    def min_experts(self, view):
        return view.n_experts

    def bind(self, view):
        self._cut, self._random = Random(self.cuts), Random(self.turns)

    def gate_done(self, gate, view):
        waiting = []
        for expert in gate.needs:
            cuts = sorted({0.0, 1.0, *(self._cut.randrange(1, 8) / 8 for _ in range(self._cut.randrange(3)))})
            parts = [view.part(gate.layer, expert, a, b) for a, b in pairwise(cuts)]
            for part in parts:
                yield Fetch(part)
            if self._cut.random() < 0.2:
                waiting.append([RunGpu(expert, joined=True)])
                continue
            by_part = self._random.sample(parts, len(parts) if self._random.random() < 0.5 else len(parts) - 1)
            waiting.append([*map(RunPart, by_part), *([RunGpu(expert)] if len(by_part) < len(parts) else [])])
        while waiting:
            one = self._random.choice(waiting)
            yield one.pop(0)
            if not one:
                waiting.remove(one)

    def layer_done(self, layer, view):
        return [Evict(piece) for piece in list(view.residents())]


@pytest.mark.parametrize("seed", range(3))
def test_any_parts_in_any_order_keep_the_rules(seed):
    kind = type("Shuffled", (Shuffled,), {"cuts": seed, "turns": seed, "__doc__": Shuffled.__doc__})
    with World(kind) as world:
        for check in (
            safety.check_computes_each_column_once,
            safety.check_executes_each_needed_expert_once,
            safety.check_bytes_add_up,
            safety.check_hit_classes_add_up,
        ):
            check(world)
        launched = [len(seen.computed) - sum(e.kind == "gpu" for e in seen.events) for seen in safety.runs(world)]
    assert min(launched) > 20


class Sliced(Policy):
    """Copies every expert in four parts, of the sizes that `cuts` says."""

    name = "sliced"
    cuts = (0.0, 0.125, 0.25, 0.5, 1.0)

    def gate_done(self, gate, view):
        for expert in gate.needs:
            for ends in pairwise(self.cuts):
                yield Fetch(view.part(gate.layer, expert, *ends))
        for expert in gate.needs:
            yield RunGpu(expert, joined=True)


# Attention 1 s, then 2 s of the framework's to enqueue an expert; copies take no time, the expert 2 s, the head 1 s.
@pytest.mark.parametrize("policy", [Sliced, Lru])
def test_a_part_takes_its_share_of_what_the_framework_spends_on_a_copy(tmp_path, policy):
    with Trace(from_rows(tmp_path / "t", [[[0]]])) as trace:
        made = setup(policy(), trace, room=1, copy_s=0)
        made = replace(made, stack=msgspec.structs.replace(made.stack, per_copy_s=figure(2.0)))
        seen = execute_easy(made)
    assert seen.end_s == 1 + 2 + 2 + 1
    shares = {found.figure: found.share for found in seen.result.provenance.figures}
    assert shares == pytest.approx({"gpu.kernel_floor_s": 4 / 6, "engine.per_copy_s": 2 / 6})


def test_a_policy_is_told_the_share_of_a_part(tmp_path):
    with Trace(from_rows(tmp_path / "t", [[[0]]])) as trace:
        made = setup(Lru(), trace, room=1, copy_launch_s=0.5)
        made = replace(made, stack=msgspec.structs.replace(made.stack, per_copy_s=figure(2.0)))
        prices = Prices(Cost(made.hw, made.model, made.stack, "bf16"), EXPERT_BYTES)
    assert prices.load_s() == 0.5 + 2.0 + 10.0
    assert prices.load_s(EXPERT_BYTES // 4) == 0.5 + 0.5 + 2.5
