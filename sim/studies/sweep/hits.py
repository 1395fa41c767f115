"""`--hits-only`: hit rates of every budget from one pass, where a policy is such a cache (`sim.studies.hit_curve`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from sim import __version__
from sim.base.errors import BadInput
from sim.base.kinds import BYTES, SHARE, capacity_of
from sim.base.units import show_count, show_frac
from sim.options import OPTIONS, RunSpec
from sim.studies.pool import n_cores
from sim.studies.sweep.grid import Block, Point, points_of
from sim.studies.sweep.table import arrow, typed

if TYPE_CHECKING:
    import pyarrow as pa

    from sim.studies.pool import Call
    from sim.studies.sweep.run import Progress
    from sim.studies.sweep.sweep import Asked

TABLE = "hits.parquet"
ANY_HW = "rtx3090"
"""A machine to set the run up with: no figure of it has a say in a hit."""
NO_SAY = ("hw", "cpu", "pcie", "engine", "vram", "gpus", "sim_simulator", "sim_hit")
MOST_SHOWN = 10
VARIED = ("precision", "split", "seed", "batch", "scheduler", "batch_static", "prefill_chunk", "draft")


class Curve(msgspec.Struct, frozen=True):
    """One policy's hits on one trace, as plain data: by experts of room, from none to all."""

    label: str
    policy: str
    params: dict[str, Any]
    meant: dict[str, Any]
    spec: RunSpec
    n_requests: int
    least: int
    n_experts: int
    expert_bytes: int
    hit_rate: list[float | None]
    prefill_hit_rate: list[float | None]
    copies: list[int]
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The policy, and what of the run is not as usual."""
        usual = RunSpec(policy="", hw="")
        own = [(name, getattr(self.spec, name)) for name in VARIED]
        return ", ".join([self.label, *(f"{name} {value}" for name, value in own if value != getattr(usual, name))])


def curve_of(label: str, spec: RunSpec) -> Curve:
    """The curve of a run, whatever its budget. Raises BadInput."""
    from sim.setup.prepare import prepare
    from sim.studies.hit_curve import hit_curve
    from sim.workload.iterations import PREFILL

    room = {"hw.vram_bytes": 10**15, "hw.cpu.memory_bytes": 10**15}
    setup = prepare(msgspec.structs.replace(spec, set={**spec.set, **room}))
    try:
        found = hit_curve(setup)
        every = range(found.n_experts + 1)
        return Curve(
            label,
            setup.policy.name,
            dict(setup.policy.settings),
            setup.resolved(),
            spec,
            len(setup.requests),
            found.least,
            found.n_experts,
            found.expert_bytes,
            [found.rate(n) for n in every],
            [found.rate(n, PREFILL) for n in every],
            [found.copies(n) for n in every],
            tuple(setup.notes()),
        )
    finally:
        setup.close()


@dataclass
class Hits:
    """Curves, and the sizes that were asked for; none for all."""

    curves: list[Curve]
    experts: list[int]
    fracs: list[float]

    def sizes(self, curve: Curve) -> list[int]:
        """Experts of room that the table tells of."""
        wanted = [*self.experts, *(max(1, int(frac * curve.n_experts)) for frac in self.fracs)]
        chosen = sorted(set(wanted)) if wanted else range(1, curve.n_experts + 1)
        return [n for n in chosen if curve.least <= n <= curve.n_experts]

    def table(self) -> pa.Table:
        """One row per curve and size."""

        rows = [_row(curve, n) for curve in self.curves for n in self.sizes(curve)]
        names = list(dict.fromkeys(name for row in rows for name in row))
        return arrow([typed(name, [row.get(name) for row in rows]) for name in names])

    def answer(self) -> str:
        """The first line: which cache finds most, and how much a quarter of the room is worth."""
        first, *others = self.curves
        if others and any((c.meant["trace"], c.n_experts) != (first.meant["trace"], first.n_experts) for c in others):
            return f"{show_count(len(self.curves), 'curve')} of hits, on several traces or models"
        sizes = [n for n in self.sizes(first) if all(n >= c.least for c in others)]
        if not sizes:
            return f"{first.title}: none of these sizes can be had; it needs {first.least} experts at least"
        best = [max(self.curves, key=lambda c: c.hit_rate[n] or 0.0) for n in sizes]
        most = max(self.curves, key=lambda c: sum(found is c for found in best))
        at = min(sizes, key=lambda n: abs(n - first.n_experts / 4))
        if all(c.hit_rate[n] is None for c in self.curves for n in sizes):
            return f"{most.title}: no hit rate, since no request has a second output token: nothing decodes"
        text = f"{show_frac(most.hit_rate[at])} hits with room for {at} of {first.n_experts} experts"
        if others:
            return f"{most.title}: most hits in {sum(c is most for c in best)} of {len(sizes)} sizes; {text}"
        return f"{most.title}: {text}"

    def text(self) -> str:
        """Hit rates by size, a column for each curve."""
        from sim.base.tables import render, table

        blocks = []
        alike: dict[tuple[str, int], list[Curve]] = {}
        for curve in self.curves:
            alike.setdefault((curve.meant["trace"], curve.n_experts), []).append(curve)
        for (trace, n_all), curves in alike.items():
            sizes = sorted({n for curve in curves for n in self.sizes(curve)})
            step = max(1, -(-len(sizes) // MOST_SHOWN))
            shown = table("experts", "share", *(curve.title for curve in curves))
            for n in sizes[step - 1 :: step]:
                rates = [show_frac(curve.hit_rate[n]) if n >= curve.least else "-" for curve in curves]
                shown.add_row(str(n), show_frac(n / n_all), *rates)
            blocks.append(f"{trace}: decode hits by room\n\n{render(shown, spare=())}")
        return "\n".join(blocks)


def _row(curve: Curve, n: int) -> dict[str, Any]:
    meant = {key: curve.meant[key] for key in ("model", "model_sha256", "trace", "trace_sha256")}
    return {
        "label": curve.label,
        "policy": curve.policy,
        "policy_sha256": curve.meant.get("policy_sha256"),
        **meant,
        "version": __version__,
        "requests": curve.n_requests,
        **{name: getattr(curve.spec, name) for name in VARIED},
        "experts": n,
        "cache_frac": n / curve.n_experts,
        "expert_bytes": curve.expert_bytes,
        "cache_capacity_bytes": n * curve.expert_bytes,
        "hit_rate": curve.hit_rate[n],
        "prefill_hit_rates.hit": curve.prefill_hit_rate[n],
        "demand_copies_n": curve.copies[n],
        "h2d_bytes": curve.copies[n] * curve.expert_bytes,
        **{f"params.{key}": value for key, value in curve.params.items()},
    }


def hits_only(asked: Asked, progress: Progress) -> Hits:
    """The curves of every policy, trace, model and workload asked for.

    Raises:
        BadInput: an axis that no hit depends on, or a policy that is no such cache.
    """
    experts: list[float] = []
    fracs: list[float] = []
    blocks = []
    for block in asked.blocks(Block(axes={"hw": [ANY_HW]})):
        extra = [name for name in NO_SAY if name in block.axes and block.axes[name] != [ANY_HW]]
        if extra or block.set:
            what = OPTIONS.by_field[extra[0]].said if extra else f"--set {next(iter(block.set))}"
            raise BadInput(f"--hits-only, got {what}: these hits do not depend on it; leave it out")
        for asked_room in block.axes.pop("cache", []):
            room = capacity_of(str(asked_room))
            if room.unit == BYTES:
                raise BadInput(f"--hits-only, got --cache {room}: experts or a share; write e.g. --cache 40%")
            (fracs if room.unit == SHARE else experts).append(room.amount)
        blocks.append(block)
    points, _ = points_of(blocks, asked.most)
    return Hits(_curves(points, asked, progress), [int(n) for n in experts], fracs)


def _curves(points: Sequence[Point], asked: Asked, progress: Progress) -> list[Curve]:
    calls: list[Call] = [(curve_of, (point.label, point.spec)) for point in points]
    found: dict[int, Curve] = {}
    with closing(asked.pool(calls, asked.workers or n_cores())) as stream:
        for index, curve in stream:
            found[index] = curve
            progress(len(found), len(calls), "counting hits")
    return [found[index] for index in range(len(calls))]
