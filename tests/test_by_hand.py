"""Hit rates, bytes and memory of plain caches counted from the bundled trace alone, by other code than the engine's."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest
from cli_help import simulated
from safetensors.numpy import load_file

from traces.format.bundled import DEFAULT, bundled_traces
from traces.format.reader import Trace
from traces.format.squeeze import unsqueeze

pytestmark = pytest.mark.skipif(DEFAULT not in bundled_traces(), reason="the default trace is not in this checkout")

EXPERT_BYTES = 3 * 4096 * 14336 * 2
KV_BYTES_PER_TOKEN = 32 * 2 * 8 * 128 * 2
DENSE_BYTES = 2 * (32 * (2 * 4096**2 + 2 * 4096 * 1024 + 8 * 4096 + 2 * 4096) + 2 * 32000 * 4096 + 4096)
N_REQUESTS = 6
Expert = tuple[int, int]  # layer, expert


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """As a plain file, which is read by the container's own library."""
    with Trace(bundled_traces()[DEFAULT]) as squeezed:
        return load_file(unsqueeze(squeezed, tmp_path_factory.mktemp("plain") / "trace.safetensors"))


def iterations(trace: dict[str, np.ndarray]) -> Iterator[tuple[str, list[list[int]]]]:
    """(phase, experts wanted by layer) of each forward pass: the prompt's rows at once, then row by row."""
    offsets, prompts, experts = trace["req_offsets"], trace["req_prompt_len"], trace["experts"]
    for request in np.flatnonzero(trace["req_split"] == 1)[:N_REQUESTS]:
        first, stop = int(offsets[request]), int(offsets[request + 1])
        decode = first + int(prompts[request])
        yield "prefill", [np.unique(experts[first:decode, layer]).tolist() for layer in range(32)]
        for row in range(decode, stop):
            yield "decode", experts[row].tolist()


def replayed(trace: dict[str, np.ndarray], rooms: list[int], frequency: bool) -> tuple[Counter[str], Counter[str]]:
    """Hits and misses by phase of one cache, or of one for each layer, that evicts by last use or number of uses."""
    caches: list[OrderedDict[Expert, None]] = [OrderedDict() for _ in rooms]
    uses: Counter[Expert] = Counter()
    hits: Counter[str] = Counter()
    misses: Counter[str] = Counter()

    def make_room(cache: OrderedDict[Expert, None], room: int, pending: set[Expert]) -> bool:
        if len(cache) < room:
            return True
        free = [expert for expert in cache if expert not in pending]  # least recently used first
        if not free:
            return False
        del cache[min(free, key=lambda expert: (uses[expert], expert[1], expert[0])) if frequency else free[0]]
        return True

    def use(cache: OrderedDict[Expert, None], expert: Expert) -> None:
        uses[expert] += 1
        cache[expert] = None
        cache.move_to_end(expert)

    for phase, layers in iterations(trace):
        for layer, ids in enumerate(layers):
            cache, room = caches[layer % len(rooms)], rooms[layer % len(rooms)]
            wanted = [(layer, expert) for expert in ids]
            found, missing = [e for e in wanted if e in cache], [e for e in wanted if e not in cache]
            hits[phase] += len(found)
            misses[phase] += len(missing)
            pending = set(wanted)
            for expert in found:
                use(cache, expert)
            waiting = []
            for expert in missing:
                if make_room(cache, room, pending):
                    use(cache, expert)
                else:
                    waiting.append(expert)
            pending = set(waiting)  # what is there runs, and may leave for what is not
            for expert in waiting:
                assert make_room(cache, room, pending)
                use(cache, expert)
                pending.discard(expert)
    return hits, misses


@pytest.mark.parametrize(
    ("policy", "rooms"),
    [("lru scope=global", [60]), ("lfu scope=global", [60]), ("lru", [2] * 28 + [1] * 4), ("lru scope=global", [130])],
)
def test_hits_and_bytes(
    capsys: pytest.CaptureFixture[str], trace: dict[str, np.ndarray], policy: str, rooms: list[int]
) -> None:
    name, *settings = policy.split()
    hw = "rtx3090" if sum(rooms) == 60 else "a6000"
    options = [word for setting in settings for word in ("--set", setting)]
    budget = ("--cache", f"{sum(rooms)}experts", "--requests", N_REQUESTS)
    said = simulated(capsys, "--policy", name, *options, "--hw", hw, *budget, "--json").json
    hits, misses = replayed(trace, rooms, frequency=name == "lfu")
    assert said["hit_rate"] == hits["decode"] / (hits["decode"] + misses["decode"])
    assert said["prefill_hit_rates"]["hit"] == hits["prefill"] / (hits["prefill"] + misses["prefill"])
    assert said["demand_copies"]["n"] == misses.total()
    assert said["h2d_bytes"] == misses.total() * EXPERT_BYTES
    assert policy == "lru scope=global" or said["hit_rate"] > 0.2  # so that something was compared


def test_memory_and_time(capsys: pytest.CaptureFixture[str], trace: dict[str, np.ndarray]) -> None:
    said = simulated(capsys, "--policy", "on_demand", "--hw", "rtx3090", "--requests", N_REQUESTS, "--json").json
    memory = said["memory"]
    lengths = np.diff(trace["req_offsets"])[np.flatnonzero(trace["req_split"] == 1)[:N_REQUESTS]]
    assert memory["dense_bytes"] == DENSE_BYTES
    assert memory["kv_cache_bytes"] == KV_BYTES_PER_TOKEN * (int(lengths.max()) + 1)
    assert memory["vram_bytes"] == 24 << 30
    taken = sum(memory[f"{part}_bytes"] for part in ("dense", "kv_cache", "activation", "reserve", "predictor"))
    assert memory["cache_capacity_bytes"] == memory["vram_bytes"] - taken
    copy_s, expert_s = 10e-6 + EXPERT_BYTES / 24.5e9, EXPERT_BYTES / 860e9
    attention_s, head_s = 2 * (2 * 4096**2 + 2 * 4096 * 1024) / 860e9, 2 * 32000 * 4096 / 860e9
    by_hand_s = 32 * (attention_s + 2 * copy_s + expert_s) + head_s
    assert by_hand_s < said["tpot_s"]["mean"] < 1.003 * by_hand_s  # launches, gates and the KV cache come on top
    phases = said["phases"].values()
    outputs = said["decode_tokens"] + said["requests"]
    assert said["throughput_tokens_per_s"] == pytest.approx(outputs / sum(phase["time_s"] for phase in phases))


def test_waiting_for_an_expert_on_another_gpu_is_not_waiting_for_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight GPUs hold everything: each has been idle for long when it is asked for an expert, but no host is slower.

    GPU 0 waits for the host at most from the end of each gate to the first kernel of an expert of its own, and to the
    read of the head.
    """
    said = simulated(capsys, "--policy", "lru", "--hw", "h200-sxm", "--gpus", 8, "--requests", 1, "--json").json
    decode = said["phases"]["decode"]
    reads_s = (32 + 1) * 15e-6 + 32 * 5e-6
    assert said["hit_rate"] > 0.999
    assert said["bottleneck"]["resource"] == "gpu"
    waited_s = sum(row["wait_host_s"] for row in said["by_layer"] if row["phase"] == "decode")
    assert waited_s < reads_s * decode["tokens"]
