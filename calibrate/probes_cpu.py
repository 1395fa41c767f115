"""Experts on the CPU: against tokens, threads and number format, with weights rotated out of the last-level cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

from calibrate.bench import Bench, Point
from calibrate.clock import Call, Clock, HostClock
from calibrate.ops import BYTES, Experts, ExpertShape, Tensor, rotations, tiled
from calibrate.stats import Effort

TOKENS = (1, 2, 4, 8, 16, 32, 64)
_TILE = 1 << 22


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


def points(bench: Bench) -> Iterator[Point]:
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
