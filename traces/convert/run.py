"""One conversion from beginning to end: find the source, read into the spool, write, check, put in place."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from sim import __version__
from sim.base.errors import BadInput, did_you_mean
from traces.convert import bigmoe, csv_long, documents, esft, hf, jsonl, llama_csv, llama_text, sglang, vllm
from traces.convert.arrays import PICKLED
from traces.convert.options import Facts, Options, Source, refuse_missing, refuse_prompt_len
from traces.convert.spool import DROPPED, Grid, Spool, finish
from traces.convert.text import DECODE, PREFILL, UNKNOWN, bad, head_of, shown
from traces.format.check import check_trace
from traces.format.header import GateRule, Header
from traces.format.layout import MAX_LAYERS, Array
from traces.format.reader import Trace
from traces.format.writer import TraceWriter

Progress = Callable[[int, int], None]
# The first whose `sniff` says yes is it: the ones with the most telling marks come first.
_SOURCES: tuple[Source, ...] = (
    *(module.SOURCE for module in (bigmoe, esft, hf, sglang, vllm)),
    *(documents.MOE_OCS, documents.STRATA, jsonl.WARP, llama_text.GGML_LOG),
    *(llama_csv.SOURCE, llama_text.SOURCE, documents.IMP, jsonl.SOURCE, csv_long.SOURCE),
)
_CHUNK_VALUES = 1 << 20
_SUM_SLACK = 0.008  # tighter than the format's 1 %, so that rounding to float16 never passes that


@dataclass(frozen=True, slots=True)
class Converted:
    """What came of a conversion: the file, its source, and every sentence about what was left out or assumed."""

    path: Path
    source: str
    header: Header
    n_requests: int
    n_store: int
    n_tokens: int
    n_decode: int
    levels: tuple[str, ...]
    notes: tuple[str, ...]


def sources() -> dict[str, Source]:
    """Every source by name."""
    return {source.name: source for source in _SOURCES}


def detect(path: Path) -> str:
    """The name of the source a file or folder looks like, judged by content.

    Raises:
        BadInput: unreadable, a pickle, a trace already, or nothing known.
    """
    try:
        head = _head(path)
    except ValueError:
        raise BadInput(f"{str(path)!r}: not a path; check the name") from None
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise BadInput(f"{path}: {PICKLED}")
    for source in _SOURCES:
        if source.sniff(path, head):
            return source.name
    if b'"moe-routing"' in head:
        raise BadInput(f"{path}: already a trace of this format; use it as it is")
    known = f"({', '.join(sources())}; docs/convert.md describes them)"
    raise BadInput(f"{path}: no known routing log; name its format with --from {known}")


def convert(
    inputs: Sequence[Path],
    out: Path,
    source: str | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Convert files of one source to one trace, whole or not at all; memory grows by a few bytes a token.

    Args:
        inputs: files (or an ESFT folder), whose requests follow each other.
        source: a name of `sources()`; found by content without.

    Raises:
        BadInput: whatever is wrong with the inputs, by file, line and field, or a fact that they do not tell.
    """
    options = options or Options()
    name = source or detect(inputs[0])
    if name not in sources():
        raise BadInput(f"--from, got {shown(name)}: no such format; {did_you_mean(name, sources())}")
    if out.is_dir():
        raise BadInput(f"{out}: a folder; name the file to write")
    kind = sources()[name]
    kind.ask(inputs[0], _head(inputs[0]), options)
    spool = Spool(out)
    try:
        facts: Facts | None = None
        for paths in kind.runs(inputs):
            facts = _read(kind, paths, spool, options).over(facts, str(paths[0]))
        assert facts is not None
        grid = finish(spool)
        try:
            return _write(grid, facts, options, inputs, out, kind, progress)
        finally:
            grid.close()
    finally:
        spool.close()


def _head(path: Path) -> bytes:
    return b"" if path.is_dir() else head_of(path)


def _read(source: Source, paths: Sequence[Path], spool: Spool, options: Options) -> Facts:
    """One run's file, or its files where each holds some of the layers."""
    try:
        return source.read(paths[0], spool, options, *([paths[1:]] if paths[1:] else []))
    except OSError as error:
        raise BadInput(f"{error.filename or paths[0]}: {error.strerror or 'cannot be read'}; check the path") from None


@dataclass(frozen=True, slots=True)
class _Requests:
    """Tokens by request: request i owns `order[starts[i]:starts[i + 1]]`, the first `prompts[i]` of them prefill."""

    order: Array
    starts: Array
    prompts: Array
    facts: list[tuple[str, float | None]]


def _write(
    grid: Grid,
    facts: Facts,
    options: Options,
    inputs: Sequence[Path],
    out: Path,
    source: Source,
    progress: Progress | None,
) -> Converted:
    spool = grid.spool
    requests = _requests(spool, options, str(inputs[0]))
    notes = list(spool.notes) + list(facts.notes)
    if options.one_stream:
        facts = replace(facts, labels=(*facts.labels, "unsegmented"))
        notes.append("The source does not tell requests apart: all rows are one request of prefill rows.")
    tasks = tuple(dict.fromkeys(task for task, _ in requests.facts if task))
    if tasks and any(not task for task, _ in requests.facts):
        way = "give the others one with --task"
        raise bad(str(inputs[0]), "task", "none for some requests", "all have one, or none", way)
    header = _header(grid, facts, options, inputs, source, requests, tasks, notes)
    splits = _splits(len(requests.facts), options)
    columns = {
        name: np.frombuffer(values, np.int32)
        for name, values in (("token_ids", spool.token_id), ("iterations", spool.iteration))
    }
    columns = {name: values for name, values in columns.items() if (values[requests.order] >= 0).all()}
    arrivals = all(arrival is not None for _, arrival in requests.facts)
    part = spool.path("trace.safetensors")
    step = max(1, _CHUNK_VALUES // (len(grid.layers) * max(spool.top_k, spool.n_experts_scored)))
    try:
        with TraceWriter(part, header) as writer:
            for i, (start, stop) in enumerate(pairwise(requests.starts.tolist())):
                task, arrival_s = requests.facts[i]
                writer.start_request(int(requests.prompts[i]), task, splits[i], arrival_s if arrivals else None)
                for at in range(start, stop, step):
                    tokens = requests.order[at : min(stop, at + step)]
                    writer.append(**grid.rows(tokens), **{name: values[tokens] for name, values in columns.items()})
                    if progress:
                        progress(at, len(requests.order))
        with Trace(part) as trace:
            for fault in check_trace(trace):
                way = "the source breaks a rule of traces/FORMAT.md, mend it or say what it holds with the options"
                raise BadInput(f"{out}: {fault}; {way}")
            levels, n_decode = tuple(sorted(trace.levels)), trace.requests.n_decode_rows
    except BadInput as error:
        raise BadInput(str(error).replace(str(part), str(out))) from None
    try:
        part.chmod(0o644)
        part.replace(out)
    except OSError as error:
        raise BadInput(f"{out}: {error.strerror or 'cannot be written'}; choose another path") from None
    if not n_decode:
        way = "; where its sequences hold answers too, --prompt-len N takes the rows behind the first N as decoded"
        lacks = "runs on this trace have a TTFT and no time per further token (TPOT)"
        notes.append(f"No decode rows: {lacks}{'' if options.one_stream else way}.")
    counts = len(splits), splits.count("store"), len(requests.order), n_decode
    return Converted(out, source.name, header, *counts, levels, tuple(notes))


def _requests(spool: Spool, options: Options, where: str) -> _Requests:
    """Group tokens by request, in the order requests came up, and settle how many rows are prompt."""
    owner = np.frombuffer(spool.owner, np.int64)
    order = np.argsort(owner, kind="stable")
    order = order[np.searchsorted(owner[order], 0) :]  # DROPPED sorts first
    if not len(order):
        rule = "every row belongs to a profiling pass or is padding"
        raise BadInput(f"{where}: no routing left: {rule}; record real requests")
    assert DROPPED < 0
    present, starts = np.unique(owner[order], return_index=True)
    starts = np.append(starts, len(order))
    phases = np.frombuffer(spool.phase, np.int8)
    if options.prompt_len is not None and not (phases[order] == UNKNOWN).any():
        refuse_prompt_len(options.prompt_len, where)
    prompts = np.empty(len(present), np.int64)
    bare = 0
    for i, (start, stop) in enumerate(pairwise(starts.tolist())):
        own = phases[order[start:stop]].copy()
        if options.prompt_len is not None and (own == UNKNOWN).any():
            own = np.where(np.arange(len(own)) < options.prompt_len, PREFILL, DECODE)
            if options.prompt_len > len(own):
                rule = f"request {i} of {where} has {len(own)} rows"
                raise BadInput(f"--prompt-len, got {options.prompt_len}: {rule}; lower it")
        decode = own == DECODE
        prompts[i] = len(own) - int(decode.sum())
        if decode[: prompts[i]].any():
            row = int(np.argmax(decode))
            got, rule = "a decode row before prefill rows", "a request's prompt comes first"
            raise bad(f"{where}: request {i}, row {row}", "phase", got, rule, "give what follows another request name")
        if not prompts[i]:
            prompts[i], bare = 1, bare + 1
    if bare:
        told = f"Requests without prefill rows in the source: {bare}"
        spool.notes.append(f"{told}; their first row stands for the prompt.")
    return _Requests(order, starts, prompts, [spool.requests[int(i)] for i in present])


def _splits(n_requests: int, options: Options) -> list[str]:
    """The share of requests nearest to `store_frac`, drawn with the seed, is the store split; one is scored."""
    n_store = min(round(options.store_frac * n_requests), n_requests - 1)
    store = set(random.Random(options.seed).sample(range(n_requests), n_store))  # noqa: S311 - a split, not a secret
    return ["store" if i in store else "test" for i in range(n_requests)]


def _header(
    grid: Grid,
    facts: Facts,
    options: Options,
    inputs: Sequence[Path],
    source: Source,
    requests: _Requests,
    tasks: tuple[str, ...],
    notes: list[str],
) -> Header:
    """The header: what the user says, else what the source says, else an error where it matters."""
    spool = grid.spool
    model = options.model or facts.model
    told = {"model": model, "n_experts": facts.n_experts or options.n_experts}
    at_least = f" (its largest id is {spool.largest_id}, so at least {spool.largest_id + 1} experts)"
    missing = [name for name, value in told.items() if not value]
    refuse_missing(missing, str(inputs[0]), "" if told["n_experts"] else at_least)
    if len(grid.layers) > MAX_LAYERS:
        raise BadInput(f"{inputs[0]}, got {len(grid.layers)} layers: at most {MAX_LAYERS}; is it the right file?")
    kind = options.weights_kind or facts.weights_kind
    scaling = facts.scaling if options.scaling is None else options.scaling
    renormalised = facts.renormalised if options.renormalised is None else options.renormalised
    if renormalised is None and spool.weighted and kind == "applied":
        renormalised = _sums_to(grid, requests, scaling)
    if renormalised is None:
        notes.append("The source does not tell whether the gate renormalises.")
    order = facts.expert_order if options.ranked is None else ("router" if options.ranked else "unranked")
    labels = tuple(dict.fromkeys(facts.labels))
    names = {"source_layers": ", ".join(map(str, grid.layers))} if grid.layers != list(range(len(grid.layers))) else {}
    origin = facts.model_source or ", ".join(path.name for path in inputs[:8]) + (" ..." if len(inputs) > 8 else "")
    return Header(
        model=model,
        model_source=options.model_source or f"{source.title}: {origin}",
        n_layers=len(grid.layers),
        n_experts=_n_experts(spool, facts, options, inputs[0]),
        top_k=spool.top_k,
        gate=GateRule(options.gate or facts.gate, bool(renormalised), options.selection or facts.selection, scaling),
        created_by=f"moesim {__version__} traces convert",
        weights_kind=kind,
        expert_order="router" if spool.weighted else order,
        labels=labels,
        tasks=tasks,
        notes=" ".join(notes),
        extra={"converted_from": source.name, **names},
    )


def _n_experts(spool: Spool, facts: Facts, options: Options, path: Path) -> int:
    told = facts.n_experts
    if told is not None and options.n_experts not in (None, told):
        raise BadInput(f"--n-experts, got {options.n_experts}: {path} says {told}; leave it out, or correct the file")
    n_experts = told or options.n_experts
    assert n_experts is not None  # asked for before
    if spool.largest_id >= n_experts:
        rule = f"ids are below the number of experts ({n_experts})"
        raise bad(spool.largest_at, "expert", spool.largest_id, rule, "mend the record, or give --n-experts")
    if spool.top_k > n_experts:
        rule = f"at most the number of experts ({n_experts})"
        raise bad(str(path), "experts", f"{spool.top_k} per token", rule, "correct it")
    return n_experts


def _sums_to(grid: Grid, requests: _Requests, scaling: float) -> bool:
    """Whether the weights of every token sum to `scaling` in every layer."""
    step = max(1, _CHUNK_VALUES // (len(grid.layers) * grid.spool.top_k))
    for at in range(0, len(requests.order), step):
        total = grid.rows(requests.order[at : at + step])["weights"].astype(np.float64).sum(axis=-1)
        if (np.abs(total - scaling) > _SUM_SLACK * scaling).any():
            return False
    return True
