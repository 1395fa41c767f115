"""DuoServe-MoE (arXiv 2509.07379): one schedule for prefill, another for decode, and k expert slots on the GPU.

Source: Zhang, Pinkert, Yang, Li and Yuan, "DuoServe-MoE: Dual-Phase Expert Prefetch and Cache Scheduling for Efficient
MoE LLM Inference". No public code. Sections are cited at each step; what the text leaves open is a parameter.

Section 4.2 does not say whether one ExpertMLP serves all layers or each has its own. Zero-padding to a fixed length is
what one needs; 300 MB of GPU memory (section 6.4) are 25 of them for Mixtral-8x7B, whose 31 predicted layers would take
371 MB in fp32 (docs/duoserve.md). The bundled predictors are one network each. Memory is charged as published for the
paper's two models (`mlp_bytes`).

Not published, and extended in the natural way: with several GPUs each has k slots for the experts that live on it; a
batch (section 6.1 serves single requests only) shares them, its tokens vote for what is prefetched, and a layer that
needs more experts than slots passes the rest through them.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.common.placement import every
from policies.duoserve.predictor import (
    Ids,
    Predictor,
    decode_positions,
    find,
    outputs_for,
    predictor_bytes,
    read,
    stand_in,
)
from sim.policy import (
    PREFILL,
    SURROGATE,
    BadInput,
    Decision,
    Evict,
    Fetch,
    Gate,
    Iteration,
    Policy,
    Predict,
    Prefetch,
    RunGpu,
    Steps,
    StoreSplit,
    Surrogate,
    Ticket,
    View,
    Wait,
    param,
)

COUNTED_AT_ONCE = 256  # iterations
Loading = Generator[Decision, Any, list[Ticket]]


EMPTY, FULL = -1, -2


def overwritten(slots: list[int], hold: list[int]) -> int:
    """What the slot to overwrite holds: `EMPTY`, or who is unused for longest and not of `hold`; `FULL`: none may."""
    for piece in slots:
        if piece not in hold:
            return piece
    return FULL


class DuoServe(Policy):
    """Pipelines all experts of a prompt through k slots; while generating, predicts the next layer's k experts."""

    name = "duoserve"
    title = "DuoServe-MoE: dual-phase schedules, learned prefetch"
    source = "arXiv 2509.07379"
    aliases = ("duoserve_moe",)
    traits = frozenset({"evicts_eagerly"})
    predictor: str = param(
        "trained",
        "trained: the bundled ExpertMLP (section 4.2) of the traced model; a file that `moesim train duoserve` "
        "wrote; or a labelled stand-in: surrogate:SHARE, surrogate:ALL/ANY, or surrogate:orca or surrogate:squad, "
        "right as often as Table 3 says of the served model",
        file=True,
    )
    slots: int | None = param(
        None, "expert slots per GPU; published: k, the experts a token needs (section 5.1)", within=(1, 65536)
    )
    mlp_s: float = param(6e-4, "time of a prediction, on a stream of its own (section 6.4)", within=(0.0, 60.0))
    mlp_bytes: int | None = param(
        None,
        "GPU memory of the predictor (published: 300 MB, section 6.4, charged for both Mixtral models, where one "
        "network of section 4.2 is 12 MB in fp32 and one per layer 371 and 679 MB; other models: the networks' "
        "weights in fp32, one unless the predictor's file has one per layer)",
        within=(0, 2**40),
    )
    prefill_fetch_gate: str = param(
        "slot_free",
        "when a prompt's next expert is copied: once a slot is free (Figure 4, 'without having to wait'), or once "
        "the expert before it is computed (section 5.2, to the letter)",
        ("slot_free", "after_prev_compute"),
    )
    prefill_fetch_all: bool = param(True, "copy experts that no prompt token chose, too (section 5.2: all are active)")
    expert_order: str = param(
        "id",
        "order of a prompt's experts after the first, which is copied before the gate: ascending ids, or most tokens "
        "first (not published)",
        ("id", "tokens"),
    )
    decode_order: str = param(
        "predicted",
        "which is Expert 1 of section 5.3: correctly prefetched experts first, or the gate's order (not published)",
        ("predicted", "gate"),
    )
    overlap_refetch: bool = param(
        False,
        "compute what was predicted while the rest is fetched again; the text compares, fetches, then computes "
        "(section 5.3)",
    )
    predict: str = param(
        "experts",
        "when the next layer is predicted: as the experts' computation begins, after what was fetched again (section "
        "5.3, 'when Layer N begins the expert computation'), or as soon as the gate has chosen ('simultaneously' "
        "with the fetch, section 5.3)",
        ("experts", "gate"),
    )
    seed: int = param(0, "for a surrogate's draws", within=(0, 2**63 - 1))

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if self.predictor.startswith(SURROGATE):
            self.labels = (SURROGATE,)

    def _n_slots(self, view: View) -> int:
        return int(self.slots or view.top_k)

    def min_experts(self, view: View) -> int:
        return self._n_slots(view)

    def predictor_bytes(self, view: View) -> int:
        if self.mlp_bytes is not None:
            return int(self.mlp_bytes)
        return predictor_bytes(self.predictor, view.model_name, view.n_layers, view.n_experts, view.top_k)

    def bind(self, view: View) -> None:
        self._k = view.top_k
        # Experts are named by `Piece.index`; of each its GPU, and what is decided about it.
        pieces = every(view)
        self._gpu_of = [piece.gpu for piece in pieces]
        self._evicts, self._fetches = [Evict(piece) for piece in pieces], [Fetch(piece) for piece in pieces]
        self._pieces = pieces
        self._of_piece = self._gpu_of, self._evicts, self._fetches, pieces
        self._runs = [RunGpu(expert) for expert in range(view.n_experts)]
        self._firsts = np.arange(1, view.n_layers)[:, None] * view.n_experts  # of the layers that are predicted
        self._prediction = Predict(self.mlp_s, "side", basis="measured")
        self._served = view.model_name
        # Per GPU what its slots hold, longest unused first: the first one that may be overwritten is clean first.
        self._slots: list[list[int]] = [[EMPTY] * self._n_slots(view) for _ in range(view.n_gpus)]
        self._coming: list[Ticket] = []  # copies that synchronisation point 1 waits for
        self._ahead: list[list[int]] = []  # by layer but the first the experts predicted, best first
        self._said: list[tuple[NDArray[Any], Ids]] = []  # what was named and chosen in iterations not counted yet
        self._n = self._right = self._every = self._some = 0

    def learn(self, store: StoreSplit) -> None:
        trace = store.trace
        self._mlp: Predictor | None = None
        self._outputs: NDArray[Any] | None = None
        if self.predictor.startswith(SURROGATE):
            self._surrogate = Surrogate(stand_in(self.predictor, self._served), trace.top_k, trace.n_experts, self.seed)
            return
        model = trace.header.model
        path = find(model) if self.predictor == "trained" else Path(self.predictor)
        if path is None:
            raise BadInput(
                f"policy duoserve, got a trace of {model!r}: no predictor is bundled for that model; train one with "
                f"`moesim train duoserve --trace {trace.path} --out FILE` and name it with --predictor FILE, or let "
                f"--predictor {SURROGATE}:SHARE stand for one that names so large a share right"
            )
        self._outputs = outputs_for(path, trace)
        if self._outputs is None:
            self._mlp = read(path, trace.n_layers, trace.n_experts, trace.top_k)
        self._position = decode_positions(trace)

    # -- predicting (sections 4.2 and 5.3) --------------------------------------------------------------------------

    def iteration_start(self, iteration: Iteration, view: View) -> None:
        """Work out what each layer's prediction will say.

        All layers of a token go through the network at once, which is many times faster; row l of that batch reads
        selections of layers before l alone (`States`), and is acted on only when those are known. For the trace it was
        measured on, its file carries what it says.
        """
        self._coming = []
        if iteration.phase == PREFILL:
            return
        chosen = iteration.all_ids()
        rows = [row for r in iteration.ranges for row in range(r.start_row, r.stop_row)]
        if self._outputs is not None:
            named = self._outputs[self._position[rows]]
        elif self._mlp is not None:
            named = self._mlp.named(chosen)
        else:
            named = self._drawn(rows, chosen)
        self._said.append((named, chosen))
        if len(self._said) == COUNTED_AT_ONCE:
            self._count()
        if len(rows) == 1:
            self._ahead = (named[0] + self._firsts).tolist()
        else:
            n_experts = view.n_experts
            self._ahead = [
                [(at + 1) * n_experts + expert for expert in self._voted(named[:, at])]
                for at in range(view.n_layers - 1)
            ]

    def _drawn(self, rows: list[int], chosen: Ids) -> Ids:
        named = [
            [self._surrogate.name(row, layer, ids) for layer, ids in enumerate(token) if layer]
            for row, token in zip(rows, chosen.tolist(), strict=True)
        ]
        return np.array(named, dtype=np.int64).reshape(len(rows), chosen.shape[1] - 1, self._k)

    def _count(self) -> None:
        if self._said:
            named, chosen = (np.concatenate(ids) for ids in zip(*self._said, strict=True))
            self._said = []
            found = (named[:, :, :, None] == chosen[:, 1:, None, :]).any(axis=2).sum(axis=2)
            self._n += found.size
            self._right += int(found.sum())
            self._every += int((found == self._k).sum())
            self._some += int((found > 0).sum())

    def _voted(self, named: NDArray[Any]) -> list[int]:
        """Experts that a batch's tokens name for a layer, by how many name them, ties to the lowest id."""
        ids, votes = np.unique(named, return_counts=True)
        found: list[int] = ids[np.argsort(-votes, kind="stable")].tolist()
        return found

    # -- prefill: two streams (section 5.2) -------------------------------------------------------------------------

    def layer_enter(self, layer: int, view: View) -> Steps | None:
        """The first expert is copied while the layers that are no experts compute."""
        return self._first_copies(layer, view) if view.phase == PREFILL else None

    def _first_copies(self, layer: int, view: View) -> Steps:
        for gpu, slots in enumerate(self._slots):
            for at, left in enumerate(slots):
                if left != EMPTY and left // view.n_experts == layer:  # of an earlier pass: a prompt's are all copied
                    yield self._evicts[left]
                    slots[at] = EMPTY
            for piece in self._sequence(layer, gpu, {}, view)[:1]:
                self._coming += yield from self._load(piece, Prefetch(self._pieces[piece]), [])

    def gate_input(self, layer: int, view: View) -> tuple[Wait, ...] | None:
        """Before the MoE layer is entered the two streams are synchronised."""
        if view.phase != PREFILL or not self._coming:
            return None
        coming, self._coming = self._coming, []
        return (Wait(tuple(coming)),)

    def _sequence(self, layer: int, gpu: int, needs: dict[int, int], view: View) -> list[int]:
        """A GPU's experts in the order of their computation; the first does not depend on the gate."""
        n_experts = view.n_experts
        first = layer * n_experts
        pieces = [piece for piece in range(first, first + n_experts) if self._gpu_of[piece] == gpu]
        rest = [piece for piece in pieces[1:] if self.prefill_fetch_all or piece - first in needs]
        if self.expert_order == "tokens":
            rest.sort(key=lambda piece: -needs.get(piece - first, 0))
        return pieces[:1] + rest

    def _prefill(self, gate: Gate, view: View) -> Steps:
        """Every expert passes through the slots once: while one is computed, the next is copied."""
        overlapped = self.prefill_fetch_gate == "slot_free"
        first = gate.layer * view.n_experts
        for gpu, slots in enumerate(self._slots):
            sequence = self._sequence(gate.layer, gpu, gate.needs, view)
            ahead = len(slots) if overlapped else 1
            before: tuple[Ticket, ...] = ()
            asked = 1
            for at, piece in enumerate(sequence):
                while asked < min(at + ahead, len(sequence)):
                    fetch = Fetch(self._pieces[sequence[asked]], before)
                    yield from self._load(sequence[asked], fetch, sequence[at:asked])
                    asked += 1
                if piece - first in gate.needs:
                    ticket = yield self._runs[piece - first]
                    self._touch(piece)
                    before = () if overlapped else (ticket,)
        self._coming = []

    # -- decode: three streams and two synchronisation points (section 5.3) -----------------------------------------

    def gate_done(self, gate: Gate, view: View) -> Steps:
        return self._prefill(gate, view) if gate.phase == PREFILL else self._decode(gate, view)

    def _decode(self, gate: Gate, view: View) -> Steps:
        predicted, last = self._ahead, len(self._ahead)
        after: tuple[Ticket, ...] = ()
        if self.predict == "gate" and gate.layer < last:
            after = ((yield self._prediction),)
        coming = self._coming
        if coming:  # synchronisation point 1: prefetching has finished
            yield Wait(tuple(coming))
            coming.clear()
        # What the gate chose is compared with what the slots hold, and what is missing is fetched (again).
        layer, all_slots = gate.layer, self._slots
        gpu_of, evicts, fetches, pieces = self._of_piece
        first = layer * view.n_experts
        order: list[int] = []  # of computation
        missing: list[int] = []
        for expert in gate.needs:
            piece = first + expert
            (order if piece in all_slots[gpu_of[piece]] else missing).append(piece)
        later: list[int] = []
        if missing:
            overlaps = self.overlap_refetch and len(order) > 0
            tickets: list[Ticket] = []
            for piece in missing:
                slots = all_slots[gpu_of[piece]]
                old = overwritten(slots, order)
                if old == FULL:
                    later.append(piece)  # a batch may need more experts than there are slots
                    continue
                slots.remove(old)
                if old != EMPTY:
                    yield evicts[old]
                slots.append(piece)
                tickets.append((yield fetches[piece]))
                order.append(piece)
            if tickets and not overlaps:
                yield Wait(tuple(tickets))
        if self.decode_order != "predicted":
            order = [first + expert for expert in gate.needs if first + expert not in later]
        # Compute; a slot that is done with takes what this layer still lacks, then what the next one is to need.
        ahead: list[int] = []
        if layer < last:
            if self.predict == "experts":  # as the expert phase begins, on the prediction stream
                after = ((yield self._prediction),)
            ahead = predicted[layer]
        hold, runs, is_first = order.copy(), self._runs, True
        for piece in order:  # which grows by what came `later`
            ticket = yield runs[piece - first]
            if is_first:
                is_first = False
                after = (ticket, *after)
            hold.remove(piece)
            slots = all_slots[gpu_of[piece]]
            slots.remove(piece)
            slots.append(piece)
            if later:
                for following in later.copy():
                    if overwritten(all_slots[gpu_of[following]], hold) != FULL:
                        yield from self._load(following, fetches[following], hold)
                        later.remove(following)
                        order.append(following)
                        hold.append(following)
            # Synchronisation point 2: Expert 1 is computed and the next layer's experts are predicted.
            if not ahead:
                continue
            waiting: list[int] = []
            for following in ahead:
                gpu = gpu_of[following]
                slots = all_slots[gpu]
                old = overwritten(slots, hold)
                if old == FULL or (later and gpu in self._gpus(later)):
                    waiting.append(following)
                    continue
                if following in slots:
                    slots.remove(following)
                else:
                    slots.remove(old)
                    if old != EMPTY:
                        yield evicts[old]
                    coming.append((yield Prefetch(pieces[following], 0.0, after)))
                slots.append(following)
                hold.append(following)
            ahead = waiting

    # -- slots ------------------------------------------------------------------------------------------------------

    def _gpus(self, pieces: list[int]) -> list[int]:
        return [self._gpu_of[piece] for piece in pieces]

    def _load(self, piece: int, copy: Fetch | Prefetch, hold: list[int]) -> Loading:
        """Copy an expert into a slot, unless it has one; answers with its ticket."""
        slots = self._slots[self._gpu_of[piece]]
        if piece in slots:
            self._touch(piece)
            return []
        old = overwritten(slots, hold)
        assert old != FULL
        slots.remove(old)
        if old != EMPTY:
            yield self._evicts[old]
        slots.append(piece)
        return [(yield copy)]

    def _touch(self, piece: int) -> None:
        """It has just been used: of all slots of its GPU its own is the last to be overwritten."""
        slots = self._slots[self._gpu_of[piece]]
        slots.remove(piece)
        slots.append(piece)

    # -- figures of its own -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Accuracy as in Table 3: all k experts of a layer named, at least one of them; and the share named."""
        self._count()
        n = max(self._n, 1)
        return {
            "predictions": self._n,
            "top_k_frac": self._every / n,
            "at_least_one_frac": self._some / n,
            "predicted_frac": self._right / (n * self._k),
        }
