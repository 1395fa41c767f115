"""Hold whole results of some thousand short runs against those of a day, so that a rewrite changes no number.

    python tests/record/record.py                 # compare all; exit 1 where a result differs
    python tests/record/record.py --only lru      # of one policy; --sample 100: so many, evenly spread
    python tests/record/record.py --run 123       # one of them: how it is asked for, and every number of its result
    python tests/record/record.py --take          # take the record anew, which gives up what it was to hold

The record knows runs and results by the names of the day it was taken; `names.py` says what became of them. Of a result
it keeps a digest for each top-level key, over all numbers and truth values below it; nulls, texts (but for
`names.WORDS`) and the echo of options have no part. Of every 40th run it also keeps the numbers themselves.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import multiprocessing
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import names

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))  # this tree, whatever is installed
RECORD = HERE / "record.json.gz"
INPUTS = "@"  # stands for the folder with files that runs read
FULL = 40
WITHIN = 1e-12
ECHOED = {
    *("schema", "run_id", "name", "policy", "policy_file", "params", "hw", "model", "precision", "stack", "overrides"),
    *("trace", "trace_sha256", "split", "seed", "gpus", "batch", "arrivals", "hit_definition", "labels", "wall_s"),
    *("engine", "version", "batching", "prefill_chunk", "router"),
}
"""Top-level keys that have no part: the echo of options, and what every change of words or code changes."""
ECHOED_BELOW = ("slo.limits", "draft.k", "kv.page_tokens", "host_memory.depth", "host_memory.block_bytes")

Options = dict[str, Any]
Leaves = dict[str, Any]


# ---- one run ----


def asked(options: Options) -> Options:
    """How a run of the record is asked for today."""
    flat = {key: value for key, value in options.items() if key != "set"}
    flat |= {f"set.{key}": value for key, value in options.get("set", {}).items()}
    found: Options = {}
    settings: Options = {}
    for key, value in flat.items():
        new, value = _renamed(key, _with_inputs(value))
        if new is None:
            continue
        if new.startswith("set."):
            settings[new.removeprefix("set.")] = value
        elif "." in new:
            settings[new] = value
        else:
            found[new] = value
    return {**found, "set": settings} if settings else found


def _renamed(key: str, value: Any) -> tuple[str | None, Any]:
    """An option and its value as they are today."""
    beginnings = [one for one in names.OPTIONS if one.endswith(".") and key.startswith(one)]
    old = key if key in names.OPTIONS else max(beginnings, key=len, default=None)
    if old is None:
        return key, value
    row = names.OPTIONS[old]
    new, becomes = row if isinstance(row, tuple) else (row, None)
    if new is not None and old.endswith("."):
        new += key.removeprefix(old)
    return new, value if becomes is None else becomes(value)


def _with_inputs(value: Any) -> Any:
    return value.replace(INPUTS, f"{(HERE / 'inputs').as_posix()}/") if isinstance(value, str) else value


def result_of(options: Options) -> dict[str, Any] | str:
    """The JSON object of a run's result, or the name of the error that refuses it."""
    from moesim import simulate
    from sim.base.errors import MoesimError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return simulate(**asked(options)).to_dict()
        except MoesimError as error:
            return type(error).__name__


def leaves_of(result: Mapping[str, Any]) -> Leaves:
    """Numbers and truth values of a result by dotted path, by the names of the record."""
    found: Leaves = {}
    for path, value in _flat(result, ""):
        if value is None:
            continue
        for old in known_as(path):
            top, _, _ = old.partition(".")
            if top in ECHOED or any(_below(old, one) for one in ECHOED_BELOW):
                continue
            if isinstance(value, str):
                known = _words_of(old)
                if known is None:
                    continue
                found[old] = known.get(value, value)
            else:
                found[old] = value
    for old, derive in names.DERIVED.items():
        if (value := derive(found)) is not None:
            found[old] = value
    return found


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    else:
        yield path, value
        return
    for key, child in pairs:
        yield from _flat(child, f"{path}.{key}" if path else str(key))


def _below(path: str, beginning: str) -> bool:
    return path == beginning or path.startswith(f"{beginning}.")


@cache
def known_as(path: str) -> tuple[str, ...]:
    """What a key of a result is called in the record; none where that has no such key."""
    parts = path.split(".")
    for n_parts in range(len(parts), 0, -1):
        for new, olds in names.KEYS.items():
            stars = _matched(new.split("."), parts[:n_parts])
            if stars is None:
                continue
            rest = parts[n_parts:]
            olds = () if olds is None else (olds,) if isinstance(olds, str) else olds
            return tuple(".".join((*_filled(old.split("."), stars), *rest)) for old in olds)
    return (path,)


@cache
def _words_of(path: str) -> Mapping[str, str] | None:
    """New words of a text that is compared; None of others."""
    rows = names.WORDS.items()
    return next((words for known, words in rows if _matched(known.split("."), path.split(".")) is not None), None)


def _matched(pattern: list[str], parts: list[str]) -> list[str] | None:
    """What stands at each star of a pattern, where it fits."""
    if len(pattern) != len(parts) or any(one not in ("*", part) for one, part in zip(pattern, parts, strict=True)):
        return None
    return [part for one, part in zip(pattern, parts, strict=True) if one == "*"]


def _filled(pattern: list[str], stars: list[str]) -> list[str]:
    left = iter(stars)
    return [next(left) if one == "*" else one for one in pattern]


def digests_of(leaves: Leaves) -> dict[str, str]:
    """Of each top-level key: ten hexadecimal digits."""
    groups: defaultdict[str, Leaves] = defaultdict(dict)
    for path, value in leaves.items():
        groups[path.partition(".")[0]][path] = value
    return {key: _digest(group) for key, group in sorted(groups.items())}


def _digest(leaves: Leaves) -> str:
    text = json.dumps(leaves, sort_keys=True, separators=(",", ":"))  # floats as `repr` writes them
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


# ---- compare ----


def load() -> dict[str, Any]:
    """The record: `runs`, each with `options` and `digests` or `refused`; `full`, leaves by number of run."""
    found: dict[str, Any] = json.loads(gzip.decompress(RECORD.read_bytes()))
    return found


def differences(job: tuple[int, dict[str, Any], Leaves | None]) -> tuple[int, dict[str, str]]:
    """What of a run differs from the record: key -> how."""
    number, run, full = job
    result = result_of(run["options"])
    if isinstance(result, str) or "refused" in run:
        now = result if isinstance(result, str) else "a result"
        was = run.get("refused", "a result")
        mended = "refused" in run and (run["options"]["policy"], run["options"]["trace"]) in names.MENDED
        return number, {} if now == was or mended else {"refused": f"was {was}, is {now}"}
    leaves = leaves_of(result)
    now_by_key, was_by_key = digests_of(leaves), run["digests"]
    found: dict[str, str] = {}
    for key in sorted(now_by_key.keys() | was_by_key.keys()):
        if key in names.GONE or now_by_key.get(key) == was_by_key.get(key):
            continue
        if key in names.ROUNDED and (full is None or not _moved(key, leaves, full, WITHIN)):
            continue
        if key not in was_by_key:
            found[key] = "is new; give it a row in names.KEYS"
        elif key not in now_by_key:
            found[key] = "is missing"
        else:
            found[key] = "differs" if full is None else "; ".join(_moved(key, leaves, full)[:3])
    return number, found


def _moved(key: str, leaves: Leaves, full: Leaves, within: float = 0.0) -> list[str]:
    """Leaves below a key that moved by more than a share of their value."""
    found = []
    for path in sorted(path for path in leaves.keys() | full.keys() if _below(path, key)):
        was, now = full.get(path), leaves.get(path)
        if was == now and type(was) is type(now):
            continue
        if isinstance(was, float | int) and isinstance(now, float | int):
            share = abs(now - was) / max(abs(was), abs(now), math.ulp(0.0))
            if share > within or not within:
                found.append(f"{path} was {was!r}, is {now!r} ({share:.1e})")
        else:
            found.append(f"{path} was {was!r}, is {now!r}")
    return found


def compare(chosen: list[int], record: dict[str, Any], n_jobs: int) -> dict[str, list[tuple[int, str]]]:
    """Key -> runs that differ in it, and how."""
    full = record["full"]
    jobs = [(number, record["runs"][number], full.get(str(number))) for number in chosen]
    found: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for number, differing in mapped(differences, jobs, n_jobs):
        for key, how in differing.items():
            found[key].append((number, how))
    return dict(found)


def mapped(function: Any, jobs: list[Any], n_jobs: int) -> Iterator[Any]:
    if n_jobs == 1:
        yield from map(function, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(n_jobs) as pool:
        for done, answer in enumerate(pool.imap(function, jobs, chunksize=8), 1):
            if done % 100 == 0:
                print(f"\r{done} of {len(jobs)}", end="", file=sys.stderr, flush=True)
            yield answer
    print("\r", end="", file=sys.stderr)


def said(options: Options) -> str:
    """A run as Python asks for it."""
    return f"moesim.simulate({', '.join(f'{key}={value!r}' for key, value in asked(options).items())})"


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", action="store_true", help="write the record anew")
    parser.add_argument("--only", metavar="POLICY", help="runs of this policy")
    parser.add_argument("--sample", metavar="N", type=int, help="so many runs, evenly spread")
    parser.add_argument("--run", metavar="NUMBER", type=int, help="show one run and every number of its result")
    parser.add_argument("--jobs", metavar="N", type=int, default=2)
    asked_for = parser.parse_args()
    if asked_for.take:
        from take import take

        return take(asked_for.jobs)
    record = load()
    if asked_for.run is not None:
        return show(record, asked_for.run)
    runs = record["runs"]
    chosen = [i for i, run in enumerate(runs) if asked_for.only in (None, run["options"]["policy"])]
    chosen = spread(chosen, asked_for.sample)
    found = compare(chosen, record, asked_for.jobs)
    for key, differing in sorted(found.items()):
        number, how = next((one for one in differing if one[1] != "differs"), differing[0])
        print(f"{key}: {len(differing)} of {len(chosen)} runs; run {number}: {how}")
        print(f"    python tests/record/record.py --run {number}    # {said(runs[number]['options'])}")
    for table, rows in (("not compared", names.GONE), ("within 1e-12", names.ROUNDED)):
        for key, why in rows.items():
            print(f"{key}: {table}: {why}")
    print(f"{len(chosen)} runs, {len({i for one in found.values() for i, _ in one})} differ")
    return 1 if found else 0


def spread(chosen: list[int], n: int | None) -> list[int]:
    """So many of them, evenly spread."""
    if n is None or n >= len(chosen):
        return chosen
    return [chosen[at * len(chosen) // n] for at in range(n)]


def show(record: dict[str, Any], number: int) -> int:
    """Print one run as it is now; where the record has its numbers, what moved."""
    run, full = record["runs"][number], record["full"].get(str(number))
    print(said(run["options"]))
    result = result_of(run["options"])
    if isinstance(result, str):
        print(f"refused: {result}")
    else:
        leaves = leaves_of(result)
        for path, value in sorted(leaves.items()):
            print(f"{path} = {value!r}")
        if full is not None:
            tops = sorted({path.partition(".")[0] for path in leaves.keys() | full.keys()})
            for line in (line for key in tops for line in _moved(key, leaves, full)):
                print(f"moved: {line}")
    _, found = differences((number, run, full))
    for key, how in found.items():
        print(f"differs: {key}: {how}")
    return 1 if found else 0


def write(runs: list[dict[str, Any]], full: dict[str, Leaves]) -> None:
    """The same bytes for the same runs."""
    text = json.dumps({"runs": runs, "full": full}, separators=(",", ":"), sort_keys=True)
    RECORD.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def summary(runs: list[dict[str, Any]]) -> str:
    """How many, and how many were refused by what."""
    refused = Counter(run["refused"] for run in runs if "refused" in run)
    return f"{len(runs)} runs, refused: {dict(refused)}; {RECORD.stat().st_size:,} bytes"


if __name__ == "__main__":
    sys.exit(main())
