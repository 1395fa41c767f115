"""Lanes that slow one another: plain lanes at zero, a naive oracle elsewhere, conservation and laws.

`test_contention_by_hand` has timelines worked out by hand, `test_simpy` the same lanes under a policy.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import shared_oracle
from event_scripts import replay
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_scripts import scripts
from tiny_traces import ALL, tiny_trace
from untaught import UNTAUGHT

from sim.base.errors import DoesNotFit
from sim.machine.events.bill import TERMS
from sim.machine.events.clock import Pending
from sim.options import RunSpec
from sim.policy.registry import policies
from sim.run import execute, prepare

GPU_BY_H2D, H2D_BY_GPU, *_ = TERMS

# -- nothing contends: plain lanes, bit for bit ------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_trace(
        tmp_path_factory.mktemp("t") / "t.safetensors",
        32,
        8,
        2,
        n_requests=2,
        prompt=4,
        outputs=6,
        levels=ALL - {"arrivals"},
    )


def simulate(tiny, policy: str, **rest: Any):
    """(result, decisions, spans) of a run on real numbers. Skips a policy that the world has too little room for."""
    spans, log = [], []
    rest["set"] = UNTAUGHT.get(policy, {}) | rest.get("set", {})
    made = prepare(RunSpec(policy=policy, trace=str(tiny), model="mixtral-8x7b", split="all", hw="rtx3090", **rest))
    try:
        outcome = execute(made, lambda *span: spans.append(span), lambda *entry: log.append(entry))
    except DoesNotFit as refusal:
        pytest.skip(str(refusal))
    finally:
        made.close()
    result = outcome.result.to_dict()
    del result["wall_s"]
    return result, log, sorted(spans)


# -- otherwise: a naive oracle, conservation, laws ------------------------------------------------------------------

shares = st.fixed_dictionaries({term: st.sampled_from([0.0, 0.05, 0.3, 0.7, 2.0]) for term in TERMS})


def uneven(script, seed: int):
    """The same script with odd durations, so that nothing meets by accident and rounding decides no order."""
    odd = random.Random(seed)

    def stretch(value):
        return value * odd.uniform(0.5, 1.5) if isinstance(value, float) else value

    result = []
    for op in script:
        rest = [stretch(value) for value in op[1:]]
        if op[0] in ("run", "block"):  # the last launch comes after the first
            at = 2 if op[0] == "run" else 1
            rest[at] = max(rest[at], rest[at - 1])
        result.append((op[0], *rest))
    return result


@settings(max_examples=200, deadline=None, derandomize=True)
@given(scripts(gpus=2), shares, st.integers(0, 10**6))
def test_scripts_equal_a_naive_oracle(script, terms, seed):
    script = uneven(script, seed)
    seen, _ = replay(script, True, terms)
    expected = shared_oracle.replay(script, terms)
    assert seen.answers == expected.answers
    assert seen.host_s == pytest.approx(expected.host_s, rel=1e-9)
    assert [end is None for end in seen.ends] == [end is None for end in expected.ends]
    assert [end for end in seen.ends if end is not None] == pytest.approx([e for e in expected.ends if e is not None])
    assert [lane for lane, _, _ in seen.spans] == [lane for lane, _, _ in expected.spans]
    for one, other in zip(seen.spans, expected.spans, strict=True):
        assert one[1:] == pytest.approx(other[1:], rel=1e-9, abs=1e-9)


def work_done(spans, terms) -> dict[str, list[float]]:
    """Integral of the rate over every span, by lane in order of time."""
    edges = sorted({at for _, start, end in spans for at in (start, end)})
    done = {}
    for lane, start, end in sorted(spans, key=lambda span: span[1:]):
        total = 0.0
        for a, b in pairwise(edges):
            if start <= a and b <= end:
                running = {name for name, s, e in spans if s <= a and b <= e}
                total += (b - a) * shared_oracle.rate_of(lane, running, terms)
        done.setdefault(lane, []).append(total)
    return done


@settings(max_examples=200, deadline=None, derandomize=True)
@given(scripts(gpus=2), shares)
def test_work_is_conserved_and_lanes_serve_one_at_a_time(script, terms):
    seen, machine = replay(script, True, terms)
    asked: dict[str, list[float]] = {}
    for op, *rest in script:
        if op == "run":
            asked.setdefault(f"gpu{rest[0]}", []).append(rest[3])
        elif op == "block":
            asked.setdefault("gpu0", []).append(rest[2])
        elif op == "cpu":
            asked.setdefault("d2h", []).append(rest[1])
            asked.setdefault("cpu", []).append(rest[2])
            asked.setdefault("h2d0", []).append(rest[3])
    kinds = [op for op in script if op[0] in ("run", "block", "copy", "cpu")]
    for op, end in zip(kinds, seen.ends, strict=True):
        if op[0] == "copy" and end is not None:
            asked.setdefault(f"h2d{op[1]}", []).append(op[3])
    found = work_done(seen.spans, terms)
    assert found.keys() == asked.keys()
    for lane, amounts in found.items():
        in_order = lane[:3] != "h2d"
        expected = asked[lane] if in_order else sorted(asked[lane])
        assert (amounts if in_order else sorted(amounts)) == pytest.approx(expected)
        own = sorted(span[1:] for span in seen.spans if span[0] == lane)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    for stream in machine.streams:
        assert sum(stream.time.parts_s) == pytest.approx(stream.time.free_s)
        assert stream.time.parts_s[0] >= stream.time.busy_s - 1e-9  # waiting for another GPU counts as GPU time


@settings(max_examples=200, deadline=None, derandomize=True)
@given(scripts(gpus=2), shares)
def test_events_are_linear_in_operations(script, terms):
    _, machine = replay(script, True, terms)
    n_ops = sum(op[0] in ("run", "block", "copy", "cpu") for op in script)
    n_waits = sum(len(op[-1]) for op in script if op[0] == "copy")
    n_more = sum(op[0] in ("cancel", "promote") for op in script)
    n_lanes, n_events = 8, next(machine.clock._eid)
    assert n_events <= 2 * n_lanes + 24 * n_ops + 2 * (n_waits + n_more)


def fixed_order(pick: random.Random) -> list[tuple[Any, ...]]:
    """Demand copies, computations that wait for them, and reads: nothing can overtake anything."""
    script: list[tuple[Any, ...]] = []
    copies: list[int] = []
    n = 0
    for _ in range(pick.randint(3, 12)):
        if n and pick.random() < 0.2:
            script.append(("sync", pick.randrange(n)))
            continue
        seconds, gpu = float(pick.randint(1, 6)), pick.randrange(2)
        if pick.random() < 0.5:
            script.append(("copy", gpu, 0.0, seconds, True, []))
            copies.append(n)
        else:
            script.append(("run", gpu, 0.0, 0.0, seconds, pick.sample(copies, min(len(copies), pick.randint(0, 1)))))
        n += 1
    return script


def test_no_more_contention_ends_sooner_where_the_order_is_fixed():
    """Not proved; where priorities or the CPU decide the order it is false."""
    for seed in range(600):
        pick = random.Random(seed)
        script = fixed_order(pick)
        terms = {term: pick.choice([0.0, 0.25, 0.5, 1.0]) for term in TERMS}
        term = pick.choice(TERMS)
        less, more = (
            max([seen.host_s, *seen.ends])
            for seen, _ in (replay(script, True, some) for some in (terms, terms | {term: terms[term] + 0.5}))
        )
        assert more >= less - 1e-9


ACTIVE = {f"hw.contention.{term}": value for term, value in zip(TERMS, (0.05, 0.02, 0.6, 0.3), strict=True)}


QUICK = {"lru", "fine_moe", "mixtral_offloading", "importance", "moe_cache", "hybrimoe", "freetoken", "daop", "sp_moe"}


@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.thorough]) for name in policies()]
)
def test_every_policy_under_contention(tiny, policy):
    first = simulate(tiny, policy, set=ACTIVE)
    assert first == simulate(tiny, policy, set=ACTIVE)  # to the last bit
    alone = simulate(tiny, policy)
    if "timing" not in policies()[policy].traits:
        assert first[1] == alone[1]
    assert first[0]["h2d_bytes"] == alone[0]["h2d_bytes"] or "timing" in policies()[policy].traits
    shares = first[0]["bottleneck"]["decode"]
    assert sum(share for share in shares.values()) == pytest.approx(1)


def test_waiting_for_what_nothing_will_end_is_an_error():
    _, machine = replay([("copy", 0, 0.0, 5.0, True, [])], False, {GPU_BY_H2D: 0.5})
    with pytest.raises(RuntimeError, match="deadlock"):
        machine.sync(Pending(0))
