"""A model and a trace small enough to be carried out for real in a fraction of a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiny_traces import ALL as LEVELS
from tiny_traces import tiny_trace

from sim.options import RunSpec
from sim.real.devices.cpu import CpuDevice
from sim.real.devices.lanes import Lanes
from sim.real.run import Measured, measure
from sim.real.weights.random_weights import random_weights
from sim.real.weights.weights import Weights
from sim.run import prepare
from sim.setup.setup import Setup

LAYERS, EXPERTS, TOP_K = 4, 4, 2
ALL = LAYERS * EXPERTS

MODEL = """
schema: 1
id: tiny-real
name: Tiny
source: tests/real_world.py
hidden_size: 64
n_layers: {layers}
dense_layers: {dense}
dense_intermediate_size: {width}
n_experts: 4
top_k: 2
expert_intermediate_size: 128
n_shared_experts: {shared}
shared_intermediate_size: {shared_width}
n_heads: 4
n_kv_heads: 2
head_dim: 16
{attention}
vocab_size: 128
native_precision: fp32
gate: {{score: softmax, renormalised: true}}
"""


LATENT = "attention: mla\nmla: {kv_lora_rank: 24, qk_nope_head_dim: 16, qk_rope_head_dim: 8, v_head_dim: 20}"


def tiny_model(folder: Path, shared: bool = False, dense: bool = False, latent: int = 0) -> Path:
    """`latent`: rank of the queries of latent attention, -1 for none, 0 for plain attention."""
    attention = LATENT.replace("}", f", q_lora_rank: {latent}}}") if latent > 0 else LATENT if latent else ""
    path = folder / "tiny-real.yaml"
    path.write_text(
        MODEL.format(
            layers=LAYERS + dense,
            dense="[0]" if dense else "[]",
            width=96 if dense else 0,
            shared=int(shared),
            shared_width=96 if shared else 0,
            attention=attention,
        )
    )
    return path


def tiny_setup(
    folder: Path,
    policy: str,
    experts: int | None = None,
    *,
    shared: bool = False,
    dense: bool = False,
    latent: int = 0,
    trace: dict[str, Any] | None = None,
    **fields: Any,
) -> Setup:
    path = folder / "tiny.safetensors"
    facts: dict[str, Any] = {
        "n_requests": 4,
        "prompt": 5,
        "outputs": 6,
        "n_layers": LAYERS,
        "n_experts": EXPERTS,
        "top_k": TOP_K,
        "levels": LEVELS - {"arrivals"},
    } | (trace or {})
    if not path.exists():
        tiny_trace(path, **facts)
    spec = RunSpec(
        policy=policy,
        hw=fields.pop("hw", "rtx3090"),
        model=str(tiny_model(folder, shared, dense, latent)),
        trace=str(path),
        precision="fp32",
        cache=f"{experts}experts",
        **fields,
    )
    return prepare(spec)


@contextmanager
def lanes_and_weights(setup: Setup, lanes: Any = None) -> Iterator[tuple[Any, Weights]]:
    lanes = lanes or Lanes(CpuDevice(setup.spec.gpus), pool_threads=1)
    try:
        yield lanes, random_weights(setup.model, "fp32", lanes.device, 0, 1 << 30)
    finally:
        lanes.close()


def carried_out(
    folder: Path,
    policy: str,
    experts: int | None = None,
    lanes: Any = None,
    spans: Any = None,
    log: Any = None,
    prepared: Any = None,
    perturb: tuple[int, int] | None = None,
    **fields: Any,
) -> Measured:
    """A real run of a policy on the tiny model; every hidden row is kept, and every copy proved by its bytes."""
    setup = tiny_setup(folder, policy, experts, **fields)
    try:
        with lanes_and_weights(setup, lanes) as (own, weights):
            if perturb is not None:
                weights.perturb(*perturb)

            def keep(machine: Any) -> None:
                machine.output.keep_hidden = True
                if prepared is not None:
                    prepared(machine)

            done = measure(setup, own, weights, spans, log, prepared=keep)
            assert done.machine.broken_copies() == []
            return done
    finally:
        setup.close()
