"""A drive below host memory: worked out by hand, the same on both engines, and the two tiers where it costs nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import easy_numbers
import msgspec
import pytest
import random_worlds
import tiered_worlds
from easy_numbers import EXPERT_BYTES
from tiny_traces import from_rows

from policies.lru import Lru
from sim.base.errors import BadInput, DoesNotFit
from sim.machine.drive_prices import DrivePrices
from sim.machine.figures import Figures
from sim.options import RunSpec
from sim.policy.api import Policy
from sim.policy.decisions import Prefetch, RunCpu, Serve
from sim.policy.registry import policies
from sim.profiles.drives import DRIVES, Drive
from sim.run import execute, prepare
from sim.setup.third_tier import ThirdTier
from traces.format.reader import Trace

DRIVE = tiered_worlds.drive(32.0, latency_s=3.0, alone_bytes_per_s=32.0)
"""An expert of 160 bytes keeps it busy for 5 s and is there 3 s later, where two are asked for at a time."""
TERMS = {"depth": 2, "block_bytes": EXPERT_BYTES}


def run(
    policy: Policy,
    tmp_path: Path,
    rows: list[Any],
    room: int,
    host: int,
    lengths: Any = None,
    engine: str | None = None,
    drive: Drive = DRIVE,
    **terms: Any,
) -> easy_numbers.Run:
    """`rows` above a drive, with room for `host` experts in host memory; a copy takes 4 s."""
    with Trace(from_rows(tmp_path / "easy.safetensors", rows, 4, lengths)) as trace:
        made = easy_numbers.setup(policy, trace, room, copy_s=4.0)
        made = replace(
            made,
            hw=msgspec.structs.replace(made.hw, drive=drive),
            tier=ThirdTier("easy", **(TERMS | terms)),
            host_bytes=host * EXPERT_BYTES,
            spec=msgspec.structs.replace(made.spec, sim_simulator=engine),
        )
        return easy_numbers.execute_easy(made)


ENGINES = pytest.mark.parametrize("engine", ["core", "simpy"])


@ENGINES
def test_a_token_of_two_experts_by_hand(tmp_path, engine):
    # attention 0..1, and both experts are missing everywhere.
    #   read 0: 1..6, there at 9; read 1: 6..11, there at 14
    #   copy 0: 9..13; copy 1: 14..18; expert 0: 13..15, expert 1: 18..20, head 20..21
    # Back from the end: head, expert 1, copy 1, read 1, read 0, attention. GPU 0 stands still 1..13 and 15..18.
    seen = run(Lru(), tmp_path, [[[0, 1]]], room=2, host=2, engine=engine)
    assert seen.lane("nvme") == [("read 0.0", 1, 6), ("read 0.1", 6, 11)]
    assert seen.lane("h2d") == [("demand 0.0", 9, 13), ("demand 0.1", 14, 18)]
    assert seen.end_s == 21
    parts = seen.result.bottleneck.prefill
    assert [round(21 * share) for share in (parts.gpu, parts.drive, parts.copy)] == [4, 13, 4]
    assert seen.result.lane_utilisation["nvme"] == 10 / 21
    host = seen.result.host_memory
    assert (host.reads, host.read_bytes, host.copies.miss) == (2, 2 * EXPERT_BYTES, 2)
    assert host.bytes_per_s == 32
    (row,) = seen.result.by_layer
    assert (row["wait_drive_s"], row["wait_demand_s"]) == (8, 7)


@ENGINES
def test_a_copy_that_waited_for_its_room_and_longer_for_its_read_waited_for_that(tmp_path, engine):
    # One read at a time. attention 0..1
    #   read 0: 1..9, copy 0: 9..13, expert 0: 13..15, which leaves its room to expert 1
    #   read 1: 9..17, copy 1: 17..21, 2 s after its room was clean; expert 1: 21..23
    seen = run(Lru(), tmp_path, [[[0, 1]]], room=1, host=2, engine=engine, depth=1)
    assert seen.lane("nvme") == [("read 0.0", 1, 9), ("read 0.1", 9, 17)]
    assert seen.lane("h2d") == [("demand 0.0", 9, 13), ("demand 0.1", 17, 21)]
    parts = seen.result.bottleneck.prefill
    assert [round(24 * share) for share in (parts.gpu, parts.drive, parts.copy)] == [4, 16, 4]


class OnCpu(Policy):
    """Computes on the CPU whatever is asked for."""

    name = "on_cpu"
    traits = frozenset({"cpu"})

    def gate_done(self, gate, view):
        return [RunCpu(expert) for expert in gate.needs]


@ENGINES
def test_an_expert_on_the_cpu_waits_for_its_read(tmp_path, engine):
    # attention 0..1, activations down 1..1.4, read 1..6, there at 9; CPU 9..14, up 14..14.4, head 14.4..15.4
    seen = run(OnCpu(), tmp_path, [[[3]]], room=1, host=1, engine=engine)
    assert seen.lane("cpu") == [("expert 0.3", 9, 14)]
    assert seen.end_s == pytest.approx(15.4)
    parts = seen.result.bottleneck.prefill
    assert (parts.drive, parts.cpu) == pytest.approx((8 / 15.4, 5 / 15.4))
    assert seen.result.host_memory.cpu.miss == 1


class Ahead(Policy):
    """Prefetches two experts before the gate is read."""

    name = "ahead"

    def __init__(self, first: int = 2, second: int = 3) -> None:
        super().__init__()
        self.experts = first, second

    def layer_enter(self, layer, view):
        return [Prefetch(view.piece(0, expert)) for expert in self.experts]

    def gate_done(self, gate, view):
        yield Serve()

    def victim(self, piece, speculative, view):
        return None if speculative else view.first_evictable(view.residents())


@ENGINES
def test_a_demanded_read_overtakes_speculative_ones_that_have_not_begun(tmp_path, engine):
    # Reads of 2 and 3 are asked for at 0; that of 2 is under way when 0 is asked for at 1.
    seen = run(Ahead(), tmp_path, [[[0]]], room=3, host=4, engine=engine)
    assert seen.lane("nvme") == [("read 0.2", 0, 5), ("read 0.0", 5, 10), ("read 0.3", 10, 15)]
    assert seen.lane("h2d") == [("prefetch 0.2", 8, 12), ("demand 0.0", 13, 17), ("prefetch 0.3", 18, 22)]


@ENGINES
def test_of_what_starts_at_one_instant_the_drive_is_first(tmp_path, engine):
    # Host memory holds 2 and 3. At 0, prefetches of 1, which is read in no time, and of 3: the link serves them in the
    # order of asking, as it would with all experts in host memory. Copy 1: 0..4, expert 1: 4..6, head 6..7.
    fast = tiered_worlds.AS_FAST_AS_RAM
    seen = run(Ahead(1, 3), tmp_path, [[[1]]], room=2, host=2, engine=engine, drive=fast, start="warm")
    assert seen.lane("nvme", zero=True) == [("read 0.1", 0, 0)]
    assert seen.lane("h2d") == [("prefetch 0.1", 0, 4), ("prefetch 0.3", 4, 8)]
    assert seen.end_s == 7


def test_what_leaves_the_gpu_is_still_in_host_memory(tmp_path):
    rows = [[[0]], [[1]], [[0]], [[1]]]
    seen = run(Lru(), tmp_path, rows, room=1, host=2, lengths=[(1, 4)])
    assert seen.classes("decode") == {"miss": 3}
    host = seen.result.host_memory
    assert (host.reads, host.copies.hit, host.copies.miss, host.evicted) == (2, 2, 2, 0)
    assert host.by_phase["decode"].hit == 2
    assert host.hit_rate == 0.5


def test_host_memory_has_a_policy_of_its_own(tmp_path):
    # Host memory for two, the GPU for one. 0 is used twice before 1 and 2 come: LRU lets it go, LFU keeps it.
    rows = [[[0]], [[1]], [[0]], [[1]], [[0]], [[2]], [[1]], [[0]]]
    reads = {}
    for policy in ("lru", "lfu", "fifo"):
        seen = run(Lru(), tmp_path, rows, room=1, host=2, lengths=[(1, 8)], evict=policy)
        reads[policy] = seen.result.host_memory.reads
    # lru: 0 1 . . . 2(1 leaves) 1(0 leaves) 0(2 leaves); lfu: 0 1 . . . 2(1 leaves) 1(2 leaves) .
    # fifo: 0 1 . . . 2(0 leaves) . 0(1 leaves)
    assert reads == {"lru": 5, "lfu": 4, "fifo": 4}


MINE = """
from policies.lru import Lru
from sim.policy import param

class Mine(Lru):
    name = "mine"
    lists: int = param(2, "how many")
    as_one_list = {"scope": "global", "%s": 1}

    def bind(self, view):
        super().bind(view)
        assert (self.scope, self.lists) == ("global", 1)
"""


def test_a_policy_says_with_which_parameters_it_is_one_list(tmp_path):
    (tmp_path / "mine.py").write_text(MINE % "lists")
    (tmp_path / "wrong.py").write_text(MINE % "list")
    assert run(Lru(), tmp_path, [[[0, 1]]], 2, 2, evict=f"{tmp_path}/mine.py").result.host_memory.reads == 2
    with pytest.raises(BadInput, match=r"parameter mine\.list: no such parameter; did you mean 'lists'"):
        run(Lru(), tmp_path, [[[0, 1]]], 2, 2, evict=f"{tmp_path}/wrong.py")


def test_warm_host_memory_holds_the_end_of_the_file(tmp_path):
    cold = run(Lru(), tmp_path, [[[3]], [[0]]], room=2, host=2, lengths=[(1, 2)])
    warm = run(Lru(), tmp_path, [[[3]], [[0]]], room=2, host=2, lengths=[(1, 2)], start="warm")
    assert (cold.result.host_memory.reads, warm.result.host_memory.reads) == (2, 1)


@pytest.mark.parametrize("ram_policy", ["lru", "lfu", "fifo", "lfru", "slru", "random", "moe_speq", "sp_moe"])
def test_a_warm_cache_of_any_policy_lets_what_the_load_left_leave(ram_policy, tmp_path):
    # Of 4 experts the load left 2 and 3. Each of 0 and 1 takes the place of one, and neither passes by.
    rows = [[[0]], [[1]]]
    host = run(Lru(), tmp_path, rows, 1, 2, [(1, 2)], start="warm", evict=ram_policy).result.host_memory
    assert (host.reads, host.evicted, host.passed) == (2, 2, 0)


def test_experts_that_follow_in_the_file_are_read_ahead(tmp_path):
    seen = run(Lru(), tmp_path, [[[0]], [[1]], [[2]]], room=1, host=4, lengths=[(1, 3)], read_ahead=1)
    assert seen.lane("nvme") == [("read 0.0", 1, 6), ("read 0.1", 6, 11), ("read 0.2", 25, 30), ("read 0.3", 30, 35)]
    host = seen.result.host_memory
    assert (host.copies.miss, host.copies.hit + host.copies.late, host.read_ahead.miss) == (2, 1, 2)


def test_an_expert_without_room_passes_through(tmp_path):
    # Both experts of the layer are in use: the second finds no room in host memory for one.
    seen = run(Lru(), tmp_path, [[[0, 1]]], room=2, host=1)
    assert (seen.result.host_memory.reads, seen.result.host_memory.passed) == (2, 1)


def test_an_expert_that_is_being_read_or_copied_does_not_leave(tmp_path):
    # At 1, host memory's two places are taken by 2, which is being read, and 3, which will be: 0 finds none.
    host = run(Ahead(), tmp_path, [[[0]]], room=3, host=2).result.host_memory
    assert (host.reads, host.evicted, host.passed) == (3, 0, 1)


# -- laws -----------------------------------------------------------------------------------------------------------


def without_drive(result: dict[str, Any]) -> dict[str, Any]:
    """What the two tiers say, too; figures that read 'drive: 0' taken out."""
    own = ("host_memory", "ram_peak_bytes", "run_id")
    kept = {key: value for key, value in result.items() if key not in own}
    kept["lane_utilisation"] = {lane: busy for lane, busy in kept["lane_utilisation"].items() if lane != "nvme"}
    kept["bottleneck"] = dict(kept["bottleneck"])
    for phase, parts in kept["bottleneck"].items():
        if isinstance(parts, dict):
            assert not parts.get("drive")
            kept["bottleneck"][phase] = {part: share for part, share in parts.items() if part != "drive"}
    return kept


def as_fast_as_ram(seed: int, folder: Path, policy: str | None = None) -> str:
    """A world with and without a drive that takes no time; why nothing was compared, or nothing."""
    plain = random_worlds.run(random_worlds.world(seed, folder, policy), random_worlds.by_engine)
    of = tiered_worlds.tiered(seed, folder, policy, made=tiered_worlds.AS_FAST_AS_RAM)
    seen = random_worlds.run(of, random_worlds.by_engine)
    of.trace.unlink()
    assert plain.error == seen.error, seen.crash
    if plain.error:
        return plain.error
    assert seen.log == plain.log, of
    assert sorted(span for span in seen.spans if span[0] != "nvme") == sorted(plain.spans), of
    assert without_drive(seen.result) == without_drive(plain.result), of
    return ""


def test_a_drive_as_fast_as_ram_changes_nothing(tmp_path):
    refused = [why for seed in range(40) if (why := as_fast_as_ram(seed, tmp_path))]
    assert len(refused) < 15


@pytest.mark.parametrize("seed", [129, 180])
def test_a_cache_of_host_memory_knows_what_was_read_ahead_of_its_use(seed, tmp_path):
    """`random` draws among those it knows; in these worlds one that was read for a prefetch leaves unused."""
    seen = random_worlds.run(tiered_worlds.tiered(seed, tmp_path, evict="random"), random_worlds.by_engine)
    assert not seen.crash


@pytest.mark.thorough
@pytest.mark.parametrize("at", range(8))
def test_a_drive_as_fast_as_ram_changes_nothing_in_a_thousand_worlds(at, tmp_path):
    for seed in range(1000 + 125 * at, 1125 + 125 * at):
        as_fast_as_ram(seed, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", sorted(policies()))
def test_every_policy_runs_unchanged_above_it(policy, tmp_path):
    holds_for(policy, tmp_path, range(12))


def holds_for(policy: str, folder: Path, seeds: range) -> None:
    for seed in seeds:
        as_fast_as_ram(seed, folder, policy)
        told, _ = random_worlds.engines_disagree(tiered_worlds.tiered(seed, folder, policy))
        assert told is None


# In world 217 a copy waits for its room and for its read: for which of them mostly?
@pytest.mark.parametrize("seeds", [*(range(at, at + 25) for at in range(0, 100, 25)), [217]], ids=str)
def test_both_engines_agree_and_the_drive_gives_no_more_than_it_has(seeds, tmp_path):
    for seed in seeds:
        of = tiered_worlds.tiered(seed, tmp_path)
        told, seen = random_worlds.engines_disagree(of)
        of.trace.unlink()
        assert told is None, of
        if not seen.error:
            conserves(of, seen)


def conserves(of: Any, seen: random_worlds.Seen) -> None:
    """Reads do not overlap, none is faster than the drive, and what was read is what was asked for."""
    reads = sorted((span for span in seen.spans if span[0] == "nvme"), key=lambda span: span[6:])
    rate = of.facts["hw"].drive.bandwidth_bytes_per_s.value
    for one, following in pairwise(reads):
        assert following[6] >= one[7]
    for read in reads:
        assert read[5] <= rate * (read[7] - read[6]) * (1 + 1e-9)
    host = seen.result["host_memory"]
    assert host["reads"] == len(reads)
    assert host["read_bytes"] == sum(read[5] for read in reads)
    assert host["peak_bytes"] <= host["bytes"]
    asked = [host[who] for who in ("copies", "prefetches", "cpu", "read_ahead")]
    assert sum(one["miss"] for one in asked) == host["reads"] + host["withdrawn"]
    assert sum(one["read_bytes"] for one in asked) == host["read_bytes"]


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_with_room_for_all_no_expert_is_read_twice(seed, tmp_path):
    of = tiered_worlds.tiered(seed, tmp_path, evict="lru")
    model, spec = of.facts["model"], of.facts["spec"]
    of.host_bytes = 40 * model.n_moe_layers * model.n_experts * model.expert_bytes(spec.precision)
    seen = random_worlds.run(of, random_worlds.by_engine)
    if not seen.error:
        keys = [(span[2], span[3], span[5]) for span in seen.spans if span[0] == "nvme"]
        assert len(keys) == len(set(keys))


# -- prices ---------------------------------------------------------------------------------------------------------


def prices(word: str, depth: int, block_bytes: int) -> DrivePrices:
    return DrivePrices(DRIVES[word], depth, block_bytes, 10**9, Figures())


def test_one_request_at_a_time_pays_latency_for_each_block():
    slow = DrivePrices(DRIVE, 1, EXPERT_BYTES // 2, EXPERT_BYTES, Figures())
    assert slow.busy_s(EXPERT_BYTES) == 2 * (3.0 + 2.5)
    assert slow.lag_s == 0


def test_experts_read_whole_at_depth_1_and_8_by_hand():
    # An expert of 12.75 MiB in one request takes 71 us + 13,369,344 bytes / 3.75 GB/s = 3.636 ms alone.
    one, eight = (prices("gen5x4", depth, 13_369_344) for depth in (1, 8))
    # One at a time: each keeps the drive for all of that.
    assert [one.alone_s(n * 13_369_344) for n in (1, 2)] == pytest.approx([3.636e-3, 7.272e-3], rel=1e-3)
    # Eight at a time: 3.636 / 8 ms apart at best, but the drive gives 10.52 GB/s: 1.272 ms. The first takes as long.
    assert [eight.alone_s(n * 13_369_344) for n in (1, 2, 8)] == pytest.approx([3.636e-3, 4.908e-3, 12.54e-3], rel=1e-3)


# -- what may be asked ----------------------------------------------------------------------------------------------

ASKED: dict[str, Any] = {"policy": "lru", "hw": "rtx3090", "requests": 1}


def refused(**fields: Any) -> str:
    with pytest.raises(BadInput) as told:
        prepare(RunSpec(**ASKED | fields)).close()
    return str(told.value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"drive": "gen9x4"}, "--drive, got 'gen9x4': no such drive"),
        ({"drive": f"gen4x4:depth={'9' * 5000}"}, "beyond any figure of a run"),
        ({"drive": "gen4x4", "drive_evict": ""}, "--set drive.evict: policy, got ''"),
        ({"drive": "gen4x4", "drive_evict": "./nowhere.py"}, "--set drive.evict: policy, got './nowhere.py'"),
        ({"drive": "gen4"}, "no such drive; did you mean 'gen4x4'"),
        ({"drive": "own"}, "has no block `drive`; name one, e.g. gen4x4"),
        ({"drive": "gen4x4:deep=3"}, "--drive, got 'deep': no such term"),
        ({"drive": "gen4x4:depth=0"}, "--set drive.depth, got 0: at least 1"),
        ({"drive": "gen4x4:depth=1:depth=2"}, "--drive, got depth twice"),
        ({"drive": "gen4x4:block=100"}, "that is 100 bytes"),
        ({"drive": "gen4x4:reads=mmap"}, "--set drive.reads, got 'mmap': no such value"),
        ({"drive_evict": "lru"}, "--set drive.evict, got lru without a drive"),
        (
            {"drive": "gen4x4", "drive_evict": "belady"},
            "--set drive.evict, got 'belady': oracle is more than keeping experts",
        ),
        ({"drive": "gen4x4", "drive_evict": "fiddler"}, "--set drive.evict, got 'fiddler'"),
        ({"drive": "gen4x4", "drive_evict": "lruu"}, "lruu"),
        ({"drive": "gen4x4:reads=buffered", "drive_evict": "lfu"}, "the page cache is the kernel's"),
        ({"set": {"hw.drive.latency_s": 0.1}}, "--set hw.drive"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(fields, told):
    assert told in refused(**fields)


def test_a_model_that_does_not_fit_host_memory_is_answered():
    made = prepare(RunSpec(**ASKED, ram=40 * 10**9, drive="gen4x4:depth=8:block=2MiB"))
    try:
        result = execute(made).result
    finally:
        made.close()
    assert result.bottleneck.resource == "drive"
    assert result.lower_bound is not None
    assert result.lower_bound.above_frac > 0
    assert result.host_memory.peak_bytes <= 40 * 10**9
    assert any("drive" in figure.figure for figure in result.provenance.figures)
    assert any("host memory of 37.3 GiB caches experts by lru" in label for label in result.caveats)


def test_buffered_reads_are_slower_and_pageable():
    ids, tpot_s = set(), {}
    for reads in ("direct", "buffered"):
        made = prepare(RunSpec(**ASKED, ram=10**11, drive=f"gen4x4:reads={reads}:start=warm"))
        assert made.stack.pinned == (reads == "direct")
        tpot_s[reads] = execute(made).result.tpot_s.mean
        ids.add(made.run_id)
        made.close()
    assert tpot_s["buffered"] > tpot_s["direct"]
    assert len(ids) == 2


# -- replicas and pages ---------------------------------------------------------------------------------------------


def results(**fields: Any) -> list[dict[str, Any]]:
    """Of both engines, without contention: the same but for what names an engine and the last digits of waits."""
    found, own = [], ("by_layer", "simulator", "wall_s", "run_id")
    for engine in ("core", "simpy"):
        made = prepare(RunSpec(**ASKED | {"sim_contention": False, "sim_simulator": engine} | fields))
        try:
            told = execute(made, bounds=False, by_layer=False).result.to_dict()
        finally:
            made.close()
        found.append({key: value for key, value in told.items() if key not in own})
    assert found[0] == found[1]
    return found


@pytest.mark.thorough
def test_each_replica_reads_a_drive_of_its_own():
    above = {"ram": 40 * 10**9, "drive": "gen4x4"}
    alone = results(**above)[0]["host_memory"]
    both = results(**above, requests=2, replicas=2, arrivals="closed:2")[0]
    # Two clients, two machines, and each gets one of the requests: cold host memories, each as large as was asked for.
    assert [one["requests"] for one in both["replicas"]] == [1, 1]
    host = both["host_memory"]
    assert host["reads"] > alone["reads"]
    assert host["peak_bytes"] <= host["bytes"] == alone["bytes"]
    assert host["read_bytes"] == host["reads"] * both["expert_bytes"]


@pytest.mark.thorough
def test_pages_that_are_swapped_out_lie_beside_experts():
    swaps = {"drive": "gen4x4", "kv_memory": 30 * 10**6, "kv_preempt": "swap", "batch": 4, "requests": 4}
    told = results(**swaps, ram=40 * 10**9)[0]
    assert told["kv"]["peak_swapped_bytes"] > 0
    assert told["host_memory"]["reads"] > 0
    with pytest.raises(DoesNotFit, match="less --ram for experts"):
        prepare(RunSpec(**ASKED | swaps, set={"hw.cpu.memory_bytes": 40 * 10**9}))
