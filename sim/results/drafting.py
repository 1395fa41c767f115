"""What speculative decoding came to: tokens a step, acceptance, what drafting took, bytes for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.figures import Drafting, Share

if TYPE_CHECKING:
    from sim.engine.report import Report
    from sim.setup.setup import Setup


def drafting(setup: Setup, report: Report) -> Drafting | None:
    """Of a run that is over; None where nothing was drafted."""
    found, drafter = report.drafted, setup.drafter
    if found is None or drafter is None:
        return None
    return Drafting(
        asked=drafter.draft.title,
        k=drafter.draft.k,
        steps=found.n_steps,
        drafted=found.n_drafted,
        accepted=found.n_accepted,
        tokens_per_step=(found.n_accepted + found.n_steps) / found.n_steps if found.n_steps else None,
        acceptance=_share(found.n_accepted, found.n_drafted),
        acceptance_by_position=[_share(n, of) for n, of in zip(found.taken, found.tried, strict=True)],
        draft_time_s=found.took_s,
        draft_bytes=setup.memory.parts.draft_bytes,
        h2d_bytes_per_token=report.lanes.h2d_bytes / report.n_decoded if report.n_decoded else None,
    )


def _share(n: int, of: int) -> Share:
    return n / of if of else None
