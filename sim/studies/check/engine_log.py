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
    found = Events(n_layers, n_experts)
    by_step, last, limits = False, (-1, -1), {"layer": n_layers, "expert": n_experts, "at_layer": n_layers}
    n_rows = 0
    for where, row in _rows(path):
        if not n_rows:
            by_step = _by_step(row, where)
        n_rows += 1
        event = row["event"]
        numbers = {name: _number(row[name], name, limits.get(name), where) for name in NUMBERS if name in row}
        missing = [name for name in (*NEEDED, *(("step",) if by_step else ("request", "token"))) if name not in row]
        if missing:
            raise BadInput(f"{where}: no {missing[0]}; every row has it, {WAY_OUT}")
        if event not in EVENTS:
            raise BadInput(f"{where}: event, got {str(event)[:40]!r}: {did_you_mean(str(event), EVENTS)}")
        key = numbers["step"] if by_step else key_of(numbers["request"], numbers["token"])
        at_layer = numbers["layer"]
        if event == EVICT:
            if "at_layer" in numbers:
                at_layer = numbers["at_layer"]
            elif last[0] == key:
                at_layer = last[1]
            else:
                raise BadInput(
                    f"{where}: event, got an evict before any hit or miss of its pass: nothing tells during which "
                    "layer; put it behind the miss that it makes room for, or write a column at_layer"
                )
        else:
            last = key, at_layer
        found.add(key, at_layer, numbers["layer"], numbers["expert"], event)
    if not n_rows:
        raise BadInput(f"{path}: no rows; log a hit, miss or evict each, {WAY_OUT}")
    return found, by_step


def _by_step(row: dict[str, object], where: str) -> bool:
    if "step" in row:
        return True
    if "request" in row and "token" in row:
        return False
    raise BadInput(f"{where}, got {', '.join(row)[:200]}: no request and token, nor step; {WAY_OUT}")


def _number(value: object, name: str, limit: int | None, where: str) -> int:
    most = MAX_NUMBER if limit is None else limit - 1
    if isinstance(value, str) and DIGITS.fullmatch(value):
        value = int(value)
    if type(value) is not int or not 0 <= value <= most:
        raise BadInput(f"{where}: {name}, got {str(value)[:40]!r}: a whole number from 0 to {most}")
    return value


def _rows(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Where each row stands, and its fields."""
    head: list[str] | None = None
    as_json = False
    for number, line in _lines(path):
        where = f"{path}: line {number}"
        if not line.strip():
            continue
        if head is None and not as_json and not (as_json := line.lstrip().startswith("{")):
            head = _header(line, where)
            continue
        if as_json:
            yield where, _object(line, where)
            continue
        assert head is not None
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(head):
            raise BadInput(f"{where}, got {len(cells)} cells under {len(head)} columns: one cell each, without quotes")
        yield where, dict(zip(head, cells, strict=True))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        if not path.is_file():
            raise BadInput(f"{path}: no such file; name an engine's log, CSV or JSON lines")
        if path.stat().st_size > MAX_BYTES:
            raise BadInput(f"{path}: more than {MAX_BYTES >> 20} MiB; log fewer requests")
        with path.open(encoding="utf-8-sig", newline=None) as file:
            number = 0
            while line := file.readline(MAX_LINE_CHARS + 1):
                number += 1
                if len(line) > MAX_LINE_CHARS:
                    raise BadInput(
                        f"{path}: line {number}: longer than {MAX_LINE_CHARS} characters; a row each, {WAY_OUT}"
                    )
                yield number, line
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: no UTF-8 ({error.reason}); write the log as text") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {getattr(error, 'strerror', None) or error}; name a file that can be read") from None


def _header(line: str, where: str) -> list[str]:
    head = [cell.strip() for cell in line.split(",")]
    for name in NEEDED:
        if name not in head:
            raise BadInput(f"{where}, got columns {', '.join(head)[:200]}: {name} is missing; {WAY_OUT}")
    for name in head:
        if head.count(name) > 1:
            raise BadInput(f"{where}, got column {name[:40]!r} twice: each once")
    return head


def _object(line: str, where: str) -> dict[str, object]:
    try:
        found = msgspec.json.decode(line.encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise BadInput(f"{where}: no JSON ({error}); an object a line, {WAY_OUT}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{where}, got {type(found).__name__}: an object a line, {WAY_OUT}")
    for name in NEEDED:
        if name not in found:
            raise BadInput(f"{where}: {name} is missing; {WAY_OUT}")
    return found
