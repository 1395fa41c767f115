"""Files that a run names rarely, under seeded mutations: trained predictors, config.json, samples of a calibration.

Each is read or refused in one printable line, in memory of its size. `test_fuzz.py` does the same for what every run
reads. A slice runs by default; so many of each kind, and of each configuration five (about seven minutes):

    MOESIM_FUZZ_FILES=4000 python -m pytest tests/test_fuzz_files.py
"""

from __future__ import annotations

import gzip
import json
import os
import random
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fuzz_inputs import spoil_bytes, spoil_container, spoil_data, spoil_shape, spoil_values
from safetensors import safe_open
from safetensors.numpy import save

from calibrate import in_situ_file, in_situ_fit
from calibrate.derive import Table
from calibrate.session import CalibrationRequest, finish
from calibrate.store import Record, Store
from sim.base.errors import BadInput
from sim.base.files import bundled
from sim.conformance.world import World
from sim.policy.registry import find
from sim.profiles.models import load_model

CASES = int(os.environ.get("MOESIM_FUZZ_FILES", "30"))
ROOM_BYTES = 32 << 20  # files are at most 20 kB; a gzip may stand for a hundred times its size
SLOWEST_S = 10.0


def judged(path: Path, use: Callable[[], object]) -> bool:
    """Whether the file was accepted; anything but that or one line of BadInput fails."""
    began_s = time.perf_counter()
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use()
        return True
    except BadInput as error:
        message = str(error)
        assert message.isprintable()
        assert len(message) < 2_000
        assert ": " in message and "; " in message, message
        assert path.name.split(".")[0] in message or "policy " in message, message
        return False
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < ROOM_BYTES, peak_bytes
        assert time.perf_counter() - began_s < SLOWEST_S


def cases(kind: str) -> Iterator[tuple[int, random.Random]]:
    for number in range(CASES):
        yield number, random.Random(f"{kind} {number}")


# -- predictors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["duoserve", "emoe"])
def test_predictors(tmp_path: Path, policy: str) -> None:
    sound = bundled("policies.data", ".safetensors")[f"seeded.{policy}"]
    with safe_open(str(sound), framework="numpy") as file:
        facts = json.loads(file.metadata()["facts"])
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    path, ran = tmp_path / "spoilt.safetensors", 0
    with World(find(policy)) as world:
        room = world.room(8)
        for number, rng in cases(policy):
            changed, said = dict(arrays), facts
            with np.errstate(all="ignore"):
                if rng.random() < 0.7:
                    rng.choice((spoil_shape, spoil_values, spoil_values))({}, changed, rng)
                if rng.random() < 0.5:
                    said = spoil_data(facts, rng)
            data = save(
                {name: np.ascontiguousarray(array) for name, array in changed.items()}, {"facts": json.dumps(said)}
            )
            path.write_bytes(spoil_container(data, rng) if rng.random() < 0.3 else data)
            ran += judged(path, lambda n=number: world.run(room, {"predictor": str(path)}, again=n))
            world._runs.clear()
    assert 0 < ran < CASES


# -- config.json ------------------------------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "vocab_size": 101,
    "num_key_value_heads": 6,
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 88,
    "moe_intermediate_size": 40,
}
CONFIGS: tuple[dict[str, Any], ...] = (
    {**SMALL, "model_type": "mixtral", "num_local_experts": 9},
    {
        **SMALL,
        "model_type": "qwen2_moe",
        "num_experts": 9,
        "shared_expert_intermediate_size": 56,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    },
    {
        **SMALL,
        "model_type": "deepseek_v2",
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 9,
        "first_k_dense_replace": 2,
        "n_shared_experts": 2,
        "q_lora_rank": None,
        "quantization_config": {"quant_method": "fp8"},
    },
    {
        "model_type": "llama4",
        "text_config": {
            **SMALL,
            "model_type": "llama4_text",
            "num_local_experts": 9,
            "intermediate_size_mlp": 88,
            "interleave_moe_layer_step": 2,
            "head_dim": 16,
        },
    },
    {
        "model_type": "switch_transformers",
        "d_model": 96,
        "d_kv": 16,
        "d_ff": 40,
        "num_layers": 4,
        "num_decoder_layers": 6,
        "num_heads": 6,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 2,
        "num_experts": 9,
        "vocab_size": 101,
    },
)


def test_configs(tmp_path: Path) -> None:
    path, read = tmp_path / "config.json", 0

    def use() -> None:
        model = load_model(path)
        model.total_params(), model.dense_bytes(), model.kv_bytes_per_token(), model.moe_layer_ids, model.routed_bytes()

    for config in CONFIGS:
        path.write_text(json.dumps(config))
        assert judged(path, use)
    for _, rng in cases("config"):
        for config in CONFIGS:
            text = json.dumps(spoil_data(config, rng)).encode()
            path.write_bytes(spoil_bytes(text, rng) if rng.random() < 0.3 else text)
            read += judged(path, use)
    assert 0 < read < CASES * len(CONFIGS)


# -- samples of a calibration -----------------------------------------------------------------------------------------


def records() -> list[Record]:
    """Copies of three sizes each way, and what the host pays."""
    found = [
        Record("host", {"what": what}, 0, "ok", "wall", 10, (1e-6, 1.1e-6, 1.2e-6), {"enqueue_s": [1e-7]})
        for what in ("kernel_floor", "launch", "readback")
    ]
    for way in ("h2d", "d2h"):
        for memory, pattern in (("pinned", "queued"), ("pageable", "wall")):
            for n_bytes in (4096, 1 << 20, 1 << 26):
                key = {"direction": way, "memory": memory, "pattern": pattern, "n_bytes": n_bytes}
                samples_s = tuple((1e-5 + n_bytes / 2e10) * x for x in (1.0, 1.01, 1.02))
                found.append(Record("copy", key, 0, "ok", "event", 4, samples_s, {"bytes": n_bytes}))
    return [*found, Record("expert", {"variant": "plain", "n_tokens": 1}, 0, "skipped", why="late")]


ENVIRONMENT = {
    "title": "A card",
    "kind": "cuda",
    "device": "cuda:0",
    "models": ["mixtral-8x7b"],
    "card": {"pcie_gen_max": 4},
    "machine": {"cpu": "a CPU", "cores": {"physical": 4}, "memory_bytes": 64e9, "versions": {"torch": "2"}},
    "threads": [1, 4],
    "dtype": "bfloat16",
    "cpu_dtype": "float32",
    "n_sms": 10,
    "l2_bytes": 1000,
    "total_bytes": 24e9,
    "readings": [{"when": "copying", "pcie_gen": 4, "pcie_width": 16}],
    "warnings": [],
}


def test_samples(tmp_path: Path) -> None:
    path, environment = tmp_path / "card.samples.jsonl.gz", tmp_path / "card.environment.json"
    environment.write_text(json.dumps(ENVIRONMENT))
    store = Store(path)
    for record in records():
        store.add(record)
    store.save()
    lines, read = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()], 0

    def use() -> None:
        Table(Store.load(path)).noise()
        finish(CalibrationRequest("", ("mixtral-8x7b",), "card", tmp_path, 0.0))

    assert judged(path, use)
    for _, rng in cases("samples"):
        changed = list(lines)
        for _ in range(rng.choice((0, 1, 1, 3))):
            at = rng.randrange(len(changed))
            spoilable = isinstance(changed[at], dict) and rng.random() < 0.9
            changed[at] = spoil_data(changed[at], rng) if spoilable else rng.choice((None, [], 3, {}))
        text = "\n".join(map(json.dumps, changed)).encode()
        if rng.random() < 0.3:
            text = spoil_bytes(text, rng)
        packed = gzip.compress(text, 1)
        path.write_bytes(spoil_bytes(packed, rng) if rng.random() < 0.3 else packed)
        spoilt = spoil_data(ENVIRONMENT, rng) if rng.random() < 0.3 else ENVIRONMENT
        environment.write_text(json.dumps(spoilt))
        read += judged(path, use)
    assert 0 < read < CASES


LANES = {
    "format": 1,
    "environment": {
        "model": "mixtral-8x7b",
        "precision": "bf16",
        "cores": 4,
        "measured": "2026-01-01",
        "load": [0.1],
        "device": "CPU backend",
        "machine": ENVIRONMENT["machine"],
    },
    "operations": [{"op": "expert", "at": 1.0, "case": "lru 1", "seconds": [1e-4, 2e-4, 3e-4]}],
    "copies": {"4096": [1e-5] * 3, "100000000": [1e-2] * 3},
    "sends": {"4096": [1e-5] * 3},
    "verbs": {
        "sync": {"1: lru": [1e-5] * 3},
        "before sync": {"1: lru": [1e-6] * 3},
        "launch expert": {"1: lru": [1e-6] * 3},
        "launch copy": {"1: lru": [1e-6] * 3},
    },
    "overlap": {"lru": [[0.5, 1e-3]]},
}


def test_lanes(tmp_path: Path) -> None:
    path, read = tmp_path / "card.lanes.json.gz", 0
    plain = yaml.safe_load(bundled("hwprofiles.gpus", ".yaml")["h100-sxm"].read_text(encoding="utf-8"))

    def use() -> None:
        in_situ_fit.apply(plain, in_situ_file.load(path), "card")

    for number, rng in cases("lanes"):
        text = json.dumps(spoil_data(LANES, rng) if number else LANES).encode()
        if number and rng.random() < 0.3:
            text = spoil_bytes(text, rng)
        packed = gzip.compress(text, 1)
        path.write_bytes(spoil_bytes(packed, rng) if number and rng.random() < 0.3 else packed)
        read += judged(path, use)
        assert number or read
    assert 0 < read < CASES


@pytest.mark.parametrize("load", [Store.load, in_situ_file.load])
def test_a_bomb_is_not_unpacked(tmp_path: Path, load: Callable[[Path], object]) -> None:
    path = tmp_path / "card.samples.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"format": 1}\n' + b" " * (60 << 20), 9))
    assert not judged(path, lambda: load(path))
