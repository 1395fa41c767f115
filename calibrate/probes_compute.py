"""Device work: experts against tokens, the dense parts of a layer, and attention against context and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from calibrate.bench import Bench, Point
from calibrate.clock import Call, Clock, LaneClock
from calibrate.geometry import AttentionShape, ExpertShape
from calibrate.ops import BYTES, Attention, Experts, Int4Experts, gate_call, head_call, rotations
from calibrate.stats import Effort
from calibrate.store import Key
from calibrate.tensors import random_tensor

ATTENTION = Effort(max_calls=16, min_block_s=1e-3)  # about 20 kernels a call: stay clear of the launch queue's depth


def _lane(bench: Bench, call: Callable[[], object]) -> tuple[Call, Clock]:
    return call, LaneClock(bench.device, bench.compute)


def _experts(bench: Bench, shape: ExpertShape) -> Experts:
    device = bench.device
    n = rotations(shape.weight_bytes(BYTES[bench.dtype]), device.facts.l2_bytes)
    return Experts(shape, bench.dtype, n, partial(random_tensor, device))


def experts(bench: Bench) -> Iterator[Point]:
    """Every distinct expert shape at 1, 2, 4 .. tokens; plain and fused at all of them, the loop at every other."""
    device = bench.device
    for shape in bench.expert_shapes():
        weights: list[Experts] = []
        for variant in ("plain", "fused", "loop"):
            for n_tokens in bench.tokens()[:: 2 if variant == "loop" else 1]:
                key = {
                    "hidden": shape.hidden,
                    "intermediate": shape.intermediate,
                    "variant": variant,
                    "n_tokens": n_tokens,
                }

                def prepare(
                    shape: ExpertShape = shape,
                    variant: str = variant,
                    n_tokens: int = n_tokens,
                    weights: list[Experts] = weights,
                ) -> tuple[Call, Clock]:
                    if not weights:
                        weights.append(_experts(bench, shape))
                    x = random_tensor(device, (n_tokens, shape.hidden), bench.dtype)
                    return _lane(bench, weights[0].call(device.torch, x, variant))

                yield Point(key, prepare, Effort(max_calls=48 if variant == "loop" else 96))
        weights.clear()
        device.free()
    if device.facts.int4:
        yield from _int4(bench)


def _int4(bench: Bench) -> Iterator[Point]:
    """The same experts in 4 bits. What a shape or a torch cannot do is a failed point that says why."""
    device = bench.device
    for shape in bench.expert_shapes():
        weights: list[Int4Experts] = []
        for n_tokens in bench.tokens():
            key = {"hidden": shape.hidden, "intermediate": shape.intermediate, "variant": "int4", "n_tokens": n_tokens}

            def prepare(
                shape: ExpertShape = shape, n_tokens: int = n_tokens, weights: list[Int4Experts] = weights
            ) -> tuple[Call, Clock]:
                if not weights:
                    n = rotations(shape.weight_bytes(0.5), device.facts.l2_bytes)
                    weights.append(Int4Experts(device.torch, shape, n, device.place))
                return _lane(bench, weights[0].call(random_tensor(device, (n_tokens, shape.hidden), "bfloat16")))

            yield Point(key, prepare, Effort(max_calls=96))
        weights.clear()
        device.free()


def dense(bench: Bench) -> Iterator[Point]:
    """Shared experts, gate and head of every model, each distinct shape once."""
    device = bench.device
    few = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if n <= bench.max_tokens]
    for shape in sorted({g.shared for g in bench.geometries if g.shared}, key=lambda s: -s.weight_bytes(2)):
        weights = _experts(bench, shape)
        for n_tokens in few[::2]:
            x = random_tensor(device, (n_tokens, shape.hidden), bench.dtype)
            key: Key = {
                "what": "shared",
                "hidden": shape.hidden,
                "intermediate": shape.intermediate,
                "n_tokens": n_tokens,
            }
            yield Point(key, lambda w=weights, x=x: _lane(bench, w.call(device.torch, x, "plain")))  # type: ignore[misc]
        del weights
        device.free()
    for hidden, n_experts, top_k in sorted({(g.expert.hidden, g.n_experts, g.top_k) for g in bench.geometries}):
        for n_tokens in few[::3]:
            key = {"what": "gate", "hidden": hidden, "n_experts": n_experts, "top_k": top_k, "n_tokens": n_tokens}
            yield Point(
                key,
                lambda h=hidden, e=n_experts, k=top_k, n=n_tokens: _lane(  # type: ignore[misc]
                    bench, gate_call(device, h, e, k, n, bench.dtype)
                ),
                Effort(max_calls=48),
            )
    for hidden, vocab in sorted({(g.expert.hidden, g.vocab) for g in bench.geometries}):
        for n_tokens in [n for n in (1, 4, 8, 32, 128) if n <= bench.max_tokens]:
            key = {"what": "head", "hidden": hidden, "vocab": vocab, "n_tokens": n_tokens}
            yield Point(
                key,
                lambda h=hidden, v=vocab, n=n_tokens: _lane(  # type: ignore[misc]
                    bench, head_call(device, h, v, n, bench.dtype)
                ),
            )


def attention(bench: Bench) -> Iterator[Point]:
    """Decode against context and batch, prefill against prompt length, for every distinct attention shape."""
    device = bench.device
    contexts = [n for n in (128, 512, 1024, 2048, 4096, 8192, 16384, 32768) if n <= bench.max_context]
    prompts = [n for n in (32, 64, 128, 256, 512, 1024, 2048, 4096) if n <= bench.max_tokens]
    grid = [("decode", batch, 1, context) for batch in (1, 4, 8) for context in contexts]
    grid += [("prefill", 1, n, n) for n in prompts]
    shapes = sorted({g.attention for g in bench.geometries}, key=lambda s: -s.hidden)
    for shape in shapes:
        block: list[Attention] = []
        for phase, batch, n_new, context in grid:
            if 8 * batch * context * shape.kv_bytes_per_token(BYTES[bench.dtype]) > bench.device_bytes:
                continue
            key: Key = {
                "phase": phase,
                "hidden": shape.hidden,
                "n_heads": shape.n_heads,
                "n_kv_heads": shape.n_kv_heads,
                "head_dim": shape.head_dim,
                "batch": batch,
                "n_new": n_new,
                "context": context,
            }

            def prepare(
                batch: int = batch,
                n_new: int = n_new,
                context: int = context,
                block: list[Attention] = block,
                shape: AttentionShape = shape,
            ) -> tuple[Call, Clock]:
                if not block:
                    block.append(Attention(device, shape, bench.dtype))
                return _lane(bench, block[0].call(batch, n_new, context))

            yield Point(key, prepare, ATTENTION)
        block.clear()
        device.free()
