"""Read untrusted text: line by line or element by element, gzipped or not, never more than one line in memory.

And the pieces that records are made of, each checked: numbers, lists, ids and weights of a token, phases.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import stat
import sys
import zlib
from collections.abc import Container, Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from sim.base.errors import BadInput
from traces.format.layout import MAX_EXPERTS, MAX_LAYERS

UNKNOWN, PREFILL, DECODE = -1, 0, 1  # phases
LARGEST_WEIGHT = 65_504.0  # what float16, the trace's type, can hold
MAX_LAYER = 65_535  # a layer's number in its source; how many there are is another matter
MAX_LINE_BYTES = 32 * 1024 * 1024  # a record may be a whole prefill pass
MAX_ROW_BYTES = 1024 * 1024  # where a line is one token's row of numbers
# What is read takes many times its text (a list of two characters is 56 bytes): what a line may hold is counted first.
MAX_VALUES = 8_000_000
MAX_LISTS = 1_000_000
MAX_DEPTH = 32
MAX_VALUE_CHARS = 4 * 1024 * 1024  # of a document: a token's element, or anything beside the array
MAX_RATIO = 400  # deflate reaches 1032; routing logs, even of constant rows, stay far below this
FREE_BYTES = 64 * 1024 * 1024  # a ratio says nothing about a small file
_BLOCK = 1 << 20
_GZIP = b"\x1f\x8b"


def bad(where: str, what: str, got: object, rule: str, way: str = "mend the record") -> BadInput:
    """A value that breaks a rule, in one line."""
    return BadInput(f"{where}: {what}, got {got}: {rule}; {way}")


class _Bounded(io.RawIOBase):
    """A gunzipped stream that refuses to be a bomb."""

    def __init__(self, path: Path, packed: BinaryIO) -> None:
        self._path, self._packed = path, packed
        self._plain = gzip.GzipFile(fileobj=packed)
        self._n_bytes = 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._plain.close()
        self._packed.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._plain.read(len(buffer))
        except EOFError:
            cut = f"the gzip stream ends early (after {self._n_bytes} bytes of text)"
            raise BadInput(f"{self._path}: {cut}: the file was cut; copy it again") from None
        except (OSError, zlib.error) as error:
            raise BadInput(f"{self._path}: not a sound gzip file ({str(error)[:80]}); copy it again") from None
        self._n_bytes += len(data)
        if self._n_bytes > FREE_BYTES and self._n_bytes > MAX_RATIO * max(1, self._packed.tell()):
            got = f"{self._n_bytes} bytes out of {self._packed.tell()}"
            rule = f"at most {MAX_RATIO}-fold is unpacked; if the file is genuine, unpack it first"
            raise BadInput(f"{self._path}, got {got}: {rule}")
        buffer[: len(data)] = data
        return len(data)


def open_bytes(path: Path) -> BinaryIO:
    """Open a regular file for reading, gunzipping on the fly. Raises BadInput."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening: a pipe would block
            raise BadInput(f"{path}: not a regular file; give the path of a routing log")
        raw = path.open("rb")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or 'cannot be read'}; check the path") from None
    except ValueError:
        raise BadInput(f"{str(path)!r}: not a path; check the name") from None
    if raw.peek(2)[:2] != _GZIP:
        return raw
    return io.BufferedReader(_Bounded(path, raw), _BLOCK)


def head_of(path: Path, n_bytes: int = 65_536) -> bytes:
    """The first bytes of a file, unpacked; for telling formats apart. Raises BadInput."""
    with open_bytes(path) as file:
        return file.read(n_bytes)


def lines(path: Path, most_bytes: int = MAX_ROW_BYTES) -> Generator[tuple[int, str], None, None]:
    """(line number from 1, text) of every line that is not blank.

    Raises:
        BadInput: unreadable, not UTF-8, a line longer than is read, or a gzip file that is cut, broken or a bomb.
    """
    with open_bytes(path) as file:
        number = 0
        while True:
            data = file.readline(most_bytes + 1)
            if not data:
                return
            number += 1
            if len(data) > most_bytes:
                long = f"a line of more than {most_bytes} bytes"
                raise BadInput(f"{path}:{number}: {long}: one record per line; is it the right file?")
            try:
                text = data.decode("utf-8").strip("\r\n")
            except UnicodeDecodeError:
                raise BadInput(f"{path}:{number}: not UTF-8 text; is it the right file?") from None
            if number == 1:
                text = text.removeprefix("\ufeff")
            if text.strip():
                yield number, text


def records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSONL file. Raises BadInput with file and line."""
    for number, text in lines(path, MAX_LINE_BYTES):
        yield number, record(f"{path}:{number}", text)


def record(where: str, text: str) -> dict[str, Any]:
    """One line of JSON as an object. Raises BadInput."""
    _check_sizes(where, text)
    try:
        data = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(f"{where}: not a line of JSON ({str(error)[:80]}); drop or mend the line") from None
    if not isinstance(data, dict):
        raise BadInput(f"{where}, got {type(data).__name__}: a line is a JSON object; drop or mend the line")
    return data


_BRACKETS = {ord(character): None for character in map(chr, range(128)) if character not in "[]{}"}
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]')


def _check_sizes(where: str, text: str) -> None:
    """Refuse what would take far more memory than its text, before it does. Raises BadInput naming the limit."""
    for what, n, most in (
        ("values", text.count(","), MAX_VALUES),
        ("lists, objects and names", text.count("[") + text.count("{") + text.count(":"), MAX_LISTS),
    ):
        if n > most:
            way = "give a token or a forward pass a line of its own"
            raise BadInput(f"{where}, got about {n} {what} in one record: at most {most}; {way}")
    if deeper(text, MAX_DEPTH):
        raise BadInput(f"{where}: nested deeper than {MAX_DEPTH} levels; is it the right file?")


def deeper(text: str, most: int) -> bool:
    """Whether JSON is nested deeper than so many levels."""
    if text.count("[") + text.count("{") <= most:
        return False
    left = text.translate(_BRACKETS)
    for _ in range(most):
        left = left.replace("[]", "").replace("{}", "")
        if not left:
            return False
    depth = 0  # a string may hold brackets: look again, at what is none
    for mark in _MARK.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark.group(), 0)
        if depth > most:
            return True
    return False


class Document:
    """One JSON object whose large array is handed out element by element; of the rest, `rest` keeps what is asked for.

    bare: whether the array may stand alone, without an object around it. Positions are characters, for
    `path: character N` in messages.
    """

    def __init__(self, path: Path, array: str, keep: Container[str], bare: bool = False) -> None:
        self.path, self._array, self._keep, self._bare = path, array, keep, bare
        self.rest: dict[str, Any] = {}
        self._decoder = json.JSONDecoder(parse_constant=self._no_constant)
        self._text, self._at, self._before = "", 0, 0
        self._done = False

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """(position, element) of the array; `rest` is complete afterwards."""
        with open_bytes(self.path) as file:
            self._file = io.TextIOWrapper(file, encoding="utf-8", errors="strict")
            yield from self._elements() if self._bare and self._is("[") else self._fields()
            if self._next():
                raise self._bad("one JSON value is expected, there is more behind it")

    def _fields(self) -> Iterator[tuple[int, Any]]:
        self._expect("{")
        while not self._is("}"):
            key = self._value()
            if not isinstance(key, str):
                raise self._bad("a name is a string")
            self._expect(":")
            if key == self._array and self._is("["):
                yield from self._elements()
            else:
                value = self._value()
                if key in self._keep:
                    self.rest[key] = value
            if not self._is(","):
                self._expect("}")
                break

    def _elements(self) -> Iterator[tuple[int, Any]]:
        if self._is("]"):
            return
        while True:
            self._next()
            at = self._before + self._at
            yield at, self._value()
            if not self._is(","):
                break
        self._expect("]")

    def _fill(self) -> bool:
        """Drop what was read and append at least as much again as is left; whether there was more."""
        if self._done:
            return False
        self._before += self._at
        self._text, self._at = self._text[self._at :], 0
        if len(self._text) > MAX_VALUE_CHARS:
            raise self._bad(f"one value of more than {MAX_VALUE_CHARS} characters; is it the right file?")
        try:
            more = self._file.read(max(_BLOCK, len(self._text)))
        except UnicodeDecodeError:
            raise BadInput(f"{self.path}: not UTF-8 text; is it the right file?") from None
        self._done = not more
        self._text += more
        return not self._done

    def _next(self) -> str:
        """The next character that is not white space, empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._fill():
                return ""

    def _is(self, character: str) -> bool:
        found = self._next() == character
        self._at += found
        return found

    def _expect(self, character: str) -> None:
        if not self._is(character):
            raise self._bad(f"{character!r} is expected here")

    def _value(self) -> Any:
        while True:
            self._next()
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except ValueError:
                if self._fill():
                    continue
                raise self._bad("not JSON, or the file was cut") from None
            except RecursionError:
                raise self._bad(f"nested deeper than {MAX_DEPTH} levels") from None
            if end == len(self._text) and self._fill():
                continue  # a number may go on
            if end - self._at > MAX_VALUE_CHARS:
                raise self._bad(f"one value of more than {MAX_VALUE_CHARS} characters; is it the right file?")
            if deeper(self._text[self._at : end], MAX_DEPTH):
                raise self._bad(f"nested deeper than {MAX_DEPTH} levels")
            self._at = end
            return value

    def _no_constant(self, name: str) -> Any:
        raise ValueError(name)

    def _bad(self, what: str) -> BadInput:
        return BadInput(f"{self.path}: character {self._before + self._at}: {what}; copy or record it again")


def whole(where: str, name: str, value: Any, least: int = 0, most: int = 2**31 - 1) -> int:
    """A whole number of a record, given as JSON number or as text. Raises BadInput naming the field."""
    number = value
    if isinstance(value, str):
        text = value.strip()
        digits = text.removeprefix("-")
        number = int(text) if len(text) <= 20 and digits.isascii() and digits.isdigit() else None
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise bad(where, name, shown(value), f"a whole number from {least} to {most}")
    return number


def finite(where: str, name: str, value: Any, most: float = sys.float_info.max) -> float:
    """A finite number that is not negative, given as JSON number or as text. Raises BadInput naming the field."""
    try:
        number = float(value) if not isinstance(value, bool) and isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= most:
        limit = f", at most {most:.0f}" if most < sys.float_info.max else ""
        raise bad(where, name, shown(value), f"a finite number, not negative{limit}")
    return number


def field(where: str, data: dict[str, Any], name: str) -> Any:
    """A field that has to be there. Raises BadInput."""
    if name not in data:
        raise bad(
            where, name, "no such field", "every record has it", "mend the record, or name its format with --from"
        )
    return data[name]


def a_list(where: str, name: str, value: Any) -> list[Any]:
    """A list that is not empty. Raises BadInput."""
    if not isinstance(value, list) or not value:
        raise bad(where, name, shown(value), "a list that is not empty")
    return value


def shown(value: Any) -> str:
    """A value for a one-line message: printable and short."""
    text = ascii(value) if not isinstance(value, (dict, list)) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."


def optional(where: str, name: str, value: Any) -> int:
    """A whole number, -1 where there is none. Raises BadInput."""
    return -1 if value is None else whole(where, name, value)


def layer_of(where: str, value: Any) -> int:
    """A layer's number. Raises BadInput."""
    return whole(where, "layer", value, 0, MAX_LAYER)


def expert_of(where: str, value: Any) -> int:
    """An expert's id, as number or text. Raises BadInput."""
    return whole(where, "expert", value, 0, MAX_EXPERTS - 1)


def expert_ids(where: str, name: str, value: Any) -> list[int]:
    """A list of expert ids. Raises BadInput."""
    ids = a_list(where, name, value)
    if not all(type(i) is int for i in ids) or min(ids) < 0 or max(ids) >= MAX_EXPERTS:
        wrong = next(i for i in ids if type(i) is not int or not 0 <= i < MAX_EXPERTS)
        raise bad(where, name, shown(wrong), f"an expert id is a whole number from 0 to {MAX_EXPERTS - 1}")
    return ids


def expert_weights(where: str, name: str, value: Any, n_ids: int) -> list[float]:
    """As many finite weights as there are ids, none negative. Raises BadInput."""
    weights = a_list(where, name, value)
    for weight in weights:
        if type(weight) not in (int, float) or not 0 <= weight <= LARGEST_WEIGHT:
            raise bad(where, name, shown(weight), f"a weight is a number from 0 to {LARGEST_WEIGHT:.0f}")
    if len(weights) != n_ids:
        raise bad(where, name, f"{len(weights)} for {n_ids} experts", "one each")
    return weights


def token_layers(where: str, name: str, ids: Any, weights: Any = None) -> tuple[list[list[int]], list[list[float]]]:
    """One token's ids of every layer, and its weights (an empty list without any). Raises BadInput."""
    layers = a_list(where, name, ids)
    if len(layers) > MAX_LAYERS:
        raise bad(where, name, f"{len(layers)} layers", f"at most {MAX_LAYERS}", "is it the right file?")
    chosen = [expert_ids(where, f"{name}[{layer}]", one) for layer, one in enumerate(layers)]
    if weights is None:
        return chosen, []
    given = a_list(where, "weights", weights)
    if len(given) != len(chosen):
        raise bad(where, "weights", f"{len(given)} layers", f"{len(chosen)} as for the experts")
    sizes = enumerate(zip(given, chosen, strict=True))
    return chosen, [expert_weights(where, f"weights[{layer}]", one, len(own)) for layer, (one, own) in sizes]


_PHASES = {"prefill": PREFILL, "prompt": PREFILL, "decode": DECODE, 0: PREFILL, 1: DECODE, "0": PREFILL, "1": DECODE}


def phase_of(where: str, value: Any) -> int:
    """`prefill` or `decode` (or 0, 1); UNKNOWN for None. Raises BadInput."""
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, (str, int)) and not isinstance(value, bool) and value in _PHASES:
        return _PHASES[value]
    raise bad(where, "phase", shown(value), "prefill or decode")


def text_of(where: str, name: str, value: Any, most: int = 200) -> str:
    """A short printable string, empty for None. Raises BadInput."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise bad(where, name, shown(value), f"printable text of at most {most} characters")
    return value


def request_key(where: str, value: Any) -> str | int:
    """What a file calls a request: text or a whole number. Raises BadInput."""
    if isinstance(value, int) and not isinstance(value, bool):
        return whole(where, "request", value, -(2**63), 2**63 - 1)
    return text_of(where, "request", value, 1000)


def has_keys(head: bytes, *names: str) -> bool:
    """Whether the head of a file has all these JSON names in it."""
    return all(re.search(rb'"' + re.escape(name.encode()) + rb'"\s*:', head) for name in names)


def starts_object(head: bytes) -> bool:
    """Whether a file begins with `{`."""
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
