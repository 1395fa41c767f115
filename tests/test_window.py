"""Layers that attend to a sliding window: what they keep, what they read, what they multiply, position by position."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from sim.base.errors import BadInput
from sim.machine.cost import Cost
from sim.options import RunSpec
from sim.profiles.geometry import Window
from sim.profiles.hardware import load_hardware
from sim.profiles.models import Model, load_model
from sim.profiles.stack import load_stack
from sim.setup.prepare import prepare
from sim.workload.iterations import DECODE, PREFILL, Iteration, Range, RequestInfo

OSS, GEMMA = load_model("gpt-oss-20b"), load_model("gemma-4-26b-a4b")


def test_what_is_kept_by_hand() -> None:
    """gpt-oss-20b: 8 heads of 64, keys and values of 2 bytes, in 24 layers of which 12 keep the last 128 tokens."""
    one = 2 * 8 * 64 * 2
    assert OSS.kv_bytes_per_token() == 24 * one
    assert OSS.kv_bytes([100]) == 24 * one * 100
    assert OSS.kv_bytes([1000, 128]) == 24 * one * 1128 - 12 * one * (1000 - 128)
    # Gemma 4: 25 layers of 8 heads of 256 with a window of 1,024, five of 2 heads of 512 whose keys are their values.
    assert GEMMA.kv_bytes([32768]) == 25 * (2 * 8 * 256) * 2 * 1024 + 5 * 2048 * 2 * 32768
    assert load_model("qwen3-30b-a3b").kv_bytes([7, 8]) == 15 * load_model("qwen3-30b-a3b").kv_bytes_per_token()


def by_position(model: Model, context: int, n_tokens: int) -> tuple[float, float]:
    """(positions read, products of positions) of the mean layer, counted one by one."""
    assert model.window is not None
    read = multiplied = 0.0
    for layer in range(model.n_layers):
        tokens = model.window.tokens if layer in model.window.layers else context + n_tokens
        seen = [range(max(0, at - tokens), at) for at in range(context + 1, context + n_tokens + 1)]
        read += len(set().union(*seen))
        multiplied += sum(map(len, seen))
    return read / model.n_layers, multiplied / model.n_layers


def attention_of(model: Model, context: int, n_tokens: int) -> tuple[Any, Cost]:
    hw = load_hardware("rtx3090")
    cost = Cost(hw, model, load_stack("bare"), "bf16")
    request = RequestInfo(0, 0, context + n_tokens, 1, "", None)
    phase = DECODE if n_tokens == 1 else PREFILL
    return cost.attention(Iteration(0, [Range(request, context, context + n_tokens, phase, context)], None)), cost


def test_what_is_read_and_multiplied_counted_one_by_one() -> None:
    rng = Random(5)
    for _ in range(60):
        layers = tuple(layer for layer in range(24) if rng.random() < 0.5)
        model = msgspec.structs.replace(OSS, window=Window(tokens=rng.randint(1, 40), layers=layers))
        context, n_tokens = rng.randint(0, 60), rng.choice((1, 1, rng.randint(2, 50)))
        price, cost = attention_of(model, context, n_tokens)
        read, multiplied = by_position(model, context, n_tokens)
        weights = model.attention_bytes() + 4 * cost.activation_bytes(n_tokens)
        each = 2 * 8 * 64 * 2
        # What a layer has is rounded up to a value, of a mean that is none: of 24 layers, less than a value a position.
        assert price.n_bytes - weights == pytest.approx(each * read, abs=2 * 60 * 2)
        in_all = 2 * (n_tokens * model.attention_params() + 64 * 2 * 64 * multiplied)
        rate = cost.roofline.flops
        longest_s = max(price.n_bytes / cost.roofline.bandwidth, in_all / rate, cost.roofline.floor_s)
        assert price.duration_s == pytest.approx(longest_s, rel=1e-3)
        if n_tokens == 1:
            assert cost.attention_one_s(context) == pytest.approx(price.duration_s, rel=1e-9)


def test_a_token_more_behind_a_full_window_costs_less_and_bounds_know_where() -> None:
    cost = Cost(load_hardware("rtx3090"), OSS, load_stack("bare"), "bf16")
    assert cost.decode_points() == (128.0,)
    n_bytes = [attention_of(OSS, context, 1)[0].n_bytes for context in (126, 127, 128)]
    assert n_bytes[1] - n_bytes[0] == 2 * (n_bytes[2] - n_bytes[1]) == 2 * 8 * 64 * 2
    assert Cost(load_hardware("rtx3090"), load_model("mixtral-8x7b"), load_stack("bare"), "bf16").decode_points() == ()


def test_memory_has_the_window_of_each_request() -> None:
    found = prepare(RunSpec(policy="lru", hw="rtx4090", trace="olmoe-1b-7b", batch=3))
    lengths = sorted((r.prompt_len + r.outputs for r in found.requests), reverse=True)[:3]
    every = found.memory.parts.kv_cache_bytes
    found.close()
    settings = {"model.window.tokens": 10, "model.window.layers": [0, 3]}
    narrow = prepare(RunSpec(policy="lru", hw="rtx4090", trace="olmoe-1b-7b", batch=3, set=settings))
    of_layer = narrow.model.kv_bytes_per_token_per_layer()
    assert every - narrow.memory.parts.kv_cache_bytes == 2 * of_layer * sum(n - 10 for n in lengths)
    narrow.close()
    spec = RunSpec(policy="lru", hw="rtx4090", trace="olmoe-1b-7b", batch=3, kv_memory=10**9, set=settings)
    pool = prepare(spec)
    assert pool.memory.parts.kv_cache_bytes == 10**9  # a page has room for every layer's
    pool.close()


def test_each_gpu_keeps_what_its_own_layers_do() -> None:
    """Gemma 4 over two GPUs: 14 of 16 layers of the first and 11 of 14 of the second have a window."""
    contexts = (32768,) * 4
    first, second = (GEMMA.kv_bytes(contexts, layers=part) for part in (range(16), range(16, 30)))
    wide, deep = 2 * 8 * 256 * 2 * 1024, 2048 * 2 * 32768
    assert (first, second) == (4 * (14 * wide + 2 * deep), 4 * (11 * wide + 3 * deep))
    assert first + second == GEMMA.kv_bytes(contexts)


def test_a_window_of_layers_that_are_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match=r"window\.layers, got \[0, 24\]: distinct layer numbers below 24"):
        load_model("gpt-oss-20b", {"window.layers": [0, 24]})
    for field, value in (("window.layers", []), ("window.tokens", 0), ("window.tokens", 2**31)):
        with pytest.raises(BadInput, match=field.replace(".", r"\.")):
            load_model("gpt-oss-20b", {field: value})
