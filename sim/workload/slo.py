"""Service level objectives: how long a request of a task may take to its first token, per further token, and in all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sim.base.errors import BadInput, did_you_mean
from sim.base.files import read_yaml
from sim.base.units import parse_seconds, show_seconds

ANY = "*"
"""In place of a task: all that have none of their own."""
_EXAMPLE = "write 'ttft_s <= 2s, tpot_s <= 200ms'"


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Seconds; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


LIMITS = Slo.__struct_fields__


class Slos:
    """SLOs by task."""

    def __init__(self, by_task: Mapping[str, Mapping[str, float]] | None = None) -> None:
        self._by_task = {task: Slo(**limits) for task, limits in (by_task or {}).items()}

    def __bool__(self) -> bool:
        return bool(self._by_task)

    def of(self, task: str) -> Slo | None:
        """Of a task: its own, else that of all others; None where nothing is promised."""
        return self._by_task.get(task, self._by_task.get(ANY))

    def limits(self) -> dict[str, dict[str, float]]:
        """What is promised, by task."""
        return {task: msgspec.to_builtins(slo) for task, slo in self._by_task.items()}

    def tasks(self) -> list[str]:
        """Tasks that have one of their own."""
        return [task for task in self._by_task if task != ANY]


def parse_slo(text: str, what: str = "--slo") -> dict[str, dict[str, float]]:
    """`ttft_s <= 2s, tpot_s <= 200ms` (of every task), or the path of a YAML file: task -> limit -> seconds.

    Raises:
        BadInput: naming what is no limit.
    """
    if not set("<>=") & set(text):
        return _read(Path(text))
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, sign, limit = part.partition("<=")
        if not sign:
            raise BadInput(f"{what}, got {part.strip()!r}: not LIMIT <= SECONDS; {_EXAMPLE}, or name a YAML file")
        name = name.strip()
        if name in limits:
            raise BadInput(f"{what}, got {name} twice: one limit each; leave one out")
        limits[_known(name, what)] = _seconds(limit.strip(), f"{what} {name}")
    return {ANY: limits}


def slo_text(by_task: Mapping[str, Mapping[str, float]]) -> str:
    """In a line: `ttft_s <= 60 s`, tasks of their own by name; nothing where nothing is promised."""
    said = []
    for task, limits in by_task.items():
        text = ", ".join(f"{name} <= {show_seconds(limit_s)}" for name, limit_s in limits.items())
        said.append(text if task == ANY and len(by_task) == 1 else f"{'others' if task == ANY else task}: {text}")
    return "; ".join(said)


def slo_of(given: str | Mapping[str, Mapping[str, float | str]], what: str = "slo") -> dict[str, dict[str, float]]:
    """What Python and files take: the text of `parse_slo`, or a mapping as an SLO's file has it. Raises BadInput."""
    return parse_slo(given, what) if isinstance(given, str) else _by_task(given, what)


def _read(path: Path) -> dict[str, dict[str, float]]:
    return _by_task(read_yaml(path), str(path))


def _by_task(data: Any, where: str) -> dict[str, dict[str, float]]:
    if not isinstance(data, Mapping) or not data:
        raise BadInput(f"{where}, got {type(data).__name__}: a mapping of tasks to limits, '*' for all others; mend it")
    return {str(task): _limits(limits, f"{where}: {task}") for task, limits in data.items()}


def _limits(data: Any, where: str) -> dict[str, float]:
    if not isinstance(data, Mapping) or not data:
        raise BadInput(f"{where}, got {data!r}: a mapping such as {{ttft_s: 2s, tpot_s: 200ms}}; mend it")
    return {_known(str(name), where): _seconds(limit, f"{where}: {name}") for name, limit in data.items()}


def _known(name: str, where: str) -> str:
    if name not in LIMITS:
        raise BadInput(f"{where}, got {name!r}: no limit of an SLO; {did_you_mean(name, LIMITS)}")
    return name


def _seconds(limit: object, where: str) -> float:
    """A positive time, as text or as a number of seconds."""
    if isinstance(limit, str):
        seconds = parse_seconds(limit, where)
    elif isinstance(limit, int | float) and not isinstance(limit, bool):
        seconds = float(limit)
    else:
        raise BadInput(f"{where}, got {limit!r}: a time such as 200ms; mend it")
    if not 0 < seconds < float("inf"):
        raise BadInput(f"{where}, got {limit!r}: more than nothing and finite; raise it")
    return seconds
