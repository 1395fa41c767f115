"""An engine's own log of hits, misses and evictions: CSV or JSON lines, read as untrusted data (docs/check.md)."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sim.base.errors import BadInput, did_you_mean

HIT, MISS, EVICT = "hit", "miss", "evict"
EVENTS = (HIT, MISS, EVICT)
MAX_BYTES = 1 << 30
MAX_LINE_CHARS = 4096
MAX_NUMBER = 2**31 - 1  # of a step, or of a token of a request
NEEDED = ("layer", "expert", "event")
NUMBERS = ("request", "token", "step", "layer", "expert", "at_layer")
DIGITS = re.compile(r"[0-9]{1,10}")
WAY_OUT = "see docs/check.md for the columns"


class Events:
    """What happened, a row each, in columns of numbers.

    Attributes:
        keys: request << 32 | token, or the step. codes: layer that was running, whether it is an eviction, expert by
            number over all layers, and whether it is a miss, so that rows of one place sort as they are told.
    """

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self.n_layers, self.n_experts = n_layers, n_experts
        self.keys, self.codes = array("q"), array("q")
        self.counts = dict.fromkeys(EVENTS, 0)

    def add(self, key: int, at_layer: int, layer: int, expert: int, event: str) -> None:
        """One more row."""
        index = layer * self.n_experts + expert
        n = self.n_layers * self.n_experts
        self.keys.append(key)
        self.codes.append((((at_layer << 1) + (event == EVICT)) * n + index) * 2 + (event == MISS))
        self.counts[event] += 1

    def told(self, code: int) -> tuple[int, int, int, str]:
        """The layer that was running, layer and expert, and the event of a code."""
        rest, missed = divmod(code, 2)
        rest, index = divmod(rest, self.n_layers * self.n_experts)
        at_layer, evicted = divmod(rest, 2)
        return at_layer, *divmod(index, self.n_experts), EVICT if evicted else MISS if missed else HIT


def key_of(request: int, token: int) -> int:
    """Passes in the order of requests and their tokens."""
    return request << 32 | token


def read_log(path: Path, n_layers: int, n_experts: int) -> tuple[Events, bool]:
    """All rows of a log, and whether they are told apart by `step`.

    Raises:
        BadInput: not such a log; the message names file, line and field.
    """
    found, by_step, last = Events(n_layers, n_experts), None, (-1, -1)
    most = dict.fromkeys(NUMBERS, MAX_NUMBER) | {
        "layer": n_layers - 1,
        "expert": n_experts - 1,
        "at_layer": n_layers - 1,
    }
    for where, row in _rows(path):
        if by_step is None:
            by_step = "step" in row
            if not by_step and not ("request" in row and "token" in row):
                raise BadInput(f"{where}, got {', '.join(row)[:200]}: no request and token, nor step; {WAY_OUT}")
        at = {name: _number(row[name], f"{where}: {name}", most[name]) for name in NUMBERS if name in row}
        for name in (*NEEDED, *(("step",) if by_step else ("request", "token"))):
            if name not in row:
                raise BadInput(f"{where}: {name} is missing; every row has it, {WAY_OUT}")
        event = row["event"]
        if event not in EVENTS:
            raise BadInput(f"{where}: event, got {str(event)[:40]!r}: {did_you_mean(str(event), EVENTS)}")
        key = at["step"] if by_step else key_of(at["request"], at["token"])
        if event != EVICT:
            last = key, at["layer"]
        elif "at_layer" not in at and last[0] != key:
            raise BadInput(
                f"{where}: event, got an evict before any hit or miss of its pass: nothing tells during which layer; "
                "put it behind the miss that it makes room for, or write a column at_layer"
            )
        at_layer = at.get("at_layer", last[1]) if event == EVICT else at["layer"]
        found.add(key, at_layer, at["layer"], at["expert"], str(event))
    if by_step is None:
        raise BadInput(f"{path}: no rows; log a hit, miss or evict each, {WAY_OUT}")
    return found, by_step


def _number(value: object, what: str, most: int) -> int:
    if isinstance(value, str) and DIGITS.fullmatch(value):
        value = int(value)
    if type(value) is not int or not 0 <= value <= most:
        raise BadInput(f"{what}, got {str(value)[:40]!r}: a whole number from 0 to {most}")
    return value


def _rows(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Where each row stands, and its fields: of a CSV under the columns of its first line, or of JSON lines."""
    head: list[str] = []
    as_json = False
    for where, line in _lines(path):
        if not head and (as_json := as_json or line.lstrip().startswith("{")):
            yield where, _object(line, where)
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if head and len(cells) != len(head):
            raise BadInput(f"{where}, got {len(cells)} cells under {len(head)} columns: one cell each, without quotes")
        if head:
            yield where, dict(zip(head, cells, strict=True))
            continue
        head = cells
        if missing := [name for name in NEEDED if name not in head]:
            raise BadInput(f"{where}, got columns {', '.join(head)[:200]}: {missing[0]} is missing; {WAY_OUT}")
        if twice := [name for name in head if head.count(name) > 1]:
            raise BadInput(f"{where}, got column {twice[0][:40]!r} twice: each once")


def _object(line: str, where: str) -> dict[str, object]:
    try:
        found = msgspec.json.decode(line.encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise BadInput(f"{where}: no JSON ({error}); an object a line, {WAY_OUT}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{where}, got {type(found).__name__}: an object a line, {WAY_OUT}")
    return found


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Where each line stands, and its text; empty ones are left out."""
    try:
        if not path.is_file():
            raise BadInput(f"{path}: no such file; name an engine's log, CSV or JSON lines")
        if path.stat().st_size > MAX_BYTES:
            raise BadInput(f"{path}: more than {MAX_BYTES >> 20} MiB; log fewer requests")
        with path.open(encoding="utf-8-sig", newline=None) as file:
            number = 0
            while line := file.readline(MAX_LINE_CHARS + 1):
                number += 1
                where = f"{path}: line {number}"
                if len(line) > MAX_LINE_CHARS:
                    raise BadInput(f"{where}: longer than {MAX_LINE_CHARS} characters; a row each, {WAY_OUT}")
                if line.strip():
                    yield where, line
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: no UTF-8 ({error.reason}); write the log as text") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {getattr(error, 'strerror', None) or error}; name a file that can be read") from None
