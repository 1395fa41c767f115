"""Policies that decide at random, and legally: every hook, every decision, in any order; seeded, so told twice alike.

`random_policy(rng)` makes a class and its arguments. An instance writes down every call it gets with what it sees
(`calls`), so that two engines that ask it in another order, or show it something else, are told apart at that call.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np

from sim.policy import (
    Assignment,
    Cancel,
    DropQueue,
    Evict,
    Fetch,
    Policy,
    Predict,
    Prefetch,
    Requeue,
    RunCpu,
    RunCpuAhead,
    RunGpu,
    RunPart,
    Serve,
    Wait,
    WriteBack,
    order,
)

LANES, BASES = ("side", "gpu", "host"), ("measured", "datasheet", "assumed")
CUTS = ((0.0, 1.0), (0.0, 0.5, 1.0), (0.0, 0.25, 0.75, 1.0), (0.0, 1 / 3, 1.0))
OPTIONAL = (
    "request_start",
    "iteration_start",
    "layer_enter",
    "gate_input",
    "gate_done",
    "layer_done",
    "iteration_end",
    "request_end",
    "idle",
    "accessed",
    "placed",
    "evicted",
)


def key(piece: Any) -> tuple[Any, ...]:
    """A piece by what it is."""
    return piece.layer, piece.expert, piece.start_frac, piece.stop_frac, piece.precision, piece.gpu


class Aimless:
    """The hooks; `random_policy` picks which of them a class has."""

    def set_up(self, seed: int, unit_s: float, busy: float, reckless: float, options: dict[str, Any]) -> None:
        self.rng, self.unit_s, self.busy, self.reckless = Random(seed), unit_s, busy, reckless
        self.options = options
        self.calls: list[Any] = []
        self.tickets: list[Any] = []
        self.ahead: set[tuple[int, int]] = set()  # computed ahead in this iteration

    # -- helpers ----------------------------------------------------------------------------------------------------

    def saw(self, hook: str, *seen: Any) -> None:
        self.calls.append((hook, *seen))

    def some_piece(self, view: Any, layer: int | None = None) -> Any:
        rng = self.rng
        layer = rng.randrange(view.n_layers) if layer is None else layer
        return self.form(view, layer, rng.randrange(view.n_experts))

    def form(self, view: Any, layer: int, expert: int) -> Any:
        """The whole expert, or a part, perhaps in another precision."""
        rng = self.rng
        if not self.options["parts"] or rng.random() < 0.5:
            return view.piece(layer, expert)
        precision = rng.choice((None, self.options["lower"]))
        if rng.random() < 0.25:
            return rng.choice(view.matrices(layer, expert, rng.choice((2, 3)), precision))
        cuts = rng.choice(CUTS)
        at = rng.randrange(len(cuts) - 1)
        return view.part(layer, expert, cuts[at], cuts[at + 1], precision)

    def after(self) -> tuple[Any, ...]:
        rng = self.rng
        return tuple(rng.sample(self.tickets, min(len(self.tickets), rng.choice((0, 0, 0, 1, 2)))))

    def keep(self, ticket: Any) -> None:
        if ticket is not None:
            self.tickets.append(ticket)
            del self.tickets[:-6]

    def candidates(self, view: Any, piece: Any) -> list[Any]:
        """What may leave for a piece."""
        return [
            one
            for one in view.residents()
            if one.gpu == piece.gpu and view.evictable(one) and (not self.options["divide"] or one.layer == piece.layer)
        ]

    def room_for(self, view: Any, piece: Any) -> bool:
        """Whether a demand of it can be met."""
        leaving = sum(one.n_bytes for one in self.candidates(view, piece))
        free = view.free_bytes(piece.gpu)
        if self.options["divide"]:
            used = sum(one.n_bytes for one in view.residents() if (one.gpu, one.layer) == (piece.gpu, piece.layer))
            free = min(free, self.layer_budgets(view)[piece.gpu][piece.layer] - used)  # type: ignore[index]
        return piece.n_bytes <= free + leaving

    # -- before the run ---------------------------------------------------------------------------------------------

    def min_experts(self, view: Any) -> int:
        return self.options["min_experts"]

    def predictor_bytes(self, view: Any) -> int:
        return self.options["predictor_bytes"]

    def layer_budgets(self, view: Any) -> list[list[int]] | None:
        if not self.options["divide"]:
            return None
        return [
            [view.capacity_of(gpu) * view.expert_bytes // view.n_layers] * view.n_layers for gpu in range(view.n_gpus)
        ]

    def bind(self, view: Any) -> None:
        if self.options["order"]:
            self.order = native_order(self.options["order"], self.rng, view.n_layers * view.n_experts)
        prices = view.prices
        self.saw(
            "bind",
            view.capacity,
            view.expert_bytes,
            [view.capacity_of(g) for g in range(view.n_gpus)],
            prices.copy_s(),
            prices.copy_s(7),
            prices.load_s(),
            prices.load_s(view.expert_bytes // 2),
            prices.back_s(),
            prices.gpu_s(2),
            prices.cpu_s(3),
            prices.expert_s(),
            prices.attention_s(5),
            prices.shared_s(),
            prices.head_s(),
        )

    def initial(self, view: Any) -> Iterator[Any]:
        free = [view.free_bytes(gpu) for gpu in range(view.n_gpus)]
        left = None if not self.options["divide"] else [list(layers) for layers in self.layer_budgets(view) or ()]
        seen = set()
        for _ in range(self.options["initial"]):
            piece = self.some_piece(view)
            short = left is not None and left[piece.gpu][piece.layer] < piece.n_bytes
            if piece not in seen and piece.n_bytes <= free[piece.gpu] and not short:
                seen.add(piece)
                free[piece.gpu] -= piece.n_bytes
                if left is not None:
                    left[piece.gpu][piece.layer] -= piece.n_bytes
                yield piece

    # -- what may be said at any time -------------------------------------------------------------------------------

    def anything(self, view: Any, hook: str) -> Iterator[Any]:
        """A few decisions of any kind."""
        rng = self.rng
        self.saw(
            hook,
            view.layer,
            view.phase,
            view.pending_experts(),
            [view.free_bytes(g) for g in range(view.n_gpus)],
            [key(piece) for piece in view.residents()],
        )
        first = view.first_evictable(view.residents())
        assert first is next((one for one in view.residents() if view.evictable(one)), None)
        ranks = getattr(self, "order", None)
        if ranks is not None and hasattr(ranks, "rank"):
            ranks.rank[rng.randrange(len(ranks.rank))] = rng.choice((0.0, 1.0, 2.0, 3.0, rng.random()))
            ranks.bar[rng.randrange(len(ranks.bar))] = rng.choice((0, 0, 0, 0, 1, 2, 3))
        while rng.random() < self.busy:
            decision = self.one(view)
            if decision is not None:
                ticket = yield decision
                self.saw(type(decision).__name__, ticket is None)
                self.keep(ticket)

    def one(self, view: Any) -> Any:
        rng, options = self.rng, self.options
        reckless = rng.random() < self.reckless
        kinds: list[Any] = [Prefetch, Fetch, Evict, Predict, Wait]
        kinds += [Cancel, DropQueue, Requeue, "ask"] if options["timing"] else []
        kinds += [RunCpuAhead] if options["cpu"] and options["lossy"] else [WriteBack] if not options["cpu"] else []
        kind = rng.choices(kinds, options["habits"][: len(kinds)])[0]
        piece = self.some_piece(view)
        residents = list(view.residents())
        if kind is Prefetch:
            return Prefetch(piece, rng.choice((0.0, 0.5, 1.0, rng.random())), self.after())
        if kind is Fetch:
            return Fetch(piece, self.after()) if reckless or view.holds(piece) or self.room_for(view, piece) else None
        if kind is Evict:
            if reckless:
                return Evict(piece)
            able = [one for one in residents if view.evictable(one)]
            return Evict(rng.choice(able)) if able else None
        if kind is WriteBack:
            return WriteBack(rng.choice(residents), self.after()) if residents else None
        if kind is Predict:
            lasts_s = rng.choice((0.0, 0.5, 1.0, 3.0)) * self.unit_s
            return Predict(lasts_s, rng.choice(LANES), rng.random() < 0.3, rng.choice(BASES))
        if kind is Wait:
            return Wait(self.after())
        if kind is Cancel:
            return Cancel(rng.choice([*residents, *view.queued(), piece]))
        if kind is DropQueue:
            return DropQueue(rng.choice((None, rng.randrange(view.n_layers))))
        if kind is Requeue:
            if self.prefetch_depth is None and not reckless:  # type: ignore[attr-defined]
                return None
            wanted = [(self.some_piece(view), rng.choice((0.0, 1.0, rng.random())), self.after()) for _ in range(3)]
            return Requeue(wanted, rng.choice((None, rng.randrange(view.n_layers))))
        if kind is RunCpuAhead:
            layer = view.layer + 1 + rng.randrange(2)
            expert = (layer, rng.randrange(view.n_experts))
            if not reckless and (layer >= view.n_layers or view.phase == "" or expert in self.ahead):
                return None
            self.ahead.add(expert)
            return RunCpuAhead(*expert, rng.randint(1, 3))
        self.saw("ask", [view.arrived(one) for one in residents], [key(one) for one in view.queued()])
        return None

    def request_start(self, request: Any, view: Any) -> Iterator[Any]:
        return self.anything(view, f"request_start {request.index}")

    def iteration_start(self, iteration: Any, view: Any) -> Iterator[Any]:
        self.ahead.clear()
        where = f"{iteration.index} {iteration.n_tokens} {float(view.embeddings().sum())}"
        return self.anything(view, f"iteration_start {where}")

    def layer_enter(self, layer: int, view: Any) -> Iterator[Any]:
        return self.anything(view, f"layer_enter {layer}")

    def gate_input(self, layer: int, view: Any) -> Iterator[Any]:
        return self.anything(view, f"gate_input {layer}")

    def layer_done(self, layer: int, view: Any) -> Iterator[Any]:
        return self.anything(view, f"layer_done {layer}")

    def iteration_end(self, iteration: Any, view: Any) -> Iterator[Any]:
        return self.anything(view, f"iteration_end {iteration.index}")

    def request_end(self, request: Any, view: Any) -> list[Any]:
        self.saw("request_end", request.index)
        return [Prefetch(self.some_piece(view)) for _ in range(self.rng.randrange(2))]

    def idle(self, view: Any) -> Iterator[Any]:
        return self.anything(view, "idle")

    def copy_done(self, piece: Any, view: Any) -> Iterator[Any]:
        return self.anything(view, f"copy_done {key(piece)}")

    # -- questions --------------------------------------------------------------------------------------------------

    def accessed(self, piece: Any, hit: bool, view: Any) -> None:
        self.saw("accessed", key(piece), hit, view.pending_tokens(piece), view.layer)

    def placed(self, piece: Any, view: Any) -> None:
        self.saw("placed", key(piece))

    def evicted(self, piece: Any, view: Any) -> None:
        self.saw("evicted", key(piece))

    def victim(self, piece: Any, speculative: bool, view: Any) -> Any:
        able = self.candidates(view, piece)
        self.saw("victim", key(piece), speculative, [key(one) for one in able])
        if not able or (speculative and self.rng.random() < 0.2):
            return None
        if self.options["oracle"]:
            return max(able, key=lambda one: (view.future.next_use(one.layer, one.expert), one.index))
        return self.rng.choice(able)

    def stats(self) -> dict[str, float]:
        return {"calls": float(len(self.calls)), "draw": self.rng.random()}

    # -- a layer ----------------------------------------------------------------------------------------------------

    def assign(self, gate: Any, view: Any) -> Any:
        rng, n = self.rng, view.n_experts
        ids = gate.ids.copy()
        self.saw("assign", gate.layer, ids.tolist(), dict(gate.needs))
        if rng.random() < 0.3:
            return None
        for row in ids:
            for at in range(len(row)):
                if rng.random() < 0.2:
                    free = [expert for expert in range(n) if expert not in row]
                    row[at] = rng.choice([-1, *free])
        lower = {int(e): self.options["lower"] for e in np.unique(ids[ids >= 0]) if rng.random() < 0.3}
        return Assignment(ids, gate.weights_of(ids), lower or None)

    def gate_done(self, gate: Any, view: Any) -> Iterator[Any]:
        rng, layer = self.rng, gate.layer
        self.saw(
            "gate_done",
            layer,
            gate.phase,
            dict(gate.needs),
            dict(gate.asked),
            dict(gate.precision),
            gate.ids.tolist(),
            float(gate.scores.sum()),
            float(gate.weights.sum()),
        )
        pending = list(gate.needs)
        rng.shuffle(pending)
        for expert in pending:
            yield from self.anything(view, f"before {expert}")
            way = rng.random()
            if way < 0.1:
                yield Serve()
                return
            if self.options["cpu"] and way < 0.4:
                self.keep((yield RunCpu(expert, rng.choice((None, None, min(layer + 1, view.n_layers - 1))))))
            elif self.options["parts"] and way < 0.7:
                yield from self.in_parts(view, layer, expert)
            else:
                piece = view.piece(layer, expert)
                if not view.holds(piece):
                    self.keep((yield Fetch(piece, self.after())))
                yield from self.anything(view, f"fetched {expert}")
                self.keep((yield RunGpu(expert, self.after())))

    def in_parts(self, view: Any, layer: int, expert: int) -> Iterator[Any]:
        """Columns in any order, or matrices in theirs; run one by one, in slices, or as they lie."""
        rng = self.rng
        kind = rng.randrange(3)
        cuts = rng.choice(CUTS)
        if kind == 0:
            pieces = view.matrices(layer, expert, rng.choice((2, 3)))
        else:
            pieces = [view.part(layer, expert, a, b) for a, b in pairwise(cuts)]
            rng.shuffle(pieces)
        missing = [Fetch(piece, self.after()) for piece in pieces if not view.holds(piece)]
        if rng.random() < 0.5:  # at once
            for ticket in (yield missing if kind else tuple(missing)):
                self.keep(ticket)
        else:
            for fetch in missing:
                self.keep((yield fetch))
        how = rng.randrange(4)
        if how == 0:
            self.keep((yield RunGpu(expert, self.after())))
        elif how == 1 and kind:
            self.keep((yield RunPart(view.piece(layer, expert), self.after(), tuple(pieces))))
        else:
            cut = rng.randrange(len(pieces) + 1) if how == 2 else len(pieces)
            for piece in pieces[:cut]:
                self.keep((yield RunPart(piece, self.after())))
            if cut < len(pieces):
                yield from self.anything(view, f"begun {expert}")
                self.keep((yield RunGpu(expert, self.after())))


def native_order(name: str, rng: Random, n: int) -> Any:
    """An order by its name, `Rank` with what it may be told."""
    per_layer = rng.random() < 0.3
    if name != "Rank":
        return getattr(order, name)(per_layer)
    made = order.Rank(n, per_layer, rng.choice(("expert", "index")), rng.random() < 0.3, rng.random() < 0.3)
    made.rank[:] = [rng.choice((0.0, 1.0, rng.random())) for _ in range(n)]
    return made


def random_policy(rng: Random, unit_s: float, closed: bool, expert_bytes: int) -> Policy:
    """A policy of a class of its own, with the hooks, traits and habits the generator draws."""
    chance = rng.random
    options: dict[str, Any] = {
        "parts": chance() < 0.5,
        "divide": chance() < 0.15,
        "timing": chance() < 0.6,
        "cpu": chance() < 0.3,
        "lossy": chance() < 0.35,
        "oracle": closed and chance() < 0.2,
        "split": chance() < 0.3,
        "initial": rng.choice((0, 0, 2, 8)),
        "min_experts": rng.choice((0, 1, 1, 2)),
        "predictor_bytes": rng.choice((0, 0, 0, expert_bytes // 3)),
        "lower": rng.choice(("int4", "int2", "fp8")),
        "order": None,
        "habits": [3 * rng.choice((1, 4)), *(rng.choice((0.2, 1, 1, 4)) for _ in range(9))],
    }
    if chance() < 0.35:
        options["order"] = rng.choice(("Recency", "Insertion", "Rank"))
    share = rng.choice((0.2, 0.6, 1.0))
    hooks = [name for name in OPTIONAL if chance() < share]
    hooks += [] if options["order"] else ["victim"]
    hooks += ["stats", "bind", "initial", "min_experts", "predictor_bytes", "layer_budgets"]
    hooks += ["assign"] if options["lossy"] else []
    hooks += ["copy_done"] if options["timing"] and chance() < 0.7 else []
    if options["cpu"] and options["lossy"]:
        hooks.append("iteration_start")  # forgets what has been computed ahead
    known = set(Policy.__dict__)
    body = {name: getattr(Aimless, name) for name in set(hooks)}
    body |= {name: value for name, value in vars(Aimless).items() if name not in known and not name.startswith("__")}
    traits = frozenset(trait for trait in ("timing", "cpu", "lossy", "oracle") if options[trait])
    depth = rng.choice((None, 1, 2, 4)) if options["timing"] else None
    needs = frozenset({"experts", "scores", "weights", "embeddings"})
    own = {"name": "drawn", "traits": traits, "needs": needs, "prefetch_depth": depth}
    kind = type("Drawn", (Policy,), {**body, **own})
    policy = kind()
    policy.set_up(rng.getrandbits(32), unit_s, rng.choice((0.1, 0.3, 0.6)), rng.choice((0.0, 0.0, 0.0, 0.05)), options)
    return policy
