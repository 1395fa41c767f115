"""What `moesim bench` times that is no command: replays, a bound, bare SimPy, and the inputs of all rows."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator

    from simpy.events import Event

    from sim.setup.setup import Setup

PLAIN = str(Path(__file__).with_name("bench_policy.py"))
Facts = dict[str, Any]
"""`value`: the figure of a row; `note`: what else there is to say; `error`: why it is wrong."""


def synthetic_trace(path: Path, shape: tuple[int, int, int], n_store: int, n_test: int, requests: int = 1) -> None:
    """Random routing (seeded, even, no correlation) of `n_test` decode tokens, and of `n_store` to learn from.

    Args:
        shape: layers, experts, top-k.
        requests: of the test split, which share its tokens; each has a prompt of one token.
    """
    import numpy as np

    from traces.format.header import Header
    from traces.format.requests import Request
    from traces.format.writer import write_trace

    made: list[Request] = []
    first = 0
    for split, n in [("store", n_store)] * (n_store > 0) + [("test", n_test // requests)] * requests:
        made.append(Request(len(made), first, 1, n + 1, "", None, split))
        first += 1 + n
    rng, parts = np.random.default_rng(0), []
    for start in range(0, first, 20_000):  # rows at once
        codes = rng.integers(0, 4096, (min(20_000, first - start), *shape[:2]))
        parts.append(np.argsort(-codes, axis=-1, kind="stable")[..., : shape[2]].astype(np.uint16))
    levels: Facts = {"experts": np.concatenate(parts)}
    if n_store:  # few enough that `codes` are those of all rows
        scores = codes / codes.sum(-1, keepdims=True)
        chosen = np.take_along_axis(scores, levels["experts"].astype(np.int64), -1)
        levels |= {"scores": scores, "weights": chosen / chosen.sum(-1, keepdims=True)}
        levels["embeddings"] = rng.standard_normal((first, 64))
    write_trace(path, Header("synthetic", "moesim bench", *shape, labels=("synthetic",)), made, **levels)


def prepared(folder: str, policy: str, n_store: int, n_test: int, requests: int = 1, **rest: Any) -> closing[Setup]:
    """A run over such a trace on an RTX 3090."""
    from sim.options import RunSpec
    from sim.profiles.models import load_model
    from sim.run import prepare

    asked = {"model": "mixtral-8x7b", **rest}
    model, trace = load_model(asked["model"]), Path(folder) / "synthetic.safetensors"
    synthetic_trace(trace, (model.n_moe_layers, model.n_experts, model.top_k), n_store, n_test, requests)
    return closing(prepare(RunSpec(policy=policy, hw="rtx3090", trace=str(trace), **asked)))


def timeouts(n: int = 200_000) -> Facts:
    """Timeouts per second that one SimPy process waits for, one after the other."""
    import simpy

    env = simpy.Environment()

    def wait() -> Generator[Event, Any, None]:
        for _ in range(n):
            yield env.timeout(1.0)

    env.process(wait())
    began_s = time.process_time()
    env.run()
    return {"value": n / (time.process_time() - began_s)}


def replay(folder: str, policy: str, n_store: int, n_test: int, **rest: Any) -> Facts:
    """Layers of decode tokens per second; what is learnt and the first iteration, a prefill, are left out."""
    from sim.run import execute

    at_s: list[float] = []

    def over(done: int, total: int) -> None:
        if done in (1, total):
            at_s.append(time.process_time())

    with prepared(folder, policy, n_store, n_test, **rest) as setup:
        hit_rate = execute(setup, progress=over, bounds=False).result.hit_rate
        per_s = n_test / (at_s[-1] - at_s[0])
        note = f"{per_s:,.0f} tokens/s, hit rate {hit_rate or 0.0:.1%}"
        return {"value": per_s * setup.model.n_moe_layers, "note": note}


def bound(folder: str, n_tokens: int, requests: int) -> Facts:
    """Seconds of the lower bound alone."""
    from sim.bounds.time_bound import lower_bound

    with prepared(folder, "lru", 0, n_tokens, requests) as setup:
        began_s = time.process_time()
        lower_bound(setup)
        return {"value": time.process_time() - began_s}


def both(folder: str, policy: str, n_store: int = 100, n_test: int = 60, **rest: Any) -> Facts:
    """Tokens per second of a run replayed by arithmetic, beside SimPy's; wrong where a figure of the two differs."""
    from sim.options import CORE, SIMPY
    from sim.results.by_layer import WAITS_S
    from sim.run import execute

    results, per_s = [], []
    for simulator in (CORE, SIMPY):
        with prepared(folder, policy, n_store, n_test, sim_simulator=simulator, sim_contention=False, **rest) as setup:
            began_s = time.process_time()
            result = execute(setup, bounds=False).result.to_dict()
            per_s.append(n_test / (time.process_time() - began_s))
        # Waits by layer are sums that each takes in an order of its own: their last digits differ.
        rows = [{name: value for name, value in row.items() if name not in WAITS_S} for row in result["by_layer"]]
        results.append(result | {"by_layer": rows, "wall_s": None, "simulator": None})
    ours, simpy = results
    unequal = sorted(key for key in ours.keys() | simpy.keys() if ours.get(key) != simpy.get(key))
    if unequal:
        return {"error": f"the two differ in {', '.join(unequal)}"}
    return {"value": per_s[0], "note": f"simpy {per_s[1]:,.0f} tokens/s, {len(ours)} keys of both results equal"}


def peak_bytes() -> int | None:
    """The most memory this process has held, or None where the system does not tell."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        import resource
    except (OSError, ImportError):
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
