"""The bundled traces, and how a name on the command line becomes an open trace."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from sim.errors import BadInput, did_you_mean
from traces.format import SUFFIX
from traces.reader import Trace

DEFAULT = "mixtral-8x7b-small"


def bundled_traces() -> dict[str, Path]:
    """Name -> path of every trace in `traces/data`, sorted by name."""
    folder = Path(str(resources.files("traces"))) / "data"
    return {path.name.removesuffix(SUFFIX): path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def resolve(name: str | Path) -> Path:
    """Path of a bundled trace's name, or of a file. A name wins over a file in the current folder (`./name` does not).

    Raises:
        BadInput: neither; suggests the nearest name.
    """
    known = bundled_traces()
    if str(name) in known:
        return known[str(name)]
    path = Path(name)
    if path.exists():
        return path
    hint = did_you_mean(str(name), known) if known else "no traces are bundled; give the path of a file"
    raise BadInput(f"trace, got {str(name)!r}: no bundled trace and no file of that name; {hint}")


def open_trace(name: str | Path) -> Trace:
    """Open a bundled trace by name, or a file by path. Raises BadInput as `resolve` and `Trace` do."""
    return Trace(resolve(name))


def default_trace() -> Trace:
    """The trace used when none is named. Raises BadInput when this installation does not carry it."""
    return open_trace(DEFAULT)


def traces_that_fit(n_layers: int, n_experts: int, top_k: int) -> list[str]:
    """Names of the bundled traces of exactly this routing shape; an unreadable one fits nothing."""
    fitting = []
    for name, path in bundled_traces().items():
        try:
            with Trace(path) as trace:
                if (trace.n_layers, trace.n_experts, trace.top_k) == (n_layers, n_experts, top_k):
                    fitting.append(name)
        except BadInput:
            continue
    return fitting
