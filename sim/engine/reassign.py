"""What a lossy policy does to the routing: checked, served, and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sim.base.errors import IllegalDecision, did_you_mean
from sim.engine.counts import DROPPED, SUBSTITUTED
from sim.machine.protocol import Machine
from sim.policy.api import Assignment
from sim.policy.mistakes import located
from sim.profiles.geometry import BITS_PER_PARAM
from sim.workload.gate import Gate, gate_of

if TYPE_CHECKING:
    from sim.engine.engine import Engine

PAIRWISE = 8
"""numpy adds fewer numbers than this from left to right."""
TWICE = "assign of {}: a token was given the same expert twice; ids must be distinct"


def reassign(engine: Engine, gate: Gate) -> Gate:
    """Let a lossy policy change the routing; count what was substituted and dropped. Returns the gate to serve."""
    policy = engine.policy
    if "lossy" not in policy.traits:
        raise IllegalDecision(f"assign of {policy.name}: changing the routing needs the trait 'lossy'; declare it")
    answer = policy.assign(gate, engine.view)
    chosen = _of_one(gate)
    if answer is None:
        if chosen is None or not count_token(engine, gate, chosen, chosen):
            before = gate.ids
            count_loss(engine, gate, before, before)
        return gate
    after = _ids(engine, gate, answer)
    alone = chosen is not None and len(after) == 1 and len(after[0]) == len(chosen)
    ids: np.ndarray | None = None
    array: np.ndarray | None = None
    if alone:
        needs = needs_of_token(engine, after[0])
    else:
        ids, array = gate.ids, np.array(after)
        needs = needs_of_rows(engine, ids, array)
    served = gate_of(gate.layer, gate.iteration, needs, engine.arrays)
    if answer.precision:
        served.precision = check_precision(engine, answer.precision)
    served.asked = {expert: n for expert, n in gate.needs.items() if expert in needs}
    hits = engine.tally.hits[gate.iteration.counted]
    if len(served.asked) < len(gate.needs):
        for expert, n_tokens in gate.needs.items():
            if expert not in needs:
                mine = after  # of the tokens that asked for it
                if not alone:
                    ids = gate.ids if ids is None else ids
                    asked = (ids == expert).any(axis=1).tolist()
                    mine = [one for one, asks in zip(after, asked, strict=True) if asks]
                kind = DROPPED if sum([one.count(-1) for one in mine]) >= len(mine) else SUBSTITUTED
                hits.count(kind, n_tokens)
                engine.tally.by_expert.more(kind, gate.layer * engine.pieces.n_experts + expert, 1)
    if chosen is None or not count_token(engine, gate, chosen, after[0]):
        count_loss(engine, gate, gate.ids if ids is None else ids, np.array(after) if array is None else array)
    if type(engine.machine).route is not Machine.route:  # nothing is computed by the others
        array = np.array(after) if array is None else array
        weights = engine.arrays.weights_of(gate.layer, array) if answer.weights is None else answer.weights
        engine.machine.route(gate.layer, array, weights)
    return served


def _of_one(gate: Gate) -> list[int] | None:
    """The experts of a token that is alone; None where several run together."""
    rows = gate.iteration.row
    if rows is not None:
        return rows[gate.layer]
    found: list[int] | None = gate.ids[0].tolist() if gate.iteration.n_tokens == 1 else None
    return found


def _ids(engine: Engine, gate: Gate, answer: Any) -> list[list[int]]:
    """The ids of an assignment. Raises IllegalDecision for an answer that is none."""
    try:
        if isinstance(answer, Assignment) and (not answer.precision or isinstance(answer.precision, dict)):
            ids: Any = answer.ids
            if type(ids) is list and len(ids) == 1 and set(map(type, ids[0])) == {int}:
                return ids
            found = np.asarray(ids, dtype=np.int64)
            if found.ndim == gate.ids.ndim:
                rows: list[list[int]] = found.tolist()
                return rows
    except (TypeError, ValueError, OverflowError):
        pass
    error = IllegalDecision(f"got {answer!r}: it answers with an Assignment of ids and weights [n, k], or None")
    raise located(error, engine.policy, "assign", gate.layer)


def needs_of_rows(engine: Engine, before: np.ndarray, after: np.ndarray) -> dict[int, int]:
    """Expert -> tokens of a changed routing [n, k]. Raises IllegalDecision for what is none."""
    if after.shape != before.shape or after.min(initial=0) < -1 or after.max(initial=0) >= engine.pieces.n_experts:
        raise IllegalDecision(
            f"assign of {engine.policy.name}, got ids of shape {after.shape}: "
            f"must be {before.shape} of expert ids or -1"
        )
    ordered = np.sort(after, axis=1)
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise IllegalDecision(TWICE.format(engine.policy.name))
    counts = np.bincount(after[after >= 0], minlength=engine.pieces.n_experts)
    return {int(e): int(counts[e]) for e in np.flatnonzero(counts)}


def needs_of_token(engine: Engine, ids: list[int]) -> dict[int, int]:
    """`needs_of_rows` of a single token, the common case, without arrays, in the order of the ids."""
    needs: dict[int, int] = {}
    n_kept = 0
    for expert in ids:
        if not -1 <= expert < engine.pieces.n_experts:
            raise IllegalDecision(f"assign of {engine.policy.name}, got ids {ids}: must be expert ids or -1")
        if expert != -1:
            needs[expert] = 1
            n_kept += 1
    if len(needs) < n_kept:
        raise IllegalDecision(TWICE.format(engine.policy.name))
    return needs


def check_precision(engine: Engine, precision: dict[int, str]) -> dict[int, str]:
    """Raises IllegalDecision for a precision that the model's experts have no size for."""
    for name in set(precision.values()):
        if name not in BITS_PER_PARAM:
            raise IllegalDecision(
                f"assign of {engine.policy.name}, got precision {name!r}: {did_you_mean(name, BITS_PER_PARAM)}"
            )
    return precision


def count_loss(engine: Engine, gate: Gate, before: np.ndarray, after: np.ndarray) -> None:
    """Activations changed and gate mass kept, from the full scores where the trace has them.

    Without scores and weights the mass is unknown and stays uncounted.
    """
    loss, levels = engine.tally.loss, engine.arrays.trace.levels_prefill
    served = after >= 0
    loss.activations += before.size
    if after is not before:
        same = (after[:, :, None] == before[:, None, :]).any(axis=2)
        loss.dropped += int((~served).sum())
        loss.changed += int((~same & served).sum())
    if "scores" in levels:
        scores, rows = engine.arrays.scores()[:, gate.layer], np.arange(len(before))[:, None]
        mass = scores[rows, before] / gate.score_scale
        loss.mass_before += float(mass.sum())
        if after is not before:
            mass = scores[rows, np.maximum(after, 0)] / gate.score_scale
    elif "weights" in levels:
        weights = engine.arrays.weights()[:, gate.layer]
        loss.mass_before += float(weights.sum())
        # Without full scores a substitute's own mass is unknown: count what was kept of the original choice.
        kept = (before[:, :, None] == after[:, None, :]).any(axis=2)
        loss.mass_kept += float(weights[kept].sum())
        return
    else:
        return
    loss.mass_kept += float(mass[served].sum())


def count_token(engine: Engine, gate: Gate, chosen: list[int], after: list[int]) -> bool:
    """`count_loss` of a single token without arrays: the same sums in the same order. False where that cannot be."""
    arrays = engine.arrays
    if len(chosen) >= PAIRWISE or "scores" not in arrays.trace.levels_prefill:
        return False
    loss, scores, scale = engine.tally.loss, arrays.scores_of_token()[gate.layer], arrays.trace.score_scale
    mass_before = mass_kept = 0.0
    for expert in chosen:
        score = scores[expert]
        mass_before += score / scale
    loss.activations += len(chosen)
    loss.mass_before += mass_before
    if after is chosen:
        loss.mass_kept += mass_before
        return True
    served = [expert for expert in after if expert >= 0]
    loss.dropped += len(chosen) - len(served)
    loss.changed += sum([expert not in chosen for expert in served])
    for expert in served:
        score = scores[expert]
        mass_kept += score / scale
    loss.mass_kept += mass_kept
    return True
