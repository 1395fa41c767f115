"""`moesim traces`: list the bundled traces, show one, check one."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
import msgspec

from sim.base.errors import BadInput, CheckFailed
from sim.base.units import show_bytes, show_count, show_frac
from sim.cli import traces_stats, traces_synth, traces_write
from sim.cli.progress import bar
from sim.cli.say import say

if TYPE_CHECKING:
    from traces.format.check import Progress
    from traces.format.reader import Trace

ALL_FAULTS = 20
SHOW_ROWS = 16_384  # statistics of `show` are of about so many rows, unless it is told to take all
SHOW_CHARACTERS = 200  # of a fact that only programs read, such as a profile
MEANINGS = {  # of what the headers of bundled traces say about the evaluation of the model they were recorded from
    "dead_experts": "experts that no held-out token was routed to",
    "gate_reuse_accuracy": "share of a layer's experts which its gate also chooses from the previous layer's input",
    "gate_reuse_accuracy_by_distance": "the same from the input so many layers before",
    "heldout_nats_per_token": "loss on held-out text, and that of interpolated n-gram models",
    "heldout_tokens": "tokens that the figures of the evaluation are of",
    "popularity_accuracy": "share of a layer's experts found by taking its most popular ones",
}
HASH_BYTES = 1 << 28  # a larger file's checksum takes longer than the rest of `show`


@click.group("traces", invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def command(ctx: click.Context) -> None:
    """List, inspect and check routing traces.

    Without a subcommand: the traces that come with this installation.
    """
    if ctx.invoked_subcommand is None:
        _list()


for _one in (*traces_write.COMMANDS, *traces_synth.COMMANDS, *traces_stats.COMMANDS):
    command.add_command(_one)


@command.command("list", short_help="The bundled traces: models, text, quality, routing.")
def list_() -> None:
    """The bundled traces: what was trained on what, how good it is, and what the routing is like."""
    from sim.base.tables import plain, render
    from traces.format.bundled import bundled_traces
    from traces.format.catalogue import facts_of, open_trace

    names = bundled_traces()
    columns, origins = [], []
    with bar("reading") as progress:
        for i, name in enumerate(names):
            with open_trace(name) as trace:
                columns.append(facts_of(trace))
                head = trace.header
                origins.append((name, head.model_source, f"{head.text_source}; {head.text_licence}", trace.sha256))
            progress(i + 1, len(names))
    facts_by_trace = plain("fact", *names, numbers=False)
    for fact in dict.fromkeys(fact for column in columns for fact in column):
        facts_by_trace.add_row(fact, *(column.get(fact, "-") for column in columns))
    say(render(facts_by_trace), nl=False)
    for name, model, text, digest in origins:
        say(f"\n{name}\n  model   {model}\n  text    {text}\n  sha256  {digest}")


def _list() -> None:
    from sim.base.tables import plain, prose, render
    from traces.format.bundled import DEFAULT, bundled_traces
    from traces.format.catalogue import open_trace

    names = bundled_traces()
    if not names:
        say("no traces are bundled; give the path of a trace file (format: traces/FORMAT.md)")
        return
    table = plain("name", "layers x experts", "requests", "tokens", "levels", "labels")
    prose(table, 1, 4, 5)
    for name in names:
        with open_trace(name) as trace:
            title, head = name + (" (default)" if name == DEFAULT else ""), trace.header
            counts = f"{trace.n_requests:,}", f"{trace.n_tokens:,}"
            table.add_row(title, head.shape, *counts, _levels(trace), ", ".join(head.labels) or "-")
    say(render(table), nl=False)


@command.command("show")
@click.argument("trace")
@click.option("--all", "every", is_flag=True, help="Statistics of all rows and the checksum, however large the file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def show(trace: str, every: bool, as_json: bool) -> None:
    """Header, sizes and statistics of TRACE, bundled or a file.

    Of a long trace the statistics are those of a sample of its requests; how many tokens it holds is printed.
    """
    from traces.format.catalogue import open_trace

    with open_trace(trace) as opened, bar(f"reading {opened.name}") as progress:
        facts = _facts(opened, progress, every)
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False, allow_nan=False))
    else:
        _show(facts)


@command.command("check", short_help="Check every value of TRACE against the format.")
@click.argument("trace")
@click.option("--all", "every", is_flag=True, help=f"List up to {ALL_FAULTS} faults instead of one for each tensor.")
def check(trace: str, every: bool) -> None:
    """Check every value of TRACE against the format, by the rules that a run holds against what it reads.

    Exit 2 where no run takes the trace: its structure or its experts break a rule. Exit 1 where something else does:
    runs that read it are refused, others are not.
    """
    from traces.format.catalogue import open_trace
    from traces.format.check import findings

    with open_trace(trace) as opened, bar(f"checking {opened.name}") as progress:
        where = f"{opened.path}: "
        shown = f"{where}sound; {opened.header.shape}, {opened.n_requests:,} requests, {opened.n_tokens:,} tokens"
        found: dict[str, list[str]] = {}
        for tensor, error in findings(opened, progress):
            if tensor == "experts" and not every:
                raise error
            if every or tensor not in found:
                found.setdefault(tensor, []).append(str(error).removeprefix(where).rpartition("; ")[0])
            if every and sum(map(len, found.values())) == ALL_FAULTS:
                break
    if not found:
        say(shown)
        return
    for faults in found.values():
        for fault in faults:
            click.echo(fault, err=True)
    n_faults = sum(map(len, found.values()))
    remedy = "correct the recorder and write the trace again, or copy a damaged file again"
    more = " or more" if n_faults == ALL_FAULTS else ""
    if "experts" in found:
        raise BadInput(f"{where}got {n_faults}{more} faults: a trace has none, and every run reads experts; {remedy}")
    read = sorted({*found} - {"plain_sha256"})
    who = [f"a run that reads {', '.join(read)} is refused, any other is not"] if read else []
    who += ["a run quotes plain_sha256 and does not compute it"] if "plain_sha256" in found else []
    raise CheckFailed(f"{where}{'; '.join(who)}; {remedy}")


def _facts(trace: Trace, progress: Progress, every: bool) -> dict[str, Any]:
    """Everything `show` prints, as plain data; what cannot be computed is null."""
    from traces.stats import figures as stats

    header = trace.header
    n_steps = 1 + len(stats.LAGS) + len(stats.recorded_distances(trace))
    sample = None if every else stats.evenly(trace, SHOW_ROWS)
    counts = stats.popularity(trace, requests=sample)
    progress(1, n_steps)
    decode = trace.requests.n_decode_rows > 0
    overlap: dict[str, Any] = {}
    for lag in stats.LAGS:
        share, n_pairs = stats.next_token_overlap(trace, lag, decode, sample)
        overlap[str(lag)] = {"share": _number(share.mean()), "n": n_pairs}
        progress(1 + len(overlap), n_steps)
    accuracy: dict[str, Any] = {}
    for distance in stats.recorded_distances(trace):
        found = stats.prediction_accuracy(trace, distance, sample)
        shares = {"recorded": found.recorded, "popular": found.popular}
        accuracy[str(distance)] = {name: list(map(_number, share)) for name, share in shares.items()}
        accuracy[str(distance)]["n"] = found.n.tolist()
        progress(1 + len(overlap) + len(accuracy), n_steps)
    n_bytes = trace.path.stat().st_size
    whole = every or n_bytes <= HASH_BYTES
    return {
        "schema": "moesim.trace/1",
        "path": str(trace.path),
        "sha256": trace.sha256 if whole else None,
        "bytes": n_bytes,
        "model": header.model,
        "model_source": header.model_source,
        "stands_for": header.stands_for or None,
        **{name: getattr(header, name) for name in ("n_layers", "n_experts", "top_k")},
        "gate": msgspec.structs.asdict(header.gate),
        "expert_order": header.expert_order,
        **{name: getattr(header, name) or None for name in ("tokenizer", "text_source", "text_licence")},
        "labels": list(header.labels),
        "created_by": header.created_by,
        "notes": header.notes or None,
        "extra": dict(header.extra),
        "levels": sorted(trace.levels),
        "levels_prefill": sorted(trace.levels_prefill),
        "score_scale": trace.score_scale,
        "n_tokens": trace.n_tokens,
        "n_decode_rows": trace.requests.n_decode_rows,
        "n_requests": trace.n_requests,
        "statistics_of_tokens": trace.n_tokens if sample is None else sum(request.n_rows for request in sample),
        "splits": {split: len(trace.requests.in_split(split)) for split in ("store", "test")},
        "lengths": list(map(asdict, stats.lengths(trace))),
        "entropy_by_layer": [_number(value) for value in stats.normalised_entropy(counts)],
        "dead_experts": stats.dead_experts(counts),
        "next_token_overlap": {"rows": "decode" if decode else "all", "by_lag": overlap},
        "prediction_accuracy": accuracy,
    }


def _show(facts: dict[str, Any]) -> None:
    from sim.base.tables import plain, render

    gate = facts["gate"]
    table = plain("", "", numbers=False)

    def row(name: str, value: object) -> None:
        if value not in (None, "", "-"):
            table.add_row(name, str(value))

    entropy = [value for value in facts["entropy_by_layer"] if value is not None]
    shape = f"{facts['n_layers']} layers x {facts['n_experts']} experts, k = {facts['top_k']}"
    digest = f"sha256 {facts['sha256'][:16]}" if facts["sha256"] else "checksum with --all"
    click.echo(facts["path"])  # on a line of its own, in one piece, to be copied
    row("file", f"{show_bytes(facts['bytes'])}, {digest}")
    row("model", f"{facts['model']} ({facts['model_source']})")
    row("stands for", facts["stands_for"])
    row("shape", f"{shape}; {gate['score']} gate{', renormalised' if gate['renormalised'] else ''}")
    splits = f"{facts['splits']['store']} store, {facts['splits']['test']} test"
    row("rows", f"{facts['n_tokens']:,} tokens, {facts['n_decode_rows']:,} of them decode")
    row("requests", f"{facts['n_requests']:,} ({splits})")
    row("levels", ", ".join(facts["levels"]))
    row("decode rows only", ", ".join(sorted(set(facts["levels"]) - set(facts["levels_prefill"]))))
    row("labels", ", ".join(facts["labels"]))
    row("text", " ".join(filter(None, (facts["text_source"], facts["text_licence"]))))
    row("tokenizer", facts["tokenizer"])
    row("created by", facts["created_by"])
    row("notes", facts["notes"])
    for name, value in facts["extra"].items():
        shown = value if len(value) <= SHOW_CHARACTERS else f"{value[:SHOW_CHARACTERS]} ... (--json has all of it)"
        row(name, shown + (f" ({MEANINGS[name]})" if name in MEANINGS else ""))
    for task in facts["lengths"]:
        said = (f"{key} {task[f'{key}_mean']:.1f} (max {task[f'{key}_max']})" for key in ("prompt", "outputs"))
        row(f"lengths {task['task']}".strip(), ", ".join((show_count(task["n_requests"], "request"), *said)))
    if facts["statistics_of_tokens"] < facts["n_tokens"]:
        row("statistics", f"of {facts['statistics_of_tokens']:,} tokens, whole requests; --all takes every one")
    row("popularity entropy", f"{min(entropy):.3f} to {max(entropy):.3f} of even, by layer")
    row("experts never used", len(facts["dead_experts"]))
    overlap = facts["next_token_overlap"]
    shares = ", ".join(f"lag {lag}: {show_frac(fact['share'])}" for lag, fact in overlap["by_lag"].items())
    row("shared with earlier", f"{shares} (of a token's experts; {overlap['rows']} rows)")
    for distance, fact in facts["prediction_accuracy"].items():
        recorded, popular = show_frac(_mean(fact["recorded"])), show_frac(_mean(fact["popular"]))
        wraps = "; the last layer predicts the next token's first" if distance == "1" else ""
        row(f"predicted, distance {distance}", f"{recorded} of the chosen experts; by popularity {popular}{wraps}")
    say(render(table), nl=False)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 6)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _levels(trace: Trace) -> str:
    """Levels on one line, the three distances as one entry."""
    distances = [str(d) for d in (1, 2, 3) if f"next_scores_{d}" in trace.levels]
    names = sorted(level for level in trace.levels if not level.startswith("next_scores_"))
    return ", ".join(names + ([f"next_scores {'/'.join(distances)}"] if distances else []))
