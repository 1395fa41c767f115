"""The replays that `moesim bench` times and samples: a policy, a model's shape, and a trace that favours nobody."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sim.setup.spec import RunSpec
    from traces.format.requests import Request


class Case(NamedTuple):
    """One replay to time; `floor` is the ratio it must reach, in timeouts per layer and decoded token."""

    title: str
    policy: str
    model: str
    settings: dict[str, int | str]
    n_store: int  # decode tokens of the store split
    n_test: int
    floor: float


PLAIN = str(Path(__file__).with_name("bench_policy.py"))
GLOBAL: dict[str, int | str] = {"scope": "global"}  # what is timed stays what it was, whatever the default
CASES = (
    Case("lru, Mixtral-8x7B's shape", "lru", "mixtral-8x7b", GLOBAL, 0, 2000, 2.0),
    Case("lru, Qwen3-30B-A3B's shape", "lru", "qwen3-30b-a3b", GLOBAL, 0, 600, 1.5),
    Case("a plain-Python policy, Mixtral-8x7B's shape", PLAIN, "mixtral-8x7b", {}, 0, 2000, 0.4),
    Case("fine_moe, 1,000 maps, Mixtral-8x7B's shape", "fine_moe", "mixtral-8x7b", {"capacity": 1000}, 1000, 400, 0.1),
)


def written(case: Case, folder: Path) -> RunSpec:
    """The run of a case; its trace is written into `folder`."""
    from sim.profiles.models import load_model
    from sim.setup.spec import RunSpec

    model = load_model(case.model)
    trace = folder / f"{case.model}-{case.n_store}-{case.n_test}.safetensors"
    synthetic_trace(trace, (model.n_moe_layers, model.n_experts, model.top_k), case.n_store, case.n_test)
    return RunSpec(policy=case.policy, hw="rtx3090", model=case.model, trace=str(trace), set=dict(case.settings))


def ten_tokens(folder: Path) -> Path:
    """A trace of Mixtral-8x7B's shape with one request of ten output tokens."""
    path = folder / "ten-tokens.safetensors"
    synthetic_trace(path, (32, 8, 2), 0, 9)
    return path


def synthetic_trace(path: Path, shape: tuple[int, int, int], n_store: int, n_test: int) -> None:
    """Random routing (seeded, even, no correlation) with one request per split and a prompt of one token."""
    import numpy as np

    from traces.format.header import Header
    from traces.format.requests import Request
    from traces.format.writer import write_trace

    n_layers, n_experts, top_k = shape
    requests: list[Request] = []
    first = 0
    for split, n in (("store", n_store), ("test", n_test)):
        if n:
            requests.append(Request(len(requests), first, 1, n + 1, "", None, split))
            first += 1 + n
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 4096, (first, n_layers, n_experts))
    experts = np.argsort(-codes, axis=-1, kind="stable")[..., :top_k]
    header = Header("synthetic", "moesim bench", *shape, labels=("synthetic",))
    levels: dict[str, Any] = {"experts": experts}
    if n_store:
        scores = codes / codes.sum(-1, keepdims=True)
        chosen = np.take_along_axis(scores, experts, -1)
        levels |= {"scores": scores, "weights": chosen / chosen.sum(-1, keepdims=True)}
        levels["embeddings"] = rng.standard_normal((first, 64))
    write_trace(path, header, requests, **levels)
