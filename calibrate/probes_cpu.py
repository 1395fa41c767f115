"""Experts on the CPU: against tokens, threads and number format, with weights rotated out of the last-level cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from calibrate.bench import Bench, Point
from calibrate.clock import Call, Clock, HostClock
from calibrate.geometry import ExpertShape
from calibrate.ops import BYTES, Experts, rotations
from calibrate.stats import Effort

TOKENS = (1, 2, 4, 8, 16, 32, 64)
_TILE = 1 << 22


def host_experts(bench: Bench, shape: ExpertShape, dtype: str) -> Experts:
    """Rotating expert weights in host memory."""
    torch = bench.device.torch
    kind = getattr(torch, dtype)
    tile = torch.empty(_TILE, dtype=kind).normal_(0.0, 0.02)

    def make(size: tuple[int, ...], _: str) -> object:
        tensor = torch.empty(size, dtype=kind)
        flat = tensor.view(-1)
        for at in range(0, flat.numel(), _TILE):
            part = flat[at : at + _TILE]
            part.copy_(tile[: part.numel()])
        return tensor

    return Experts(shape, dtype, rotations(shape.weight_bytes(BYTES[dtype]), bench.llc_bytes), make)


def host_call(bench: Bench, weights: Experts, n_tokens: int, n_threads: int) -> tuple[Callable[[], object], Clock]:
    """One expert on `n_threads` of the calling thread's pool, and the host clock."""
    torch = bench.device.torch
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
    most = bench.threads[-1]
    try:
        for dtype_index, dtype in enumerate(bench.cpu_dtypes):
            for shape in bench.expert_shapes():
                main = dtype_index == 0
                grid = [(n, most) for n in (tokens if main else tokens[::3])]
                if main:
                    grid += [(n, t) for t in reversed(bench.threads[:-1]) for n in tokens[::2]]
                weights: list[Experts] = []
                for n_tokens, n_threads in grid:
                    key = {
                        "hidden": shape.hidden,
                        "intermediate": shape.intermediate,
                        "dtype": dtype,
                        "n_tokens": n_tokens,
                        "threads": n_threads,
                    }

                    def prepare(
                        shape: ExpertShape = shape,
                        dtype: str = dtype,
                        n_tokens: int = n_tokens,
                        n_threads: int = n_threads,
                        weights: list[Experts] = weights,
                    ) -> tuple[Call, Clock]:
                        if not weights:
                            weights.append(host_experts(bench, shape, dtype))
                        return host_call(bench, weights[0], n_tokens, n_threads)

                    yield Point(key, prepare, Effort(min_block_s=4e-3, max_s=0.5, n_samples=15))
                weights.clear()
    finally:
        torch.set_num_threads(before)
