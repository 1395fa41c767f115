"""Traces that are drawn because a run asks for a model: from its own fit, or scaled from the nearest model's.

`NAME` is the trace drawn from the bundled fit of that name; `NAME@LxEkK` the one scaled from a bundled fit or trace to
another shape. Either is drawn once by each version of the code that draws, into a folder of the user's own for what can
be had again; each request when a run first reads it (`traces.format.growing`).

What a run rests on must not depend on what ran before. So a drawn trace has all its requests from the start, drawn or
not, and its digest is that of what decides them: header, request table, the fit, and the rows of the first request that
is scored, in which a change of the code that draws shows.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import time
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import platformdirs

from sim import __version__
from sim.base.errors import BadInput
from sim.base.files import must_be_writable, sweep_out
from traces.format.bundled import DEFAULT, bundled_traces
from traces.format.growing import Rows, marks
from traces.format.header import Header
from traces.format.layout import SPLITS, SUFFIX, Array
from traces.format.parts import Held
from traces.format.reader import Trace
from traces.format.shapes import apart, family
from traces.format.writer import TraceWriter
from traces.synth import fitted
from traces.synth.draw import Drawer
from traces.synth.frame import begin, is_sound
from traces.synth.profile import Profile, to_json
from traces.synth.scale import scaled
from traces.synth.streams import RequestPlan
from traces.synth.write import both_splits, header, layout, put

SEED = 0
SAME_SPARSITY = 1.1  # 4 of 60 experts and 4 of 64 are one design; taken, not measured
_SCALED = re.compile(r"(?P<source>[^@/\\]+)@(?P<shape>[0-9]{1,4}x[0-9]{1,4}k[0-9]{1,4})")


UNUSED_S = 30 * 86_400
"""After so long what other versions drew is removed, when something is drawn."""


class Source(NamedTuple):
    """What a trace can be scaled from. real: routing of a published model, not of a small one of its shape."""

    name: str
    shape: tuple[int, int, int]
    real: bool


def sources() -> list[Source]:
    """Every bundled fit and trace."""
    found = [Source(name, fitted.shape(name), True) for name in fitted.fitted()]
    for name, path in bundled_traces().items():
        with Trace(path) as trace:
            found.append(Source(name, (trace.n_layers, trace.n_experts, trace.top_k), False))
    return found


def by_nearness(shape: tuple[int, int, int], of_family: str, among: list[Source]) -> list[Source]:
    """The sources to scale from, the one to take first: by family, sparsity, number of experts, then layers.

    of_family: as `family` names it; empty for a model of no known one.

    Family comes first, because how evenly a router spreads its choices and how often it repeats them comes from how a
    model was trained, and models of a family share more of that than strangers do. Only a published model's routing
    counts as its family's; a small model that was trained here in its shape was trained otherwise. Sparsity, the share
    of a layer's experts that a token takes, comes second: what is chosen is the tail of a layer's scores, and the less
    it changes where that begins, the less rests on how `scale` assumes scores to be distributed. Sparsities that differ
    by less than `SAME_SPARSITY` count as equal. These are rules, made before anything was compared: two fits of one
    family can differ as much as any (`over_fits`). Of equally near ones, published models come before small ones, and
    the default trace before others.
    """

    def distance(source: Source) -> tuple[bool, float, float, bool, float, bool, str]:
        related = source.real and family(source.name) == of_family
        experts, share = apart(*shape[1:], *source.shape[1:])
        layers = abs(math.log(source.shape[0] / shape[0]))
        near = round(share if share > math.log(SAME_SPARSITY) else 0.0, 6), round(experts, 6)
        return not related, *near, not source.real, layers, source.name != DEFAULT, source.name

    return sorted(among, key=distance)


def nearest(shape: tuple[int, int, int], of_family: str, among: list[Source]) -> Source:
    """The first of `by_nearness`."""
    return by_nearness(shape, of_family, among)[0]


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
    return folder() / digest / f"{name}{SUFFIX}"


def folder() -> Path:
    """Where drawn traces lie."""
    return Path(platformdirs.user_cache_dir("moesim", appauthor=False)) / "drawn"


@cache
def _code() -> str:
    """Digest of what fits and draws: in a checkout one version has many."""
    sources = (path for part in ("synth", "stats") for path in sorted(Path(__file__).parents[1].glob(f"{part}/*.py")))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def drawn(name: str) -> Path:
    """The trace of that name (`drawn_path` knows it): its file, whose requests are drawn as they are read.

    Raises:
        BadInput: the folder for drawn traces cannot be had.
    """
    path = drawn_path(name)
    assert path is not None
    if path.exists():
        if _sound(path, path.stat().st_size, path.stat().st_mtime_ns):
            return path
        path.unlink()
    _make_private(folder(), path)
    path.parent.mkdir(exist_ok=True)
    sweep_out(path.parent)
    marks(path).mkdir(exist_ok=True)
    _begin(path)
    _remove_unused(path.parent)
    return path


def _begin(path: Path) -> None:
    """Make a drawn trace's file, with the first request that is scored: most runs read that."""
    drawer, head = _drawer(path.stem)
    both_splits(drawer, fitted.DRAWN_REQUESTS, None)
    plans = _plans(path.stem)
    first = next((plan for plan in plans if plan.split == "test"), plans[0])
    rows, metadata = _rows(path.stem, first.index)
    tables: dict[str, Array] = {
        "req_offsets": np.cumsum([0, *(plan.n_rows for plan in plans)]).astype("<i8"),
        "req_prompt_len": np.array([plan.prompt_len for plan in plans], "<i8"),
        "req_split": np.array([SPLITS.index(plan.split) for plan in plans], "u1"),
    }
    if head.tasks:
        tables["req_task"] = np.array([plan.task for plan in plans], "<u2")
    if drawer.embedding_table is not None:
        tables["embedding_table"] = drawer.embedding_table
    begin(path, metadata, rows, tables, to_json(drawer.profile))


def rows_of(path: Path, request: int) -> Rows:
    """A request of a drawn trace, drawn now.

    Raises:
        BadInput: the file is none of this version's own.
    """
    name = path.stem
    if drawn_path(name) != path:
        raise BadInput(
            f"{path}: request {request} is not drawn yet, and the file is none of this version's drawn traces: name "
            f"the trace or the model instead of the file, or write a whole one: moesim traces synth NAME -o FILE"
        )
    return _rows(name, request)[0]


@lru_cache(maxsize=1)  # the first one is asked for twice
def _rows(name: str, request: int) -> tuple[Rows, dict[str, str]]:
    """A request's rows, and the strings of a header for them."""
    drawer, head = _drawer(name)
    held = Held()
    writer = TraceWriter(Path(f"{name}{SUFFIX}"), head, layout(drawer.profile), None, held)
    put(writer, drawer, _plans(name)[request])
    return held.rows, writer.metadata()


@lru_cache(maxsize=1)
def _drawer(name: str) -> tuple[Drawer, Header]:
    source, shape = _parts(name)
    profile, own_shape = _profile(source, shape)
    profile = scaled(profile, *(shape or own_shape))
    return Drawer(profile, SEED), header(profile, name, SEED)


def _plans(name: str) -> list[RequestPlan]:
    return list(_drawer(name)[0].plans(fitted.DRAWN_REQUESTS, None))


@cache
def _sound(path: Path, n_bytes: int, mtime_ns: int) -> bool:  # noqa: ARG001 - they tell a file that has changed
    """Whether a drawn trace's file is as it was made, but for its rows; a request is judged when it is read."""
    sound = is_sound(path)
    with suppress(OSError):
        if sound and time.time() - path.parent.stat().st_mtime > UNUSED_S / 30:
            os.utime(path.parent)  # used, for `_remove_unused`
    return sound


def _make_private(top: Path, path: Path) -> None:
    """Make the folder, for this user alone. Raises BadInput where it cannot be had, or is somebody else's."""
    try:
        must_be_writable(path)
        for one in (top.parent, top):
            one.parent.mkdir(parents=True, exist_ok=True)
            one.mkdir(mode=0o700, exist_ok=True)
            if hasattr(os, "getuid") and one.stat().st_uid != os.getuid():
                raise BadInput(f"{one}: the folder for drawn traces, and another user's; {_WAY_OUT}")
            if os.name == "posix" and one.stat().st_mode & 0o077:
                one.chmod(0o700)
    except OSError as error:
        raise BadInput(f"{top}: the folder for drawn traces: {error.strerror or error}; {_WAY_OUT}") from None


_WAY_OUT = "see to it that it is yours, or (on Linux) set XDG_CACHE_HOME to a folder that is"


def _remove_unused(own: Path) -> None:
    """Remove what other versions of the code drew and nobody has used for long."""
    for one in own.parent.iterdir():
        with suppress(OSError):
            if one != own and time.time() - one.stat().st_mtime > UNUSED_S:
                shutil.rmtree(one, ignore_errors=True)


def shape_named(name: str) -> tuple[int, int, int]:
    """The routing shape of the trace drawn under that name, known without drawing it."""
    source, shape = _parts(name)
    return fitted.shape(source) if shape is None else shape


def of_shape(n_layers: int, n_experts: int, top_k: int) -> list[str]:
    """Ids of the bundled fits that are drawn in this shape."""
    return [name for name in fitted.fitted() if fitted.shape(name) == (n_layers, n_experts, top_k)]


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

    with Trace(bundled_traces()[source]) as trace:
        shape = trace.n_layers, trace.n_experts, trace.top_k
        return fit(trace, routes=wanted in (None, shape)), shape
