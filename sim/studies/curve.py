"""Hit rates of a cache of every size, from one pass over its trace (`sim.base.stack_distance`)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sim import __version__
from sim.base.errors import BadInput
from sim.base.kinds import Capacity, capacity_of
from sim.base.stack_distance import RankStack, RecencyStack
from sim.base.units import show_count, show_frac
from sim.figures import SCHEMA
from sim.options import OPTIONS, RunSpec, unusual
from sim.policy.api import overrides
from sim.policy.decisions import Serve
from sim.policy.order import EXPERT, Rank, Recency
from sim.studies.runner.pool import in_order
from sim.studies.runner.records import check_table
from sim.studies.sweep.grid import MOST_POINTS, Block, points_of
from sim.workload.future import closed_loop
from sim.workload.iterations import DECODE, PHASES, PREFILL, Iteration

if TYPE_CHECKING:
    import pyarrow as pa

    from sim.engine.engine import Engine
    from sim.policy.api import Policy
    from sim.setup.setup import Setup
    from sim.studies.runner.runner import Progress

TABLE = "curve.parquet"
ANY_HW = "rtx3090"
"""A machine to set the run up with: no figure of it has a say in a hit."""
VARIED = ("precision", "split", "seed", "batch", "scheduler", "batch_static", "prefill_chunk", "draft")
AXES = ("model", "trace", "requests", "arrivals", "cache", *VARIED)
"""What a hit may depend on, besides policy and `model.*`, and the sizes that are told."""
NO_SAY = "leave it out: hits of one cache are counted, without a machine, a clock or a pool of keys and values"
MOST_SHOWN = 10
SERVE = (Serve(),)
DECIDING = (
    *("request_start", "iteration_start", "layer_enter", "gate_input", "assign", "gate_done", "layer_done"),
    *("iteration_end", "request_end", "idle", "initial", "victim", "predictor_bytes", "drafting"),
)


class Curve(msgspec.Struct, frozen=True):
    """One policy's hits on one trace, by experts of room, from none to all.

    Attributes:
        least: experts of room that the policy needs.
        asked: phase -> experts asked for. hits: phase -> by experts of room, how many of them were there.
    """

    label: str
    policy: str
    params: dict[str, Any]
    meant: dict[str, Any]
    spec: RunSpec
    n_requests: int
    least: int
    n_experts: int
    expert_bytes: int
    asked: dict[str, int]
    hits: dict[str, list[int]]
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The policy, and what of the run is not as usual."""
        own = [row.titled(value) for row, value in unusual(self.spec) if row.field in VARIED]
        return ", ".join([self.label, *own])

    def holds(self, room: Capacity) -> int:
        """How many experts a room holds."""
        return room.experts(self.n_experts, self.expert_bytes)

    def rate(self, n: int, phase: str = DECODE) -> float | None:
        """Share of the experts asked for that were there, with room for `n`."""
        return self.hits[phase][n] / self.asked[phase] if self.asked[phase] else None

    def copies(self, n: int) -> int:
        """Copies on demand in both phases: one for each expert that was not there."""
        return sum(self.asked[phase] - self.hits[phase][n] for phase in PHASES)

    def row(self, n: int) -> dict[str, Any]:
        """Of the table."""
        return {
            "label": self.label,
            "policy": self.policy,
            "policy_sha256": self.meant.get("policy_sha256"),
            **{key: self.meant[key] for key in ("model", "model_sha256", "trace", "trace_sha256")},
            "version": __version__,
            "requests": self.n_requests,
            **{name: getattr(self.spec, name) for name in VARIED},
            "experts": n,
            "cache_frac": n / self.n_experts,
            "expert_bytes": self.expert_bytes,
            "cache_capacity_bytes": n * self.expert_bytes,
            "hit_rate": self.rate(n),
            "prefill_hit_rates.hit": self.rate(n, PREFILL),
            "demand_copies_n": self.copies(n),
            "h2d_bytes": self.copies(n) * self.expert_bytes,
            **{f"params.{key}": value for key, value in self.params.items()},
        }


def curve_of(label: str, spec: RunSpec) -> Curve:
    """The curve of a run; its hardware and its budget do not matter.

    Raises:
        BadInput: hits of one size do not tell another's under that policy, or time decides what runs together.
    """
    from sim.run import assemble
    from sim.setup.prepare import prepare

    room = {"hw.vram_bytes": 10**15, "hw.cpu.memory_bytes": 10**15}
    setup = prepare(msgspec.structs.replace(spec, set={**spec.set, **room}))
    try:
        if not setup.timeless:
            raise BadInput(
                "curve, got batches of requests that arrive over time: time decides what runs together; add --arrivals "
                "none, or replay each size: moesim sweep --cache 10%:90%:10%"
            )
        engine, _ = assemble(setup)
        order = _order_of(setup, engine)
        n_all = setup.model.n_moe_layers * setup.model.n_experts
        n_caches = setup.model.n_moe_layers if order.per_layer else 1
        count = _by_rank if isinstance(order, Rank) else _by_recency
        asked, stacks = count(setup, n_caches)
        return Curve(
            label,
            setup.policy.name,
            dict(setup.policy.settings),
            setup.resolved(),
            spec,
            len(setup.requests),
            n_caches,
            n_all,
            engine.view.expert_bytes,
            asked,
            {phase: _by_room([stack.hits(kind) for stack in stacks], n_all) for kind, phase in enumerate(PHASES)},
            tuple(setup.notes()),
        )
    finally:
        setup.close()


def _order_of(setup: Setup, engine: Engine) -> Recency | Rank:
    """The policy's order. Raises BadInput where it is another, or where the policy decides more than that."""
    policy = setup.policy
    order, more = policy.order, [hook for hook in DECIDING if overrides(policy, hook)]
    ranked = policy.ranks_by_trace and isinstance(order, Rank)
    if ranked:
        more = [hook for hook in more if hook != "gate_done"]  # which says the ranks
    if more or not (ranked or isinstance(order, Recency)):
        answers = (
            f"it answers {more[0]}, so hits of one size do not tell another's" if more else "its order is no stack"
        )
        raise BadInput(
            f"curve, got policy {policy.name}: {policy.one_size or answers}; replay each size: moesim sweep "
            f"--policy {policy.name} --cache 10%:90%:10%"
        )
    assert isinstance(order, Recency | Rank)
    divided = policy.layer_budgets(engine.view)
    n_layers, size = setup.model.n_moe_layers, engine.view.expert_bytes
    each, more_ = divmod(engine.view.capacity_of(0), n_layers)
    evenly = [(each + (layer < more_)) * size for layer in range(n_layers)]
    if (divided is not None) != order.per_layer or (divided is not None and list(divided[0]) != evenly):
        raise BadInput(f"curve, got policy {policy.name}: its layers do not share the room evenly; leave it out")
    return order


def _by_recency(setup: Setup, n_caches: int) -> tuple[dict[str, int], list[RecencyStack]]:
    """Experts asked for by phase, and the stacks of a least-recently-used cache."""
    n_layers, n_experts = setup.model.n_moe_layers, setup.model.n_experts
    stacks = [RecencyStack(n_layers * n_experts // n_caches, n_experts, len(PHASES)) for _ in range(n_caches)]
    asked = dict.fromkeys(PHASES, 0)
    for iteration in closed_loop(setup.trace, setup.batching(open_loop=False)):
        row, kind = iteration.token, iteration.number
        for layer in range(n_layers):
            if row is not None:
                ids, at, n = row.block.ids, row.at + layer * row.top_k, row.top_k
            else:
                ids, at = array("q", iteration.chosen(layer)), 0
                n = len(ids)
            asked[iteration.counted] += n
            cache = layer % n_caches
            stacks[cache].visit(ids, at, n, (layer - cache) * n_experts, kind)
    return asked, stacks


def _by_rank(setup: Setup, n_caches: int) -> tuple[dict[str, int], list[RankStack]]:
    """The same of a cache that ranks experts by the trace alone: ranks are those of a replay with room for all."""
    from sim.run import execute

    n_layers, n_experts = setup.model.n_moe_layers, setup.model.n_experts
    n = n_layers * n_experts // n_caches
    asked = dict.fromkeys(PHASES, 0)
    stacks: list[RankStack] = []

    def watch(policy: Policy, iteration: Iteration, layer: int, experts: Sequence[int]) -> None:
        order = policy.order
        assert isinstance(order, Rank)
        if not stacks:
            ties = [piece % n_experts * n + piece if order.ties == EXPERT else piece for piece in range(n)]
            stacks.extend(RankStack(n, n_experts, ties, cache * n_experts, len(PHASES)) for cache in range(n_caches))
        asked[iteration.counted] += len(experts)
        cache, ids = layer % n_caches, array("q", experts)
        rank: Any = order.rank
        stacks[cache].visit(ids, 0, len(ids), (layer - cache) * n_experts, iteration.number, rank)

    policy = _watched(setup.policy, watch)
    execute(replace(setup, policy=policy), bounds=False, by_layer=False)
    if policy.order.bar.any():  # type: ignore[union-attr]
        raise BadInput(
            f"curve, got policy {policy.name}: it bars experts from leaving, and a stack has none; leave it out"
        )
    return asked, stacks


def _watched(policy: Policy, watch: Callable[..., None]) -> Policy:
    """The policy, which says what each layer asked for once it is served: ranks of these are settled then, and the
    others' have not changed since its gate spoke."""
    kind: Any = type(policy)
    decides = overrides(policy, "gate_done")
    gates: list[Any] = []

    class Watched(kind):  # type: ignore[misc]
        def gate_done(self, gate: Any, view: Any) -> Any:
            gates[:] = [gate]
            return super().gate_done(gate, view) if decides else SERVE

        def layer_done(self, layer: int, view: Any) -> None:
            watch(self, gates[0].iteration, layer, gates[0].needs)

    watched: Policy = Watched(**policy.settings)
    return watched


def _by_room(by_cache: list[list[int]], n_all: int) -> list[int]:
    """Hits by experts of room in all caches, which share it evenly, the first ones taking what is left over."""
    n = len(by_cache)
    found = []
    for room in range(n_all + 1):
        each, more = divmod(room, n)
        found.append(sum(hits[each + (at < more)] for at, hits in enumerate(by_cache)))
    return found


@dataclass
class Curves:
    """Curves, and the sizes that were asked for; none for all."""

    curves: list[Curve]
    asked: list[Capacity]

    def sizes(self, curve: Curve) -> list[int]:
        """Experts of room that the table tells of."""
        chosen = sorted({curve.holds(room) for room in self.asked}) or range(1, curve.n_experts + 1)
        return [n for n in chosen if curve.least <= n <= curve.n_experts]

    def notes(self) -> list[str]:
        """What each run says of itself, and sizes that were asked for and cannot be had."""
        found = dict.fromkeys(text for curve in self.curves for text in curve.notes)
        for curve in self.curves:
            for room in self.asked:
                n = curve.holds(room)
                if not curve.least <= n <= curve.n_experts:
                    what = f"note: {curve.title}: --cache {room} is left out: it is room for {show_count(n, 'expert')}"
                    found[f"{what}, and a size has {curve.least} to {curve.n_experts}"] = None
        return list(found)

    def rows(self) -> list[dict[str, Any]]:
        """One per curve and size, all with the same names."""
        rows = [curve.row(n) for curve in self.curves for n in self.sizes(curve)]
        names = dict.fromkeys(name for row in rows for name in row)
        return [names | row for row in rows]

    def frame(self) -> pa.Table:
        """The same with a type for each column."""
        from sim.studies.sweep.table import arrow, typed

        rows = self.rows()
        return arrow([typed(name, [row[name] for row in rows]) for name in (rows[0] if rows else ())])

    def answer(self) -> str:
        """The first line: which cache finds most, and how much a quarter of the room is worth."""
        first, *others = self.curves
        if others and any((c.meant["trace"], c.n_experts) != (first.meant["trace"], first.n_experts) for c in others):
            return f"{show_count(len(self.curves), 'curve')} of hits, on several traces or models"
        sizes = [n for n in self.sizes(first) if all(n >= c.least for c in others)]
        if not sizes:
            return f"{first.title}: none of these sizes can be had; it needs {first.least} experts at least"
        best = [max(self.curves, key=lambda c: c.rate(n) or 0.0) for n in sizes]
        most = max(self.curves, key=lambda c: sum(found is c for found in best))
        at = min(sizes, key=lambda n: abs(n - first.n_experts / 4))
        if not any(curve.asked[DECODE] for curve in self.curves):
            return f"{most.title}: no hit rate, since no request has a second output token: nothing decodes"
        text = f"{show_frac(most.rate(at))} hits with room for {at} of {first.n_experts} experts"
        if others:
            return f"{most.title}: most hits in {sum(c is most for c in best)} of {len(sizes)} sizes; {text}"
        return f"{most.title}: {text}"

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {"schema": SCHEMA, "answer": self.answer(), "rows": self.rows()}

    def lines(self) -> list[str]:
        """Nothing stands between answer and table."""
        return []

    def table(self) -> str:
        """Hit rates by size, a column for each curve."""
        from sim.base.tables import tabled

        blocks = []
        alike: dict[tuple[str, int], list[Curve]] = {}
        for curve in self.curves:
            alike.setdefault((curve.meant["trace"], curve.n_experts), []).append(curve)
        for (trace, n_all), curves in alike.items():
            sizes = sorted({n for curve in curves for n in self.sizes(curve)})
            step = max(1, -(-len(sizes) // MOST_SHOWN))
            rows = [
                [str(n), show_frac(n / n_all), *(show_frac(c.rate(n)) if n >= c.least else "-" for c in curves)]
                for n in sizes[step - 1 :: step]
            ]
            titles = ["experts", "share", *(curve.title for curve in curves)]
            blocks.append(f"{trace}: decode hits by room\n\n{tabled(titles, rows, (), ())}")
        return "\n".join(blocks)


def curves(block: Block, out: Path | None, workers: int | None, progress: Progress) -> Curves:
    """The curves of every policy, trace, model and workload of a block, kept as `curve.parquet` in the folder `out`.

    Raises:
        BadInput: an axis that no hit depends on, or a policy that has no curve.
    """
    extra = [OPTIONS.by_field[name].said for name in block.axes if name not in AXES]
    extra += [f"--set {key}" for key in block.set]
    extra = [what for what in extra if not what.startswith("--set model.")]
    if extra or block.slo:
        raise BadInput(f"curve, got {(*extra, '--slo')[0]}: {NO_SAY}")
    sizes = [capacity_of(str(room)) for room in block.axes.pop("cache", []) if room is not None]
    block = Block(axes={"hw": [ANY_HW]}).over(block)
    block.check("curve")
    if out is not None:
        check_table(out / TABLE)
    points, _ = points_of([block], MOST_POINTS)
    calls = [(curve_of, (point.label, point.spec)) for point in points]
    found = in_order(calls, workers or 1, lambda n, n_all: progress(n, n_all, "counting hits"))
    told = Curves(found, sizes)
    if out is not None:
        from sim.studies.sweep.table import write

        write(out / TABLE, told.frame(), {"answer": told.answer()})
    return told
