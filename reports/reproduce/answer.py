"""What `moesim reproduce` makes, keeps in last.json and reads back: an answer per row, and the counts over them."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from reports.reproduce.rows import Figure, Flag, TraceKind


class JudgedPair(TypedDict):
    """Two systems in the published order, and whether they come out in it."""

    better: str
    worse: str
    right: bool


class WithConstants(TypedDict):
    """The same with the constants of single systems."""

    simulated: dict[str, Figure]
    right: int


class OnTrace(TypedDict):
    """A row on one kind of trace."""

    simulated: dict[str, Figure]
    ratio: NotRequired[dict[str, float | None]]
    did_not_run: NotRequired[dict[str, str]]
    pairs: NotRequired[list[JudgedPair]]
    counted: NotRequired[bool]
    fitted: NotRequired[WithConstants]
    cases: NotRequired[dict[str, int]]


class Asked(TypedDict):
    """The experiment of a row, and why it stands for what was published."""

    name: str
    why: str


class Answer(TypedDict):
    """One row: what was published, what was simulated, and how that is judged."""

    id: str
    flag: Flag
    source: str
    where: str
    model: str
    testbed: str
    setting: str
    metric: str
    unit: str
    published: dict[str, Figure]
    check: str
    note: str
    reason: str
    unknown: str
    constant: str
    added: NotRequired[bool]
    simulated: NotRequired[dict[str, Figure]]
    ratio: NotRequired[dict[str, float | None]]
    slope: NotRequired[float]  # of a ladder: simulated over printed steps from its first rung
    experiment: NotRequired[Asked]
    scored: NotRequired[TraceKind]
    not_sized: NotRequired[list[str]]
    constants: NotRequired[dict[str, str]]
    traces: NotRequired[dict[TraceKind, OnTrace]]
    left_out: NotRequired[dict[TraceKind, dict[str, str]]]
    status: NotRequired[str]
    carried: NotRequired[bool]


class Spread(TypedDict):
    """How far magnitudes are off (`judge.spread`); a factor of None: the sign is the other one."""

    n: int
    other_sign: int
    within: NotRequired[int]
    median_ratio: NotRequired[float]
    least: NotRequired[float | None]
    lower_quartile: NotRequired[float | None]
    median: NotRequired[float | None]
    upper_quartile: NotRequired[float | None]
    greatest: NotRequired[float | None]


class Orders(TypedDict):
    """Pairs that are right, as judged and with the constants of single systems."""

    right: int
    right_fitted: int
    pairs: int
    magnitudes: Spread
    ids: NotRequired[list[str]]


class Totals(TypedDict):
    """Counts over all rows."""

    flags: dict[Flag, dict[str, int]]
    scored: Orders
    apart: dict[str, Orders]
    did_not_run: list[str]
    orders: dict[str, Orders]


class ToldConstant(TypedDict):
    """A constant, and the row that it was fitted to."""

    id: str
    testbed: str
    seconds: float
    form: str
    row: str
    label: str


class ToldTrace(TypedDict):
    """The trace that stands for a model's."""

    trace: str
    recorded_model: str
    requests: int
    tokens: int
    labels: list[str]


# `is` is no name in Python, so this one is written as a call.
ToldTraces = TypedDict("ToldTraces", {"is": str, "of": dict[str, ToldTrace]})


class Reproduction(TypedDict):
    """The whole table."""

    date: NotRequired[str]
    schema: str
    version: str
    engine: str
    traces: dict[TraceKind, ToldTraces]
    constants: list[ToldConstant]
    not_fitted: NotRequired[dict[str, str]]
    rows: list[Answer]
    totals: Totals
