"""FreeToken: its slots, the split of what is missing between link and CPU, and how prompts pass through two buffers."""

from __future__ import annotations

import dataclasses
from random import Random as Draws

import pytest
from cpu_bench import check_knobs, resident, seeded
from easy_numbers import EXPERT_BYTES, execute_easy, figure, run, setup
from msgspec.structs import replace
from tiny_traces import from_rows

from policies.freetoken import EMPTY, FreeToken, Slots, fetch_fraction, n_fetched
from sim.base.errors import BadInput
from traces.format.reader import Trace

# -- the split ---------------------------------------------------------------------------------------------------------


def test_the_fraction_of_measured_machines():
    # FreeToken #232, TR PRO 5955WX + RTX 4090: 54.0 and 23.9 GB/s together, 63.8 and 24.9 alone.
    assert fetch_fraction(1 / 54.0, 1 / 23.9, overlapped=True) == pytest.approx(23.9 / 77.9)
    assert fetch_fraction(1 / 63.8, 1 / 24.9, overlapped=False) == pytest.approx(0.3903, abs=1e-4)
    # FreeToken #436, EPYC 7302 + RTX PRO 4000: 21.89 and 8.41 together; its log says "auto split 27.8 %".
    assert round(fetch_fraction(1 / 21.89, 1 / 8.41, overlapped=True), 3) == 0.278
    assert fetch_fraction(1 / 10, 1 / 20, overlapped=False) == 1.0
    # What takes no time is done at once: nothing to fetch for, and all of it.
    assert [fetch_fraction(0.0, copy_s, True) for copy_s in (0.0, 1.0)] == [0.0, 0.0]
    assert [fetch_fraction(cpu_s, 0.0, both) for cpu_s, both in ((1.0, True), (1.0, False), (0.0, False))] == [1.0] * 3


def test_q_by_hand():
    # f = 23.9 / 77.9 = 0.307. Of 2: q = 0 costs 2 x 0.307, q = 1 costs 0.693: all on the CPU. Of 3: 0.92 against 0.693.
    f = fetch_fraction(1 / 54.0, 1 / 23.9, overlapped=True)
    assert [n_fetched(m, f) for m in range(11)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    slow_link = fetch_fraction(1 / 21.89, 1 / 8.41, overlapped=True)  # of 6: q = 1 costs 1.39, q = 2 1.44
    assert [n_fetched(m, slow_link) for m in range(11)] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3]
    # #232 counts 1.07 fetched and 3.19 computed on the CPU per layer, of 4.26 missing on average.
    assert n_fetched(4, f) / 4 == pytest.approx(1.07 / 4.26, abs=0.002)
    assert [n_fetched(m, 0.5) for m in range(4)] == [0, 0, 1, 1]  # 1 of 1 and none cost the same: the CPU's
    assert [n_fetched(3, f) for f in (0.0, 1.0)] == [0, 3]


def test_q_is_the_best_of_all():
    draw = Draws(1)
    for _ in range(300):
        m, share = draw.randrange(1, 30), draw.randrange(1, 1 << 16)
        q = n_fetched(m, share / (1 << 16))
        costs = [max(n * ((1 << 16) - share), (m - n) * share) for n in range(m + 1)]
        assert costs[q] == min(costs)
        assert costs.index(min(costs)) == q


# -- timelines ---------------------------------------------------------------------------------------------------------


def test_offload_by_hand(tmp_path):
    """Two layers of two experts, four slots: a prompt streams through both buffers, and leaves nothing behind."""
    seen = run(FreeToken(backend="offload"), tmp_path, [[[0], [1]], [[0], [0]], [[0], [1]]], room=4, n_experts=2)
    # The prompt: 0.0 and 0.1 by 20, 1.0 and 1.1 by 40. Experts 20..22 and, attention behind it, 40..42; head ..43.
    prompt = [("prefetch 0.0", 0, 10), ("prefetch 0.1", 10, 20), ("prefetch 1.0", 20, 30), ("prefetch 1.1", 30, 40)]
    # A token: 0.0 is fetched 44..54 after attention, runs ..56; 1.0 57..67, runs ..69; head ..70. The next finds 0.0:
    # attention ..71, expert ..73, attention ..74; 1.1 74..84, runs ..86, head ..87.
    assert seen.lane("h2d") == [*prompt, ("demand 0.0", 44, 54), ("demand 1.0", 57, 67), ("demand 1.1", 74, 84)]
    assert seen.end_s == 87
    assert seen.classes("decode") == {"hit": 1, "miss": 3}
    assert resident(seen) == [(0, 0), (1, 0), (1, 1)]


def test_hits_wait_for_the_gather(tmp_path):
    # k = 2 of three experts, one layer, without buffers: the prompt's layer stays in the first slots, 0 1 2, all three.
    rows = [[[0, 1]], [[0, 1]], [[1, 2]]]
    seen = run(FreeToken(backend="offload"), tmp_path, rows, room=3, n_experts=3)
    assert seen.classes("decode") == {"hit": 4}
    # Two layers, three slots: layer 1's three take them all, so a token's layer 0 fetches 0.0 and 0.1 into slots 0, 1.
    rows = [[[0, 1], [0, 1]], [[0, 1], [1, 2]]]
    seen = run(FreeToken(backend="offload"), tmp_path, rows, room=3, n_experts=3)
    log = [entry for entry in seen.log if entry[0] != "gpu"]
    # Layer 1 then lacks 1: of the slots 0 and 1 are as old, 2 is a hit, so 1.1 goes into slot 0 in place of 0.0.
    assert log[-6:] == [
        ("evict", 1, 0),
        ("fetch", 0, 0),
        ("evict", 1, 1),
        ("fetch", 0, 1),
        ("evict", 0, 0),
        ("fetch", 1, 1),
    ]
    (fetched,) = [end_s for what, _, end_s in seen.lane("h2d") if what == "demand 1.1"][-1:]
    ran = [(what, start_s) for what, start_s, _ in seen.lane("gpu") if what in ("expert 1.1", "expert 1.2")]
    assert ran[-2:] == [("expert 1.1", fetched), ("expert 1.2", fetched + 2)]  # 1.2 was there all the time


def test_hybrid_by_hand(tmp_path):
    """CPU 4 s against copies of 10 s: f = 4 / 14, of 4 missing one is fetched, of 3 one, of 2 none."""
    rows = [[[0, 1, 2, 3], [0, 1, 2, 3]], [[3, 2, 1, 0], [0, 1, 2, 4]], [[3, 2, 1, 4], [4, 5, 6, 7]]]
    seen = run(FreeToken(backend="hybrid"), tmp_path, rows, room=16, n_experts=8, cpu_s=4.0)
    decode = [entry for entry in seen.log if entry[0] in ("cpu", "fetch")][-16:]
    # First token: nobody was ever active: the lowest id of layer 0 is fetched, 3 2 1 run on the CPU.
    assert decode[:8] == [
        ("cpu", 0, 3),
        ("cpu", 0, 2),
        ("cpu", 0, 1),
        ("fetch", 0, 0),
        ("cpu", 1, 1),
        ("cpu", 1, 2),
        ("cpu", 1, 4),
        ("fetch", 1, 0),
    ]
    # Second: of 1 2 3 4, missing all, 1 to 3 were active: the lowest of them is fetched. In layer 1 4 was active.
    assert decode[8:] == [
        ("cpu", 0, 3),
        ("cpu", 0, 2),
        ("cpu", 0, 4),
        ("fetch", 0, 1),
        ("cpu", 1, 5),
        ("cpu", 1, 6),
        ("cpu", 1, 7),
        ("fetch", 1, 4),
    ]
    assert seen.result.policy_stats["fetched_frac"] == pytest.approx(4 / 16)
    lowest = run(FreeToken(backend="hybrid", fetch_order="lowest_id"), tmp_path, rows, room=16, n_experts=8, cpu_s=4.0)
    assert [entry for entry in lowest.log if entry[0] == "fetch"][-4:] == [
        ("fetch", 0, 0),
        ("fetch", 1, 0),
        ("fetch", 0, 1),
        ("fetch", 1, 4),
    ]


def test_hybrid_overlaps_cpu_and_link(tmp_path):
    # One layer, three missing, CPU 4 s: one is fetched and two run on the CPU at the same time.
    rows = [[[0, 1, 2], [0, 1, 2]], [[0, 1, 2], [0, 1, 2]]]
    seen = run(FreeToken(backend="hybrid"), tmp_path, rows, room=6, n_experts=3, cpu_s=4.0)
    start_s = next(end_s for what, _, end_s in seen.lane("gpu") if what == "head") + 1  # attention of the token
    copies = [(a, b) for what, a, b in seen.lane("h2d") if what == "demand 0.0"]
    assert copies[-1] == (start_s, start_s + 10)
    on_cpu = [(what, a - start_s, b - start_s) for what, a, b in seen.lane("cpu") if what.startswith("expert 0")]
    assert on_cpu == [("expert 0.1", 1, 5), ("expert 0.2", 5, 9)]  # the hidden state is down after 1 s


@pytest.mark.parametrize(("backend", "layers"), [("offload", 0), ("hybrid", 4)])
def test_every_layer_of_hybrid_costs_the_host(backend, layers, tmp_path):
    """Two tokens of two layers, 3 s each: also where the one missing is fetched, and where all are hit."""
    rows = [[[0], [0]]] * 3
    path = from_rows(tmp_path / "t", rows, 2)
    with Trace(path) as trace:
        ends_s = []
        for cost_s in (0.0, 3.0):
            made = setup(FreeToken(backend=backend, max_fetch=None if backend == "offload" else 1), trace, 4)
            dearer = replace(made.stack, hybrid_layer_s=figure(cost_s))
            ends_s.append(execute_easy(dataclasses.replace(made, stack=dearer)).end_s)
    assert ends_s[1] - ends_s[0] == 3.0 * layers


# -- slots -------------------------------------------------------------------------------------------------------------


def test_slots_by_hand():
    slots = Slots(3, 2)
    assert [slots.take(piece, 1) for piece in (7, 8, 9)] == [EMPTY] * 3  # slots 0 1 2
    slots.use(7, 2)
    assert slots.take(5, 3) == 8  # 8 and 9 are as old: the lower slot
    assert slots.clear(0) == 7
    assert slots.take(6, 4) == EMPTY
    assert slots.holds == [6, 5, 9]
    assert slots.slot_of(8) == EMPTY


@pytest.mark.parametrize(("n_layers", "room"), [(3, 12), (4, 17), (2, 7)])
def test_offload_against_a_replay_of_its_rule(n_layers, room, tmp_path):
    """Lists of slots and their last use, as the code's reference has them; random tokens after a prompt of one."""
    draw, n_experts = Draws(room), 6
    rows = [[draw.sample(range(n_experts), 2) for _ in range(n_layers)] for _ in range(60)]
    usage, held, copies, step = [0] * room, [EMPTY] * room, [], 0
    if room < 2 * n_experts:  # the prompt's last layer stays
        step = n_layers
        usage[:n_experts] = [step] * n_experts
        held[:n_experts] = [(n_layers - 1, expert) for expert in range(n_experts)]
    for row in rows[1:]:
        for layer, experts in enumerate(row):
            step += 1
            for expert in experts:
                if (layer, expert) in held:
                    usage[held.index((layer, expert))] = step
            for expert in sorted(experts):
                if (layer, expert) not in held:
                    slot = min(range(room), key=lambda s: (usage[s], s))
                    usage[slot], held[slot] = step, (layer, expert)
                    copies.append((layer, expert))
    seen = run(FreeToken(backend="offload"), tmp_path, rows, room=room, n_experts=n_experts)
    fetched = [(layer, expert) for kind, layer, expert in seen.log if kind == "fetch"]
    assert fetched[-len(copies) :] == copies
    assert resident(seen) == sorted(where for where in held if where != EMPTY)


def test_a_prompt_spares_the_slots_behind_its_buffers(tmp_path):
    # Four layers of two, six slots: buffers are slots 0 to 3. The first request's last token leaves 0.0 1.0 2.0 3.0 in
    # them and 0.1 1.1 in 4 and 5; the second prompt takes the first four.
    rows = [[[0]] * 4, [[0]] * 4, [[1], [1], [0], [0]], [[0]] * 4]
    for d2d, gathered in ((False, 0.0), (True, 1.0)):
        seen = run(
            FreeToken(backend="offload", prefill_hit_d2d=d2d),
            tmp_path,
            rows,
            room=6,
            n_experts=2,
            lengths=[(1, 3), (1, 1)],
        )
        assert resident(seen) == [(0, 1), (1, 1)]
        # Each prompt copies 8 experts; with the gather the second takes 0.1 and 1.1 from their slots.
        prefetches = seen.outcome.report.counts.tally.prefetch
        assert prefetches.n_issued == 16 - 2 * gathered + (0 if d2d else 2)  # without it these two come in halves
        assert seen.result.h2d_bytes == (16 + 6 - 2 * gathered) * EXPERT_BYTES


def test_without_room_for_two_buffers_a_layer_comes_after_its_gate(tmp_path):
    seen = run(FreeToken(backend="offload"), tmp_path, [[[0], [1]]], room=3, n_experts=2)
    # Attention 0..1, 0.0 and 0.1 1..21, expert ..23, attention ..24, 1.0 and 1.1 24..44, expert ..46, head ..47.
    assert [span[1:] for span in seen.lane("h2d")] == [(1, 11), (11, 21), (24, 34), (34, 44)]
    assert seen.end_s == 47
    with pytest.raises(BadInput, match="at least 2 whole experts"):
        run(FreeToken(), tmp_path, [[[0], [1]]], room=1, n_experts=2)


# -- which backend -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpu_s", "settings", "hybrid"),
    [
        (5.0, {}, 0),  # twice as fast as the link's 10 s is not more than twice
        (4.9, {}, 1),
        (4.9, {"profile": "none"}, 0),
        (4.9, {"threshold": 2.1}, 0),
        (50.0, {"backend": "hybrid"}, 1),
        (1.0, {"backend": "offload"}, 0),
    ],
)
def test_auto(cpu_s, settings, hybrid, tmp_path):
    seen = run(FreeToken(**settings), tmp_path, [[[0]], [[1]]], room=2, n_experts=2, cpu_s=cpu_s)
    assert seen.result.policy_stats["hybrid"] == hybrid


def test_without_a_profile_one_is_fetched_at_most(tmp_path):
    rows = [[[0, 1, 2, 3]] * 2, [[0, 1, 2, 3]] * 2]
    for settings, n in (({"profile": "none"}, 2), ({"max_fetch": 3}, 6), ({"max_fetch": 0}, 0)):
        seen = run(FreeToken(backend="hybrid", **settings), tmp_path, rows, room=8, n_experts=4)
        assert sum(kind == "fetch" for kind, _, _ in seen.log) == n  # what a prompt demands is under way already


@pytest.mark.parametrize(("profile", "fraction"), [("overlapped", 10 / 34), ("alone", 0.5), ("none", 0.0)])
def test_the_split_rests_on_bandwidths(profile, fraction, tmp_path):
    """Alone the link brings 16 bytes/s and the CPU reads 32; beside each other 10 and 24."""
    with seeded(tmp_path) as trace:
        made = setup(FreeToken(backend="hybrid", profile=profile), trace, 8)
        slower = replace(made.hw.contention, cpu_slowdown_by_h2d=figure(1 / 3), h2d_slowdown_by_cpu=figure(0.6))
        seen = execute_easy(dataclasses.replace(made, hw=replace(made.hw, contention=slower)))
    assert seen.result.policy_stats["fetch_fraction"] == pytest.approx(fraction)


KNOBS = {
    "backend": ({}, "hybrid"),
    "profile": ({"backend": "hybrid"}, "none"),
    "threshold": ({}, 1.0),
    "max_fetch": ({"backend": "hybrid"}, 0),
    "fetch_order": ({"backend": "hybrid"}, "lowest_id"),
    "prefill_overlap": ({}, False),
    "prefill_hit_d2d": ({}, True),
}


def test_every_parameter_matters(tmp_path):
    draw = Draws(3)
    rows = [[draw.sample(range(4), 3) for _ in range(3)] for _ in range(24)]
    path = from_rows(tmp_path / "knobs", rows, 4, [(2, 6), (2, 8), (2, 7)])
    check_knobs(FreeToken, path, 10, KNOBS)
