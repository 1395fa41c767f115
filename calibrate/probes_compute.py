"""Experts against tokens, on the device and on the CPU; on the device the dense parts of a layer, and attention against
context and batch, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

from calibrate.bench import Bench, Point
from calibrate.clock import Call, Clock, HostClock, LaneClock
from calibrate.ops import (
    BYTES,
    Attention,
    Experts,
    ExpertShape,
    Int4Experts,
    Tensor,
    gate_call,
    head_call,
    random_tensor,
    rotations,
    tiled,
)
from calibrate.stats import Effort
from calibrate.store import Key

ATTENTION = Effort(max_calls=16, min_block_s=1e-3)  # about 20 kernels a call: stay clear of the launch queue's depth
TOKENS = (1, 2, 4, 8, 16, 32, 64)
_TILE = 1 << 22
Made = Callable[[], Callable[[Tensor, str], Call]]
"""Weights, made by the first point that needs them -> an expert on tokens, of a variant."""


def on_device(bench: Bench, shape: ExpertShape) -> Experts:
    """Rotating expert weights in the device's memory."""
    device = bench.device
    n = rotations(shape.weight_bytes(BYTES[bench.dtype]), device.facts.l2_bytes)
    return Experts(shape, bench.dtype, n, partial(random_tensor, device))


def _experts(bench: Bench, shape: ExpertShape) -> Callable[[Tensor, str], Call]:
    return partial(on_device(bench, shape).call, bench.device.torch)


def _int4(bench: Bench, shape: ExpertShape) -> Callable[[Tensor, str], Call]:
    """The same in 4 bits. What a shape or a torch cannot do is a failed point that says why."""
    device = bench.device
    weights = Int4Experts(device.torch, shape, rotations(shape.weight_bytes(0.5), device.facts.l2_bytes), device.place)
    return lambda x, _: weights.call(x)


def _lane(bench: Bench, make: Callable[..., Call], *args: object) -> tuple[Call, Clock]:
    """The call that `make` gives, timed on the compute lane."""
    return make(*args), LaneClock(bench.device, bench.compute)


def _expert(bench: Bench, weights: Made, hidden: int, variant: str, n_tokens: int, dtype: str) -> Call:
    call = weights()
    return call(random_tensor(bench.device, (n_tokens, hidden), dtype), variant)


def experts(bench: Bench) -> Iterator[Point]:
    """Every distinct expert shape at 1, 2, 4 .. tokens; plain and fused at all of them, the loop at every other."""
    yield from _of_shapes(bench, _experts, ("plain", "fused", "loop"), bench.dtype)
    if bench.device.facts.int4:
        yield from _of_shapes(bench, _int4, ("int4",), "bfloat16")


def _of_shapes(
    bench: Bench,
    make: Callable[[Bench, ExpertShape], Callable[[Tensor, str], Call]],
    variants: tuple[str, ...],
    dtype: str,
) -> Iterator[Point]:
    for shape in bench.expert_shapes():
        weights = cache(partial(make, bench, shape))
        for variant in variants:
            step, most = (2, 48) if variant == "loop" else (1, 96)
            for n_tokens in bench.tokens()[::step]:
                key = {**shape.key, "variant": variant, "n_tokens": n_tokens}
                prepare = partial(_lane, bench, _expert, bench, weights, shape.hidden, variant, n_tokens, dtype)
                yield Point(key, prepare, Effort(max_calls=most))
        weights.cache_clear()
        bench.device.free()


def dense(bench: Bench) -> Iterator[Point]:
    """Shared experts, gate and head of every model, each distinct shape once."""
    device, dtype, most = bench.device, bench.dtype, bench.max_tokens
    few = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if n <= most]
    for shape in sorted({g.shared for g in bench.geometries if g.shared}, key=lambda s: -s.weight_bytes(2)):
        weights = cache(partial(_experts, bench, shape))
        for n in few[::2]:
            prepare = partial(_lane, bench, _expert, bench, weights, shape.hidden, "plain", n, dtype)
            yield Point({"what": "shared", **shape.key, "n_tokens": n}, prepare)
        weights.cache_clear()
        device.free()
    for hidden, n_experts, top_k in sorted({(g.expert.hidden, g.n_experts, g.top_k) for g in bench.geometries}):
        for n in few[::3]:
            prepare = partial(_lane, bench, gate_call, device, hidden, n_experts, top_k, n, dtype)
            key: Key = {"what": "gate", "hidden": hidden, "n_experts": n_experts, "top_k": top_k, "n_tokens": n}
            yield Point(key, prepare, Effort(max_calls=48))
    for hidden, vocab in sorted({(g.expert.hidden, g.vocab) for g in bench.geometries}):
        for n in (n for n in (1, 4, 8, 32, 128) if n <= most):
            prepare = partial(_lane, bench, head_call, device, hidden, vocab, n, dtype)
            yield Point({"what": "head", "hidden": hidden, "vocab": vocab, "n_tokens": n}, prepare)


def _attention(block: Callable[[], Attention], batch: int, n_new: int, context: int) -> Call:
    return block().call(batch, n_new, context)


def attention(bench: Bench) -> Iterator[Point]:
    """Decode against context and batch, prefill against prompt length, for every distinct attention shape."""
    device, n_bytes = bench.device, BYTES[bench.dtype]
    contexts = [n for n in (128, 512, 1024, 2048, 4096, 8192, 16384, 32768) if n <= bench.max_context]
    prompts = [n for n in (32, 64, 128, 256, 512, 1024, 2048, 4096) if n <= bench.max_tokens]
    grid = [("decode", batch, 1, context) for batch in (1, 4, 8) for context in contexts]
    grid += [("prefill", 1, n, n) for n in prompts]
    for shape in sorted({g.attention for g in bench.geometries}, key=lambda s: -s.hidden):
        block = cache(partial(Attention, device, shape, bench.dtype))
        for phase, batch, n_new, context in grid:
            if 8 * batch * context * shape.kv_bytes_per_token(n_bytes) <= bench.device_bytes:
                key: Key = {"phase": phase, **vars(shape), "batch": batch, "n_new": n_new, "context": context}
                yield Point(key, partial(_lane, bench, _attention, block, batch, n_new, context), ATTENTION)
        block.cache_clear()
        device.free()


def host_experts(bench: Bench, shape: ExpertShape, dtype: str) -> Experts:
    """Rotating expert weights in host memory."""
    torch = bench.device.torch
    kind = getattr(torch, dtype)
    tile = torch.empty(_TILE, dtype=kind).normal_(0.0, 0.02)

    def make(size: tuple[int, ...], _: str) -> Tensor:
        tensor = torch.empty(size, dtype=kind)
        return tiled(tensor, tensor.view(-1), tile)

    return Experts(shape, dtype, rotations(shape.weight_bytes(BYTES[dtype]), bench.llc_bytes), make)


def host_call(bench: Bench, made: Callable[[], Experts], n_tokens: int, n_threads: int) -> tuple[Call, Clock]:
    """One expert on `n_threads` of the calling thread's pool, and the host clock."""
    torch, weights = bench.device.torch, made()
    torch.set_num_threads(n_threads)
    x = torch.randn((n_tokens, weights.shape.hidden)).to(getattr(torch, weights.dtype)) * 0.02
    inner = weights.call(torch, x, "plain")

    def call() -> None:
        with torch.inference_mode():
            inner()

    return call, HostClock(lambda: None, each=False, now=bench.now)


def on_cpu(bench: Bench) -> Iterator[Point]:
    """All tokens on all cores first (what a policy asks about), then fewer threads, then the other number format."""
    torch = bench.device.torch
    before = torch.get_num_threads()
    tokens = [n for n in TOKENS if n <= bench.max_tokens]
    *fewer, most = bench.threads
    main = [*((n, most) for n in tokens), *((n, t) for t in reversed(fewer) for n in tokens[::2])]
    try:
        for dtype in bench.cpu_dtypes:
            for shape in bench.expert_shapes():
                weights = cache(partial(host_experts, bench, shape, dtype))
                for n, n_threads in main if dtype == bench.cpu_dtypes[0] else [(n, most) for n in tokens[::3]]:
                    key = {**shape.key, "dtype": dtype, "n_tokens": n, "threads": n_threads}
                    prepare = partial(host_call, bench, weights, n, n_threads)
                    yield Point(key, prepare, Effort(min_block_s=4e-3, max_s=0.5, n_samples=15))
                weights.cache_clear()
    finally:
        torch.set_num_threads(before)
