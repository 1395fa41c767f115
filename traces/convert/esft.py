"""ESFT's expert logs: `expert_weights_<layer>.txt[.gz]`, a line per sequence, the same sequence in every layer's file.

    id<TAB>id<TAB>...<TAB><TAB>w<TAB>w<TAB>...        (ids of all tokens flattened, then their weights in the same
    order)

Built from real files, `results/expert_scores` of https://github.com/deepseek-ai/ESFT. Weights are raw softmax scores
of the chosen experts, not sorted within a token and not renormalised. Neither k nor the number of experts is in the
files. Give the folder, or one file of it. Sequences were run in one forward pass each: prefill rows only.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from sim.base.errors import BadInput
from traces.convert.options import SHAPE, Facts, Options, Source
from traces.convert.spool import Spool
from traces.convert.text import LARGEST_WEIGHT, UNKNOWN, bad, lines, shown
from traces.format.layout import MAX_EXPERTS, MAX_LAYERS, Array

_FILE = re.compile(r"^expert_weights_([0-9]{1,5})\.txt(?:\.gz)?$")
CUT = "the line was cut, copy the file again"
_HEAD = re.compile(rb"^[0-9]+(?:\t[0-9]+)*(?:\t\t|$)")


def sniff(path: Path, head: bytes) -> bool:
    """Whether a folder has such files, or a file is one of them."""
    if path.is_dir():
        return any(_FILE.match(entry.name) for entry in path.iterdir())
    return bool(_FILE.match(path.name)) and bool(_HEAD.match(head.split(b"\n", 1)[0][:4096].rpartition(b"\t")[0]))


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every layer of every sequence into the spool. Raises BadInput with file, line and field."""
    files = _files(path if path.is_dir() else path.parent)
    readers = {layer: lines(file) for layer, file in files.items()}
    spool.at(path, ": sequence ")
    with ExitStack() as stack:
        for reader in readers.values():
            stack.callback(reader.close)
        sequence = 0
        while True:
            found = {layer: next(reader, None) for layer, reader in readers.items()}
            if all(line is None for line in found.values()):
                break
            sequence += 1
            _sequence(found, files, sequence, spool, options)
    return Facts(weights_kind="raw", renormalised=False)


def _sequence(
    found: dict[int, tuple[int, str] | None], files: dict[int, Path], sequence: int, spool: Spool, options: Options
) -> None:
    """One line of every layer's file: the same tokens."""
    assert options.top_k is not None
    ids: list[Array] = []
    weights: list[Array] = []
    for layer, line in found.items():
        if line is None:
            rule = "every layer's file has the same sequences; the file was cut, copy it again"
            raise BadInput(f"{files[layer]}: sequence {sequence}, got no such line: {rule}")
        where = f"{files[layer]}:{line[0]}"
        chosen, given = _line(where, line[1], options.top_k)
        if ids and len(chosen) != len(ids[0]):
            raise bad(where, "ids", f"{len(chosen)} tokens", f"{len(ids[0])} in the other layers", CUT)
        ids.append(chosen)
        weights.append(given)
    request = spool.request(sequence, options.task)
    for _ in range(len(ids[0])):
        spool.token(request, UNKNOWN)
    spool.layer_names = list(files)
    spool.block(np.stack(ids, axis=1), np.stack(weights, axis=1), np.full(len(ids[0]), sequence))


def _line(where: str, text: str, top_k: int) -> tuple[Array, Array]:
    """(tokens, k) ids and weights of one line. Raises BadInput."""
    left, tab, right = text.partition("\t\t")
    if not tab:
        raise BadInput(f"{where}: got no double tab: ids, a double tab, weights; {CUT}")
    try:
        ids = np.array(left.split("\t"), np.int64)
        weights = np.array(right.strip("\t").split("\t"), np.float64)
    except (ValueError, OverflowError) as error:
        rule = "ids are whole numbers, weights decimal ones; mend the line"
        raise BadInput(f"{where}: {shown(str(error))}: {rule}") from None
    if len(ids) != len(weights) or len(ids) % top_k:
        rule = f"as many of one as of the other, a multiple of k = {top_k}; the line was cut, or --top-k is wrong"
        raise BadInput(f"{where}: got {len(ids)} ids and {len(weights)} weights: {rule}")
    if ids.min() < 0 or ids.max() >= MAX_EXPERTS:
        raise BadInput(f"{where}: ids, got {ids.min()} to {ids.max()}: from 0 to {MAX_EXPERTS - 1}; mend the line")
    if not ((weights >= 0) & (weights <= LARGEST_WEIGHT)).all():
        raise BadInput(f"{where}: weights: finite numbers from 0 to {LARGEST_WEIGHT:.0f}; mend the line")
    ordered = np.sort(ids.reshape(-1, top_k), axis=1)
    if (twice := (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)).any():
        rule = "the experts of a token are distinct; mend the line, or --top-k is wrong"
        raise BadInput(f"{where}: token {int(np.argmax(twice))}, got one expert twice: {rule}")
    return ids.reshape(-1, top_k), weights.reshape(-1, top_k)


def _files(folder: Path) -> dict[int, Path]:
    """Layer -> file, in order of layers. Raises BadInput."""
    found: dict[int, Path] = {}
    for entry in sorted(folder.iterdir()):
        if match := _FILE.match(entry.name):
            layer = int(match[1])
            if layer in found:
                raise BadInput(f"{folder}: layer {layer}, got two files: one per layer; move {entry.name} away")
            found[layer] = entry
    if not 1 <= len(found) <= MAX_LAYERS:
        got = f"{len(found)} files expert_weights_<layer>.txt"
        raise BadInput(f"{folder}, got {got}: from 1 to {MAX_LAYERS}; check the path")
    return dict(sorted(found.items()))


SOURCE = Source(
    "esft",
    "ESFT expert_weights_* folder",
    "real files",
    sniff,
    read,
    silent=(*SHAPE, "top_k"),
    hint=" (ESFT's own logs: --top-k 6 --n-experts 64)",
)
