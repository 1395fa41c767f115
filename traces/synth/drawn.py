"""Traces that are drawn because a run asks for a model: from its own fit, or scaled from the nearest shape's.

`NAME` is the trace drawn from the bundled fit of that name; `NAME@LxEkK` the one scaled from a bundled fit or trace to
another shape. Either is drawn once by each version of the code that draws, into a folder for temporary files.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sim import __version__
from sim.base.errors import BadInput
from traces.format.catalogue import DEFAULT, bundled_traces, open_trace
from traces.format.layout import SUFFIX
from traces.format.reader import Trace
from traces.format.shapes import apart
from traces.synth import fitted
from traces.synth.profile import Profile
from traces.synth.scale import scaled

_SCALED = re.compile(r"(?P<source>[^@/\\]+)@(?P<shape>[0-9]{1,4}x[0-9]{1,4}k[0-9]{1,4})")


class Source(NamedTuple):
    """What a trace can be scaled from. real: routing of a published model, not of a small one of its shape."""

    name: str
    shape: tuple[int, int, int]
    real: bool


def sources() -> list[Source]:
    """Every bundled fit and trace."""
    found = []
    for name in fitted.fitted():
        n_layers, n_experts, top_k = fitted.load(name).shape
        found.append(Source(name, (n_layers, n_experts, top_k), True))
    for name, path in bundled_traces().items():
        with Trace(path) as trace:
            found.append(Source(name, (trace.n_layers, trace.n_experts, trace.top_k), False))
    return found


def nearest(shape: tuple[int, int, int], among: list[Source]) -> Source:
    """The source to scale from: nearest in number of experts and in the share of them that a layer chooses.

    The sum of both differences counts, as where a trace is held beside published ones. Of equally near ones, published
    models come before small ones, then the nearest in layers, then the default trace.
    """

    def distance(source: Source) -> tuple[float, bool, float, bool, str]:
        layers = abs(math.log(source.shape[0] / shape[0]))
        near = round(sum(apart(*shape[1:], *source.shape[1:])), 6)
        return near, not source.real, layers, source.name != DEFAULT, source.name

    return min(among, key=distance)


def scaled_name(source: str, shape: tuple[int, int, int]) -> str:
    """What the trace scaled from a source to a shape is called: `qwen3-30b-a3b@94x128k8`."""
    n_layers, n_experts, top_k = shape
    return f"{source}@{n_layers}x{n_experts}k{top_k}"


def drawn_path(name: str) -> Path | None:
    """Where the trace of that name, drawn by this version, lies, or will; None for a name that is not drawn."""
    source, _ = _parts(name)
    path = fitted.fitted().get(source) or (bundled_traces().get(source) if source != name else None)
    if path is None:
        return None
    asked = f"{__version__} {_code()} {fitted.DRAWN_REQUESTS} {name if source != name else ''}"
    digest = hashlib.sha256(asked.encode() + path.read_bytes()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"moesim-{digest}" / f"{name}{SUFFIX}"


@cache
def _code() -> str:
    """Digest of what fits and draws: in a checkout one version has many."""
    sources = (path for part in ("synth", "stats") for path in sorted(Path(__file__).parents[1].glob(f"{part}/*.py")))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def drawn(name: str) -> Path:
    """The trace of that name (`drawn_path` knows it), drawn now if it was not yet. Raises BadInput."""
    path = drawn_path(name)
    assert path is not None
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and path.parent.stat().st_uid != os.getuid():
        raise BadInput(f"{path.parent}, got a folder of another user: traces are kept there; remove it, or set TMPDIR")
    if not path.exists():
        from traces.synth.write import write  # loads scipy

        source, shape = _parts(name)
        profile, own_shape = _profile(source, shape)
        own = path.with_name(f"{os.getpid()}{SUFFIX}")
        write(own, scaled(profile, *(shape or own_shape)), n_requests=fitted.DRAWN_REQUESTS, model=name)
        own.replace(path)
    return path


def shape_named(name: str) -> tuple[int, int, int]:
    """The routing shape of the trace drawn under that name, known without drawing it."""
    source, shape = _parts(name)
    if shape is None:
        n_layers, n_experts, top_k = fitted.load(source).shape
        return n_layers, n_experts, top_k
    return shape


def of_shape(n_layers: int, n_experts: int, top_k: int) -> list[str]:
    """Ids of the bundled fits that are drawn in this shape."""
    return [name for name in fitted.fitted() if fitted.load(name).shape == [n_layers, n_experts, top_k]]


def _parts(name: str) -> tuple[str, tuple[int, int, int] | None]:
    """Source and shape; the name itself and None where it is not of that form."""
    found = _SCALED.fullmatch(name)
    if found is None:
        return name, None
    n_layers, n_experts, top_k = map(int, re.split("[xk]", found["shape"]))
    return found["source"], (n_layers, n_experts, top_k)


def _profile(source: str, wanted: tuple[int, int, int] | None) -> tuple[Profile, tuple[int, int, int]]:
    if source in fitted.fitted():
        found = fitted.load(source)
        n_layers, n_experts, top_k = found.shape
        return found.profile, (n_layers, n_experts, top_k)
    from traces.synth.fit import fit  # loads scipy

    with open_trace(source) as trace:
        shape = trace.n_layers, trace.n_experts, trace.top_k
        return fit(trace, routes=wanted in (None, shape)), shape
