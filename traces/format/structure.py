"""Structural rules: what must hold before a trace may be opened at all. Cheap: headers and the request table only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from sim.base.errors import BadInput, did_you_mean
from traces.format.container import Entry
from traces.format.header import Header, code_of
from traces.format.layout import (
    REMEDY,
    REQUIRED_TENSORS,
    SPARSE,
    SPLITS,
    TENSORS,
    U4_SQUARE,
    U6_SQUARE,
    VERSIONS,
    Array,
)
from traces.format.requests import RequestTable


def check_shapes(header: Header, pairs: Mapping[str, str], entries: Mapping[str, Entry], where: str) -> frozenset[str]:
    """Check names, types and shapes of all tensors; return those stored for decode rows only.

    Raises:
        BadInput: the first breach, naming tensor, what it has and the rule.
    """
    for name in entries:
        if name not in TENSORS:
            raise BadInput(f"{where}: tensor {name[:60]!r}: no such tensor; {did_you_mean(name, TENSORS)}")
    for name in REQUIRED_TENSORS:
        if name not in entries:
            raise BadInput(f"{where}: tensor {name!r} is missing: every trace has it; {REMEDY}")
    for key in pairs:
        tensor, _, what = key.rpartition(".")
        if what in ("code", "rows", "squeezed") and tensor in TENSORS and tensor not in entries:
            raise BadInput(f"{where}: metadata {key}: there is no tensor {tensor!r}; {REMEDY}")
    _check_companions(header, entries, where)
    for what, since in _news(pairs, entries):
        if int(pairs["version"]) < since:
            version = pairs["version"]
            raise BadInput(f"{where}: {what} in a file of version {version}: it came with version {since}; {REMEDY}")
    sizes = {"L": header.n_layers, "E": header.n_experts, "K": header.top_k}
    sizes["N"] = _first(entries["req_prompt_len"], where, "req_prompt_len")
    sizes["T"] = _first(entries["experts"], where, "experts")
    if sizes["N"] > sizes["T"]:
        raise BadInput(
            f"{where}: req_prompt_len, got {sizes['N']} requests for {sizes['T']} rows: each has one; {REMEDY}"
        )
    decode_only = set()
    for name in (name for name in TENSORS if name in entries):  # experts first, whatever the order in the file
        entry = entries[name]
        rows = pairs.get(f"{name.removesuffix('.ids')}.rows", "all")
        if rows not in ("all", "decode"):
            raise BadInput(f"{where}: metadata {name}.rows, got {rows[:40]!r}: all or decode; {REMEDY}")
        if rows == "decode":
            decode_only.add(name.removesuffix(".ids"))
        _check_one(name, entry, {**sizes, **({} if rows == "decode" else {"R": sizes["T"]})}, pairs, entries, where)
    return frozenset(decode_only)


def _check_companions(header: Header, entries: Mapping[str, Entry], where: str) -> None:
    """Tensors and header facts that come only together, or never."""
    for name in SPARSE:
        if f"{name}.ids" in entries and name not in entries:
            raise BadInput(f"{where}: {name}.ids without {name}: the two come together; {REMEDY}")
    if header.weights_kind == "derived" and ("weights" in entries or "scores" not in entries):
        raise BadInput(
            f"{where}: metadata weights_kind, got 'derived': with scores, from which they follow, and without weights; "
            f"{REMEDY}"
        )
    if ("req_task" in entries) != bool(header.tasks):
        raise BadInput(f"{where}: req_task and metadata tasks, got one of them: the two come together; {REMEDY}")
    if {"embeddings", "embedding_table"} <= set(entries):
        raise BadInput(f"{where}: embeddings and embedding_table, got both: one way is enough; {REMEDY}")
    if "embedding_table" in entries and "token_ids" not in entries:
        raise BadInput(f"{where}: embedding_table without token_ids: rows are looked up by id; {REMEDY}")


def _news(pairs: Mapping[str, str], entries: Iterable[str]) -> list[tuple[str, int]]:
    """What a file uses that a file of version 1 cannot have, each with the version it came with."""
    since = {U6_SQUARE.name: 2, U4_SQUARE.name: 3}
    codes = [text for key, text in pairs.items() if key.endswith(".code")]
    news = [(f"code {text}", since[text]) for text in codes if text in since]
    news += [(name, 2) for name in entries if name == "shared_scores.ids"]
    news += [("weights_kind derived", 3)] if pairs.get("weights_kind") == "derived" else []
    return news + [(key, 4) for key in pairs if key == "stands_for" or key.endswith(".squeezed")]


def version_for(pairs: Mapping[str, str], entries: Iterable[str]) -> str:
    """The lowest version that has everything a file uses."""
    return VERSIONS[max((since for _, since in _news(pairs, entries)), default=1) - 1]


def _first(entry: Entry, where: str, name: str) -> int:
    if not entry.shape or entry.shape[0] < 1:
        raise BadInput(f"{where}: {name}, got shape {_show(entry.shape)}: at least one row and one request; {REMEDY}")
    return entry.shape[0]


def _check_one(
    name: str,
    entry: Entry,
    sizes: Mapping[str, int],
    pairs: Mapping[str, str],
    entries: Mapping[str, Entry],
    where: str,
) -> None:
    """One tensor's type and every axis of its shape."""
    spec = TENSORS[name]
    code = code_of(name, pairs, where) if spec.scored else None
    allowed = spec.dtypes if code is None else (code.dtype,)
    if entry.dtype not in allowed:
        raise BadInput(f"{where}: {name}, got type {entry.dtype}: {' or '.join(allowed)}; {REMEDY}")
    dims = spec.dims
    if name in SPARSE and f"{name}.ids" in entries:  # as many codes as ids, at most one per expert
        dims = (*dims[:2], "M")
        sizes = {**sizes, "M": min(entries[f"{name}.ids"].shape[-1:] or (0,), default=0)}
    if len(entry.shape) != len(dims):
        raise BadInput(f"{where}: {name}, got shape {_show(entry.shape)}: ({', '.join(dims)}); {REMEDY}")
    for axis, (dim, got) in enumerate(zip(dims, entry.shape, strict=True)):
        want = _size(dim, sizes)
        if want is not None and code is not None and dim in ("E", "M"):
            want = code.width(want)
        if want is None and (got >= 1 or (dim == "R" and got == 0)) and (dim != "M" or got <= sizes["E"]):
            continue  # free dimensions: widths, the vocabulary, and decode rows, which the request table settles
        if want is None or got != want or want < (0 if dim == "R" else 1):
            rule = f"{dim} = {want}" if want is not None else f"{dim} at least 1, and at most one entry per expert"
            raise BadInput(
                f"{where}: {name}, got shape {_show(entry.shape)}: axis {axis} is {rule} in "
                f"({', '.join(dims)}); {REMEDY}"
            )


def _size(dim: str, sizes: Mapping[str, int]) -> int | None:
    """`L-2` or `N+1` in numbers; None for a dimension that nothing fixes."""
    if dim[0] not in sizes:
        return None
    return sizes[dim[0]] + (int(dim[1:]) if len(dim) > 1 else 0)


def _show(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(str(size) for size in shape) + ")"


def check_requests(
    header: Header,
    columns: Mapping[str, Array | None],
    entries: Mapping[str, Entry],
    decode_only: frozenset[str],
    where: str,
) -> RequestTable:
    """Check the request table against the rows and return it.

    Raises:
        BadInput: the first request that breaks a rule.
    """
    offsets, prompt_len, split = (columns[name] for name in ("req_offsets", "req_prompt_len", "req_split"))
    task, arrival_s = columns["req_task"], columns["req_arrival_s"]
    assert offsets is not None and prompt_len is not None and split is not None
    n_rows = entries["experts"].shape[0]

    def refuse(name: str, column: Array, bad: Array, rule: str) -> None:
        if bad.any():
            i = int(np.argmax(bad))
            raise BadInput(f"{where}: {name}[{i}], got {column[i]}: {rule}; {REMEDY}")

    ends = np.zeros(len(offsets), bool)
    ends[0], ends[-1] = offsets[0] != 0, offsets[-1] != n_rows
    refuse("req_offsets", offsets, ends, f"offsets start at 0 and end at the number of rows ({n_rows})")
    # Compared, not subtracted: hostile offsets would overflow in a difference.
    stuck = np.append(False, offsets[1:] <= offsets[:-1])
    refuse("req_offsets", offsets, stuck, "offsets increase: a request has a row")
    rule = "a prompt has at least one row and at most the request's"
    refuse("req_prompt_len", prompt_len, (prompt_len < 1) | (prompt_len > np.diff(offsets)), rule)
    refuse("req_split", split, split >= len(SPLITS), "0 (store) or 1 (test)")
    if task is not None:
        n_tasks = len(header.tasks)
        refuse("req_task", task, task >= n_tasks, f"a position in metadata tasks, which lists {n_tasks}")
    if arrival_s is not None:
        refuse("req_arrival_s", arrival_s, ~np.isfinite(arrival_s) | (arrival_s < 0), "finite seconds, not negative")
        back = np.append(False, arrival_s[1:] < arrival_s[:-1])
        refuse("req_arrival_s", arrival_s, back, "arrivals never go back in time")
    table = RequestTable(offsets, prompt_len, split, task, header.tasks, arrival_s)
    for name, entry in entries.items():
        if name.removesuffix(".ids") in decode_only and entry.shape[0] != table.n_decode_rows:
            raise BadInput(
                f"{where}: {name}, got {entry.shape[0]} rows: rows = decode means {table.n_decode_rows}, "
                f"one for each decode row; {REMEDY}"
            )
    return table
