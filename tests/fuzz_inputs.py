"""Seeded mutations of everything a user can hand to a run: traces, profiles, configurations, settings."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import yaml

from traces.format.container import Entry, header_bytes
from traces.format.layout import DTYPES

Arrays = dict[str, Any]

SCALARS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    10**6,
    2**31,
    2**63,
    -(2**63),
    10**25,
    0.0,
    -0.0,
    0.5,
    1.5,
    -1.5,
    1e-320,
    1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    " ",
    "x",
    "12 GB",
    "24GB",
    "1e3",
    "5 us",
    "yes",
    "~",
    "null",
    "bf16",
    "rtx3090",
    "../../etc/passwd",
    "/",
    "a\nb",
    "\x1b[31mred",
    "é",
    "\u2028",
    "x" * 300,
    "y" * 5000,
    "{}",
    "%s%n",
    "${HOME}",
    "nan",
    "inf",
    "0x10",
    "2026-01-01",
)
SHAPES: tuple[Callable[[random.Random, Any], Any], ...] = (
    lambda rng, old: [],
    lambda rng, old: {},
    lambda rng, old: [old],
    lambda rng, old: [old] * 40,
    lambda rng, old: {"value": old},
    lambda rng, old: {"value": old, "source": "measured"},
    lambda rng, old: {"value": rng.choice(SCALARS), "source": "guessed"},
    lambda rng, old: {"from": rng.choice(("xeon-8358p", "nothing", None, "../x"))},
    lambda rng, old: {rng.choice(("", "a b", "1", "schema")): old},
    lambda rng, old: nested(rng.choice((3, 30, 200)), old),
)
UNITS = (1e-12, 1e-9, 1e-6, 1e-3, 1e3, 1e6, 1e9, 1e12, -1.0, 0.0)  # a wrong unit is a wrong power of ten
BITS = (
    b"",
    b":",
    b": ",
    b"- ",
    b"\t",
    b"\n",
    b"  ",
    b"[",
    b"]",
    b"{",
    b"}",
    b"[" * 60,
    b"{a: " * 60,
    b"'",
    b'"',
    b"#",
    b"|",
    b">",
    b"!",
    b"!!python/object/apply:os.system ",
    b"!!binary ",
    b"!!set ",
    b"&a ",
    b"*a ",
    b"<<: *a",
    b"? ",
    b"---\n",
    b"...\n",
    b"%YAML 9.9\n",
    b"\xff\xfe",
    b"\x00",
    b"\x85",
    b"\xc0",
    b"\xe2\x80\xa8",
    b"9" * 30,
    b"9" * 5000,
    b".nan",
    b"-.inf",
    b"1e999",
    b"1:30",
    b"0o17",
    b"0x",
    b"=",
    b"~",
    b"@",
    b"`",
    b"\xef\xbb\xbf",
    b"true",
    b"2026-01-01",
    b"\\ud800",
)
BOMB = "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(f'*{chr(97 + i)}' for _ in range(9))}]\n" for i in range(20))


def nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def typo(word: str, rng: random.Random) -> str:
    """A word as a hurried hand writes it."""
    at = rng.randrange(len(word) + 1)
    how = rng.randrange(5)
    if how == 0:
        return word[:at] + word[at + 1 :]
    if how == 1:
        return word[:at] + rng.choice("abcxyz_.-1") + word[at:]
    if how == 2:
        return word[: max(0, at - 2)] + word[max(0, at - 2) : at][::-1] + word[at:]
    return word.upper() if how == 3 else word.replace("_", rng.choice(("-", "", " ")))


# -- plain data and its text ------------------------------------------------------------------------------------------


def spots(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) in nested data."""
    found: list[tuple[Any, Any]] = []
    stack = [node]
    while stack:
        inside = stack.pop()
        keys = list(inside) if isinstance(inside, dict) else range(len(inside))
        for key in keys:
            found.append((inside, key))
            if isinstance(inside[key], dict | list):
                stack.append(inside[key])
    return found


def spoil_data(data: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A copy with one to three places changed: missing, misspelt, doubled, of another type, in another unit."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = spots(data)
        if not places:
            break
        inside, key = rng.choice(places)
        how, old = rng.randrange(7), inside[key]
        if how == 0:
            del inside[key]
        elif how == 1 and isinstance(inside, dict) and isinstance(key, str):
            inside[typo(key, rng)] = inside.pop(key)
        elif how == 2 and isinstance(old, int | float) and not isinstance(old, bool):
            inside[key] = old * rng.choice(UNITS)
        elif how == 3 and isinstance(old, str):
            inside[key] = typo(old, rng)
        elif how == 4:
            inside[key] = rng.choice(SHAPES)(rng, old)
        elif how == 5 and isinstance(inside, dict):
            inside[rng.choice(("x", "note", "gpu", "schema", "id", "sources", "curves", "mla", "encoder"))] = old
        else:
            inside[key] = rng.choice(SCALARS)
    return data


def spoil_bytes(text: bytes, rng: random.Random) -> bytes:
    """Cut, flip, insert, delete or repeat a few bytes."""
    changed = bytearray(text)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        how = rng.randrange(6)
        if how == 0 and rng.random() < 0.3:
            changed[at:] = b""
        elif how == 1 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif how in (0, 2, 3):
            changed[at:at] = rng.choice(BITS)
        elif how == 4:
            changed[at : at + rng.randrange(1, 30)] = b""
        else:
            changed[at:at] = changed[max(0, at - rng.randrange(1, 60)) : at]
    return bytes(changed)


def spoil_document(data: dict[str, Any], rng: random.Random) -> bytes:
    """A YAML document that is not what it should be."""
    how = rng.randrange(20)
    if how == 0:
        return rng.choice(
            (
                b"",
                b"[]",
                b"3",
                b"null",
                b"a: b: c",
                b"- 1\n- 2\n",
                b"\xff\xfe\x00\x01",
                b"[" * 3000,
                b"{a: " * 3000,
                b"- " * 3000,
                b"? " * 500,
                BOMB.encode(),
                b"a: &a [1]\nb: *a\n",
                b"1: 2\n",
                b"{[1]: 2}\n",
                b"--- {}\n--- {}\n",
                b"!!map {}\n",
            )
        )
    if how < 12:
        return dump(spoil_data(data, rng))
    text = dump(data if how < 18 else spoil_data(data, rng))
    if how == 12:
        return text + rng.choice(text.splitlines(keepends=True))  # a line twice
    return spoil_bytes(text, rng)


def dump(data: Any) -> bytes:
    return yaml.dump(
        data, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10_000, Dumper=_Flat
    ).encode("utf-8", "surrogatepass")


class _Flat(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


# -- traces -----------------------------------------------------------------------------------------------------------


def trace_bytes(pairs: dict[str, str], arrays: Arrays) -> bytes:
    """A safetensors file of these tensors, whatever they hold."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    names |= {np.dtype("i1"): "I8", np.dtype("?"): "BOOL", np.dtype("<u4"): "U32", np.dtype("<u8"): "U64"}
    at, placed = 0, {}
    for name in sorted(arrays, key=lambda name: (-arrays[name].itemsize, name)):
        placed[name] = Entry(names[arrays[name].dtype], arrays[name].shape, at, at + arrays[name].nbytes)
        at += arrays[name].nbytes
    return header_bytes(pairs, placed) + b"".join(arrays[name].tobytes() for name in placed)


def spoil_trace(pairs: dict[str, str], arrays: Arrays, rng: random.Random) -> bytes:
    """One to three places changed: facts of the header, tensors, values, the container itself."""
    pairs, arrays = dict(pairs), dict(arrays)
    ways = (spoil_facts, spoil_shape, spoil_values, spoil_values, spoil_values, spoil_requests)
    with np.errstate(all="ignore"):
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice(ways)(pairs, arrays, rng)
    data = trace_bytes(pairs, arrays)
    return spoil_container(data, rng) if rng.random() < 0.25 else data


def spoil_facts(pairs: dict[str, str], arrays: Arrays, rng: random.Random) -> None:
    """The metadata map."""
    key = rng.choice(sorted(pairs))
    how = rng.randrange(4)
    if how == 0:
        del pairs[key]
    elif how == 1:
        pairs[typo(key, rng)] = pairs.pop(key)
    elif how == 2:
        pairs[key] = rng.choice(
            (
                "",
                "0",
                "1",
                "2",
                "3",
                "4",
                "5",
                "1024",
                "4096",
                "99999999",
                "-1",
                "nan",
                "1e9",
                "true",
                "false",
                "sigmoid",
                "raw",
                "other",
                "unranked",
                "decode",
                "u8_square",
                "u6_square",
                "[]",
                '["a"]',
                "[" * 900,
                "a\nb",
                "\x1b",
                "é" * 70_000,
                "sparsemixer",
            )
        )
    else:
        pairs[rng.choice(("x.note", "notes", "tasks", "scores.rows", "weights.rows", "next_scores_1.rows", "zzz"))] = (
            rng.choice(("decode", "all", "[]", '["chat"]', "", "x" * 99))
        )


def spoil_shape(pairs: dict[str, str], arrays: Arrays, rng: random.Random) -> None:
    """A tensor as a whole: gone, under another name, of another type or shape."""
    name = rng.choice(sorted(arrays))
    array, how = arrays[name], rng.randrange(8)
    if how == 0:
        del arrays[name]
    elif how == 1:
        arrays[typo(name, rng) or "x"] = arrays.pop(name)
    elif how == 2:
        arrays[name] = array.astype(rng.choice(("u1", "<u2", "<i4", "<i8", "<f2", "<f4", "<f8", "i1", "?")))
    elif how == 3:
        axis = rng.randrange(array.ndim)
        arrays[name] = np.take(array, np.arange(max(0, array.shape[axis] - rng.randrange(1, 3))), axis)
    elif how == 4:
        arrays[name] = np.concatenate([array, array], rng.randrange(array.ndim))
    elif how == 5:
        arrays[name] = array.reshape(-1) if rng.random() < 0.5 else array[None]
    elif how == 6:
        arrays[name] = array[:0]
    else:
        arrays[name] = np.swapaxes(array, 0, array.ndim - 1).copy()


def spoil_values(pairs: dict[str, str], arrays: Arrays, rng: random.Random) -> None:
    """A few values of one tensor."""
    name = rng.choice([name for name in sorted(arrays) if arrays[name].size] or [""])
    if not name:
        return
    array = arrays[name] = arrays[name].copy()
    flat = array.reshape(-1)
    for _ in range(rng.choice((1, 1, 2, 9, len(flat)))):
        at = rng.randrange(len(flat))
        if array.dtype.kind == "f":
            flat[at] = rng.choice((np.nan, np.inf, -np.inf, -1.0, 0.0, 2.0, 1e-7, 6e4))
        elif rng.random() < 0.5:
            flat[at] = flat[rng.randrange(len(flat))]
        else:
            info = np.iinfo(array.dtype) if array.dtype.kind != "b" else None
            flat[at] = rng.choice((0, 1, info.max, info.min, info.max // 2)) if info else True


def spoil_requests(pairs: dict[str, str], arrays: Arrays, rng: random.Random) -> None:
    """The request table."""
    names = [name for name in sorted(arrays) if name.startswith("req_") and arrays[name].size]
    if not names:
        return
    name = rng.choice(names)
    array = arrays[name] = arrays[name].copy()
    at = rng.randrange(array.size)
    if array.dtype.kind == "f":
        array.reshape(-1)[at] = rng.choice((np.nan, np.inf, -1.0, 1e300, 0.0))
    elif array.dtype.kind != "b":
        info = np.iinfo(array.dtype)
        value = int(array.reshape(-1)[at]) + rng.choice((-1, 1, 3, 0))
        array.reshape(-1)[at] = rng.choice((max(info.min, min(info.max, value)), info.min, info.max, 0))


def spoil_container(data: bytes, rng: random.Random) -> bytes:
    """The bytes around the tensors: length prefix, JSON header, offsets; or any bytes, or the end missing."""
    n_header = struct.unpack("<Q", data[:8])[0]
    how = rng.randrange(6)
    if how == 0:
        return data[: rng.randrange(len(data))]
    if how == 1:
        length = rng.choice((0, 1, n_header - 1, n_header + 1, 2**20, 2**31, 2**63, 2**64 - 1, len(data)))
        return struct.pack("<Q", length) + data[8:]
    if how == 2:
        return spoil_bytes(data, rng)
    if how == 3:
        return data[:8] + spoil_bytes(data[8 : 8 + n_header], rng)[:n_header].ljust(n_header) + data[8 + n_header :]
    header = json.loads(data[8 : 8 + n_header])
    name = rng.choice([name for name in header if name != "__metadata__"] or ["x"])
    entry = header.setdefault(name, {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]})
    key = rng.choice(("dtype", "shape", "data_offsets"))
    if how == 4:
        entry[key] = rng.choice(
            (
                None,
                [],
                [0, 0],
                [0, 10**9],
                [10**18, 1],
                [-1, 4],
                "U5",
                "F64",
                [2**62, 4],
                [1] * 900,
                {"a": 1},
                [1.5],
                3,
                True,
            )
        )
    else:
        start, stop = entry["data_offsets"] if isinstance(entry["data_offsets"], list) else (0, 0)
        entry["data_offsets"] = [start + rng.choice((-8, 0, 8)), stop + rng.choice((-8, 0, 8, 2**40))]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + n_header :]
