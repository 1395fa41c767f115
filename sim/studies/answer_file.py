"""`--out` of a comparison, plan, explanation or rates: what `--json` prints, in a folder that `moesim report` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.base.errors import BadInput
from sim.base.files import is_hidden, replacing
from sim.base.json import to_json

ANSWER = "answer.json"


def begin(folder: Path) -> None:
    """Make a folder for an answer, before any work is done for it.

    Raises:
        BadInput: it is there and holds something, or cannot be made.
    """
    said = f"--out, got {str(folder)!r}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise BadInput(f"{said}: {error.strerror}; name a folder that can be written") from None
    held = [name for name in names if not is_hidden(name)]
    if held:
        raise BadInput(f"{said}: it holds {held[0]}; name a new folder")


def keep(folder: Path, answer: dict[str, Any]) -> Path:
    """Write an answer whole or not at all."""
    path = folder / ANSWER
    with replacing(path) as part:
        part.write_text(to_json(answer) + "\n", encoding="utf-8", newline="\n")
    return path
