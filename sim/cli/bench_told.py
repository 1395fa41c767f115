"""What `moesim bench --json` says, by its keys."""

from __future__ import annotations

from typing import TypedDict


class ReplayTold(TypedDict):
    """How fast one case replays, beside its floor."""

    title: str
    policy: str
    model: str
    decode_tokens: int
    hit_rate: float | None
    tokens_per_s: float
    ratio: float
    floor: float
    ok: bool


class ImportsTold(TypedDict):
    """The time of bare imports, beside which processes are shown."""

    command: str
    wall_s: float


class ProcessTold(TypedDict):
    """A process from its start to its end; None where a figure cannot be had."""

    title: str
    command: str
    exit: int
    wall_s: float | None
    most_s: float
    ratio: float | None
    most_ratio: float
    peak_bytes: int | None
    error: str | None
    ok: bool


class StartsTold(TypedDict):
    """All processes."""

    imports: ImportsTold
    processes: list[ProcessTold]


class PairTold(TypedDict):
    """One run by both engines."""

    title: str
    policy: str
    tokens_per_s: dict[str, float]  # by engine
    keys: int
    unequal: list[str]
    ok: bool


class SweepTold(TypedDict):
    """A sweep over hardware beside one run, in seconds of processor time; None where a process failed."""

    points: int
    run_s: float | None
    sweep_s: float | None
    ratio: float | None


class LoadTold(TypedDict):
    """A long load: a process, and what a token costs in it beside one in half as many; None where a process failed."""

    log: str
    requests: int
    tokens: int | None
    cpu_s: float | None
    most_s: float
    peak_bytes: int | None
    most_bytes: int
    per_token_ratio: float | None
    more_tokens: float | None
    stable: bool | None
    error: str | None
    ok: bool


class BenchTold(StartsTold):
    """Everything."""

    compiled: bool
    bare_timeouts_per_s: float
    cases: list[ReplayTold]
    engines: list[PairTold]
    sweep: SweepTold
    load: LoadTold
    ok: bool


class ProfileTold(TypedDict):
    """Where the replay of a case spends its time."""

    title: str
    shares: dict[str, float]  # by part
    samples: int
