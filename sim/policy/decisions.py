"""What a policy may say. The engine applies each decision at once and refuses what is illegal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sim.base.quantities import Basis
    from sim.policy.outlook import Outlook
    from sim.policy.pieces import Piece
    from sim.policy.tickets import Ticket
    from sim.policy.wishes import Wishes


class Fetch(NamedTuple):
    """Copy `piece` to its GPU now, ahead of every prefetch; room is made through `Policy.victim`."""

    piece: Piece
    after: tuple[Ticket, ...] = ()


class Prefetch(NamedTuple):
    """Queue a speculative copy.

    With `Policy.prefetch_depth = None` the piece takes its room and enters the copy queue at once, in order of asking;
    `priority` then says nothing. With a depth the piece waits in the policy's own queue, larger `priority` first and
    ties in order of asking, and takes room only when the engine hands it over, at a polling point.
    """

    piece: Piece
    priority: float = 0.0
    after: tuple[Ticket, ...] = ()


Wanted = Prefetch | tuple["Piece", float, "tuple[Ticket, ...]"]  # the same fields in the same order


class Requeue(NamedTuple):
    """Make `wanted` the policy's whole queue of prefetches, best first; what was queued before is withdrawn.

    Only for policies with a `prefetch_depth`; copies already handed to the copy engine stay, but for those aimed at
    layers up to and including `up_to_layer`, which are withdrawn as `DropQueue` does.
    """

    wanted: Sequence[Wanted]
    up_to_layer: int | None = None


class RequeueFrom(NamedTuple):
    """`Requeue` for many layers' worth of numbers: entries `start` to `stop` of `wishes` become the whole queue.

    Entries from `fresh` on wait for the tickets in `after`, those before for nothing; at most `most` wait (-1: all).
    """

    wishes: Wishes
    start: int
    stop: int
    fresh: int
    after: tuple[Ticket, ...] = ()
    up_to_layer: int | None = None
    most: int = -1


class Foresee(NamedTuple):
    """Once `layer` has been served: predict, believe in what an outlook has chosen, and ask for the layers ahead.

    `predict` is spent as `Predict` is, and `outlook` believes from then on in its choice for the layer `distance`
    behind `layer`; None: nothing new has been predicted. Then `outlook.ahead(layer)` becomes the whole queue, and what
    it asks for by this prediction waits for it.
    """

    outlook: Outlook
    layer: int
    predict: Predict | None = None


class Cancel(NamedTuple):
    """Withdraw a queued prefetch; one already in flight finishes (no system can abort a copy)."""

    piece: Piece


class DropQueue(NamedTuple):
    """Withdraw every queued prefetch, or those aimed at layers up to and including `up_to_layer`."""

    up_to_layer: int | None = None


class RunGpu(NamedTuple):
    """Compute `(layer, expert)` on the GPU that holds it, each of its pieces once it has arrived; of an expert begun by
    `RunPart`, what is left.

    `joined`: slices of columns are computed as one, side by side, once all of them are there.
    """

    expert: int
    after: tuple[Ticket, ...] = ()
    joined: bool = False


class RunPart(NamedTuple):
    """Compute one resident piece of a pending expert, for all its tokens, once the piece has arrived.

    The rest may follow after other experts: the partial results add up (MoEpic's tops before any bottom). Parts must
    not overlap and must make the expert up by the end of the layer; `RunGpu` computes all that is left. Whole matrices
    (`view.matrices`) run in their order.

    `slices`: the piece lies there in these slices of columns, computed as one, once all of them are there.
    """

    piece: Piece
    after: tuple[Ticket, ...] = ()
    slices: tuple[Piece, ...] = ()


class RunCpu(NamedTuple):
    """Compute on the CPU; the result joins the GPU stream at `join_layer` (default: this layer).

    `expert` runs for all its tokens. A later join is KTransformers' deferral.
    """

    expert: int
    join_layer: int | None = None


class RunCpuAhead(NamedTuple):
    """Compute an expert of a later layer on the CPU before its gate has spoken (DAOP's pre-calculation).

    The result waits on the GPU for `RunCpu(expert)` at that layer, which then costs nothing more; one nobody asks for
    in this iteration was computed in vain.
    """

    layer: int
    expert: int
    n_tokens: int


class Serve(NamedTuple):
    """Let the engine serve every pending expert: residents run while what is missing is fetched."""


class Evict(NamedTuple):
    """Free a resident piece; a copy into its place waits until its last computation is done."""

    piece: Piece


class WriteBack(NamedTuple):
    """Copy a resident piece back to the host, as systems do that keep one copy of every expert.

    It stays resident; evicted afterwards, its room is clean once this copy is over.
    """

    piece: Piece
    after: tuple[Ticket, ...] = ()


class Wait(NamedTuple):
    """Block the host until the tickets have ended, as a synchronous copy does."""

    tickets: tuple[Ticket, ...]


class Predict(NamedTuple):
    """Spend predictor time on a lane (`side`: does not occupy the compute stream; `gpu`; `host`).

    The engine sends the ticket back into the generator: `ticket = yield Predict(...)`.
    `basis` says what the figure rests on: measured, datasheet or assumed; or stack, of `view.prices.hybrid_layer_s()`.
    """

    duration_s: float
    lane: str = "side"
    blocking: bool = False
    basis: Basis = "assumed"


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
