"""Kill a command at each of its steps in a folder, and see what the same command makes of what is left.

`python tests/kill_stages.py FOLDER EVERY FIRST AGAIN` runs FIRST, a JSON list of words, in a folder of its own for each
step (or one of EVERY), until it comes to its end, and AGAIN in the same folder afterwards. It prints a JSON line for
each: step, status of AGAIN, what it said, and what lies in the folder then.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "tempfile.mkstemp", "tempfile.mkdtemp"}
KILLED = 77
BASELINE = '{"schema": 1, "runs": [{"policy": "lru", "hw": "rtx3090", "requests": 1}]}'


def command(args: list[str], folder: Path, kill_at: int = 0) -> tuple[int, str]:
    """Its status and what it said; killed before the step of that number which touches the folder."""
    said = tempfile.TemporaryFile()  # noqa: SIM115 - the child writes into it
    pid = os.fork()
    if not pid:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        os.chdir(folder)
        if kill_at:
            sys.addaudithook(dying(kill_at, os.fspath(folder)))
        status = 1
        try:
            from sim.cli.verbs import guarded, moesim

            guarded(moesim, args, "moesim")
        except SystemExit as left:
            status = int(left.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    said.seek(0)
    return os.waitstatus_to_exitcode(status), said.read().decode()


def dying(kill_at: int, folder: str) -> Any:
    """A hook that ends the process before its step of that number which writes below the folder."""
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in STEPS or (event == "open" and not writes(args)):
            return
        path = args[0] if isinstance(args[0], (str, os.PathLike)) else ""
        if os.path.abspath(os.fspath(path)).startswith(folder):  # noqa: PTH100 - no link is followed
            seen += 1
            if seen == kill_at:
                os._exit(KILLED)

    return hook


def writes(args: tuple[Any, ...]) -> bool:
    return bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) if isinstance(args[2], int) else False


def main(folder: Path, every: int, first: list[str], again: list[str]) -> None:
    import sim.cli.verbs  # noqa: F401 - once, not in every child

    step, status = 1 - every, KILLED
    while status == KILLED:
        step += every
        own = folder / f"{step:03d}"
        own.mkdir()
        (own / "thesis.tex").write_text("precious")
        (own / "b.json").write_text(BASELINE)
        status, said = command(first, own, step)
        if status == KILLED:
            status_again, said = command(again, own)
        else:
            status_again = status
        left = sorted(path.relative_to(own).as_posix() for path in own.rglob("*") if not path.is_dir())
        sys.stdout.write(json.dumps({"step": step, "status": status_again, "said": said, "left": left}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]))
