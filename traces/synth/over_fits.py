"""What every bundled fit gives in one shape: a trace that is drawn from one of them could have been drawn from any."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from traces.format.layout import SUFFIX
from traces.format.reader import Trace
from traces.stats.cuts import of_one_request
from traces.synth import fitted
from traces.synth.profile import Lengths
from traces.synth.scale import scaled
from traces.synth.write import labels, write

ROWS = 128  # of one request, as most of what is published
PLAIN = ("lru", "lfu", "lcp")
_REQUESTS, _PROMPT = 12, 24
_LAYERS = 12  # of a scaled fit: they take their statistics from all depths of the source, and so have the same mean


def over_fits(shape: tuple[int, int, int]) -> Iterator[tuple[str, dict[str, float]]]:
    """Id of each bundled fit, and its figures in this shape: `traces.stats.cuts.of_one_request` of `ROWS` tokens.

    A fit of that shape is drawn as it is, another one scaled to `_LAYERS` layers of it.
    """
    for name in fitted.fitted():
        found = fitted.load(name)
        own = tuple(found.shape) == shape
        profile = scaled(found.profile, shape[0] if own else min(shape[0], _LAYERS), *shape[1:])
        n_tasks = max(1, len(profile.tasks))
        alike = [Lengths(_PROMPT, ROWS, i % n_tasks, False) for i in range(_REQUESTS)]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}{SUFFIX}"
            write(path, msgspec.structs.replace(profile, requests=alike), levels="experts")
            with Trace(path) as trace:
                figures = of_one_request(trace, ROWS, PLAIN)
        assert figures is not None
        yield name, figures


def drawn_from(trace: Trace) -> str | None:
    """Id of the bundled fit that a trace was drawn from; None where it was not drawn from one."""
    own = set(trace.header.labels)
    if "synthetic" not in own:
        return None
    return next((name for name in fitted.fitted() if labels(fitted.load(name).profile)[1] in own), None)
