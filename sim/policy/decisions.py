"""What a policy may say. The engine applies each decision at once and refuses what is illegal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from sim.base.quantities import Basis
    from sim.policy.outlook import Outlook
    from sim.policy.pieces import Piece
    from sim.policy.tickets import Ticket
    from sim.policy.wishes import Wishes


class Record:
    """What every decision is: fields that are set once, in their order; equal where kind and fields are."""

    __slots__ = ()
    _fields: ClassVar[tuple[str, ...]] = ()

    def values(self) -> tuple[Any, ...]:
        """What its fields hold."""
        return tuple([getattr(self, name) for name in self._fields])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.values() == other.values()

    def __hash__(self) -> int:
        return hash((type(self), self.values()))

    def __repr__(self) -> str:
        told = ", ".join([f"{name}={getattr(self, name)!r}" for name in self._fields])
        return f"{type(self).__name__}({told})"


class Fetch(Record):
    """Copy `piece` to its GPU now, ahead of every prefetch; room is made through `Policy.victim`."""

    _fields = ("piece", "after")
    __slots__ = _fields

    def __init__(self, piece: Piece, after: tuple[Ticket, ...] = ()) -> None:
        self.piece = piece
        self.after = after


class Prefetch(Record):
    """Queue a speculative copy.

    With `Policy.prefetch_depth = None` the piece takes its room and enters the copy queue at once, in order of asking;
    `priority` then says nothing. With a depth the piece waits in the policy's own queue, larger `priority` first and
    ties in order of asking, and takes room only when the engine hands it over, at a polling point.
    """

    _fields = ("piece", "priority", "after")
    __slots__ = _fields

    def __init__(self, piece: Piece, priority: float = 0.0, after: tuple[Ticket, ...] = ()) -> None:
        self.piece = piece
        self.priority = priority
        self.after = after


Wanted = Prefetch | tuple["Piece", float, "tuple[Ticket, ...]"]  # the same fields in the same order


class Requeue(Record):
    """Make `wanted` the policy's whole queue of prefetches, best first; what was queued before is withdrawn.

    Only for policies with a `prefetch_depth`; copies already handed to the copy engine stay, but for those aimed at
    layers up to and including `up_to_layer`, which are withdrawn as `DropQueue` does.
    """

    _fields = ("wanted", "up_to_layer")
    __slots__ = _fields

    def __init__(self, wanted: Sequence[Wanted], up_to_layer: int | None = None) -> None:
        self.wanted = wanted
        self.up_to_layer = up_to_layer


class RequeueFrom(Record):
    """`Requeue` for many layers' worth of numbers: entries `start` to `stop` of `wishes` become the whole queue.

    Entries from `fresh` on wait for the tickets in `after`, those before for nothing; at most `most` wait (-1: all).
    """

    _fields = ("wishes", "start", "stop", "fresh", "after", "up_to_layer", "most")
    __slots__ = _fields

    def __init__(
        self,
        wishes: Wishes,
        start: int,
        stop: int,
        fresh: int,
        after: tuple[Ticket, ...] = (),
        up_to_layer: int | None = None,
        most: int = -1,
    ) -> None:
        self.wishes = wishes
        self.start = start
        self.stop = stop
        self.fresh = fresh
        self.after = after
        self.up_to_layer = up_to_layer
        self.most = most


class Foresee(Record):
    """Once `layer` has been served: predict, believe in what an outlook has chosen, and ask for the layers ahead.

    `predict` is spent as `Predict` is, and `outlook` believes from then on in its choice for what lies `distance`
    behind `layer` (`Outlook.foresee`); None: nothing new has been predicted. Then `outlook.ahead(layer)` becomes the
    whole queue, and what it asks for by this prediction waits for it.
    """

    _fields = ("outlook", "layer", "predict")
    __slots__ = _fields

    def __init__(self, outlook: Outlook, layer: int, predict: Predict | None = None) -> None:
        self.outlook = outlook
        self.layer = layer
        self.predict = predict


class Cancel(Record):
    """Withdraw a queued prefetch; one already in flight finishes (no system can abort a copy)."""

    _fields = ("piece",)
    __slots__ = _fields

    def __init__(self, piece: Piece) -> None:
        self.piece = piece


class DropQueue(Record):
    """Withdraw every queued prefetch, or those aimed at layers up to and including `up_to_layer`."""

    _fields = ("up_to_layer",)
    __slots__ = _fields

    def __init__(self, up_to_layer: int | None = None) -> None:
        self.up_to_layer = up_to_layer


class RunGpu(Record):
    """Compute `(layer, expert)` on the GPU that holds it, each of its pieces once it has arrived; of an expert begun by
    `RunPart`, what is left.

    `joined`: slices of columns are computed as one, side by side, once all of them are there.
    """

    _fields = ("expert", "after", "joined")
    __slots__ = _fields

    def __init__(self, expert: int, after: tuple[Ticket, ...] = (), joined: bool = False) -> None:
        self.expert = expert
        self.after = after
        self.joined = joined


class RunPart(Record):
    """Compute one resident piece of a pending expert, for all its tokens, once the piece has arrived.

    The rest may follow after other experts: the partial results add up (MoEpic's tops before any bottom). Parts must
    not overlap and must make the expert up by the end of the layer; `RunGpu` computes all that is left. Whole matrices
    (`view.matrices`) run in their order.

    `slices`: the piece lies there in these slices of columns, computed as one, once all of them are there.
    """

    _fields = ("piece", "after", "slices")
    __slots__ = _fields

    def __init__(self, piece: Piece, after: tuple[Ticket, ...] = (), slices: tuple[Piece, ...] = ()) -> None:
        self.piece = piece
        self.after = after
        self.slices = slices


class RunCpu(Record):
    """Compute on the CPU; the result joins the GPU stream at `join_layer` (default: this layer).

    `expert` runs for all its tokens. A later join is KTransformers' deferral.
    """

    _fields = ("expert", "join_layer")
    __slots__ = _fields

    def __init__(self, expert: int, join_layer: int | None = None) -> None:
        self.expert = expert
        self.join_layer = join_layer


class RunCpuAhead(Record):
    """Compute an expert of a later layer on the CPU before its gate has spoken (DAOP's pre-calculation).

    The result waits on the GPU for `RunCpu(expert)` at that layer, which then costs nothing more; one nobody asks for
    in this iteration was computed in vain.
    """

    _fields = ("layer", "expert", "n_tokens")
    __slots__ = _fields

    def __init__(self, layer: int, expert: int, n_tokens: int) -> None:
        self.layer = layer
        self.expert = expert
        self.n_tokens = n_tokens


class Serve(Record):
    """Let the engine serve every pending expert: residents run while what is missing is fetched."""

    __slots__ = ()


class Evict(Record):
    """Free a resident piece; a copy into its place waits until its last computation is done."""

    _fields = ("piece",)
    __slots__ = _fields

    def __init__(self, piece: Piece) -> None:
        self.piece = piece


class WriteBack(Record):
    """Copy a resident piece back to the host, as systems do that keep one copy of every expert.

    It stays resident; evicted afterwards, its room is clean once this copy is over.
    """

    _fields = ("piece", "after")
    __slots__ = _fields

    def __init__(self, piece: Piece, after: tuple[Ticket, ...] = ()) -> None:
        self.piece = piece
        self.after = after


class Wait(Record):
    """Block the host until the tickets have ended, as a synchronous copy does."""

    _fields = ("tickets",)
    __slots__ = _fields

    def __init__(self, tickets: tuple[Ticket, ...]) -> None:
        self.tickets = tickets


class Predict(Record):
    """Spend predictor time on a lane (`side`: does not occupy the compute stream; `gpu`; `host`).

    The engine sends the ticket back into the generator: `ticket = yield Predict(...)`.
    `basis` says what the figure rests on: measured, datasheet or assumed; or stack, of `view.prices.hybrid_layer_s()`,
    and overlap, of `view.prices.overlap_layer_s()`.
    """

    _fields = ("duration_s", "lane", "blocking", "basis")
    __slots__ = _fields

    def __init__(self, duration_s: float, lane: str = "side", blocking: bool = False, basis: Basis = "assumed") -> None:
        self.duration_s = duration_s
        self.lane = lane
        self.blocking = blocking
        self.basis = basis


Decision = (
    Fetch
    | Prefetch
    | Requeue
    | RequeueFrom
    | Foresee
    | Cancel
    | DropQueue
    | RunGpu
    | RunPart
    | RunCpu
    | RunCpuAhead
    | Serve
    | Evict
    | WriteBack
    | Wait
    | Predict
)
