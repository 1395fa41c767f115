"""Paste real output into README.md and docs/*.md.

    python tools/paste.py [--check] [PAGE ...]

A fenced block that follows `<!-- output of: COMMAND -->` holds what COMMAND prints. Without --check the blocks are
rewritten; with it, the script exits 1 and names the pages that have gone stale. Commands run in temporary folders, one
per core at a time. Pages are named as they are (`README.md docs/compare.md`); without a name, all of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs" / "examples"
BLOCK = re.compile(r"(<!-- output of: (?P<command>.+?) -->\n```text\n)(?P<text>(?:.*?\n)??)(?P<end>```\n)", re.DOTALL)


def pages() -> list[Path]:
    """README.md and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def output_of(command: str) -> str:
    """What a documented command prints; the commands of this Python's environment come first."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    with tempfile.TemporaryDirectory() as folder:
        for example in EXAMPLES.glob("*.*"):
            shutil.copy(example, folder)
        words, env = ["bash", "-c", command], {**os.environ, "PATH": path}
        env.pop("COLUMNS", None)  # pages hold what a pipe gets, whoever's terminal this is
        done = subprocess.run(words, cwd=folder, env=env, text=True, capture_output=True, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"{command}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout.rstrip("\n")


def pasted(page: str) -> list[tuple[str, str]]:
    """(command, pasted text) of every block of a page."""
    return [(match["command"], match["text"].removesuffix("\n")) for match in BLOCK.finditer(page)]


def refreshed(page: str, printed: dict[str, str]) -> str:
    """The page with the blocks of these commands replaced by what each prints now: command -> text."""

    def now(block: re.Match[str]) -> str:
        command = block["command"]
        return f"{block[1]}{printed[command]}\n{block['end']}" if command in printed else block[0]

    return BLOCK.sub(now, page)


def main(words: list[str]) -> int:
    """Refresh the pages, or check them; 1 when --check finds a stale one."""
    named = [Path(word) for word in words if word != "--check"]
    before = {path: path.read_text(encoding="utf-8") for path in named or pages()}
    commands = list(dict.fromkeys(command for page in before.values() for command, _ in pasted(page)))
    # Threads: the work is done by the processes that they start.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        printed = dict(zip(commands, pool.map(output_of, commands), strict=True))
    stale = []
    for path, page in before.items():
        after = refreshed(page, printed)
        if page != after:
            stale.append(path.name)
            if "--check" not in words:
                path.write_text(after, encoding="utf-8")
    sys.stdout.write(f"stale: {', '.join(stale)}\n" if stale else "every pasted output is current\n")
    return 1 if stale and "--check" in words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
