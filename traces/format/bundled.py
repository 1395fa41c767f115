"""The bundled traces: their names, and which of them have a model's shape."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from sim.base.errors import BadInput
from traces.format.layout import SUFFIX
from traces.format.reader import Trace

DEFAULT = "mixtral-8x7b-small"
FOLDER = Path(__file__).resolve().parents[1] / "data"


def bundled_traces() -> dict[str, Path]:
    """Name -> path of every trace in `traces/data`, sorted by name."""
    return dict(_listed(FOLDER, FOLDER.stat().st_mtime_ns)) if FOLDER.is_dir() else {}


@lru_cache(maxsize=1)
def _listed(folder: Path, mtime_ns: int) -> dict[str, Path]:  # noqa: ARG001 - it tells a changed folder
    return {path.name.removesuffix(SUFFIX): path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def traces_that_fit(n_layers: int, n_experts: int, top_k: int) -> list[str]:
    """Names of the bundled traces of exactly this routing shape; an unreadable one fits nothing.

    The default comes first, then those whose requests follow one another: who names a model asks for no load.
    """
    fitting: list[tuple[bool, str]] = []
    for name, path in bundled_traces().items():
        try:
            with Trace(path) as trace:
                if (trace.n_layers, trace.n_experts, trace.top_k) == (n_layers, n_experts, top_k):
                    arriving = any(request.arrival_s is not None for request in trace.requests)
                    fitting.append((arriving, name))
        except BadInput:
            continue
    return [name for _, name in sorted(fitting, key=lambda found: (found[1] != DEFAULT, *found))]
