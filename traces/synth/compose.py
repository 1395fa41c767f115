"""Give the requests of a trace arrival times, and on demand the lengths of a production log; rows are streamed.

With recorded lengths the requests stay what they are; only the time they arrive is new. With the lengths of the
arrivals a request is spliced: a prompt goes on with prompt rows, and its output with decode rows, of the next recorded
requests of the same task and split. What is cut or joined so never ran like that, hence the label `spliced`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from sim import __version__
from sim.base.errors import BadInput
from traces.format.layout import TENSORS, Array
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import Layout, TraceWriter
from traces.synth.arrivals import Arrival

SPLICED = "spliced"
LENGTHS = ("recorded", "arrivals")
_CHUNK_BYTES = 8 * 1024 * 1024
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request to write: its rows in the source, prompt first, and what the table says of it."""

    prompt_rows: Array
    decode_rows: Array
    task: str
    split: str
    arrival_s: float

    @property
    def n_rows(self) -> int:
        return len(self.prompt_rows) + len(self.decode_rows)


def plan(trace: Trace, times: Sequence[Arrival], lengths: str = "recorded", split: str = "test") -> list[ServedRequest]:
    """Requests in the order they are written: those that get no arrival of their own first, at 0, then one per arrival.

    Args:
        times: arrivals in order; with recorded lengths the i-th goes to the i-th request of the split, and there are at
            most as many as requests; with their own lengths requests are taken in turn.
        split: `test` (the store split is what came before: it arrives at 0), or `all`.

    Raises:
        BadInput: more arrivals than requests, lengths that the source does not have, or nothing to splice from.
    """
    scored = trace.requests.in_split("test") if split == "test" else list(trace.requests)
    before = trace.requests.in_split("store") if split == "test" else []
    if not scored:
        raise BadInput(f"{trace.path}: split test has no requests; --split all takes every request")
    whole = [ServedRequest(*_rows(one), one.task, one.split, 0.0) for one in before]
    if lengths == "recorded":
        if len(times) > len(scored):
            rule = f"{len(scored)} requests can be given one; lower --requests, or splice with --lengths arrivals"
            raise BadInput(f"{trace.path}, got {len(times)} arrivals: {rule}")
        return whole + [
            ServedRequest(*_rows(one), one.task, one.split, time.at_s) for one, time in zip(scored, times, strict=False)
        ]
    pools = {
        name: _Pool(trace, [one for one in scored if (one.task, one.split) == name])
        for name in dict.fromkeys((one.task, one.split) for one in scored)
    }
    turn: dict[tuple[str, str], int] = dict.fromkeys(pools, 0)
    for i, time in enumerate(times):
        base = scored[i % len(scored)]
        name = (base.task, base.split)
        whole.append(pools[name].splice(turn[name], time, base))
        turn[name] += 1
    return whole


def _rows(request: Request) -> tuple[Array, Array]:
    first, middle, end = request.first_row, request.first_decode_row, request.end_row
    return np.arange(first, middle), np.arange(middle, end)


class _Pool:
    """The recorded requests of one task and split, as two rings of rows: prompts and outputs."""

    def __init__(self, trace: Trace, requests: Sequence[Request]) -> None:
        self._where = str(trace.path)
        parts = [_rows(one) for one in requests]
        self._n = len(requests)
        self._prompts = np.concatenate([prompt for prompt, _ in parts])
        self._outputs = np.concatenate([decode for _, decode in parts])
        self._prompt_at = np.cumsum([0, *(len(prompt) for prompt, _ in parts)])
        self._output_at = np.cumsum([0, *(len(decode) for _, decode in parts)])

    def splice(self, turn: int, time: Arrival, base: Request) -> ServedRequest:
        """The `turn`-th request begins with the rows of that recorded one and goes on around the rings."""
        if time.prompt_len is None or time.outputs is None:
            rule = "a Poisson or Gamma process has none; use --lengths recorded, or a log"
            raise BadInput(f"--lengths arrivals, got arrivals without lengths: {rule}")
        if time.outputs > 1 and not len(self._outputs):
            lacks = f"task {base.task!r} has no decode rows to make {time.outputs} outputs of"
            raise BadInput(f"{self._where}: {lacks}; use --lengths recorded")
        i = turn % self._n
        prompt = self._prompts[(self._prompt_at[i] + np.arange(time.prompt_len)) % len(self._prompts)]
        output = self._outputs[:0]
        if time.outputs > 1:
            output = self._outputs[(self._output_at[i] + np.arange(time.outputs - 1)) % len(self._outputs)]
        return ServedRequest(prompt, output, base.task, base.split, time.at_s)


def compose(
    trace: Trace,
    plans: Sequence[ServedRequest],
    out: Path,
    origin: str,
    spliced: bool,
    progress: Progress | None = None,
) -> Path:
    """Write the planned requests as a new trace; memory stays constant but for 8 bytes a row.

    Args:
        origin: where the arrivals come from, kept in the header as `x.arrivals`.

    Raises:
        BadInput: as `TraceWriter` does.
    """
    header = trace.header
    labels = header.labels + ((SPLICED,) if spliced and SPLICED not in header.labels else ())
    header = msgspec.structs.replace(
        header,
        labels=labels,
        created_by=f"{header.created_by}; moesim {__version__} traces compose",
        extra={**header.extra, "arrivals": origin},
    )
    names = [name for name in trace.entries if TENSORS[name].by_row and not name.endswith(".ids")]
    names.remove("iterations") if "iterations" in names else None  # a recorded batch composition holds no longer
    table = np.asarray(trace.stored("embedding_table")) if "embedding_table" in trace.entries else None
    row_bytes = sum(trace.stored(name)[:1].nbytes for name in names)
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    total, done = sum(one.n_rows for one in plans), 0
    with TraceWriter(out, header, _layout(trace, names), table) as writer:
        for one in plans:
            writer.start_request(len(one.prompt_rows), one.task, one.split, one.arrival_s)
            for rows, decode in ((one.prompt_rows, False), (one.decode_rows, True)):
                for at in range(0, len(rows), step):
                    chunk = rows[at : at + step]
                    writer.append(**{name: _stored(trace, name, chunk, decode) for name in names})
                    done += len(chunk)
                    if progress:
                        progress(done, total)
    return out


def _layout(trace: Trace, names: Sequence[str]) -> Layout:
    """Stored as in the source."""
    return Layout(
        codes={name: trace.code(name).name for name in names if TENSORS[name].scored},
        decode_only=frozenset(name for name in names if trace.decode_only(name)),
        sparse={name: trace.entries[f"{name}.ids"].shape[2] for name in names if f"{name}.ids" in trace.entries},
    )


def _stored(trace: Trace, name: str, rows: Array, decode: bool) -> Array:
    """Rows of a tensor as stored; none of a tensor without prefill rows when the rows are prompt."""
    if trace.decode_only(name):
        if not decode:
            rows = rows[:0]
        table = trace.requests
        owner = np.searchsorted(table.offsets, rows, side="right") - 1
        rows = rows - np.cumsum(table.prompt_len)[owner]
    values = np.asarray(trace.stored(name)[rows])
    if TENSORS[name].scored:
        values = trace.codes(name, values)
    if f"{name}.ids" not in trace.entries:
        return values
    ids = np.asarray(trace.stored(f"{name}.ids")[rows]).astype(np.int64)
    dense = np.zeros((*values.shape[:2], trace.n_experts), values.dtype)
    np.put_along_axis(dense, ids, values, axis=-1)
    return dense
