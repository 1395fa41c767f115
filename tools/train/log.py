"""The training log: what a run was told from which step on, and what its model's traces have to be labelled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sim.profiles.models import model_names
from traces.format.header import REPEATING

NAME = "training_log.json"
# what a run that is continued may be told anew
PHASE = (
    *("batch_tokens", "length", "long_length", "lr", "steps", "decay_steps"),
    *("optimizer", "bias_step", "aux_coef", "by_window", "turning_coef"),
)


def continued(phases: list[dict[str, Any]], step: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The phases of a run that goes on at `step`: a new one where it is told something else than before."""
    told = {key: settings[key] for key in PHASE}
    before = [phase for phase in phases if phase["from_step"] < step]
    if before and {key: value for key, value in before[-1].items() if key != "from_step"} == told:
        return before
    return [*before, {"from_step": step, **told}]


def labels_of(log: dict[str, Any]) -> tuple[str, ...]:
    """Of traces of the model. What it was begun from has taught it, too."""
    taught = any(phase.get("turning_coef") for phase in log.get("phases", ()))
    return (REPEATING,) if taught or REPEATING in log.get("begun_labels", ()) else ()


def stands_for(log: dict[str, Any]) -> str:
    """Id of the catalogue's model that has the trained shape; empty for a shape of this project's own."""
    shape = str(log["settings"]["shape"])
    return shape if shape in model_names() else ""


def labels_at(checkpoint: Path) -> tuple[str, ...]:
    """The same of a checkpoint's folder; none where no log lies in it."""
    path = checkpoint / NAME
    return labels_of(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else ()
