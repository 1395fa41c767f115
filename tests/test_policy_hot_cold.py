"""Caches beside CPU experts by hand: llama_cpp_lru, moe_cache, static_cache, heat.

Copy of an expert 10 s, expert 2 s on the GPU and 5 s on the CPU, a token's hidden state 1 s each way, attention and
head 1 s each. One layer unless a test says otherwise, and no room kept for op offload.
"""

from __future__ import annotations

import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cpu_bench import decided, replay, resident, seeded, taught, written
from easy_numbers import Run, execute_easy, figure, run, setup
from tiny_traces import from_rows

import policies
from policies.heat import Heat
from policies.llama_cpp_lru import LlamaCppLru
from policies.moe_cache import MoeCache
from policies.static_cache import StaticCache
from sim.base.errors import BadInput
from sim.options import RunSpec
from sim.policy.api import Policy
from sim.run import Setup, prepare
from traces.format.reader import Trace
from traces.stats import counts

ROOMY = {"op_offload": False}
LARGE = {"op_offload_min_batch": 2}
OFFLOAD: dict[str, tuple[dict[str, Any], Any]] = {
    "op_offload": (LARGE, False),
    "op_offload_min_batch": ({}, 2),
    "ubatch": (LARGE, 2),
    "matrices": (LARGE, 1),
}
KNOBS: dict[type[Policy], dict[str, tuple[dict[str, Any], Any]]] = {
    LlamaCppLru: {
        "slots": (ROOMY, 1),
        "inserts": (ROOMY, 1),
        "max_batch": (ROOMY, 1),
        "overlap": (ROOMY, False),
        **OFFLOAD,
    },
    MoeCache: {
        "pool": (ROOMY, 5),
        "admit_after": (ROOMY, 1),
        "replace_after": (ROOMY, 2),
        "max_batch": (ROOMY | {"admit_after": 1}, 1),
        **OFFLOAD,
    },
    StaticCache: {"slots": (ROOMY, 1), "profile": (ROOMY, "another"), "overlap": (ROOMY, False), **OFFLOAD},
    Heat: {
        "slots": (ROOMY, 5),
        "decay": (ROOMY, 0.5),
        "hysteresis": (ROOMY, 2.0),
        "dwell": (ROOMY, 3),
        "sync_every": (ROOMY, 2),
        "overlap": (ROOMY, False),
        **OFFLOAD,
    },
}
FACTS = {"n_layers": 4, "n_experts": 12, "top_k": 3, "prompt": 5, "outputs": 10, "n_requests": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A trace, and another of its shape."""
    folder = tmp_path_factory.mktemp("t")
    paths = []
    for seed in (1, 2):
        (folder / str(seed)).mkdir()
        with seeded(folder / str(seed), seed=seed, **FACTS) as trace:
            paths.append(trace.path)
    return paths[0], paths[1]


@pytest.mark.parametrize(("kind", "knob"), [(kind, knob) for kind, knobs in KNOBS.items() for knob in knobs])
def test_every_parameter_changes_something(kind: type[Policy], knob: str, files: tuple[Path, Path]) -> None:
    assert set(KNOBS[kind]) == {param.name for param in kind.params}
    beside, other = KNOBS[kind][knob]
    value = str(files[1]) if other == "another" else other
    before, after = (replay(kind(**settings), files[0], 16) for settings in (beside, beside | {knob: value}))
    assert decided(before) != decided(after)


def said(policy: Policy, tmp_path: Path, rows: list[list[int]], room: int, n_experts: int = 8, **world: Any) -> Run:
    """One layer; each row a token's experts."""
    return run(policy, tmp_path, [[row] for row in rows], room=room, n_experts=n_experts, **world)


def moves(seen: Run) -> list[tuple[str, int]]:
    return [(kind, expert) for kind, _, expert in seen.log]


# -- llama.cpp pull request 27861 -----------------------------------------------------------------------------------


def test_llama_cpp_lru_uploads_two_misses_a_step_and_lets_the_oldest_use_leave(tmp_path):
    seen = said(LlamaCppLru(**ROOMY), tmp_path, [[0, 1, 2], [0, 1, 2], [3, 0, 1]], room=2)
    assert moves(seen) == [
        *[("cpu", 0), ("cpu", 1), ("cpu", 2), ("prefetch", 0), ("prefetch", 1)],
        # 0 was used before 1, both were hit: 0 leaves for 2.
        *[("cpu", 2), ("gpu", 0), ("gpu", 1), ("evict", 0), ("prefetch", 2)],
        # 2 came before 1 was hit.
        *[("cpu", 3), ("cpu", 0), ("gpu", 1), ("evict", 2), ("prefetch", 3), ("evict", 1), ("prefetch", 0)],
    ]


def test_llama_cpp_lru_without_uploads_is_the_cpu_alone(tmp_path):
    seen = said(LlamaCppLru(inserts=0, **ROOMY), tmp_path, [[0, 1]] * 3, room=2)
    assert {kind for kind, _ in moves(seen)} == {"cpu"}


def test_hits_run_while_the_cpu_computes_and_uploads_come_behind_its_results(tmp_path):
    # Step 1, after attention (0 to 1): expert 0 on the CPU 2 to 7, 1 from 7 to 12, results up at 8 and 13; the upload
    # of 0 waits for both: 13 to 23. Step 2 (attention 14 to 15): 2 on the CPU 16 to 21, its result behind the copy in
    # flight, 23 to 24; 0 is hit, there at 23, and runs beside that, 23 to 25. Head 25 to 26.
    seen = said(LlamaCppLru(**ROOMY), tmp_path, [[0, 1], [0, 2]], room=1)
    assert seen.lane("cpu") == [("expert 0.0", 2, 7), ("expert 0.1", 7, 12), ("expert 0.2", 16, 21)]
    assert seen.lane("h2d")[2:4] == [("prefetch 0.0", 13, 23), ("activations 0.2", 23, 24)]
    assert seen.lane("gpu")[-2:] == [("expert 0.0", 23, 25), ("head", 25, 26)]
    # In turns: 2's input goes down when 0 has run, 25 to 26, 26 to 31 on the CPU, its result 31 to 32.
    turns = said(LlamaCppLru(overlap=False, **ROOMY), tmp_path, [[0, 1], [0, 2]], room=1)
    assert turns.lane("cpu")[-1] == ("expert 0.2", 26, 31)
    assert turns.lane("gpu")[-1] == ("head", 32, 33)


def test_a_layer_without_misses_still_pays_the_host_for_the_cpus_part(tmp_path):
    # 3 s of the host per layer with the CPU. Step 1: attention 0 to 1, the host to 4, expert 0 on the CPU 5 to 10, its
    # result 10 to 11, head to 12, the upload 11 to 21. Step 2: attention to 13, the host 13 to 16 though 0 is hit; that
    # runs 21 to 23. Step 3: attention 24 to 25, the host to 28, and only then 0, 28 to 30; head to 31.
    with Trace(from_rows(tmp_path / "t.safetensors", [[[0]], [[0]], [[0]]], 8)) as trace:
        made = setup(LlamaCppLru(**ROOMY), trace, 1)
        seen = execute_easy(replace(made, stack=msgspec.structs.replace(made.stack, hybrid_layer_s=figure(3.0))))
    assert seen.lane("host") == [("hybrid layer 0", 1, 4), ("predict", 13, 16), ("predict", 25, 28)]
    assert seen.lane("gpu")[-2:] == [("expert 0.0", 28, 30), ("head", 30, 31)]
    shares = {f.figure: f.share for f in seen.result.provenance.figures}
    assert not any(name.startswith("predictor") for name in shares)  # the stack's seconds, with or without misses
    assert shares["engine.hybrid_layer_s"] == pytest.approx(6 / 31)  # 3 s are hidden behind the upload


@pytest.mark.parametrize("slots", [0, 2])
def test_a_layer_without_misses_costs_the_host_no_more_than_one_with_them(slots, tmp_path):
    """The host reads gates and tokens, and nothing else, whether the CPU computes both experts or none."""
    with Trace(from_rows(tmp_path / "t.safetensors", [[[0, 1]]] * 6, 2)) as trace:
        made = setup(LlamaCppLru(slots=slots, **ROOMY), trace, 2, sync_s=0.5)
        made = replace(made, stack=msgspec.structs.replace(made.stack, hybrid_layer_s=figure(3.0)))
        host = execute_easy(made).lane("host")
    assert [end_s - begun_s for what, begun_s, end_s in host if what == "sync"] == [0.5] * 12  # gates and tokens
    assert [end_s - begun_s for what, begun_s, end_s in host if what != "sync"].count(3.0) == 6


# -- moe-cache ------------------------------------------------------------------------------------------------------


def uploads(seen: Run) -> list[tuple[str, int]]:
    return [move for move in moves(seen) if move[0] in ("evict", "prefetch")]


def test_moe_cache_admits_by_how_full_its_pool_is(tmp_path):
    # Room for one of eight: 0 joins at its second touch; from then on the eighth touch of another takes its place.
    asked = [[0]] * 3 + [[1]] * 7
    assert uploads(said(MoeCache(**ROOMY), tmp_path, asked, room=1)) == [("prefetch", 0)]
    replaced = [("prefetch", 0), ("evict", 0), ("prefetch", 1)]
    assert uploads(said(MoeCache(**ROOMY), tmp_path, [*asked, [1]], room=1)) == replaced
    # Who left starts anew: 0 comes back after eight more touches, not at once.
    again = said(MoeCache(**ROOMY), tmp_path, [*asked, [1], *[[0]] * 7], room=1)
    assert uploads(again) == replaced
    # With room for all there is, the first touch suffices.
    assert uploads(said(MoeCache(**ROOMY), tmp_path, [[0], [5], [0]], room=8)) == [("prefetch", 0), ("prefetch", 5)]


def test_moe_cache_with_fixed_numbers_of_touches(tmp_path):
    asked = [[0], [0], [0], [1], [1], [1]]
    assert uploads(said(MoeCache(admit_after=3, **ROOMY), tmp_path, asked, room=1)) == [
        ("prefetch", 0),
        ("evict", 0),
        ("prefetch", 1),
    ]
    fixed = MoeCache(admit_after=1, replace_after=4, **ROOMY)
    assert uploads(said(fixed, tmp_path, asked, room=1)) == [("prefetch", 0)]


def test_moe_cache_lets_the_oldest_use_leave(tmp_path):
    # 0 and 1 are in, 0 is used again: 1 leaves for 2.
    cache = MoeCache(admit_after=1, **ROOMY)
    assert uploads(said(cache, tmp_path, [[0], [1], [0], [2]], room=2))[-2:] == [("evict", 1), ("prefetch", 2)]


@pytest.mark.parametrize(("prompt", "served"), [(8, True), (9, False), (31, False), (32, None)])
def test_moe_cache_serves_small_batches_copies_for_large_ones_and_leaves_those_between(prompt, served, tmp_path):
    """A prompt of all zeros behind two steps that ask for 0, in a cache that has admitted it."""
    rows = [[[0]]] * (3 + prompt)
    lengths = [(1, 3), (prompt, 1)]
    seen = run(MoeCache(admit_after=1), tmp_path, rows, room=5, n_experts=8, lengths=lengths)
    last = moves(seen)[-1]
    assert last == (("gpu", 0) if served in (True, None) else ("cpu", 0))
    other = [*rows[:3], *[[[1]]] * prompt]  # an expert that is not there
    seen = run(MoeCache(admit_after=100), tmp_path, other, room=5, n_experts=8, lengths=lengths)
    copied = [move for move in moves(seen) if move == ("fetch", 1)]
    assert len(copied) == (3 if served is None else 0)  # its three matrices


# -- pinned by a profile --------------------------------------------------------------------------------------------


def test_static_cache_pins_the_most_routed_of_each_layer_and_computes_the_rest_on_the_cpu(tmp_path):
    store = [[[3], [1]], [[3], [2]], [[0], [1]]]
    rows = [[[3], [2]], [[0], [1]]]
    seen = replay(StaticCache(slots=1, **ROOMY), taught(tmp_path, store, rows, 4), 2)
    assert resident(seen) == [(0, 3), (1, 1)]
    assert seen.log == [("gpu", 0, 3), ("cpu", 1, 2), ("cpu", 0, 0), ("gpu", 1, 1)]
    assert seen.outcome.setup.policy.stats() == {"profile_covered_frac": 4 / 6}


def test_static_cache_pays_a_worker_thread_in_each_layer_where_both_chains_run_at_once(tmp_path):
    # The host's 3 s: attention 0 to 1, the host to 4, expert 0 on the GPU 4 to 6, head to 7; next attention 7 to 8, the
    # host to 11, expert 1 on the CPU 11 to 16, its result to 17, head to 18. In turns no thread is handed anything.
    hosts, path = {}, taught(tmp_path, [[[0]], [[0]]], [[[0]], [[1]]], 2)
    for overlap in (True, False):
        with Trace(path) as trace:
            made = setup(StaticCache(slots=1, overlap=overlap, **ROOMY), trace, 1)
            seen = execute_easy(replace(made, stack=msgspec.structs.replace(made.stack, overlap_layer_s=figure(3.0))))
        hosts[overlap] = [(begun_s, end_s) for what, begun_s, end_s in seen.lane("host") if what == "predict"]
        shares = {f.figure: f.share for f in seen.result.provenance.figures}
        assert ("engine.overlap_layer_s" in shares) is overlap
    assert hosts == {True: [(1, 4), (8, 11)], False: []}
    assert shares.keys().isdisjoint({"engine.hybrid_layer_s"})


def test_static_cache_gives_ties_to_the_lowest_id(tmp_path):
    seen = replay(StaticCache(**ROOMY), taught(tmp_path, [[[3]], [[2]], [[1]]], [[[0]]], 4), 2)
    assert resident(seen) == [(0, 1), (0, 2)]


def test_a_profile_of_the_traffic_itself_hits_what_it_covers(tmp_path):
    """Z8 of the published replays: the miss share of a static set is one minus its share of accesses, exactly."""
    rows = np.random.default_rng(3).zipf(1.5, size=(60, 3, 1)) % 10
    path = written(tmp_path / "t.safetensors", [(1, len(rows), "test")], rows.tolist(), 10)
    seen = replay(StaticCache(slots=4, profile=str(path), **ROOMY), path, 12)
    on_gpu = sum(kind == "gpu" for kind, _, _ in seen.log)
    assert on_gpu / rows.size == pytest.approx(seen.outcome.setup.policy.stats()["profile_covered_frac"], abs=1e-12)
    assert 0.4 < on_gpu / rows.size < 0.95


def imatrix_of(table: list[list[int]]) -> bytes:
    """A GGUF importance matrix with these counts by layer and expert, and nothing else."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = (
        b"GGUF" + struct.pack("<IQQ", 3, len(table), 1) + text("general.type") + struct.pack("<I", 8) + text("imatrix")
    )
    data = b""
    for layer, row in enumerate(table):
        head += text(f"blk.{layer}.ffn_gate_exps.weight.counts") + struct.pack("<IQQIQ", 2, 1, len(row), 0, len(data))
        data += struct.pack(f"<{len(row)}f", *row).ljust(-(-4 * len(row) // 32) * 32, b"\0")
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + data


def test_one_profile_in_every_format_pins_the_same(tmp_path):
    rows = [[[0], [3]], [[2], [3]], [[2], [1]]]
    table = [[1, 0, 2, 0], [0, 1, 0, 2]]
    trace = written(tmp_path / "profile.safetensors", [(1, 3, "test")], rows, 4)
    csv, gguf, plain = (tmp_path / name for name in ("profile.csv", "imatrix.gguf", "counts.yaml"))
    csv.write_text("".join(f"{at},{layer},{row[layer][0]}\n" for at, row in enumerate(rows) for layer in (0, 1)))
    gguf.write_bytes(imatrix_of(table))
    found = counts.ExpertCounts(schema=counts.SCHEMA, model="", source="", tokens=3, layers=[0, 1], counts=table)
    counts.save(plain, found)
    for profile in (trace, csv, gguf, plain):
        seen = replay(StaticCache(profile=str(profile), **ROOMY), trace, 2)
        assert resident(seen) == [(0, 2), (1, 3)], profile


def _counts(path: Path, table: list[list[int]]) -> Path:
    layers = list(range(len(table)))
    found = counts.ExpertCounts(schema=counts.SCHEMA, model="", source="", tokens=3, layers=layers, counts=table)
    counts.save(path, found)
    return path


def test_runs_of_equal_profiles_are_equal_wherever_these_lie(tmp_path, monkeypatch):
    """`run_id` rests on what a file says; saved, it is found from any folder."""
    (tmp_path / "moved").mkdir()
    first = _counts(tmp_path / "p.yaml", [[8, 7, 6, 5, 4, 3, 2, 1]] * 32)
    moved = _counts(tmp_path / "moved" / "other.yaml", [[8, 7, 6, 5, 4, 3, 2, 1]] * 32)
    another = _counts(tmp_path / "another.yaml", [[1, 2, 3, 4, 5, 6, 7, 8]] * 32)
    monkeypatch.chdir(tmp_path)
    spec = RunSpec(policy="static_cache", hw="rtx3090", model="mixtral-8x7b", trace="mixtral-8x7b-small", requests=1)

    def prepared(path: str) -> Setup:
        return prepare(msgspec.structs.replace(spec, set={"profile": path}))

    by_name = prepared("p.yaml")
    assert by_name.run_id == prepared(str(moved)).run_id == prepare(by_name.explicit()).run_id
    assert by_name.run_id != prepared(str(another)).run_id
    assert by_name.explicit().set == {"profile": str(first.resolve())}
    assert "params_sha256" not in prepared("store").resolved()


def test_a_predictor_file_counts_as_what_it_says(tmp_path):
    bundled = Path(policies.__file__).parent / "data" / "mixtral-8x7b-small.duoserve.safetensors"
    ids = []
    for name in ("a.safetensors", "b.safetensors"):
        shutil.copy(bundled, tmp_path / name)
        spec = RunSpec(policy="duoserve", hw="rtx3090", trace="mixtral-8x7b-small", requests=1)
        ids.append(prepare(msgspec.structs.replace(spec, predictor=str(tmp_path / name))).run_id)
    assert ids[0] == ids[1]


def test_a_profile_of_another_model_or_of_none_is_refused(tmp_path):
    trace = written(tmp_path / "t.safetensors", [(1, 2, "test")], [[[0]], [[1]]], 4)
    for text, rule in (
        ("0,0,1\n0,1,2\n", "got counts of 2 layers of 4 experts: the model has 1 of 4"),
        ("0,0,4\n", r"expert, got 4: the model has 4, 0 to 3"),
        ("hello\n", "no profile of routed experts; give llama-moe-trace CSV"),
    ):
        (tmp_path / "p.csv").write_text(text)
        with pytest.raises(BadInput, match=rule):
            replay(StaticCache(profile=str(tmp_path / "p.csv"), **ROOMY), trace, 2)
    with pytest.raises(BadInput, match="no store: No such file"):
        replay(StaticCache(profile=str(tmp_path / "no store"), **ROOMY), trace, 2)


def test_a_large_batch_copies_what_is_not_pinned_and_nothing_else(tmp_path):
    rows = [[[0]]] * 20 + [[[1]]] * 20
    path = written(tmp_path / "t.safetensors", [(1, 2, "store"), (40, 1, "test")], [[[0]], [[0]], *rows], 4)
    seen = replay(StaticCache(slots=1), path, 3)
    assert moves(seen) == [("gpu", 0), *[("fetch", 1)] * 3, ("gpu", 1), *[("evict", 1)] * 3]


# -- heat -----------------------------------------------------------------------------------------------------------


def test_heat_swaps_only_where_a_candidate_is_clearly_hotter(tmp_path):
    # Room for one, a tenth of the heat lost per step: 0 comes in with 1. After 1 is asked once: 1 against 0.9, ratio
    # 1.11. Twice: 1.9 against 0.81, ratio 2.3: 1 takes its place.
    cache = Heat(decay=0.9, **ROOMY)
    assert uploads(said(cache, tmp_path, [[0], [1]], room=1)) == [("prefetch", 0)]
    swapped = [("prefetch", 0), ("evict", 0), ("prefetch", 1)]
    assert uploads(said(cache, tmp_path, [[0], [1], [1]], room=1)) == swapped
    # Exactly 1.3 times as hot is not more than that; without fading 2 against 1 is, 2 against 2 never.
    assert uploads(said(Heat(decay=1.0, hysteresis=2.0, **ROOMY), tmp_path, [[0], [1], [1]], room=1)) == swapped[:1]
    assert uploads(said(Heat(decay=1.0, **ROOMY), tmp_path, [[0], [1], [1]], room=1)) == swapped


def test_heat_lets_a_newcomer_dwell(tmp_path):
    # 1 is hot enough after step 3; 0 came at update 1 and stays for 4 updates, so until update 5.
    asked = [[0], [1], [1], [1], [1]]
    early = said(Heat(dwell=4, **ROOMY), tmp_path, asked[:4], room=1)
    late = said(Heat(dwell=4, **ROOMY), tmp_path, asked, room=1)
    assert uploads(early) == [("prefetch", 0)]
    assert uploads(late) == [("prefetch", 0), ("evict", 0), ("prefetch", 1)]


def test_heat_takes_the_hottest_first_and_ties_by_the_lowest_id(tmp_path):
    # A prompt of three tokens: 2 twice, 5 and 1 twice each too, 7 never. Room for two.
    rows = [[2, 5], [2, 1], [5, 1]]
    seen = said(Heat(**ROOMY), tmp_path, rows, room=2, lengths=[(3, 1)])
    assert uploads(seen) == [("prefetch", 1), ("prefetch", 2)]
