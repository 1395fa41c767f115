"""The published figures, the experiments that answer them and the constants they are allowed, read from YAML."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from sim.base.errors import BadInput, did_you_mean
from sim.base.files import read_yaml, to_struct
from sim.results.expectations import parsed

HERE = Path(str(resources.files("reports"))) / "reproduce"

Flag = Literal["G", "G+", "T", "T!", "S", "Q", "X"]
Check = Literal["within", "inside", "ladder", "ratio", "shown", "order", "fit", "none"]
Relation = Literal[
    "value",
    "milli",
    "percent",
    "rate",
    "ratio",
    "reduction",
    "speedup",
    "slowdown",
    "improvement",
    "hideable",
    "memory",
]
TraceKind = Literal["a", "b", "c"]
Scored = Literal["a", "b"]
Figure = float | Annotated[list[float], Meta(min_length=2, max_length=2)]
Scalar = bool | int | float | str | None

FLAGS: dict[Flag, str] = {
    "G": "geometry and hardware alone",
    "G+": "geometry and one constant of the software",
    "T": "needs a routing trace of the model",
    "T!": "rests on something that is not public",
    "S": "a speed-up over somebody else's implementation",
    "Q": "quality of the output",
    "X": "contradicts itself; never a target",
}
SCORED: Scored = "b"  # the trace on which experiments are judged that do not say otherwise
TOLERANCE: dict[Flag, float] = {"G": 0.03, "G+": 0.15}
LADDER_TOLERANCE = 0.12  # of a ladder's slope


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One published figure, or a few of one table.

    published: label -> figure, or [least, most] where a range is printed.
    readings: name -> experiment that runs the same row otherwise: each is a row `ID-NAME` of its own, shown beside it.
    check: `within` the flag's tolerance, `inside` the printed range, a `ladder`, whose one constant comes from its
    first rung and whose slope over the others is judged (`judge.slope`), a `ratio` of a figure that needs a trace,
    `shown` beside it because a term is unknown, the `order` of systems, `fit` where a constant comes from, or `none`
    with the reason.
    A row is answered by a `method` of `closed`, or by an `experiment`, whose figure `value` of every system (dotted, as
    `policy_stats.cache_ratio`; of some systems another one, `value_of`) is turned into the published form by `relation`
    (to the system `own`). `memory`: the GB of GPU memory with which `value` falls to `target`, between the two cases of
    the experiment on either side. `beside`: systems that are run and told too, of which the paper prints nothing.
    """

    id: str
    flag: Flag
    where: str
    metric: str
    published: dict[str, Figure]
    check: Check
    unit: str = ""
    model: str = ""
    testbed: str = ""
    setting: str = ""
    note: str = ""
    reason: str = ""
    unknown: str = ""
    method: str = ""
    experiment: str = ""
    value: str = ""
    value_of: dict[str, str] = {}
    relation: Relation = "value"
    own: str = ""
    target: Annotated[float, Meta(ge=0)] = 0.0
    beside: list[str] = []
    better: Literal["low", "high"] = "low"
    pairs_of: str = ""  # only pairs with this system are judged
    cases: list[int] = []  # of the experiment's cases, these alone
    constant: str = ""
    fitted_traces: list[TraceKind] = []  # traces that were fitted to this very row: printed, not counted
    step: Annotated[float, Meta(ge=0)] = 0.0  # what printed figures are multiples of; 0: their last digit
    readings: dict[str, str] = {}
    reading_of: str = ""  # filled in: the row that this one is another reading of
    other_quantity: bool = False  # what is simulated orders the systems but is another quantity than the printed one
    added: bool = False  # after others of its group had been run
    source: str = ""  # filled in from the file
    group: str = ""  # the same


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Cases x systems; a case has the keys of a configuration, a system is `POLICY KEY=VALUE ...`, where a key is a
    parameter, a dotted override, or one of `work.OF_RUN`.

    prompt_tokens, output_tokens: mean lengths of prompts and answers on synthetic traces, as the paper's texts have
        them; 0: the default trace's. output_tokens_of: model -> mean length of answers, where models differ in it.
    requests: scored ones per run, in order; 0: the whole split. synth_requests: drawn for trace (b), both splits.
    fit: the bundled fit that trace (b) is drawn from (`moesim traces synth` knows it), where there is one of the model.
    slo: task -> limit -> seconds, as a configuration has it; `*`: all tasks without their own.
    scored: the trace on which its rows are judged, with the reason in `why` where it is not (b).
    mechanism: system -> what must hold in each of its runs (as `simulate --expect` has it), or rows that compare it
        are not judged: their mechanism did not run.
    constants: system -> id of the constant that is its own; rows are judged without, and told with it beside that.
    could_not: system -> models that it could not run there, says the paper.
    """

    why: str
    prompt_tokens: Annotated[int, Meta(ge=0, le=32768)] = 0
    output_tokens: Annotated[int, Meta(ge=0, le=4096)] = 0
    output_tokens_of: dict[str, int] = {}
    requests: Annotated[int, Meta(ge=0)] = 4  # some hundred generated tokens
    synth_requests: Annotated[int, Meta(ge=2, le=1000)] = 40  # so many that both splits have some
    fit: str = ""
    slo: dict[str, dict[str, float]] = {}
    scored: Scored = SCORED
    mechanism: dict[str, str] = {}
    cases: list[dict[str, Scalar]]
    systems: dict[str, str]
    constants: dict[str, str] = {}
    could_not: dict[str, list[str]] = {}


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is fitted for one (testbed, system), and the row it comes from.

    label: the system, or figure, of that row. In closed form, `seconds` turns the figure into seconds for `copies`
    experts of a machine, model and precision; without `copies` the row's experiment is run until its figure comes out.
    """

    id: str
    testbed: str
    row: str
    label: str
    form: Literal["per_copy", "link_gb", "per_layer", "on_cpu", "on_gpu", "gpu_gb"]
    hw: str = ""
    model: str = ""
    precision: str = ""
    seconds: float = 1.0
    copies: Annotated[float, Meta(ge=0)] = 0.0

    @property
    def solved(self) -> bool:
        """Whether an experiment has to be run for it."""
        return not self.hw


class _RowFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema: Literal["moesim.published-rows/1"]
    source: str
    group: str = ""
    rows: list[Row]


class _ExperimentFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema: Literal["moesim.experiments/1"]
    experiments: dict[str, Experiment]


class _ConstantFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema: Literal["moesim.constants/1"]
    constants: list[Constant]


T = TypeVar("T", bound=msgspec.Struct)


def _read(path: Path, kind: type[T]) -> T:
    return to_struct(read_yaml(path), kind, str(path))


def load_experiments() -> dict[str, Experiment]:
    """All experiments by name."""
    files = [_read(path, _ExperimentFile) for path in sorted(HERE.glob("experiments*.yaml"))]
    found = {name: experiment for file in files for name, experiment in file.experiments.items()}
    for name, experiment in found.items():
        for system, text in experiment.mechanism.items():
            if system not in experiment.systems:
                raise BadInput(
                    f"experiment {name}, got a mechanism of {system!r}: "
                    f"{did_you_mean(system, experiment.systems)}; correct the file"
                )
            parsed((text,))
    return found


def load_constants() -> dict[str, Constant]:
    """All constants by id."""
    return {constant.id: constant for constant in _read(HERE / "constants.yaml", _ConstantFile).constants}


def load_rows() -> dict[str, Row]:
    """All rows by id, in the order of the files. Raises BadInput for a row that contradicts itself."""
    found: dict[str, Row] = {}
    for path in sorted((HERE / "rows").glob("*.yaml")):
        file = _read(path, _RowFile)
        for row in (one for named in file.rows for one in (named, *readings_of(named))):
            check_row(row, found, str(path))
            found[row.id] = msgspec.structs.replace(row, source=file.source, group=file.group)
    return found


def readings_of(row: Row) -> list[Row]:
    """A row's other readings as rows that are shown and not judged, so that no choice of one can be for its figure."""
    return [
        msgspec.structs.replace(
            row,
            id=f"{row.id}-{name}",
            reading_of=row.id,
            setting=", ".join(part for part in (row.setting, name) if part),
            check="shown",
            experiment=experiment,
            unknown=f"which reading holds for what was measured; this one is experiment {experiment}",
            reason="",
            note="",
            pairs_of="",
            readings={},
        )
        for name, experiment in row.readings.items()
    ]


def check_row(row: Row, before: dict[str, Row], where: str) -> None:
    def require(holds: bool, rule: str) -> None:
        if not holds:
            raise BadInput(f"{where}: row {row.id}, got check {row.check!r}: {rule}; correct the file")

    require(row.id not in before, "an id is given once")
    answered = bool(row.method) + bool(row.experiment)
    if row.check == "none":
        require(bool(row.reason) and not answered, "give the reason, and neither method nor experiment")
    elif row.check == "fit":
        require(bool(row.reason) and not row.method, "give the reason, and no method")
    else:
        require(answered == 1, "exactly one of method and experiment answers it")
        require(bool(row.published), "there is nothing to compare with")
    if row.check == "ladder":
        single = [figure for figure in row.published.values() if isinstance(figure, float)]
        require(len(single) == len(row.published) > 1, "a ladder has two rungs or more, each a figure")
    if row.check == "shown":
        require(bool(row.unknown), "say which term is unknown")
    if row.check == "within":
        require(row.flag in TOLERANCE, f"only {' and '.join(TOLERANCE)} have a tolerance")
    if row.experiment:
        require(bool(row.value), "say which key of the results is compared")
    if row.relation in ("reduction", "speedup", "slowdown", "improvement", "hideable"):
        require(bool(row.own), "a relation needs the system it is to (own)")
    require((row.relation == "memory") == bool(row.target), "memory is told for a target, and a target for memory")


GROUPS = ("geometry", "experiments", "unanswered")
ENGINES = "engines"


def _group(row: Row) -> str:
    return GROUPS[0] if row.method else GROUPS[1] if row.experiment and row.check != "fit" else GROUPS[2]


def _words(row: Row) -> tuple[str, ...]:
    """What a row can be asked for by."""
    return tuple(filter(None, (row.id, row.reading_of, row.id.split("-")[0], row.flag, _group(row), row.group)))


def pick(wanted: tuple[str, ...], rows: dict[str, Row]) -> list[Row]:
    """Rows by id, by the letters before the dash, by flag or by group; all of them for ().

    Groups: `geometry` needs no trace, `experiments` replay one, `unanswered` have a reason instead; `engines` are
    measurements of engines that people run, of all three kinds.

    Raises:
        BadInput: a word that is none of these.
    """
    words = [word for item in wanted for word in item.replace(",", " ").split()]
    if not words:
        return list(rows.values())
    chosen: set[str] = set()
    for word in words:
        ids = {row.id for row in rows.values() if word in _words(row)}
        if not ids:
            hint = did_you_mean(word, [*rows, *FLAGS, *GROUPS, ENGINES])
            raise BadInput(f"--rows, got {word!r}: no such row, system, flag or group; {hint}")
        chosen |= ids
    return [row for row in rows.values() if row.id in chosen]
