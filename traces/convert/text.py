"""Read untrusted text: line by line or element by element, gzipped or not, never more than one line in memory."""

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

MAX_LINE_BYTES = 32 * 1024 * 1024  # a record may be a whole prefill pass
MAX_ROW_BYTES = 1024 * 1024  # where a line is one token's row of numbers
# What is read takes many times its text (a list of two characters is 56 bytes): what a line may hold is counted first.
MAX_VALUES = 8_000_000
MAX_LISTS = 1_000_000
MAX_DEPTH = 32
MAX_VALUE_CHARS = 4 * 1024 * 1024  # of a document: a token's element, or anything beside the array
MAX_RATIO = 400  # deflate reaches 1032; routing logs, even of constant rows, stay far below this
_FREE_BYTES = 64 * 1024 * 1024  # a ratio says nothing about a small file
_BLOCK = 1 << 20
_GZIP = b"\x1f\x8b"


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
            raise BadInput(
                f"{self._path}: the gzip stream ends early (after {self._n_bytes} bytes of text): the file "
                f"was cut; copy it again"
            ) from None
        except (OSError, zlib.error) as error:
            raise BadInput(f"{self._path}: not a sound gzip file ({str(error)[:80]}); copy it again") from None
        self._n_bytes += len(data)
        if self._n_bytes > _FREE_BYTES and self._n_bytes > MAX_RATIO * max(1, self._packed.tell()):
            raise BadInput(
                f"{self._path}, got {self._n_bytes} bytes out of {self._packed.tell()}: at most "
                f"{MAX_RATIO}-fold is unpacked; if the file is genuine, unpack it first"
            )
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
                raise BadInput(
                    f"{path}:{number}: a line of more than {most_bytes} bytes: one record per line; is it the "
                    f"right file?"
                )
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
            raise BadInput(
                f"{where}, got about {n} {what} in one record: at most {most}; give a token or a forward "
                "pass a line of its own"
            )
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
        number = (
            int(text)
            if len(text) <= 20 and text.removeprefix("-").isascii() and text.removeprefix("-").isdigit()
            else None
        )
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise BadInput(f"{where}: {name}, got {shown(value)}: a whole number from {least} to {most}; mend the record")
    return number


def finite(where: str, name: str, value: Any, most: float = sys.float_info.max) -> float:
    """A finite number that is not negative, given as JSON number or as text. Raises BadInput naming the field."""
    try:
        number = float(value) if not isinstance(value, bool) and isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= most:
        limit = f", at most {most:.0f}" if most < sys.float_info.max else ""
        raise BadInput(f"{where}: {name}, got {shown(value)}: a finite number, not negative{limit}; mend the record")
    return number


def field(where: str, data: dict[str, Any], name: str) -> Any:
    """A field that has to be there. Raises BadInput."""
    if name not in data:
        raise BadInput(
            f"{where}: {name}, got no such field: every record has it; mend the record, or name its format with --from"
        )
    return data[name]


def a_list(where: str, name: str, value: Any) -> list[Any]:
    """A list that is not empty. Raises BadInput."""
    if not isinstance(value, list) or not value:
        raise BadInput(f"{where}: {name}, got {shown(value)}: a list that is not empty; mend the record")
    return value


def shown(value: Any) -> str:
    """A value for a one-line message: printable and short."""
    text = ascii(value) if not isinstance(value, (dict, list)) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."
