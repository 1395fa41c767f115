"""How a name on the command line becomes an open trace: bundled, a file, or drawn when it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from sim.base.errors import BadInput, did_you_mean
from sim.base.paths import mode_of
from sim.base.units import show_bytes
from traces.format import growing
from traces.format.bundled import bundled_traces
from traces.format.reader import Trace

SUCCEEDED = {  # names that were bundled once, and what took their place
    "qwen1.5-moe-small": "qwen1.5-moe-chat",
    "deepseek-moe-16b-small": "deepseek-moe-16b-chat",
}


def resolve(name: str | Path) -> Path:
    """Path of a bundled trace's name, of a file, or of a trace that is drawn when its name is asked for.

    A bundled trace's name wins over a file in the current folder (`./name` does not).

    Raises:
        BadInput: neither; suggests the nearest name.
    """
    known = bundled_traces()
    if str(name) in known:
        return known[str(name)]
    path = Path(name)
    if mode_of(path):
        if path.suffix in (".yaml", ".yml"):
            from traces.stats.counts import WHAT_FOR, is_one

            if is_one(path):
                raise BadInput(f"trace, got {str(name)!r}: {WHAT_FOR}")
        return path
    from traces.synth.drawn import drawn, drawn_path
    from traces.synth.fitted import fitted

    if drawn_path(str(name)):
        return drawn(str(name))
    if str(name) in SUCCEEDED:
        new = SUCCEEDED[str(name)]
        raise BadInput(
            f"trace, got {str(name)!r}: {new} has taken its place, with longer requests that arrive; take "
            f"--trace {new} --arrivals none, with --requests N for the first of them alone"
        )
    hint = did_you_mean(str(name), {**known, **fitted()})
    raise BadInput(f"trace, got {str(name)!r}: no bundled trace and no file of that name; {hint}")


def open_trace(name: str | Path) -> Trace:
    """Open a bundled trace by name, or a file by path. Raises BadInput as `resolve` and `Trace` do."""
    return Trace(resolve(name))


def facts_of(trace: Trace) -> dict[str, str]:
    """What to know about a bundled trace before using it, in words; statistics are of all its decode rows.

    Held-out losses, in nats per token, come from its header: the evaluation that `tools.train.evaluate` made.
    """
    from traces.stats import figures as stats

    header, splits = trace.header, trace.requests.in_split
    loss = json.loads(header.extra.get("heldout_nats_per_token", "{}"))
    share, _ = stats.next_token_overlap(trace, 1, decode=True)
    facts = {
        "routing shape": header.shape,
        "gate": f"{header.gate.score}{', renormalised' if header.gate.renormalised else ''}",
        "requests": f"{trace.n_requests} ({len(splits('store'))} store, {len(splits('test'))} test)",
        "tasks": str(len(header.tasks)),
        "tokens": f"{trace.n_tokens:,}, {trace.requests.n_decode_rows:,} of them decode",
        "labels": ", ".join(header.labels) or "none",
        "held-out loss": _nats(loss, "model"),
        "  interpolated bigram": _nats(loss, "bigram"),
        "  interpolated trigram": _nats(loss, "trigram"),
        "experts never used": str(len(stats.dead_experts(stats.popularity(trace)))),
        "shared with the token before": f"{100 * np.nanmean(share):.1f} %",
    }
    for distance in stats.recorded_distances(trace):
        found = stats.prediction_accuracy(trace, distance)
        recorded, popular = np.nanmean(found.recorded), np.nanmean(found.popular)
        facts[f"predicted, distance {distance}"] = f"{100 * recorded:.1f} % ({100 * popular:.1f} % by popularity)"
    return {**facts, "size": show_bytes(trace.path.stat().st_size)}


def _nats(loss: dict[str, float], name: str) -> str:
    return f"{loss[name]:.2f} nats per token" if name in loss else "-"


def _rows_of(path: Path, request: int) -> growing.Rows:
    from traces.synth.drawn import rows_of  # slow to load, and mostly not needed

    return rows_of(path, request)


growing.draw = _rows_of
