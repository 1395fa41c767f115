"""Apply mutants one at a time to a copy of the tree, and write down which test finds each.

    python tests/mutants/run.py [N ...]          # these (all): the test files that each one names, until one fails
    python tests/mutants/run.py --full [N ...]   # then all other tests of the quick suite, too
    python tests/mutants/run.py --control        # without a mutant: the tests that found one pass, as source

A mutant is a wrong behaviour in words (`mutants.toml`) and the text that brings it about in today's code: new code is
held to the same words with a text of its own. What is compiled runs as its source, since its digest is another.
`found.toml` has the test that found each; "" where none did.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "*_cache", "__pycache__", "build", "runs")
LIMIT_S, LIMIT_BYTES = 900, 3 * 10**9
"""A mutant that makes tests take longer, or more memory, is found: they would not end."""


def mutants() -> dict[int, dict[str, Any]]:
    return {one["n"]: one for one in tomllib.loads((HERE / "mutants.toml").read_text(encoding="utf-8"))["mutant"]}


def apply(mutant: dict[str, Any], tree: Path) -> None:
    """Write its text into a tree. Raises ValueError where the text that it replaces is not there, or not once."""
    for edit in mutant["edits"]:
        path = tree / edit["file"]
        text = path.read_text(encoding="utf-8")
        if text.count(edit["before"]) != 1:
            n = text.count(edit["before"])
            raise ValueError(f"mutant {mutant['n']}, got its text {n} times in {edit['file']}: write it anew")
        text = text.replace(edit["before"], edit["after"])
        compile(text, edit["file"], "exec")  # a mistake in the text is no mutant
        path.write_text(text, encoding="utf-8")


def limit_memory() -> None:
    import resource  # not on Windows

    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))


def finder(tree: Path, tests: list[str]) -> str:
    """The first test that fails in a tree, or "": none does."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        ran = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            preexec_fn=None if os.name == "nt" else limit_memory,
        )
    except subprocess.TimeoutExpired:
        return f"takes longer than {LIMIT_S} s"
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", ran.stdout, re.MULTILINE)
    if ran.returncode == 1 and found:
        return found[1]
    if ran.returncode < 0:
        return f"takes more than {LIMIT_BYTES} bytes, or crashes: signal {-ran.returncode}"
    if ran.returncode:
        raise RuntimeError(f"pytest ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return ""


def link_or_copy(source: str, target: str) -> None:
    """Traces are linked, which no test writes to."""
    if os.path.getsize(source) > 10**6:  # noqa: PTH202 - `copytree` gives text
        os.link(source, target)
    else:
        shutil.copy2(source, target)


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the tree."""
    with tempfile.TemporaryDirectory() as folder:
        yield shutil.copytree(ROOT, Path(folder) / "tree", copy_function=link_or_copy, symlinks=True, ignore=LEFT_OUT)


def try_one(mutant: dict[str, Any], full: bool) -> str:
    with copied() as tree:
        apply(mutant, tree)
        found = finder(tree, mutant["tests"])
        if not found and full:
            others = sorted(str(path.relative_to(tree)) for path in (tree / "tests").glob("test_*.py"))
            found = finder(tree, [name for name in others if name not in mutant["tests"]])
        return found


def control() -> int:
    """The exit code: 1 where a test that is to find a mutant fails without one."""
    os.environ["MOESIM_PURE"] = "1"
    with copied() as tree:
        failed = finder(tree, sorted({name for name in known().values() if "::" in name}))
    sys.stdout.write(f"without a mutant: {failed or 'all pass'}\n")
    return int(bool(failed))


def known() -> dict[str, str]:
    """Who found which, as far as it is written down."""
    path = HERE / "found.toml"
    found: dict[str, str] = tomllib.loads(path.read_text(encoding="utf-8"))["found"] if path.exists() else {}
    return found


def note(n: int, found: str) -> None:
    """Write down who found a mutant."""
    every = known() | {str(n): found}
    rows = [f"{at} = '{every[at]}'\n" for at in sorted(every, key=int)]
    head = '# The test that finds each mutant; "" where none of those that it names does.\n[found]\n'
    (HERE / "found.toml").write_text(head + "".join(rows), encoding="utf-8")


def main(words: list[str]) -> int:
    if "--control" in words:
        return control()
    every = mutants()
    chosen = [int(word) for word in words if word != "--full"] or list(every)
    survived = []
    for n in chosen:
        began_s = time.monotonic()
        found = try_one(every[n], "--full" in words)
        note(n, found)
        survived += [] if found else [n]
        sys.stdout.write(f"{n:3} {time.monotonic() - began_s:5.0f} s  {found or 'SURVIVES'}  {every[n]['behaviour']}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - len(survived)} of {len(chosen)} found; survived: {survived or 'none'}\n")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
