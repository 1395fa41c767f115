"""How a layer is served: what its gate finds, what comes and runs in which order, and what is counted of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sim.policy.decisions import (
    Cancel,
    DropQueue,
    Evict,
    Fetch,
    Prefetch,
    RunCpu,
    RunCpuAhead,
    RunGpu,
    RunPart,
    Serve,
    WriteBack,
)
from sim.policy.pieces import Piece
from sim.reference.residency import Copy, Residency
from sim.reference.script import BreaksOff, Differs, Script


class Reference(Residency):
    """Follows a script: every deed of the engine must be the next that the rules ask for."""

    lower: dict[int, str]  # experts of the layer that may run in another precision
    found: dict[int, tuple[str, str, int]]  # what its gate asked for: class, why of a miss, tokens
    begun: dict[int, list[Piece]]  # of pending experts, the pieces that have run
    on_cpu: list[int]
    has_looked = False

    def replay(self, script: Script) -> bool:
        """Whether the run is told to its end; False: it is refused before. Raises Differs where the engine differs."""
        self.script = script
        self.lower, self.found, self.begun, self.on_cpu = {}, {}, {}, []
        try:
            for said in script.follow():
                if said.what in ("victim", "placed", "evicted"):  # of what was handed over when the host looked
                    n_said, self.has_looked = script.n_said, True
                    self.look(said.now_s)
                    if script.n_said == n_said:
                        raise Differs(f"before deed {script.n_done}: expected nothing, got {said}")
                else:
                    getattr(self, said.what)(*script.hear(said.what).facts)
        except BreaksOff:
            return False
        for copy in self.resident.values():
            self.judge(copy, "wasted")
        return True

    # -- what is said -----------------------------------------------------------------------------------------------

    def initial(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self.come(Copy(piece))

    def iteration(self, phase: str) -> None:
        """A pass begins. What is decided between two passes counts for the earlier one's phase."""
        self.phase, self.layer, self.spoken = phase, -1, -1
        self.pass_n += 1

    def gate(self, layer: int, ids: list[list[int]], after: list[list[int]] | None, lower: dict[int, str]) -> None:
        """Classify what the gate asks for, all experts at once, before anything is evicted for any of them."""
        self.layer, self.spoken, self.lower = layer, layer, lower
        self.found, self.begun, self.on_cpu = {}, {}, []
        asked, self.pending = tokens_by_expert(ids), tokens_by_expert(after or ids)
        for old, new in zip(ids, after or ids, strict=True):
            self.n["activations", self.phase, layer, -1] += len(old)
            self.n["changed activations", self.phase, layer, -1] += sum(expert not in old for expert in new)
        for expert, n_tokens in asked.items():
            whole = self.pieces.whole[layer][expert]
            if expert in self.pending:
                self.found[expert] = (*self.find(whole, judging=True), n_tokens)
            else:  # dropped, if as many choices were dropped as tokens had asked for it
                rows = [new for old, new in zip(ids, after or ids, strict=True) if expert in old]
                kind = "dropped" if sum(row.count(-1) for row in rows) >= len(rows) else "substituted"
                self.found_as(kind, whole, n_tokens)
        for expert in self.pending.keys() - asked.keys():  # in another's place: no gate asked for it
            whole = self.pieces.whole[layer][expert]
            self.count("instead_n", whole)
            self.count(f"{self.find(whole, judging=False)[0]} aside", whole)

    def served(self) -> None:
        """The layer is over: all of it has run. What the CPU computed counts as that, however it was found."""
        if self.pending:
            raise BreaksOff
        for expert, (kind, why, n_tokens) in self.found.items():
            whole = self.pieces.whole[self.layer][expert]
            if expert in self.on_cpu:
                self.count(f"{kind} aside", whole)
            elif why:
                self.count(f"miss_{why}_n", whole)
            self.found_as("cpu" if expert in self.on_cpu else kind, whole, n_tokens)

    def found_as(self, kind: str, whole: Piece, n_tokens: int) -> None:
        self.count(f"{kind}_n", whole)
        self.count(f"{kind} tokens", whole, n_tokens)

    def looks(self) -> None:
        """The host looks what has arrived; the policy may react to that, and what waits is handed over."""
        while said := self.script.said_by("copy_done"):
            getattr(self, said.what)(*said.facts)
        self.hand_over()

    def looked(self) -> None:
        if not self.has_looked:
            self.look(self.script.now_s)
        self.has_looked = False

    def look(self, before_s: float) -> None:
        """It has looked before this was said: when the next thing was done, if that was earlier."""
        self.script.now_s = min([before_s, *self.script.next_s()])
        self.hand_over()

    def requeue(self, _hook: str, wanted: list[tuple[Piece, float]], up_to_layer: int | None, most: int | None) -> None:
        """These wait, and no others; of a piece that is wanted twice the later counts, with `most` the earlier."""
        if self.depth is None:
            raise BreaksOff
        self.queue.clear()
        if up_to_layer is not None:
            self.cancel_flying(up_to_layer)
        for piece, priority in wanted:
            self.predict(piece)
            if piece not in self.resident and (most is None or piece not in self.queue):
                self.enqueue(piece, priority)
                if len(self.queue) == most:
                    break
        self.hand_over()

    def decision(self, _hook: str, said: Any) -> None:
        match said:
            case Serve():
                self.serve()
            case RunGpu():
                self.run_gpu(said.expert)
            case RunPart():
                self.run_part(said.piece, said.slices)
            case RunCpu():
                self.run_cpu(said.expert)
            case RunCpuAhead():
                if self.script.n_done == len(self.script.done):  # whether it may be, no count rests on
                    raise BreaksOff
                self.script.do("cpu_ahead", said.layer, said.expert)
                self.count("cpu_ahead_n", self.pieces.whole[said.layer][said.expert])
            case Fetch():
                self.fetch(said.piece)
            case Prefetch():
                self.prefetch(said.piece, said.priority)
            case Evict():
                self.evict(said.piece)
            case Cancel():
                self.cancel(said.piece)
            case DropQueue():
                last = self.pieces.n_layers if said.up_to_layer is None else said.up_to_layer
                self.queue = {piece: place for piece, place in self.queue.items() if piece.layer > last}
                self.cancel_flying(last)
            case WriteBack():
                self.script.do("write_back", said.piece.layer, said.piece.expert)
                self.count_bytes("write_back", said.piece)

    # -- what is found ----------------------------------------------------------------------------------------------

    def parts(self, whole: Piece) -> list[Piece]:
        """Resident parts of an expert in a precision that serves, oldest first."""
        serving = whole.precision, self.lower.get(whole.expert)
        same = [one for one in self.resident if (one.layer, one.expert) == (whole.layer, whole.expert)]
        return [one for one in same if one is not whole and one.precision in serving]

    def enough(self, whole: Piece, done: Sequence[Piece] = ()) -> list[Piece] | None:
        """Pieces that make up what is not `done` of an expert: it whole, the serving precision first, the largest."""
        if whole in self.resident and not done:
            return [whole]
        parts = self.parts(whole)
        parts.sort(key=lambda one: (one.start_frac, one.precision != whole.precision, -one.stop_frac))
        return tiling(parts, done)

    def find(self, whole: Piece, judging: bool) -> tuple[str, str]:
        """How an expert is found, and why, if it is missing; `judging` the prefetches that brought it, or did not."""
        enough = self.enough(whole)
        parts = enough if enough == [whole] else self.parts(whole)
        late = [one for one in parts if not self.has_arrived(self.resident[one])]
        if not parts:
            return "miss", self.why_missing(whole) if judging else ""
        if judging:
            for one in late:
                self.resident[one].late = True
        if enough is None:
            return "late_hit" if late == parts else "partial_hit", ""
        if any(one in late for one in enough):
            return "late_hit", ""
        if judging and any(self.resident[one].unused for one in enough):
            self.count("prefetched hits", whole)
        return "hit", ""

    # -- what is computed -------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """What a cache does. Missing experts come in the order of the gate; hits run first, then these, in that order.

        One for which nobody can leave, since all that is there is still needed, comes when the others have run.
        """
        here: list[Piece] = []
        missing: list[Piece] = []
        later: list[Piece] = []
        for expert in self.pending:
            piece = self.pieces.whole[self.layer][expert]
            if piece not in self.resident and expert in self.lower:
                piece = self.pieces.part(self.layer, expert, 0.0, 1.0, self.lower[expert])
            (here if piece in self.resident else missing).append(piece)
        for piece in here:
            self.promote(piece)
            self.tell("accessed", piece, True)
        for piece in missing:
            self.queue.pop(piece, None)
            if self.copy(piece, speculative=False):
                here.append(piece)
                self.tell("accessed", piece, False)
            else:
                later.append(piece)
        for piece in here:
            self.run_gpu(piece.expert)
        for piece in later:
            self.fetch(piece)
            self.tell("accessed", piece, False)
            self.run_gpu(piece.expert)

    def run_gpu(self, expert: int) -> None:
        """Compute what has not run of a pending expert."""
        begun = self.begun.get(expert, [])
        enough = self.enough(self.pieces.whole[self.layer][expert], begun)
        if enough is None or expert not in self.pending:
            raise BreaksOff
        for piece in enough:
            self.use(piece)
        self.ran(expert, [*begun, *enough])

    def run_part(self, piece: Piece, slices: Sequence[Piece]) -> None:
        """Compute a piece, which may lie there in slices; the last piece completes its expert."""
        lying = sorted(slices or (piece,), key=lambda one: one.start_frac)
        if not self.is_pending(piece) or any(one not in self.resident for one in lying):
            raise BreaksOff
        for one in lying:
            self.use(one)
        begun = self.begun.setdefault(piece.expert, [])
        begun.append(piece)
        if tiling([], begun) is not None:
            self.ran(piece.expert, begun)
            return
        self.count("part_n", piece)
        self.script.do("part", piece.layer, piece.expert)
        self.looks()

    def use(self, piece: Piece) -> None:
        copy = self.resident[piece]
        self.judge(copy, "late" if copy.late else "useful")
        self.recent[piece] = self.recent.pop(piece)

    def ran(self, expert: int, parts: Sequence[Piece]) -> None:
        whole, n_tokens = self.pieces.whole[self.layer][expert], self.pending.pop(expert)
        self.begun.pop(expert, None)
        self.count("gpu_n", whole)
        self.count("experts_n", whole)
        self.count("executed tokens", whole, n_tokens)
        if any(part.precision != whole.precision for part in parts):
            self.count("lowered tokens", whole, n_tokens)
        self.script.do("gpu", self.layer, expert)
        self.looks()

    def run_cpu(self, expert: int) -> None:
        if expert in self.begun or expert not in self.pending:
            raise BreaksOff
        whole = self.pieces.whole[self.layer][expert]
        self.count("experts_n", whole)
        self.count("executed tokens", whole, self.pending.pop(expert))
        self.on_cpu.append(expert)
        self.script.do("cpu", self.layer, expert)


def tokens_by_expert(ids: list[list[int]]) -> dict[int, int]:
    """Expert -> tokens: of a single token in the order of its gate, of several by rising id; -1 is none."""
    found = Counter(expert for row in ids for expert in row if expert >= 0)
    return dict(found) if len(ids) == 1 else dict(sorted(found.items()))


def tiling(parts: Sequence[Piece], done: Sequence[Piece], at: float = 0.0) -> list[Piece] | None:
    """Of `parts`, the preferred first, those that with those `done` make up [at, 1) exactly; None if none do."""
    if at >= 1.0:
        return []
    ran = [one for one in done if one.start_frac == at]
    for piece in ran or parts:
        if piece.start_frac == at and not any(at < one.start_frac < piece.stop_frac for one in done):
            rest = tiling(parts, done, piece.stop_frac)
            if rest is not None:
                return rest if ran else [piece, *rest]
    return None
