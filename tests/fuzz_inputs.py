"""Seeded mutations of everything a user can hand to a command, and a table of classes of input that tries them.

    python tests/fuzz_inputs.py N SEED [CLASS ...]      N cases; a failure is repeated by 1 SEED/NUMBER CLASS

Whatever the input, a command ends in a result or in one printable line that says what to mend, with exit code 2.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import importlib
import io
import json
import os
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from safetensors import safe_open
from safetensors.numpy import load_file, save

from sim.base.files import bundled, owned_prefix, parse_yaml
from traces.format.container import Entry, header_bytes
from traces.format.layout import DTYPES

Arrays = dict[str, Any]

# fmt: off
SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 255, 10**6, 2**31, 2**63, -(2**63), 10**25, 0.0, -0.0, 0.5, 1.5, -1.5,
    1e-320, 1e300, float("inf"), float("-inf"), float("nan"), "", " ", "x", "12 GB", "24GB", "1e3", "5 us", "yes",
    "~", "null", "bf16", "rtx3090", "../../etc/passwd", "/", "a\nb", "\x1b[31mred", "é", "\u2028", "x" * 300,
    "y" * 5000, "{}", "%s%n", "${HOME}", "nan", "inf", "0x10", "2026-01-01",
)
# fmt: on
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
# fmt: off
BITS = (
    b"", b":", b": ", b"- ", b"\t", b"\n", b"  ", b"[", b"]", b"{", b"}", b"[" * 60, b"{a: " * 60, b"'", b'"', b"#",
    b"|", b">", b"!", b"!!python/object/apply:os.system ", b"!!binary ", b"!!set ", b"&a ", b"*a ", b"<<: *a", b"? ",
    b"---\n", b"...\n", b"%YAML 9.9\n", b"\xff\xfe", b"\x00", b"\x85", b"\xc0", b"\xe2\x80\xa8", b"9" * 30,
    b"9" * 5000, b".nan", b"-.inf", b"1e999", b"1:30", b"0o17", b"0x", b"=", b"~", b"@", b"`", b"\xef\xbb\xbf",
    b"true", b"2026-01-01", b"\\ud800",
)
# fmt: on
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


# -- words ------------------------------------------------------------------------------------------------------------

WORDS = (
    *("", " ", "0", "1", "-1", "2", "7", "1e3", "1e308", "nan", "inf", "-inf", "0x10", "9" * 30, "9" * 5000),
    *("0.5", "1:3", "1:3:0", "a,b", ",", "=", "a=", "=a", "a=b=c", "lru", "lfu", "fine_moe", "all", "test", "none"),
    *("bf16", "4GB", "24GiB", "-3GB", "1e30GB", "/", ".", "..", "/dev/null", "/dev/zero", "~", "x" * 300, "y" * 5000),
    *("\x1b[31mred", "a\nb", "é", "\u2028", "\udce9", "\x00", "{}", "[]", "[" * 50, "%s%n", "${HOME}", "*", "-", "--"),
    *("--help", "k=4,acceptance=0.7", "poisson:1", "closed:2", "gen4x4:reads=buffered", "ttft_s <= 60s"),
    *("tpot_s.mean <= 1", "yes", "null", "hw.cpu=x", "gen4x16"),
)


def spoil_text(text: str, rng: random.Random) -> str:
    """A word of a command line as it should not be: misspelt, cut, doubled, with other words in it, or another one."""
    for _ in range(rng.choice((1, 1, 2))):
        at, how = rng.randrange(len(text) + 1), rng.randrange(5)
        if how == 0:
            text = typo(text, rng)
        elif how == 1:
            text = text[:at] + rng.choice(WORDS) + text[at:]
        elif how == 2:
            text = text[:at]
        elif how == 3:
            text = text + rng.choice(",:;/=. ") + text
        else:
            text = rng.choice(WORDS)
    return text


def spoil_line(args: list[str], params: list[Any], bench: Bench, rng: random.Random) -> list[str]:
    """A command line with some of its words changed, and options of the command that it did not have."""
    args = list(args)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        args += value_of(rng.choice(params), bench, rng)
    for _ in range(rng.choice((0, 0, 1, 2))):
        at = rng.randrange(len(args) - 1) + 1 if len(args) > 1 else 0
        args[at : at + 1] = [] if rng.random() < 0.2 else [spoil_text(args[at], rng)]
    return args


def value_of(param: Any, bench: Bench, rng: random.Random) -> list[str]:
    """An option with a value of its type, or nearly."""
    name, kind = param.opts[-1], param.type.name
    option = [name] if name.startswith("-") else []
    if getattr(param, "is_flag", False):
        return option
    value = rng.choice(WORDS)
    if kind.startswith(("integer", "float")) and rng.random() < 0.7:
        value = rng.choice(("0", "1", "2", "3", "16", "-1", "0.25", "0.9", "1e9", "99999999999999999999"))
    elif kind == "size" and rng.random() < 0.7:
        value = rng.choice(("1kB", "1MB", "60GB", "24GiB", "0", "1", "1e18"))
    elif kind == "choice" and rng.random() < 0.7:
        value = rng.choice(param.type.choices)
    elif kind in ("path", "file", "directory") or name.strip("-") in bench.soundly:
        value = str(rng.choice(bench.soundly.get(name.strip("-"), bench.paths)))
        if rng.random() < 0.4:
            value = spoil_text(value.replace(str(bench.sound), str(bench.work)), rng)
    return [*option, value]


# -- every class of input: what a user can hand to a command -----------------------------------------------------------

SLOWEST_S = 20
LANES = {
    "format": 1,
    "environment": {
        "model": "mixtral-8x7b",
        "precision": "bf16",
        "cores": 4,
        "measured": "2026-01-01",
        "load": [0.1],
        "device": "CPU backend",
        "machine": {"cpu": "a CPU", "cores": {"physical": 4}, "memory_bytes": 64e9, "versions": {"torch": "2"}},
    },
    "operations": [{"op": "expert", "at": 1.0, "case": "lru 1", "seconds": [1e-4, 2e-4, 3e-4]}],
    "copies": {"4096": [1e-5] * 3, "100000000": [1e-2] * 3},
    "sends": {"4096": [1e-5] * 3},
    "verbs": {
        "sync": {"1: lru": [1e-5] * 3},
        "before sync": {"1: lru": [1e-6] * 3},
        "launch expert": {"1: lru": [1e-6] * 3},
        "launch copy": {"1: lru": [1e-6] * 3},
    },
    "overlap": {"lru": [[0.5, 1e-3]]},
}

REPORTS = Path(__file__).parents[1] / "reports" / "validation"
LOAD = ["closed:1", "closed:2:think=1s", "poisson:0.01", "gamma:0.01:cv=2", "recorded"]
NEVER = {"--real", "--device", "--checkpoint", "--workers", "--cluster", "--out", "--replicas", "--trust-remote-code"}
"""Options that start other processes or measure this machine; `--out` has classes of its own."""
OWN_POLICY = """from sim.policy import *
class P(Policy):
    name = "p"
    def bind(self, view):
        self.order = Insertion()
"""
LINES: dict[str, list[str]] = {
    "run": [],
    "compare": ["--policy", "lfu", "--workers", "1"],
    "sweep": ["--workers", "1"],
    "plan": ["--goal", "tpot_s.mean <= 1", "--no-suggestions", "--workers", "1"],
    "saturate": ["--workers", "1", "--draws", "1"],
    "diff": [],
    "check": ["BASELINE", "--workers", "1"],
    "report": ["KEPT", "-o", "PAGE"],
    "timeline": ["KEPT", "-o", "PAGE"],
    "policies": ["lru"],
    "schedulers": ["fcfs"],
    "routers": ["round_robin"],
    "models": ["mixtral-8x7b"],
    "hw": ["rtx3090"],
    "validate": ["--table", "cpu-backend"],
}
"""Verbs, and what a sound line of each has besides the options of a run."""


class Bench:
    """Sound inputs in a folder, and the folder in which a case puts its broken ones."""

    made: object = None  # what the last case was

    def __init__(self, folder: Path) -> None:
        import msgspec
        from convert_samples import SAMPLES
        from test_bad_input import MODEL
        from tiny_traces import ALL, tiny_trace

        from sim.policy.registry import policies
        from sim.profiles.hardware import load_hardware
        from sim.profiles.stack import load_stack
        from traces.format.container import read_file
        from traces.format.reader import Trace
        from traces.format.squeeze import squeeze
        from traces.format.writer import Layout

        self.sound, self.work = folder / "sound", folder / "work"
        self.sound.mkdir()
        self.work.mkdir()
        self.traces = []
        for name, levels, store in (
            ("all", "all", None),
            ("no_arrivals", ALL - {"arrivals", "iterations"}, None),
            (
                "packed",
                ALL - {"arrivals"},
                Layout(
                    codes={"scores": "u6_square", "next_scores_1": "u8_square"},
                    sparse={"shared_scores": 2},
                    decode_only=frozenset({"next_scores_1", "next_scores_2"}),
                ),
            ),
            ("experts", (), None),
            ("squeezed", ALL - {"arrivals"}, None),
        ):
            path = tiny_trace(self.sound / f"{name}.safetensors", levels=levels, store=store, n_requests=6, outputs=4)
            if name == "squeezed":
                with Trace(path) as plain:
                    path = squeeze(plain, self.sound / "in_blocks.safetensors")
                with Trace(path) as trace:
                    assert trace.squeezed, "else no case reads a block"
            pairs, entries, data = read_file(path)
            arrays = {
                tensor: data[entry.start : entry.stop].view(DTYPES[entry.dtype]).reshape(entry.shape).copy()
                for tensor, entry in entries.items()
            }
            self.traces.append((path, pairs, arrays))
        self.data: dict[str, dict[str, Any]] = {
            "hw": json.loads(msgspec.json.encode(load_hardware("rtx3090"))),
            "model": MODEL,
            "engine": json.loads(msgspec.json.encode(load_stack("hf"))),
        }
        for figures in (self.data["hw"], self.data["engine"]):
            for text in figures["sources"]:
                figures["sources"][text] = "a source"
        self.files = {}
        for kind, data in self.data.items():  # JSON reads faster than YAML, but a model in JSON is a config.json
            self.files[kind] = self.sound / f"{kind}.{'yaml' if kind == 'model' else 'json'}"
            self.files[kind].write_bytes(dump(data) if kind == "model" else json.dumps(data).encode())
        self.policies = {name: kind.params for name, kind in policies().items()}
        self.untouched = folder / "untouched"
        trace = str(self.traces[0][0])
        self.line = ["--policy", "lru", "--hw", str(self.files["hw"]), "--model", str(self.files["model"])]
        self.line += ["--engine", str(self.files["engine"]), "--trace", trace, "--cache", "3experts", "--requests", "1"]
        self.profiles = sorted(bundled("traces.profiles", ".yaml").values(), key=lambda path: path.stat().st_size)[:2]
        self.options = dict(zip(self.line[::2], self.line[1::2], strict=True))
        self.kept, self.sweep = self.sound / "kept", self.sound / "sweep"
        said = [call(["run", *self.line, "--out", str(self.kept), "--set", "out.spans=on"])]
        said.append(
            call(["sweep", *self.swap("--cache", "3experts,4experts"), "--out", str(self.sweep), "--workers", "1"])
        )
        self.results = {}
        for verb in ("run", "compare", "plan", "saturate"):
            line = self.swap("--requests", "3") if verb == "saturate" else self.line
            said.append(call([verb, *line, *LINES[verb], "--json"]))
            assert said[-1].code == 0, said[-1]
            self.results[verb] = json.loads(said[-1].out)
        assert not any(one.code for one in said), [one for one in said if one.code]
        self.results["validate"] = json.loads((REPORTS / "cpu-backend.json").read_text(encoding="utf-8"))
        self.calibration = yaml.safe_load((REPORTS / "cpu-backend.yaml").read_text(encoding="utf-8"))
        self.samples_of_machine = gzip.decompress((REPORTS / "cpu-backend.samples.jsonl.gz").read_bytes())
        self.samples = {}
        for name, (write, options, source) in SAMPLES.items():
            (home := self.sound / f"log-{name}").mkdir()
            told = {key: value for key, value in msgspec.to_builtins(options).items() if value not in (None, "", (), 0)}
            self.samples[name] = write(home), told, source
        self.spec = {"policy": "lru", "cache": "3experts", "requests": 1, "trace": trace}
        self.spec |= {name: str(file) for name, file in self.files.items()}
        self.baseline = {"schema": 2, "runs": [self.spec | {"figures": {"hit_rate": 0.3, "tpot_s.mean": 1.0}}]}
        self.grid = {"grid": self.spec | {"cache": {"from": 3, "to": 5}, "policy": ["lru", {"name": "lcp", "set": {}}]}}
        self.paths = [self.kept, self.sweep, *self.files.values(), Path(trace), self.sound, self.sound / "nothing"]
        self.soundly: dict[str, list[Any]] = {name: [file] for name, file in self.files.items()}
        self.soundly |= {"trace": [path for path, *_ in self.traces], "policy": sorted(self.policies), "arrivals": LOAD}

    def swap(self, *words: str) -> list[str]:
        """The sound line with other values of these options."""
        return [
            word for pair in (self.options | dict(zip(words[::2], words[1::2], strict=True))).items() for word in pair
        ]

    def put(self, name: str, data: bytes) -> str:
        """A broken file."""
        path = self.work / name
        path.write_bytes(data)
        return str(path)

    def broken_trace(self, rng: random.Random) -> str:
        _, pairs, arrays = rng.choices(self.traces, (5, 3, 3, 1, 4))[0]
        return self.put("broken.safetensors", spoil_trace(pairs, arrays, rng))

    def broken_copy(self, folder: Path, rng: random.Random) -> Path:
        """A kept folder with one or two of its files damaged, emptied or gone."""
        copied = Path(shutil.copytree(folder, self.work / folder.name))
        for _ in range(rng.choice((1, 1, 2))):
            path = rng.choice(sorted(path for path in copied.rglob("*") if path.is_file()))
            data = path.read_bytes()
            if rng.random() < 0.1:
                path.unlink()
            elif path.suffix == ".json" and rng.random() < 0.7 and isinstance(plain := _json(data), dict):
                path.write_bytes(json.dumps(spoil_data(plain, rng)).encode())
            else:
                path.write_bytes(spoil_bytes(data, rng))
        return copied


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def of_trace(bench: Bench, rng: random.Random) -> list[str]:
    return ["run", *bench.swap("--trace", bench.broken_trace(rng), "--policy", rng.choice(sorted(bench.policies)))]


def of_trace_verb(bench: Bench, rng: random.Random) -> list[str]:
    trace, out = bench.broken_trace(rng), str(bench.work / "out.safetensors")
    return [
        "traces",
        *rng.choice(
            (
                ["check", trace],
                ["check", trace, "--all"],
                ["show", trace, "--json"],
                ["stats", trace, "--json"],
                ["squeeze", trace, out],
                ["unsqueeze", trace, out],
                ["compose", trace, "-o", out, "--arrivals", spoil_text(rng.choice(LOAD), rng)],
                ["realism", trace, "--json"],
            )
        ),
    ]


def of_profile(kind: str) -> Make:
    def make(bench: Bench, rng: random.Random) -> list[str]:
        path = bench.put(f"broken-{kind}.yaml", spoil_document(bench.data[kind], rng))
        if kind != "engine" and rng.random() < 0.3:
            return ["models" if kind == "model" else "hw", path]
        return ["run", *bench.swap(f"--{kind}", path)]

    return make


def of_hf_config(bench: Bench, rng: random.Random) -> list[str]:
    from test_models import ARCHITECTURES

    kind, (_, settings, _) = rng.choice(list(ARCHITECTURES.items()))
    whole = {"model_type": kind, "num_experts_per_tok": 2, "linear_conv_kernel_dim": 4} | settings
    data = json.dumps(spoil_data(whole, rng)).encode()
    return ["models", bench.put("config.json", spoil_bytes(data, rng) if rng.random() < 0.3 else data), "--json"]


def of_config(bench: Bench, rng: random.Random) -> list[str]:
    spec = bench.spec | {"set": {"hw.h2d.latency_s": 1e-5}, "batch": 1, "split": "test"}
    return ["run", "--config", bench.put("config.yaml", spoil_document(spec, rng))]


def of_set(bench: Bench, rng: random.Random) -> list[str]:
    policy = rng.choice(sorted(bench.policies))
    params = bench.policies[policy]
    words = []
    for _ in range(rng.choice((1, 1, 3))):
        group = rng.choice(("policy", "hw", "model", "engine"))
        if group == "policy" and params:
            param = rng.choice(params)
            values = (*param.choices, param.low, param.high, param.default, rng.choice(SCALARS))
            word = f"{param.name}={rng.choice(values)}"
        else:
            _, key = rng.choice(spots(bench.data.get(group, bench.data["hw"])))
            word = f"{group}.{key}={rng.choice(SCALARS)}"
        words += ["--set", spoil_text(word, rng) if rng.random() < 0.3 else word]
    return ["run", *bench.swap("--policy", policy), *words]


def of_options(bench: Bench, rng: random.Random) -> list[str]:
    verb = rng.choice(sorted(LINES))
    line = (
        []
        if verb in ("check", "report", "timeline", "policies", "schedulers", "routers", "models", "hw", "validate")
        else bench.line
    )
    more = {
        "BASELINE": bench.put("b.yaml", dump(bench.baseline)),
        "KEPT": str(bench.kept),
        "PAGE": str(bench.work / "p"),
    }
    if verb == "diff":
        line = ["lru", "lfu", *bench.line[2:]]
    args = [*line, *(more.get(word, word) for word in LINES[verb])]
    params = [param for param in command_of(verb).params if param.opts[-1] not in NEVER]
    return spoil_line([verb, *args], params, bench, rng)


def of_other_options(bench: Bench, rng: random.Random) -> list[str]:
    """Verbs that record, train or measure: what is wrong with their lines is said before any work."""
    group, verb = rng.choice(
        (
            ("traces", "convert"),
            ("traces", "fit"),
            ("traces", "synth"),
            ("traces", "compose"),
            ("traces", "stats"),
            ("traces", "show"),
            ("train", "duoserve"),
            ("train", "emoe"),
            ("", "conformance"),
            ("", "calibrate"),
            ("", "record"),
        )
    )
    command = command_of(verb, group)
    params = [param for param in command.params if param.opts[-1] not in NEVER]
    args = [word for word in (group, verb) if word]
    args += {"record": [str(bench.work / "none")], "conformance": ["nobody"]}.get(verb, [str(bench.work / "none")])
    args = spoil_line(args, params, bench, rng)
    return [*args, "--fit-only"] if verb == "calibrate" and "--fit-only" not in args else args


def of_grid(bench: Bench, rng: random.Random) -> list[str]:
    path = bench.put("grid.yaml", spoil_document(bench.grid, rng))
    return [
        "sweep",
        "--grid",
        path,
        "--workers",
        "1",
        *rng.choice((["--dry-run"], ["--max-points", "8"], ["--max-points", "8"])),
    ]


def of_axes(bench: Bench, rng: random.Random) -> list[str]:
    option, value = rng.choice(
        (
            ("--cache", "3experts:5experts"),
            ("--cache", "20%:60%:20%"),
            ("--vram", "1MB:2MB:1MB"),
            ("--policy", "lcp rho=0.5,0.9"),
            ("--draft", "k=1/2,acceptance=0.5"),
            ("--seed", "1,2"),
            ("--batch", "1,2"),
            ("--hw", "rtx3090,a6000"),
        )
    )
    line = bench.line if option not in ("--cache", "--vram") else [*bench.line[:-4], *bench.line[-2:]]
    line = [word for pair in zip(line[::2], line[1::2], strict=True) if pair[0] != option for word in pair]
    return ["sweep", *line, option, spoil_text(value, rng), "--workers", "1", "--max-points", "8"]


def of_baseline(bench: Bench, rng: random.Random) -> list[str]:
    return ["check", bench.put("b.yaml", spoil_document(bench.baseline, rng)), "--workers", "1"]


def of_update(bench: Bench, rng: random.Random) -> Callable[[], Said]:
    """What `--update` wrote is read again and asks for the same runs; what it refused, it left alone."""
    sound = bench.baseline | ({"inputs": {"hw rtx3090": "x"}} if rng.random() < 0.5 else {})
    text = dump(sound) if rng.random() < 0.7 else json.dumps(sound).encode()
    path = Path(bench.put("b.yaml", spoil_document(sound, rng) if rng.random() < 0.5 else text))

    def update() -> Said:
        from sim.studies.check.baseline import read_baseline

        before = path.read_bytes()
        said = call(["check", str(path), "--update", "--workers", "1"])
        if path.read_bytes() == before:
            return said
        runs = read_baseline(Path(bench.put("before.yaml", before))).runs
        assert [run.point for run in read_baseline(path).runs] == [run.point for run in runs], path.read_text()
        return said

    return update


def of_resume(bench: Bench, rng: random.Random) -> Callable[[], Said]:
    """What a kill may leave of a sweep: points that are missing or cut, parts of files; none is a reason to refuse."""
    folder = Path(shutil.copytree(bench.sweep, bench.work / "sweep"))
    for _ in range(rng.choice((1, 2, 3))):
        path = rng.choice(
            sorted(
                path
                for path in folder.rglob("*")
                if (path.is_file() and path.name[0] not in ".s") or path.name == "sweep.parquet"
            )
        )
        data, how = path.read_bytes(), rng.randrange(3)
        if how == 0:
            path.unlink()
        elif how == 1 and path.suffix != ".parquet":
            path.write_bytes(data[: rng.randrange(len(data))])
        else:
            owner = owned_prefix(path).replace(f"-{os.getpid()}-", "-4194305-")  # no process has this number
            path.with_name(f"{owner}{rng.randrange(16**8):08x}.part").write_bytes(data[: rng.randrange(len(data))])

    def resume() -> Said:
        said = call(
            ["sweep", *bench.swap("--cache", "3experts,4experts"), "--out", str(folder), "--resume", "--workers", "1"]
        )
        assert said.code == 0, said.err
        return said

    return resume


def of_kept(bench: Bench, rng: random.Random) -> list[str]:
    path, page = str(bench.broken_copy(bench.kept, rng)), str(bench.work / "page")
    return rng.choice(
        (
            ["report", path, "-o", f"{page}.html"],
            ["report", path, "--json"],
            ["timeline", path, "-o", f"{page}.json"],
            ["diff", path, str(bench.kept)],
            ["run", "--config", f"{path}/config.yaml"],
        )
    )


def of_kept_sweep(bench: Bench, rng: random.Random) -> list[str]:
    path = str(bench.broken_copy(bench.sweep, rng))
    line = [*bench.swap("--cache", "3experts,4experts"), "--out", path, "--resume", "--workers", "1"]
    return rng.choice((["report", path, "-o", str(bench.work / "page.html")], ["sweep", *line]))


def of_result(bench: Bench, rng: random.Random) -> list[str]:
    data = json.dumps(spoil_data(rng.choice(sorted(bench.results.items()))[1], rng)).encode()
    path = bench.put("result.json", spoil_bytes(data, rng) if rng.random() < 0.2 else data)
    return rng.choice(
        (
            ["report", path, "-o", str(bench.work / "page.html")],
            ["report", path, "--json"],
            ["validate", "--table", path],
        )
    )


def of_calibration(bench: Bench, rng: random.Random) -> list[str]:
    path = bench.put(
        "calibrated.yaml", spoil_document(bench.calibration, rng) if rng.random() < 0.5 else dump(bench.calibration)
    )
    samples = (REPORTS / "cpu-backend.samples.jsonl.gz").read_bytes()
    if rng.random() < 0.5:
        samples = gzip.compress(spoil_bytes(bench.samples_of_machine, rng))
    bench.put("calibrated.samples.jsonl.gz", spoil_bytes(samples, rng) if rng.random() < 0.2 else samples)
    return rng.choice((["report", path, "-o", str(bench.work / "page.html")], ["hw", path], ["hw", path, "--json"]))


def of_drive(bench: Bench, rng: random.Random) -> list[str]:
    word = rng.choice(("gen4x4", "gen3x4:depth=8", "gen4x4:reads=buffered:start=warm", "3.5GB/s"))
    return [
        "run",
        *bench.line,
        "--ram",
        spoil_text("1kB", rng) if rng.random() < 0.3 else "1kB",
        "--drive",
        spoil_text(word, rng),
    ]


def of_arrivals(bench: Bench, rng: random.Random) -> list[str]:
    from test_arrivals import AZURE_2023, AZURE_2024, MOONCAKE

    text = rng.choice((AZURE_2023, AZURE_2024, MOONCAKE)).encode()
    word = bench.put("log.csv", spoil_bytes(text, rng)) if rng.random() < 0.6 else spoil_text(rng.choice(LOAD), rng)
    return [
        "run",
        *bench.swap("--requests", "2"),
        "--arrivals",
        word,
        *rng.choice(([], ["--slo", spoil_text("ttft_s <= 60s", rng)])),
    ]


def of_draft(bench: Bench, rng: random.Random) -> list[str]:
    path = bench.put("counts,2.csv", spoil_bytes(b"request,accepted\n0,1\n0,2\n1,0\n", rng))
    word = (
        f"k=2,accepted={path}"
        if rng.random() < 0.5
        else spoil_text("k=4,acceptance=0.8/0.7/0.6/0.5,draft_s=0.002", rng)
    )
    return ["run", *bench.line, "--draft", word]


def of_texts(bench: Bench, rng: random.Random) -> list[str]:
    option, value = rng.choice(
        (
            ("--expect", "hit_rate >= 0.31"),
            ("--slo", "ttft_s <= 60s, tpot_s <= 4s"),
            ("--scheduler", "sjf"),
            ("--pcie", "gen4x16"),
            ("--engine", "hf"),
            ("--set", "drive.evict=lru"),
            ("--set", "timeline.from=2.5s"),
            ("--set", "gpus.map=layers"),
            ("--predictor", "surrogate:0.85"),
            ("--set", "sim.contention=share"),
            ("--set", "sim.energy=on"),
        )
    )
    return ["run", *bench.swap(option, spoil_text(value, rng))]


def of_several(bench: Bench, rng: random.Random) -> list[str]:
    """Some of what a run reads broken at once, under any policy."""
    words = ["--policy", rng.choice(sorted(bench.policies)), "--cache", rng.choice(("3experts", "50%", "2000B"))]
    broken = rng.sample(["trace", *bench.files], rng.choice((0, 1, 2, 4)))
    if "trace" in broken:
        words += ["--trace", bench.broken_trace(rng)]
    for kind in bench.files:
        if kind in broken:
            words += [f"--{kind}", bench.put(f"broken-{kind}.yaml", spoil_document(bench.data[kind], rng))]
    more = rng.choice(([], ["--batch", "2"], ["--gpus", "2"], ["--set", f"sim.hit={rng.choice(SCALARS)}"]))
    return ["run", *bench.swap(*words), *more]


def of_goal(bench: Bench, rng: random.Random) -> list[str]:
    path = bench.put(
        "prices.yaml",
        spoil_document(
            {"schema": 1, "unit": "EUR", "prices": {"rtx3090": 700, "a6000": {"price": 3000, "note": "used"}}}, rng
        ),
    )
    goal = spoil_text("tpot_s.mean <= 200ms", rng) if rng.random() < 0.5 else "tpot_s.mean <= 200ms"
    if rng.random() < 0.5:
        return ["explain", *bench.line, "--measured", spoil_text("12.5tok/s", rng), "--workers", "1"]
    return ["plan", *bench.line, "--goal", goal, "--prices", path, "--no-suggestions", "--workers", "1"]


def of_policy(bench: Bench, rng: random.Random) -> list[str]:
    words = [spoil_text(rng.choice(("lcp rho=0.5", "lru scope=layer", "fine_moe", "moepic")), rng) for _ in range(2)]
    verb = rng.choice(("compare", "diff", "conformance"))
    if verb == "conformance":
        data = spoil_bytes(OWN_POLICY.encode(), rng)
        return ["run", *bench.swap("--policy", bench.put("mine.py", data))]
    return (
        ["diff", *words, *bench.line[2:]]
        if verb == "diff"
        else ["compare", "--policy", words[0], "--policy", words[1], *bench.line[2:], "--workers", "1"]
    )


def of_log(bench: Bench, rng: random.Random) -> list[str]:
    path, told, source = bench.samples[rng.choice(sorted(bench.samples))]
    copied = bench.work / path.name
    (shutil.copytree if path.is_dir() else shutil.copy)(path, copied)
    victim = rng.choice(sorted(copied.iterdir())) if copied.is_dir() else copied
    victim.write_bytes(spoil_bytes(victim.read_bytes(), rng))
    args = ["traces", "convert", str(copied), "-o", str(bench.work / "out.safetensors")]
    known = {param.name: param for param in command_of("convert", "traces").params}
    for key, value in told.items():
        args += ["--" + key.replace("_", "-")] + ([] if value is True else [str(value)]) if key in known else []
    return [*args, *(["--from", source] if rng.random() < 0.5 else [])]


def of_prompts(bench: Bench, rng: random.Random) -> Callable[[], object]:
    from traces.record.prompts import Lengths, read_prompts

    rows = [
        {"prompt": "a b", "task": "x", "arrival_s": 0.5, "max_new_tokens": 3},
        {"token_ids": [1, 2], "output_tokens": 2, "split": "test"},
    ]
    text = b"".join(
        json.dumps(spoil_data(row, rng)).encode() + b"\n" for row in rng.choices(rows, k=rng.choice((1, 2)))
    )
    path = bench.put(
        "prompts.jsonl" if rng.random() < 0.8 else "prompts.txt", spoil_bytes(text, rng) if rng.random() < 0.5 else text
    )
    lengths = Lengths(spoil_text(rng.choice(("37", "20-54", "lognormal:40:0.5")), rng))
    return lambda: rng.choice(
        (
            lambda: read_prompts(Path(path), lambda text: list(text.encode()), 8, 64),
            lambda: lengths.draw(np.random.default_rng(1), 3),
        )
    )()


def of_fit(bench: Bench, rng: random.Random) -> list[str]:
    path = rng.choice(bench.profiles)
    data = path.read_bytes()
    data = spoil_bytes(data, rng) if rng.random() < 0.3 else spoil_document(parse_yaml(data.decode(), path.name), rng)
    profile, out = bench.put("profile.yaml", data), str(bench.work / "out.safetensors")
    return ["traces", "synth", profile, "-o", out, "--requests", "2", "--prompt-tokens", "3", "--output-tokens", "2"]


def of_predictor(bench: Bench, rng: random.Random) -> Callable[[], object]:

    name = rng.choice(("duoserve", "emoe"))
    path = bundled("policies.data", ".safetensors")[f"seeded.{name}"]
    arrays = {key: array.copy() for key, array in load_file(path).items()}
    with safe_open(str(path), framework="numpy") as file:
        facts = json.loads(file.metadata()["facts"])
    with np.errstate(all="ignore"):
        rng.choice((spoil_shape, spoil_values, spoil_values))({}, arrays, rng)
    facts = spoil_data(facts, rng) if rng.random() < 0.5 else facts
    whole = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    spoilt = save(whole, {"facts": json.dumps(facts)})
    data = rng.choice((spoilt, spoil_container(path.read_bytes(), rng)))
    return [
        "run",
        *bench.swap("--policy", name, "--cache", "12experts", "--predictor", bench.put("w.safetensors", data)),
    ]


def of_samples(bench: Bench, rng: random.Random) -> Callable[[], object]:
    """The samples of a calibration, and what was measured of its lanes, from which a profile is fitted again."""
    from calibrate import in_situ_file, in_situ_fit
    from calibrate.session import CalibrationRequest, finish

    home = bench.work
    environment = json.loads((REPORTS / "cpu-backend.environment.json").read_text(encoding="utf-8"))
    bench.put("card.environment.json", json.dumps(spoil_data(environment, rng)).encode())
    lines = [json.loads(line) for line in bench.samples_of_machine.splitlines()]
    at = rng.randrange(len(lines))
    lines[at] = spoil_data(lines[at], rng) if rng.random() < 0.9 else rng.choice((None, [], 3, {}))
    packed = gzip.compress("\n".join(map(json.dumps, lines)).encode(), 1)
    bench.put("card.samples.jsonl.gz", spoil_bytes(packed, rng) if rng.random() < 0.3 else packed)
    text = json.dumps(spoil_data(LANES, rng)).encode()
    packed = gzip.compress(spoil_bytes(text, rng) if rng.random() < 0.3 else text, 1)
    lanes = Path(bench.put("card.lanes.json.gz", spoil_bytes(packed, rng) if rng.random() < 0.3 else packed))
    plain = yaml.safe_load(bundled("hwprofiles.gpus", ".yaml")["h100-sxm"].read_text(encoding="utf-8"))
    if rng.random() < 0.5:
        return lambda: in_situ_fit.apply(plain, in_situ_file.load(lanes), "card")
    return lambda: finish(CalibrationRequest("", ("mixtral-8x7b",), "card", home, 0.0))


def of_training(bench: Bench, rng: random.Random) -> list[str]:
    args = ["train", "duoserve", "--trace", bench.broken_trace(rng), "--out", str(bench.work / "out.safetensors")]
    return [
        *args,
        "--epochs",
        "1",
        *rng.choice(([], ["--widths", spoil_text("8,8", rng)], ["--batch-size", rng.choice(WORDS)])),
    ]


Make = Callable[["Bench", random.Random], "list[str] | Callable[[], object]"]
CLASSES: dict[str, Make] = {
    "trace": of_trace,
    "trace verbs": of_trace_verb,
    "hardware": of_profile("hw"),
    "model": of_profile("model"),
    "engine": of_profile("engine"),
    "config.json": of_hf_config,
    "configuration": of_config,
    "set": of_set,
    "options": of_options,
    "other options": of_other_options,
    "grid": of_grid,
    "axes": of_axes,
    "baseline": of_baseline,
    "update": of_update,
    "resume": of_resume,
    "kept run": of_kept,
    "kept sweep": of_kept_sweep,
    "result": of_result,
    "calibration": of_calibration,
    "drive": of_drive,
    "arrivals": of_arrivals,
    "draft": of_draft,
    "texts": of_texts,
    "several": of_several,
    "goal": of_goal,
    "policy": of_policy,
    "log": of_log,
    "prompts": of_prompts,
    "fit": of_fit,
    "predictor": of_predictor,
    "samples": of_samples,
    "training": of_training,
}


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class Slow(BaseException):
    """A case that takes longer than it may."""


def command_of(verb: str, group: str = "") -> Any:
    """The click command of a verb."""
    from sim.cli.verbs import VERBS

    found = importlib.import_module(f"sim.cli.{VERBS[group or verb][0]}").command
    return found.commands[verb] if group else found


def call(args: list[str]) -> Said:
    """A command in this process."""
    from sim.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(args)
        except SystemExit as stop:
            return Said(stop.code if isinstance(stop.code, int) else 0, out.getvalue(), err.getvalue())
    return Said(-1, out.getvalue(), err.getvalue())


def outcome(made: list[str] | Callable[[], object]) -> Said:
    """Carry a case out. Raises whatever is neither a result nor one line that says what to mend."""
    from sim.base.errors import BadInput

    if callable(made):
        try:
            said = made()
        except BadInput as error:
            return Said(2, "", f"error: {error}\n")
        return said if isinstance(said, Said) else Said(0, "", "")
    return call(made)


WAYS_OUT = ("; ", "did you mean", "write ")
SIMULATED = {"trace", "hardware", "model", "engine", "configuration", "several"}  # classes of what a run reads
ROOM_BYTES = 1 << 30
"""Address space that cases may take beyond what there is before the first; most of it is what they import."""


def limit_memory() -> None:
    """Allow this process little more than it has; where the system counts address space (Linux)."""
    if sys.platform == "linux":
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if sys.platform == "linux" else 0


def judge(said: Said, name: str) -> None:
    """What is wrong with how a case of a class ended; AssertionError."""
    assert said.code in (0, 1, 2), said
    assert len(said.err) < 4_000, said.err
    for text in (said.out, said.err):
        assert "Traceback" not in text, text[-2000:]
        odd = {c for c in text if not (c.isprintable() or c in "\n\t")}
        assert not odd, (sorted(odd), text[:2000])
    if said.code == 2:
        *_, last = said.err.splitlines() or [""]
        in_table = bool(said.out) and not said.err  # a sweep none of whose points can run says why in each row
        assert in_table or last.startswith("error: ") or "Usage:" in said.err, said
        assert in_table or name not in SIMULATED or any(word in said.err for word in WAYS_OUT), said


def case(bench: Bench, name: str, seed: str) -> Said:
    """One case of a class, in a new folder of broken files; repeats exactly.

    Sound inputs are a copy of its own, since a command may be told to write over any of them.
    """
    shutil.rmtree(bench.work, ignore_errors=True)
    bench.work.mkdir()
    if not bench.untouched.exists():
        shutil.copytree(bench.sound, bench.untouched)
    shutil.rmtree(bench.sound)
    shutil.copytree(bench.untouched, bench.sound)
    made = CLASSES[name](bench, random.Random(f"{name} {seed}"))
    bench.made = made
    alarmed = hasattr(signal, "SIGALRM")

    def late(*_: object) -> None:
        raise Slow

    if alarmed:
        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(SLOWEST_S)
    try:
        said = outcome(made)
    finally:
        if alarmed:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    judge(said, name)
    return said


def failure_of(error: BaseException) -> str:
    """Where a case failed, so that failures of one kind are counted together."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/tests/" not in f.filename]
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    text = re.sub(r"[0-9a-f]{6,}", "N", re.sub(r"/\S*fuzz-\S*?/", "", str(error)))  # names of this case alone
    return f"{type(error).__name__} {at} {text[:160]}"


def hunt(folder: Path, n: int, seed: str, names: Sequence[str] = ()) -> tuple[Counter[str], dict[str, list[str]]]:
    """`n` cases, the classes in turn. Returns how they ended by class, and the seeds of failures by kind."""
    names = names or list(CLASSES)
    bench, ended, failed = Bench(folder), Counter[str](), defaultdict[str, list[str]](list)
    importlib.import_module("traces.synth.write")
    importlib.import_module("traces.synth.fitted").DRAWN_REQUESTS = 3
    n_open = open_descriptors()
    limit_memory()
    for number in range(n):
        name, own = names[number % len(names)], seed if n == 1 else f"{seed}/{number}"
        try:
            ended[f"{name} {case(bench, name, own).code}"] += 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            if str(bench.work) in last or str(error).startswith("P."):
                ended[f"{name} its own"] += 1  # code of the user's file, whose traceback he wants to see
                continue
            ended[f"{name} failed"] += 1
            kind = f"{name}: {failure_of(error)}"
            if kind not in failed:
                sys.stderr.write(f"{own} {kind}\n  {bench.made!r}\n")
                if n == 1:
                    traceback.print_exc()
            failed[kind].append(own)
    if open_descriptors() > n_open + 2:
        failed["descriptors left open"].append(seed)
    return ended, failed


def main(words: list[str]) -> int:
    """`python tests/fuzz_inputs.py N SEED [CLASS ...]`; a failure is repeated by `1 SEED/NUMBER CLASS`."""
    warnings.simplefilter("error")
    n, seed, names = int(words[0]), words[1], words[2:]
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    os.chdir(folder)  # in which files of any name may be written
    began_s = time.perf_counter()
    ended, failed = hunt(folder, n, seed, names)
    for key in sorted(ended):
        sys.stdout.write(f"{ended[key]:7} {key}\n")
    sys.stdout.write(f"{n} cases in {time.perf_counter() - began_s:.0f} s, {sum(map(len, failed.values()))} failed\n")
    for kind, seeds in sorted(failed.items(), key=lambda item: -len(item[1])):
        sys.stdout.write(f"{len(seeds):6} {kind}   e.g. {', '.join(seeds[:3])}\n")
    if n > 1:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
    sys.exit(main(sys.argv[1:]))
