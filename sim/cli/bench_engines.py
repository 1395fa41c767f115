"""The same runs replayed by arithmetic and on SimPy events: how fast each is, and whether every figure is equal."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.cli.bench_cases import synthetic_trace
from sim.results.by_layer import WAITS_S

if TYPE_CHECKING:
    from sim.cli.bench_told import PairTold
    from sim.setup.spec import RunSpec

ENGINES = ("arithmetic", "simpy")
DIFFERS = ("wall_s", "engine")  # keys that say which replay it was
N_STORE, N_TEST = 100, 60  # decode tokens


class Pair(NamedTuple):
    """One run to replay by both."""

    title: str
    policy: str
    rest: dict[str, Any]


PAIRS = (
    Pair("lru", "lru", {"set": {"scope": "global"}}),
    Pair("fine_moe", "fine_moe", {}),
    Pair("ktransformers, CPU", "ktransformers", {}),
    Pair("mixtral_offloading, copies back", "mixtral_offloading", {"set": {"guesses": 0}}),
    Pair("fine_moe, 2 GPUs", "fine_moe", {"gpus": 2}),
)


def measure() -> list[PairTold]:
    """Decode tokens per second of processor time of both, and the keys of their results that differ."""
    from sim.profiles.models import load_model
    from sim.setup.spec import RunSpec

    model = load_model("mixtral-8x7b")
    found: list[PairTold] = []
    with tempfile.TemporaryDirectory(prefix="moesim-bench-") as folder:
        trace = Path(folder) / "engines.safetensors"
        synthetic_trace(trace, (model.n_moe_layers, model.n_experts, model.top_k), N_STORE, N_TEST)
        for pair in PAIRS:
            spec = RunSpec(
                policy=pair.policy, hw="rtx3090", model=model.id, trace=str(trace), contention="off", **pair.rest
            )
            found.append(replayed(pair.title, spec))
    return found


def replayed(title: str, spec: RunSpec) -> PairTold:
    """One run by both engines."""
    import msgspec

    from sim.run import execute, prepare

    results, tokens_per_s = [], {}
    for engine in ENGINES:
        setup = prepare(msgspec.structs.replace(spec, engine=engine))
        began_s = time.process_time()
        results.append(_alike(execute(setup, bounds=False).result.to_dict()))
        tokens_per_s[engine] = results[-1]["decode_tokens"] / (time.process_time() - began_s)
        setup.close()
    arithmetic, simpy = results
    keys = [key for key in arithmetic.keys() | simpy.keys() if key not in DIFFERS]
    unequal = sorted(key for key in keys if arithmetic.get(key) != simpy.get(key))
    return {
        "title": title,
        "policy": spec.policy,
        "tokens_per_s": tokens_per_s,
        "keys": len(keys),
        "unequal": unequal,
        "ok": not unequal,
    }


def _alike(result: dict[str, Any]) -> dict[str, Any]:
    """A result without waits by layer, sums that each engine takes in an order of its own: their last digits differ."""
    rows = [{name: value for name, value in row.items() if name not in WAITS_S} for row in result["by_layer"]]
    return result | {"by_layer": rows}


def told(found: list[PairTold]) -> tuple[str, str]:
    """The table, and a line on what it shows."""
    from sim.base.tables import render, table

    rows = table("by both engines", *(f"{engine}, tokens/s" for engine in ENGINES), "results")
    for one in found:
        speeds = (f"{one['tokens_per_s'][engine]:,.0f}" for engine in ENGINES)
        same = f"{one['keys']} keys equal" if one["ok"] else f"differ in {', '.join(one['unequal'])}"
        rows.add_row(one["title"], *speeds, same)
    note = f"by both engines: tokens/s of processor time; keys of the results but {' and '.join(DIFFERS)}"
    return render(rows), note
