"""Draw the runs of the record: every policy on every bundled trace, with corners of all options in changing company."""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import combinations
from typing import Any

from record import FULL, digests_of, leaves_of, mapped, result_of, summary, write

Options = dict[str, Any]


def words(text: str) -> list[str]:
    """Those between blanks."""
    return text.split()


CELLS = {
    "mixtral-8x7b-small": (15, 8, 256),
    "phi-3.5-moe-small": (12, 16, 512),
    "mixtral-8x7b-chat": (10, 8, 256),
    "qwen1.5-moe-chat": (9, 60, 1440),
    "deepseek-moe-16b-chat": (6, 64, 1728),
}
"""Bundled trace -> runs of each policy on it, experts of a layer, experts in all."""
SLOW = {"adapmoe", "deepspeed", "hobbit", "moe_lightning", "moepic", "moesys"}
FEWER = {"qwen1.5-moe-chat": 5, "deepseek-moe-16b-chat": 2}
"""Runs of slow policies on traces of many experts."""
KEPT_REFUSED = 12  # a refused draw is kept in one of so many runs, else drawn again
MOST_PARAMS = 3  # of a policy that are set at once

HW = (
    *(words("h100-sxm h200-sxm h100-pcie a100-80g-pcie rtx3090 rtx4090 rtx5090 b200-sxm rtx-pro-6000 a6000 l40s") * 3),
    *words("gb10 t4 rtx3060 gtx1080ti v100-32g-pcie rtx4060ti a10 l4 quadro-rtx-6000 a100-40g-sxm rtx4090-5955wx"),
)
FRACS = (0.1, 0.25, 0.5, 0.75, 1.0)
SLO = {"*": {"ttft_s": 3.0, "tpot_s": 0.2}, "prose": {"e2e_s": 30.0}}
LIMITS = {"*": {"ttft_s": 20.0, "tpot_s": 2.0}}

CORNERS: dict[str, list[Options]] = {
    "precision": [
        {"precision": word}
        for word in words(
            "fp32 fp16 fp8 int8 mxfp4 q4_k nvfp4 int4_g128 int4 int2 hqq2 q8_0 q6_k q5_0 q4_0 iq4_xs q3_k "
            "q4_k_m q2_k iq2_xxs q5_k_m"
        )
    ],
    "stack": [
        {"stack": word} for word in words("freetoken hf imp ktransformers llama_cpp llama_cpp separate tinyserve")
    ],
    "gpus": [
        {"gpus": 2},
        {"gpus": 3, "host_links": "shared"},
        {"gpus": 2, "host_links": "split"},
        {"gpus": 4, "peer": "all-to-all"},
        {"gpus": 2, "peer": "all-to-all", "host_links": "shared"},
        {"gpus": 2, "placement": "@placement-{experts}.yaml"},
        {"gpus": 2, "placement": "@placement-{experts}.yaml", "peer": "all-to-all"},
        {"gpus": 2, "dense": "tensor"},
        {"gpus": 4, "dense": "tensor", "host_links": "split"},
        {"gpus": 2, "dense": "data", "batch": 2, "requests": 2},
        {"gpus": 3, "dense": "data", "batch": 3, "requests": 3},
        {"gpus": 2, "dense": "layers"},
        {"gpus": 3, "dense": "layers"},
        {"gpus": 2, "dense": "layers:3/1"},
        {"gpus": 2, "dense": "gpu0"},
    ],
    "load": [
        {"batch": 2, "requests": 2},
        {"batch": 3, "requests": 4},
        {"batch": 2, "requests": 3, "batching": "static"},
        {"batch": 2, "requests": 3, "batching": "continuous"},
        {"batch": 3, "requests": 3, "prefill_chunk": 24},
        {"prefill_chunk": 16},
        {"prefill_chunk": 512},
        {"arrivals": "none"},
        {"arrivals": "poisson:0.5", "requests": 3, "batch": 2},
        {"arrivals": "poisson:0.02", "requests": 3},
        {"arrivals": "poisson:2", "requests": 4, "batch": 4, "prefill_chunk": 64},
        {"arrivals": "gamma:0.2,3", "requests": 3, "batch": 2, "seed": 3},
        {"arrivals": "closed:2", "requests": 3, "batch": 2},
        {"arrivals": "@arrivals.csv", "requests": 3, "batch": 2},
        {"arrivals": "@arrivals.csv", "requests": 4, "batch": 2, "rate_scale": 4.0},
        {"arrivals": "poisson:0.1", "rate_scale": 0.3, "requests": 3},
        {"arrivals": "poisson:1", "requests": 4, "batch": 2, "scheduler": "sjf"},
        {"arrivals": "poisson:1", "requests": 4, "batch": 2, "scheduler": "edf", "slo": SLO},
        {"arrivals": "poisson:1", "requests": 4, "batch": 2, "scheduler": "emoe_slo", "slo": LIMITS},
        {"arrivals": "poisson:0.1", "requests": 3, "batch": 2, "slo": SLO, "scheduler": "fcfs"},
        {"batch": 4, "requests": 4, "scheduler": "batch_affinity"},
        {"replicas": 2, "requests": 3, "arrivals": "poisson:0.5"},
        {"replicas": 2, "requests": 4, "batch": 2, "router": "least_loaded", "arrivals": "poisson:1"},
        {"replicas": 3, "requests": 4, "router": "task_affinity", "arrivals": "gamma:1,2", "slo": SLO},
        {"replicas": 2, "requests": 3, "router": "round_robin", "arrivals": "closed:3", "scheduler": "sjf"},
    ],
    "kv": [
        {"kv_memory_bytes": 60_000_000},
        {"kv_memory_bytes": 90_000_000, "kv_page": 1},
        {"kv_memory_bytes": 120_000_000, "kv_page": 64, "preempt": "swap"},
        {"kv_memory_bytes": 60_000_000, "batch": 3, "requests": 3, "preempt": "swap"},
        {"kv_memory_bytes": 30_000_000, "batch": 3, "requests": 3, "preempt": "recompute", "kv_page": 8},
        {"kv_memory_bytes": 240_000_000, "batch": 4, "requests": 4, "preempt": "swap"},
        {"kv_memory_bytes": 1_000_000_000, "preempt": "recompute"},
    ],
    "draft": [
        {"draft": "k=4,acceptance=0.7"},
        {"draft": "k=2,acceptance=0.8/0.5"},
        {"draft": "k=3,acceptance=0.6,rejected=elsewhere"},
        {"draft": "k=2,acceptance=0.9,draft_s=0.002"},
        {"draft": "k=3,accepted=@accepted.csv"},
        {"draft": "k=3,acceptance=0.7,model=switch-base-8"},
        {"draft": "k=1,acceptance=1", "batch": 2, "requests": 2},
    ],
    "drive": [
        {"nvme": "gen4x4", "host_memory_bytes": 24 * 2**30},
        {"nvme": "gen3x4", "host_memory_bytes": 10 * 2**30, "ram_policy": "lfu"},
        {"nvme": "gen5x4:depth=8:block=256KiB", "host_memory_bytes": 16 * 2**30, "ram_policy": "lru"},
        {"nvme": "gen4x4:reads=buffered:ahead=2", "host_memory_bytes": 24 * 2**30},
        {"nvme": "gen4x4:start=warm", "host_memory_bytes": 20 * 2**30, "ram_policy": "fifo"},
        {"nvme": "gen5x4:reads=direct:start=warm", "host_memory_bytes": 40 * 2**30, "ram_policy": "slru"},
        {"nvme": "gen5x4"},
    ],
    "host": [{"host_memory_bytes": 64 * 2**30}, {"host_memory_bytes": 200 * 10**9}],
    "hit": [{"hit_definition": word} for word in ("room", "cached", "token")],
    "split": [{"split": "store"}, {"split": "all"}],
    "contention": [{"contention": "off"}],
    "energy": [{"energy": "gpu"}, {"energy": "machine"}],
    "link": [{"link": word} for word in words("pcie3x4 pcie3x16 pcie4x8 pcie4x16 pcie5x8 pcie5x16 pcie6x16")],
    "predictor": [{"predictor": "surrogate:0.85"}, {"predictor": "surrogate:0.6"}],
    "seed": [{"seed": 1}, {"seed": 12345}],
    "engine": [{"engine": "simpy"}, {"engine": "arithmetic"}],
    "hw.set": [
        {"set": {"hw.h2d.bandwidth_bytes_per_s": 5e9}},
        {"set": {"hw.h2d.latency_s": 1e-4, "hw.d2h.latency_s": 1e-4}},
        {"set": {"hw.cpu": "ryzen-7950x"}},
        {"set": {"hw.cpu": "epyc-9355"}},
        {"set": {"hw.cpu.memory_bandwidth_bytes_per_s": 2e10}},
        {"set": {"hw.cpu.memory_bytes": 2e12}},
        {"set": {"hw.gpu.memory_bandwidth_bytes_per_s": 3e11, "hw.gpu.kernel_floor_s": 1e-5}},
        {"set": {"hw.vram_bytes": 4.8e10}},
        {"set": {"hw.host.sync_s": 5e-5, "hw.host.launch_s": 1e-6}},
        {"set": {"hw.p2p.bandwidth_bytes_per_s": 2e11}},
    ],
    "stack.set": [
        {"set": {"stack.pinned": False}},
        {"set": {"stack.per_layer_s": 1e-4, "stack.per_expert_s": 2e-5}},
        {"set": {"stack.per_copy_s": 5e-5, "stack.per_iteration_s": 1e-3}},
        {"set": {"stack.copy_efficiency_frac": 0.7}},
        {"set": {"stack.graphs": True}},
        {"set": {"stack.grouped": True, "stack.cpu_region": "layer"}},
        {"set": {"stack.hybrid_layer_s": 2e-5, "stack.overlap_layer_s": 3e-5}},
    ],
    "model.set": [{"set": {"model.n_kv_heads": 4}}, {"set": {"model.vocab_size": 64000}}],
}
"""Option, or options that belong together -> values that are not the default."""
CHANCE = {"gpus": 0.25, "load": 0.35, "precision": 0.4, "stack": 0.25, "host": 0.06, "engine": 0.08, "model.set": 0.06}
USUAL = 0.14


def draw(policy: str, trace: str, n: int, attempt: int) -> Options:
    """One run of a policy on a trace; later attempts have less that could be refused."""
    chance = random.Random(f"{policy}/{trace}/{n}/{attempt}")
    _, n_experts, n_all = CELLS[trace]
    options: Options = {"policy": policy, "trace": trace, "requests": chance.choice((1, 1, 2))}
    options["unstable"] = True  # percentiles of every queue are held
    options["hw"] = chance.choice(HW) if attempt < 3 else chance.choice(("h200-sxm", "b200-sxm"))
    if attempt < 6:
        options |= chance.choice(
            (
                {},
                *({"cache_frac": frac} for frac in FRACS[: 4 if attempt < 3 else 3]),
                *({"experts": int(frac * n_all)} for frac in FRACS[:4]),
                *({"expert_cache_bytes": n_bytes} for n_bytes in (4_000_000_000, 12_000_000_000, 30_000_000_000)),
                *({"vram_bytes": n_bytes} for n_bytes in (16_000_000_000, 24_000_000_000, 48_000_000_000)),
            )
        )
    often = 0.6**attempt if attempt < 6 else 0.0
    for name, corners in CORNERS.items():
        drawn, corner = chance.random(), chance.choice(corners)
        if drawn < often * CHANCE.get(name, USUAL):
            for key, value in corner.items():
                if key == "set":
                    options["set"] = {**options.get("set", {}), **value}
                elif key in ("requests", "batch"):
                    options[key] = max(value, options.get(key, 1))
                else:
                    options[key] = value.format(experts=n_experts) if key == "placement" else value
    if params := drawn_params(policy, chance) if n % 2 and attempt < 5 else {}:
        options["set"] = {**options.get("set", {}), **params}
    return options


def drawn_params(policy: str, chance: random.Random) -> Options:
    """Some parameters of a policy at another value than the default."""
    from sim.policy.registry import find

    corners = {param.name: values for param in find(policy).params if (values := corners_of(param))}
    names = chance.sample(sorted(corners), min(len(corners), chance.randint(1, MOST_PARAMS)))
    return {name: chance.choice(corners[name]) for name in names}


def corners_of(param: Any) -> list[Any]:
    """Values other than the default; none of texts that name something."""
    default, low, high = param.default, param.low, param.high
    if param.choices:
        return [choice for choice in param.choices if choice != default]
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, str) or param.file:
        return []
    if default is None:
        numbers: list[float] = [0.3, 0.8] if high == 1.0 and isinstance(high, float) else [1, 2, 5]
    elif isinstance(default, float):
        numbers = [default / 2, default * 1.5] if default else [0.1, 0.01]
    else:
        numbers = [default // 2, default + 1, 2 * default]
    return [number for number in numbers if low <= number <= high and number != default]


def settle(slot: tuple[str, str, int]) -> tuple[dict[str, Any], dict[str, Any] | None, float]:
    """A run of the record and its leaves: of the first draw that is not refused, but for one in some."""
    policy, trace, n = slot
    attempt = 0
    began_s = time.perf_counter()
    while True:
        options = draw(policy, trace, n, attempt)
        result = result_of(options)
        if not isinstance(result, str):
            leaves = leaves_of(result)
            return {"options": options, "digests": digests_of(leaves)}, leaves, time.perf_counter() - began_s
        attempt += 1
        if (n + len(policy)) % KEPT_REFUSED == 0 or attempt == 8:
            return {"options": options, "refused": result}, None, time.perf_counter() - began_s


def slots_of(policies: list[str]) -> list[tuple[str, str, int]]:
    """Policy, trace and number of each run, in the order of the record."""
    found = []
    for trace, (n_runs, _, _) in CELLS.items():
        for policy in policies:
            n_own = FEWER.get(trace, n_runs) if policy in SLOW else n_runs
            found += [(policy, trace, n) for n in range(n_own)]
    return found


def take(n_jobs: int) -> int:
    """Write the record; 0."""
    from sim.policy.registry import policies

    began_s = time.perf_counter()
    slots = slots_of(sorted(policies()))
    runs, full, spent = [], {}, Counter[str]()
    for number, (run, leaves, time_s) in enumerate(mapped(settle, slots, n_jobs)):
        runs.append(run)
        spent[f"{run['options']['policy']} {run['options']['trace']}"] += time_s
        if number % FULL == 0 and leaves is not None:
            full[str(number)] = leaves
    write(runs, full)
    print(summary(runs), f"{time.perf_counter() - began_s:.0f} s")
    print("most time:", *(f"{name} {time_s:.0f} s" for name, time_s in spent.most_common(8)), sep="\n  ")
    print(coverage(runs))
    return 0


def coverage(runs: list[dict[str, Any]]) -> str:
    """How many values of options, and pairs of two options' values, are in runs that were not refused."""
    seen, pairs, rare = Counter[str](), set(), []
    for run in runs:
        if "refused" in run:
            continue
        flat = {key: value for key, value in run["options"].items() if key not in ("set", "requests")}
        flat |= {f"set.{key}": value for key, value in run["options"].get("set", {}).items()}
        words = sorted(f"{key}={value}" for key, value in flat.items())
        seen.update(words)
        pairs.update(combinations(words, 2))
    for corners in CORNERS.values():
        for corner in corners:
            for key, value in corner.items():
                rows = [(f"set.{k}", v) for k, v in value.items()] if key == "set" else [(key, value)]
                rare += [f"{k}={v}" for k, v in rows if k not in ("requests", "placement") and not seen[f"{k}={v}"]]
    return f"{len(seen)} values, {len(pairs)} pairs of them; in no run: {sorted(set(rare))}"
