"""Paste real output into README.md and docs/*.md.

    python docs/paste.py [--check]

A fenced block that follows `<!-- output of: COMMAND -->` holds what COMMAND prints. Without --check the blocks are
rewritten; with it, the script exits 1 and names those that have gone stale. Commands run in a temporary folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- output of: (?P<command>.+?) -->\n```text\n)(?P<text>.*?)(\n```\n)", re.DOTALL)


def pages() -> list[Path]:
    """README.md and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def output_of(command: str) -> str:
    """What a documented command prints; the commands of this Python's environment come first."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    with tempfile.TemporaryDirectory() as folder:
        words, env = ["bash", "-c", command], {**os.environ, "PATH": path}
        done = subprocess.run(words, cwd=folder, env=env, text=True, capture_output=True, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"{command}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout.rstrip("\n")


def pasted(page: str) -> list[tuple[str, str]]:
    """(command, pasted text) of every block of a page."""
    return [(match["command"], match["text"]) for match in BLOCK.finditer(page)]


def refreshed(page: str) -> str:
    """The page with every block replaced by what its command prints now."""
    return BLOCK.sub(lambda m: m[1] + output_of(m["command"]) + m[4], page)


def main() -> int:
    stale = []
    for path in pages():
        before = path.read_text(encoding="utf-8")
        after = refreshed(before)
        if before != after:
            stale.append(path.name)
            if "--check" not in sys.argv[1:]:
                path.write_text(after, encoding="utf-8")
    sys.stdout.write(f"stale: {', '.join(stale)}\n" if stale else "every pasted output is current\n")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
