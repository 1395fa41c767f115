"""Draw a whole trace into a file, in constant memory, with everything it rests on in its header."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from sim import __version__
from sim.base.errors import BadInput
from traces.format.header import ONE_PROMPT, REPEATING, Header
from traces.format.layout import DISTANCES, MAX_TEXT, U8_SQUARE
from traces.format.writer import Layout, TraceWriter
from traces.synth.draw import Drawer
from traces.synth.profile import ALONE, TAUGHT, Profile, to_json
from traces.synth.streams import RequestPlan

DENSE_EXPERTS = 16  # up to so many experts, predictions two and three layers ahead are kept whole
PREDICTIONS = (*(f"next_scores_{d}" for d in DISTANCES), "shared_scores")
LEVELS = {
    "all": None,
    "scores": frozenset({"experts", "weights", "scores", "token_ids"}),
    "experts": frozenset({"experts"}),
}


def layout(profile: Profile) -> Layout:
    """How the tensors are stored: one byte per score, predictions for decode rows, of far ones the 2K highest."""
    sparse = {} if profile.n_experts <= DENSE_EXPERTS else dict.fromkeys(PREDICTIONS[1:3], 2 * profile.top_k)
    return Layout(dict.fromkeys(("scores", *PREDICTIONS), U8_SQUARE.name), frozenset(PREDICTIONS), sparse)


def labels(profile: Profile) -> tuple[str, ...]:
    """What every result on the trace must carry."""
    source = re.sub(r"[^a-z0-9_-]+", "-", profile.source.lower()).strip("-_")[:40] or "trace"
    told = {"scaling rule": "scaled-by-assumption", "published targets": "fitted-to-published-figures"}
    told |= {ALONE: ONE_PROMPT, TAUGHT: REPEATING}
    found = [label for rule, label in told.items() if any(text.startswith(rule) for text in profile.assumptions)]
    return "synthetic", f"fitted-to-{source}", *found


def both_splits(drawer: Drawer, n_requests: int | None, n_tokens: int | None) -> None:
    """Insist on requests to learn from (split store) and requests to score (test), if the source has both."""
    wanted = {"store" if like.store else "test" for like in drawer.profile.requests}
    found: set[str] = set()
    for plan in drawer.plans(n_requests, n_tokens):
        found.add(plan.split)
        if found == wanted:
            return
    (missing,) = wanted - found
    few = next(plan.index + 1 for plan in drawer.plans(None, None) if plan.split == missing)
    asked = f"--requests, got {n_requests}" if n_tokens is None else f"--tokens, got {n_tokens}"
    rule = "too few for a request to learn from (split store) and one to score (test), as the source has"
    raise BadInput(f"{asked}: {rule}; draw {few} requests at least: --requests {few}")


def header(profile: Profile, model: str, seed: int) -> Header:
    """The header of a trace drawn from a profile; the profile itself travels in `x.profile` when it is short enough."""
    text = to_json(profile)
    means = {name: f"{share:.3f}" for name, share in profile.varies_with().items()}
    fresh, parts = means.pop("new"), ", ".join(f"{name} {share}" for name, share in means.items())
    extra = {"seed": str(seed), "variance_shares": f"{parts}, new at every token {fresh}"}
    if len(text) <= MAX_TEXT:
        extra["profile"] = text
    return Header(
        model=model,
        model_source=f"drawn by moesim traces synth {__version__} from statistics of {profile.source}",
        n_layers=profile.n_layers,
        n_experts=profile.n_experts,
        top_k=profile.top_k,
        gate=profile.gate,
        created_by=f"moesim {__version__}",
        tokenizer="none: ids are ranks of frequency" if profile.vocabulary else "",
        labels=labels(profile),
        tasks=tuple(profile.tasks),
        extra=extra,
        notes="\n".join(["Synthetic: no model and no text; see docs/traces.md.", *profile.assumptions]),
    )


def write(
    path: Path,
    profile: Profile,
    *,
    seed: int = 0,
    n_requests: int | None = None,
    n_tokens: int | None = None,
    model: str = "synthetic",
    levels: str = "all",
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Draw `n_requests` requests, or `n_tokens` rows (default: as many requests as the source had).

    progress(done, total) counts rows when n_tokens is given, requests otherwise.

    Raises:
        BadInput: the path cannot be written, or the source has both splits and so few requests would have one.
    """
    drawer = Drawer(profile, seed)
    if n_requests is None and n_tokens is None:
        n_requests = len(profile.requests)
    both_splits(drawer, n_requests, n_tokens)
    keep = LEVELS[levels]
    table = drawer.embedding_table if keep is None else None
    done = 0
    with TraceWriter(path, header(profile, model, seed), layout(profile), table) as writer:
        for plan in drawer.plans(n_requests, n_tokens):
            put(writer, drawer, plan, keep)
            done += plan.n_rows
            if progress:
                progress(*((done, n_tokens) if n_tokens is not None else (plan.index + 1, n_requests or 1)))
    return path


def put(writer: TraceWriter, drawer: Drawer, plan: RequestPlan, keep: frozenset[str] | None = None) -> None:
    """Draw a request's rows, block by block; keep: the tensors to write, all by default."""
    tasks = drawer.profile.tasks
    writer.start_request(plan.prompt_len, tasks[plan.task] if tasks else "", plan.split)
    for block in drawer.rows(plan):
        writer.append(**{name: rows for name, rows in block.items() if keep is None or name in keep})
