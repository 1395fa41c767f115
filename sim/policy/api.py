"""What a policy is: hooks it may implement, traits it declares, parameters it lists.

A policy decides. It moves no bytes, reads no clock and counts nothing; see `sim/DESIGN.md`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np

from sim.base.errors import BadInput, did_you_mean
from sim.policy.decisions import Decision

if TYPE_CHECKING:
    from sim.policy.order import Order
    from sim.policy.pieces import Piece
    from sim.policy.tickets import Ticket
    from sim.policy.view import View
    from sim.workload.gate import Gate
    from sim.workload.iterations import Iteration, RequestInfo
    from sim.workload.learn_split import StoreSplit

# A hook that yields; a decision's ticket comes back from `yield`, and a list of tickets where several are yielded.
Steps = Generator[Decision | Sequence[Decision], Any, None]
Decisions = Iterable[Decision] | Steps | None
ParamValue = bool | int | float | str | None
_Value = TypeVar("_Value", bound=ParamValue)

TRAITS = {
    "oracle": "may read the future of the trace",
    "lossy": "changes what the model computes; replay is open-loop",
    "timing": "reads completions or queue state, so decisions depend on measured time",
    "cpu": "computes experts on the CPU",
    "evicts_eagerly": "forgets experts it has room for, as the system it stands for does",
    "bound": "a reference, not a system: may run in hypothetical memory",
}


@dataclass(frozen=True)
class Param:
    """One settable parameter, as `param` in a policy's class declares it."""

    name: str
    default: ParamValue
    doc: str
    choices: tuple[str, ...]
    low: float
    high: float
    file: bool

    def names_file(self, value: ParamValue) -> bool:
        """Whether a value is the path of a file that is there."""
        try:
            return self.file and isinstance(value, str) and value != self.default and Path(value).is_file()
        except (OSError, ValueError):  # no path at all
            return False

    @property
    def _default(self) -> str:
        return "derived" if self.default is None else str(self.default)

    def check(self, value: Any, policy: str) -> ParamValue:
        """Return the value in the default's type. Raises BadInput naming parameter, rule and range."""
        where = f"parameter {policy}.{self.name}, got {value!r}"
        if value is None and self.default is None:
            return None
        if self.choices:
            if value not in self.choices:
                raise BadInput(f"{where}: not a choice; {did_you_mean(str(value), self.choices)}")
            return str(value)
        if isinstance(self.default, bool):
            if not isinstance(value, bool):
                raise BadInput(f"{where}: must be true or false; write {self.name}=true")
            return value
        if isinstance(self.default, str):
            if not isinstance(value, str):
                raise BadInput(f"{where}: must be a word; default {self.default!r}")
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadInput(f"{where}: must be a finite number; default {self._default}")
        if not self.low <= value <= self.high:
            raise BadInput(f"{where}: must lie in [{self.low:g}, {self.high:g}]; default {self._default}")
        # A default of None stands for "derived"; its parameters are numbers, whole when written whole.
        if isinstance(self.default, int):
            if value != int(value):
                raise BadInput(f"{where}: must be a whole number; default {self._default}")
            return int(value)
        return float(value) if isinstance(self.default, float) else value


def param(
    default: _Value,
    doc: str,
    choices: tuple[str, ...] = (),
    *,
    within: tuple[float, float] = (-math.inf, math.inf),
    file: bool = False,
) -> _Value:
    """Declare a parameter in a policy's class: `rank: int = param(1, "how many to spare", within=(0, 9))`.

    An instance has the value as that attribute. A subclass has its bases' parameters, in their order and before its
    own; what it assigns anew takes the place of theirs, and is no parameter where it is a plain value.

    Args:
        default: as published. None: the policy derives it. doc: what it is, and where it is published. within: the
            least and the largest number.
        file: a value other than the default may name a file; what it holds then decides the run, wherever it lies.
    """
    return cast(_Value, Param("", default, doc, choices, *within, file))


@dataclass(frozen=True)
class Assignment:
    """What `Policy.assign` returns, per token: `ids` [n, k] (-1 where dropped) and the weights used [n, k]; None: those
    that the model's gate would apply to them (`Gate.weights_of`).

    `precision` names experts that may run in less than the serving precision; they are counted as lowered when they do.
    """

    ids: Any  # an array, or lists in a list
    weights: np.ndarray | None = None
    precision: dict[int, str] | None = None


class Policy:
    """Base of every policy. Implement the hooks you need; the engine skips those you do not override.

    Without `gate_done` the engine serves a layer itself: run what is resident, fetch what is missing in router
    order, ask `victim` for room, tell `accessed`. A plain cache is then two short methods.

    Attributes:
        name, title, source, aliases: what it is called, in words, where it is published, and its other names.
        from_notes: its author knew the published system from third parties' notes alone.
        traits, needs: what it may do, and the trace levels it reads (docs/policies.md has both lists).
        params: its settable parameters, collected from what its class declares with `param`; an instance has their
            values as attributes, and in `settings`.
        predicts_with: libraries of tensors that it imports to predict with: `torch`; results are labelled so.
        labels: words that every result of an instance carries. keeps_all: it wants room for every expert.
        prefetch_depth: speculative copies handed to each GPU's copy engine at once; None: all, as they are asked.
        ranks_by_trace: what its `Rank` says of experts that the running layer does not ask for rests on the trace
            alone, so that one replay tells the hits of every budget (`moesim curve`). one_size: why not.
        as_one_list: parameters with which it is one list over all layers, as host memory above a drive keeps experts.
        known_ahead: layers by which its own, fine-tuned model names experts earlier.
        copies_mapped: it copies straight out of the file that its engine maps, through no page-locked buffer.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    source: ClassVar[str] = ""
    from_notes: ClassVar[bool] = False
    aliases: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[frozenset[str]] = frozenset()
    needs: frozenset[str] = frozenset({"experts"})  # an instance may narrow it by its parameters
    predicts_with: ClassVar[frozenset[str]] = frozenset()
    params: ClassVar[tuple[Param, ...]] = ()
    labels: tuple[str, ...] = ()  # words every result of an instance must carry (`surrogate`)
    # Layers by which its own, fine-tuned model names a layer's experts earlier (Pre-gated MoE); label such results.
    known_ahead: int = 0
    keeps_all: ClassVar[bool] = False  # wants room for every expert, whatever the budget (gpu_only)
    copies_mapped: ClassVar[bool] = False  # pageable where the stack maps its weights
    # Speculative copies handed to each GPU's copy engine at once: of two GPUs, each may have so many. What waits for a
    # full link holds up nothing that another could carry. None: all of them, room taken when asked (no timing).
    prefetch_depth: int | None = None
    ranks_by_trace: bool = False  # an instance may say so by its parameters
    one_size: ClassVar[str] = ""
    as_one_list: ClassVar[dict[str, ParamValue]] = {}
    order: Order | None = None  # who leaves, instead of `victim`; an instance sets it in `bind`

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "params" in vars(cls):
            raise BadInput(
                f"policy {cls.name or cls.__name__}, got params {cls.params!r}: each parameter is an attribute; write "
                'rank: int = param(1, "what it is")'
            )
        declared = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
        cls.params = tuple(replace(one, name=name) for name, one in declared.items() if isinstance(one, Param))

    def __init__(self, **values: Any) -> None:
        known = {param.name: param for param in self.params}
        for key in values:
            if key not in known:
                hint = did_you_mean(key, known) if known else "it has none"
                raise BadInput(f"parameter {self.name}.{key}: no such parameter; {hint}")
        self.settings: dict[str, ParamValue] = {}
        for param in self.params:
            value = param.check(values[param.name], self.name) if param.name in values else param.default
            self.settings[param.name] = value
            setattr(self, param.name, value)

    # -- before the run ---------------------------------------------------------------------------------------------

    def keeps_all_if_room(self, n_layers: int) -> bool:
        """Whether with room for every expert of so many layers all of them lie on their GPUs from the start, for good:
        an engine then reads no router's choice (`resident` of its stack), and host memory holds none."""
        return False

    def min_experts(self, view: View) -> int:
        """Fewest whole experts per GPU the policy can work with."""
        return 1

    def fits_smaller(self, view: View) -> str:
        """The setting with which the policy would run in this budget, told where it does not fit; "": there is none."""
        return ""

    def predictor_bytes(self, view: View) -> int:
        """GPU memory the policy takes beside its experts; counted inside the expert budget."""
        return 0

    def layer_budgets(self, view: View) -> list[list[int]] | None:
        """Bytes by GPU and layer when the cache is divided per layer; None for one cache per GPU.

        A cache per layer needs this: without it one layer's experts take the room that others are to have, and a
        `victim` that looks among its own layer's experts then finds none.
        """
        return None

    def bind(self, view: View) -> None:
        """Size the state to the run's geometry and budget; called once, before anything else."""

    def learn(self, store: StoreSplit) -> None:
        """Learn from the training split of the trace (never from what is scored)."""

    def initial(self, view: View) -> Iterable[Piece]:
        """Pieces resident before the first request; placed at no cost, as loading the model would."""
        return ()

    def kept_layers(self, view: View) -> Collection[int]:
        """Layers whose experts all lie on their GPUs for good; asked once, after `initial`. An engine that reads no
        router where all of them are there (its stack has `resident`) reads none of these layers, and host memory has
        none of them, unless they are pages of a mapped file."""
        return ()

    # -- hooks, in the order they fire ------------------------------------------------------------------------------

    def request_start(self, request: RequestInfo, view: View) -> Decisions:
        """A request joins the iteration that is about to run: its prompt comes first."""

    def drafting(self, iteration: Iteration, tickets: Sequence[Ticket], view: View) -> Decisions:
        """The tokens of a decode step with drafts are being drafted: `tickets[i]` ends when the i-th after the last
        that came out is there, of every request; none where drafting takes no time."""

    def iteration_start(self, iteration: Iteration, view: View) -> Decisions:
        """Before the first layer; which tokens run together is known, and their embeddings."""

    def layer_enter(self, layer: int, view: View) -> Decisions:
        """Before the attention of an MoE layer."""

    def gate_input(self, layer: int, view: View) -> Decisions:
        """After the attention, before the gate has spoken."""

    def assign(self, gate: Gate, view: View) -> Assignment | None:
        """Change the layer's routing (trait `lossy`); None leaves it. `gate_done` then sees the changed gate."""

    def gate_done(self, gate: Gate, view: View) -> Decisions:
        """The gate has spoken: serve the layer. Every expert of `gate.needs` must run exactly once."""

    def copy_done(self, piece: Piece, view: View) -> Decisions:
        """A copy has completed; told at the next polling point (trait `timing`)."""

    def layer_done(self, layer: int, view: View) -> Decisions:
        """All experts of the layer have been launched."""

    def iteration_end(self, iteration: Iteration, view: View) -> Decisions:
        """The output head has run."""

    def request_end(self, request: RequestInfo, view: View) -> Decisions:
        """The request's last token is out."""

    def idle(self, view: View) -> Decisions:
        """Nothing to do until the next arrival."""

    # -- questions the engine asks ----------------------------------------------------------------------------------

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        """A needed whole expert was found (`hit`), or was missing and has just been given room.

        The default service calls it: for all hits of a layer first; then for each missing expert, after `victim` and
        `evicted` have made its room and its copy has been asked for.
        """

    def placed(self, piece: Piece, view: View) -> None:
        """A prefetched piece has taken its room; in host memory above a drive, also one that was there from the start
        or has been written back."""

    def evicted(self, piece: Piece, view: View) -> None:
        """A piece has left the cache, whoever asked for it."""

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        """Which resident piece makes room for `piece`; None refuses (a prefetch is then dropped)."""
        return None

    def stats(self) -> dict[str, float]:
        """Figures of the policy's own (prediction accuracy, store size ...) for the report."""
        return {}


def overrides(policy: Policy, hook: str) -> bool:
    """True when the policy's class implements a hook of its own."""
    return getattr(type(policy), hook) is not getattr(Policy, hook)


HOOKS = frozenset(name for name, value in vars(Policy).items() if isfunction(value) and not name.startswith("_"))
"""Names of what a policy may answer."""


def answers_anew(policy: Policy, hook: str, than: str) -> bool:
    """True when a class below the one that wrote `than` has written `hook`: it may not know what `than` settles."""
    order = [vars(kind) for kind in type(policy).__mro__]
    wrote = [next(at for at, names in enumerate(order) if name in names) for name in (hook, than)]
    return wrote[0] < wrote[1]
