"""`--predictor`: who predicts. A policy's own predictor, or a stand-in that draws the levels of the trace it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.errors import BadInput
from sim.workload.surrogate import SURROGATE, is_surrogate, outcomes

if TYPE_CHECKING:
    from sim.policy.api import Policy
    from traces.format.reader import Trace

OPTION = "predictor"


class Predicting(NamedTuple):
    """A policy, and who predicts for it.

    Attributes:
        stand_in: `surrogate:SHARE`, where the user named one: it draws what the trace lacks. own: the policy has a
            predictor of its own to choose. refused: why that is not the stand-in; None: it is, or there is none.
    """

    policy: Policy
    stand_in: str | None
    own: bool
    refused: BadInput | None = None


def predicting(kind: type[Policy], settings: Mapping[str, Any], predictor: str | None) -> Predicting:
    """The policy with these parameters, and with that predictor.

    A stand-in goes to the policy's own predictor where the policy takes one there. Otherwise it predicts from levels of
    the trace, which are then drawn.

    Raises:
        BadInput: a wrong parameter, or a predictor for a policy that has none to choose.
    """
    own = any(param.name == OPTION for param in kind.params)
    asked = {**({OPTION: predictor} if own and predictor is not None else {}), **settings}
    said = asked.get(OPTION) if own else predictor
    if not is_surrogate(said):
        if predictor is not None and not own:
            raise BadInput(
                f"--predictor, got {predictor!r}: {kind.name} has no predictor to choose; leave it out, or write "
                f"{SURROGATE}:0.85, which draws predictions (labelled)"
            )
        return Predicting(kind(**asked), None, own)
    try:
        return Predicting(kind(**asked), str(said), own)
    except BadInput as error:
        without = {name: value for name, value in asked.items() if name != OPTION}
        if not own:
            raise
        return Predicting(kind(**without), str(said), own, error)


def with_levels(trace: Trace, one: Predicting, seed: int) -> Trace:
    """The trace with all levels that the policy needs; where some are drawn, the one that was given is closed.

    Raises:
        BadInput: a level is missing and not drawn, or the policy refused a stand-in that has nothing to draw.
    """
    policy, needs = one.policy, one.policy.needs
    lossy = "lossy" in policy.traits
    if one.stand_in is not None and not one.own:
        outcomes(one.stand_in, trace.top_k)  # a share that cannot be is one, whoever reads nothing of it
    if one.stand_in is None and needs <= trace.levels:
        return trace
    from sim.workload.drawn_levels import DrawnTrace, to_draw

    drawn = frozenset[str]() if one.stand_in is None else to_draw(trace, needs, lossy)
    trace.require_all(needs - drawn, f"policy {policy.name}", _rest(trace, one, lossy))
    if not drawn:
        if one.refused is not None:
            raise one.refused
        return trace
    assert one.stand_in is not None
    made = DrawnTrace(trace.path, drawn, one.stand_in, seed)
    trace.close()
    return made


def _rest(trace: Trace, one: Predicting, lossy: bool) -> str:
    """What the stand-in can do about levels that are missing, or why it does not."""
    from sim.workload.drawn_levels import DRAWABLE, to_draw

    missing = (one.policy.needs - trace.levels) & DRAWABLE
    if one.stand_in is None:
        can = to_draw(trace, missing, lossy)
        all_of_it = can == one.policy.needs - trace.levels
        return (
            f"; or --predictor {SURROGATE}:0.85, which draws {', '.join(sorted(can))} (labelled)" if all_of_it else ""
        )
    if lossy and missing:
        return f"; {SURROGATE} draws no gates of a lossy policy: they would decide what it changes"
    return ""
