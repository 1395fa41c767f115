"""Who is on the GPUs, who leaves, what is copied, and what is counted of that: the documented rules, once more.

Dictionaries and lists, and no time: a `Script` says when each copy began and ended. `layers` has the other half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sim.policy.order import EXPERT, LAST, NEVER, NOT_FOR_PREFETCH, Insertion, Order, Rank
from sim.policy.pieces import Piece, Pieces
from sim.reference.script import BreaksOff, Script

CLASSES = ("hit", "partial_hit", "late_hit", "miss", "cpu", "substituted", "dropped")


@dataclass(eq=False)
class Copy:
    """How a resident piece came: by the `number`-th copy that was asked for; -1: it was there from the start.

    `speculative`: a prefetch that nobody has demanded. `unused`: a prefetch whose fate is open. `late`: a gate asked
    for it before it had arrived. `harmful`: a gate missed an expert that had left for it.
    """

    piece: Piece
    number: int = -1
    speculative: bool = False
    unused: bool = False
    late: bool = False
    harmful: bool = False


class Residency:
    """The cache of one policy.

    Args:
        room_bytes: of each GPU. layer_bytes: by GPU and layer, where the policy divides its cache. order: who leaves;
            None: the policy is asked. depth: prefetches handed to a link at once; None: each as it is asked for.
        tells: which of `accessed`, `placed`, `evicted` the policy implements.

    Attributes:
        n: counts by (name, phase, layer, expert), under the names of docs/output.md.
    """

    def __init__(
        self,
        pieces: Pieces,
        room_bytes: Sequence[int],
        layer_bytes: list[list[int]] | None,
        order: Order | None,
        depth: int | None,
        tells: Collection[str],
    ) -> None:
        self.pieces, self.room_bytes, self.layer_bytes = pieces, room_bytes, layer_bytes
        self.order, self.depth, self.tells = order, depth, tells
        self.script = Script()
        self.n: Counter[tuple[str, str, int, int]] = Counter()
        self.peak_bytes = [0] * len(room_bytes)
        self.resident: dict[Piece, Copy] = {}  # who came first stands first
        self.recent: dict[Piece, Copy] = {}  # the same pieces; who came or was computed with longest ago stands first
        self.queue: dict[Piece, tuple[float, int]] = {}  # prefetches that wait: minus priority, order of asking
        self.n_asked = self.n_copies = 0
        self.flying: list[dict[Piece, Copy]] = [{} for _ in room_bytes]  # by link: handed over, not known to have ended
        self.pending: dict[int, int] = {}  # experts that the running layer has still to compute, and their tokens
        self.left_for: dict[Piece, Copy] = {}  # who is gone, and the prefetch that took the room
        self.left: dict[tuple[int, int], int] = {}  # the pass in which an expert, or a part of it, left last
        self.predicted: dict[tuple[int, int], int] = {}  # the pass that an expert was last predicted for
        self.predicted_of: dict[int, int] = {}  # the pass that any expert of a layer was
        self.phase, self.layer, self.pass_n, self.spoken = "prefill", -1, 1, pieces.n_layers

    def count(self, name: str, piece: Piece, n: int = 1) -> None:
        self.n[name, self.phase, piece.layer, piece.expert] += n

    def count_bytes(self, name: str, piece: Piece) -> None:
        self.count(f"{name}_n", piece)
        self.count(f"{name}_bytes", piece, piece.n_bytes)

    def shares(self, definition: str) -> dict[str, float | None]:
        """How decode's gates found what they asked for, as papers count it: docs/output.md, "Hit definitions"."""
        decode: Counter[str] = Counter()
        for (name, phase, _, _), n in self.n.items():
            decode[name] += n if phase == "decode" else 0
        found = {kind: decode[f"{kind} tokens" if definition == "token" else f"{kind}_n"] for kind in CLASSES}
        if definition == "slot":
            found["hit"], found["late_hit"] = found["hit"] + found["late_hit"], 0
        elif definition == "cached":
            found["hit"] -= decode["prefetched hits"]
            found["miss"] += decode["prefetched hits"]
        total = sum(found.values())
        return {kind: (n / total if total else None) for kind, n in found.items()}

    def tell(self, what: str, *facts: object) -> None:
        if what in self.tells:
            self.script.hear(what, *facts)

    # -- time, as the script knows it -------------------------------------------------------------------------------

    def may_withdraw(self, copy: Copy) -> bool:
        """A prefetch that has not begun, unless somebody has demanded it; what begins exactly now has not."""
        return copy.speculative and self.script.copies_s[copy.number][0] >= self.script.now_s

    def has_arrived(self, copy: Copy) -> bool:
        """What ends exactly now has arrived."""
        ended = copy.number < 0 or self.script.copies_s[copy.number][1] <= self.script.now_s
        return ended and not self.may_withdraw(copy)

    # -- room -------------------------------------------------------------------------------------------------------

    def fits(self, piece: Piece) -> bool:
        """A piece takes its bytes when its copy is asked for: of its GPU, and of its layer's share of it."""
        near = [one for one in self.resident if one.gpu == piece.gpu]
        free_bytes = [self.room_bytes[piece.gpu] - sum(one.n_bytes for one in near)]
        if self.layer_bytes is not None:
            taken_bytes = sum(one.n_bytes for one in near if one.layer == piece.layer)
            free_bytes.append(self.layer_bytes[piece.gpu][piece.layer] - taken_bytes)
        return piece.n_bytes <= min(free_bytes)

    def come(self, copy: Copy) -> None:
        piece = copy.piece
        if piece in self.resident or not self.fits(piece):
            raise BreaksOff
        self.resident[piece] = self.recent[piece] = copy
        self.left_for.pop(piece, None)
        taken_bytes = sum(one.n_bytes for one in self.resident if one.gpu == piece.gpu)
        self.peak_bytes[piece.gpu] = max(self.peak_bytes[piece.gpu], taken_bytes)

    def leave(self, piece: Piece) -> Copy:
        del self.recent[piece]
        return self.resident.pop(piece)

    def is_pending(self, piece: Piece) -> bool:
        """What the running layer has still to compute does not leave, nor do parts of it."""
        return piece.layer == self.layer and piece.expert in self.pending

    def evict(self, piece: Piece) -> None:
        if piece not in self.resident or self.is_pending(piece):
            raise BreaksOff
        copy = self.leave(piece)
        self.script.do("evict", piece.layer, piece.expert)
        self.count("evict_n", piece)
        if copy.unused and self.may_withdraw(copy):  # it never came
            self.withdrawn(copy)
        else:
            self.judge(copy, "wasted")
            self.left[piece.layer, piece.expert] = self.pass_n
        self.tell("evicted", piece)

    def victim(self, piece: Piece, speculative: bool) -> Piece | None:
        """Who makes room for a piece; None: nobody may."""
        order = self.order
        if order is None:
            answer: Piece | None = self.script.hear("victim", piece, speculative).facts[2]
            return answer
        able = [
            one
            for one in (self.resident if isinstance(order, Insertion) else self.recent)
            if one.gpu == piece.gpu and (not order.per_layer or one.layer == piece.layer) and not self.is_pending(one)
        ]
        return self.lowest(able, piece, speculative, order) if isinstance(order, Rank) else able[0] if able else None

    def lowest(self, able: list[Piece], piece: Piece, speculative: bool, order: Rank) -> Piece | None:
        """The whole expert of the lowest rank among those whose bar allows it; `LAST` only where there is no other."""
        said = self.script.said[self.script.n_said - 1]
        assert said.rank is not None and said.bar is not None
        choices = []
        for one in able:
            if one.serving:
                spared = order.spares_unused and self.resident[one].unused
                bar = max(said.bar[one.index], NOT_FOR_PREFETCH if spared else 0)
                tie = (one.expert, one.layer) if order.ties == EXPERT else (one.layer, one.expert)
                if bar < (NOT_FOR_PREFETCH if speculative else NEVER):
                    choices.append((bar == LAST, said.rank[one.index], tie, one.index))
        if not choices:
            return None
        _, rank, _, index = min(choices)
        refused = speculative and order.guarded and piece.serving and rank >= said.rank[piece.index]
        return None if refused else self.pieces.all[index]

    # -- copies -----------------------------------------------------------------------------------------------------

    def copy(self, piece: Piece, speculative: bool) -> bool:
        """Make room for a piece and ask for its copy; False where nobody leaves (though somebody may have left)."""
        gone: list[Piece] = []
        while not self.fits(piece):
            leaving = self.victim(piece, speculative)
            if leaving is None:
                return False
            self.evict(leaving)
            gone.append(leaving)
        copy = Copy(piece, self.n_copies, speculative, unused=speculative)
        self.come(copy)
        self.n_copies += 1
        self.count_bytes("prefetch_issued" if speculative else "demand_copies", piece)
        if speculative:
            self.left_for.update(dict.fromkeys(gone, copy))
            self.flying[piece.gpu][piece] = copy
            self.tell("placed", piece)
        self.script.do("prefetch" if speculative else "fetch", piece.layer, piece.expert)
        return True

    def fetch(self, piece: Piece) -> None:
        """A piece on its way goes to the front; one that is not there is demanded, and waits in no queue any more."""
        if piece in self.resident:
            self.promote(piece)
            return
        self.queue.pop(piece, None)
        if not self.copy(piece, speculative=False):
            raise BreaksOff

    def promote(self, piece: Piece) -> None:
        """A prefetch that has not begun is a demand from now on, and no more among those on its link."""
        copy = self.resident[piece]
        if self.may_withdraw(copy):
            copy.speculative = False
            self.flying[piece.gpu].pop(piece, None)

    def predict(self, piece: Piece) -> None:
        """Who asks for a prefetch predicts its expert, for the pass in which the layer's gate speaks next."""
        aim = self.pass_n + (piece.layer <= self.spoken)
        self.predicted[piece.layer, piece.expert] = self.predicted_of[piece.layer] = aim

    def prefetch(self, piece: Piece, priority: float) -> None:
        """What is there or on its way is left alone; asking again replaces the priority."""
        self.predict(piece)
        if piece not in self.resident:
            self.enqueue(piece, priority)
            self.hand_over()

    def enqueue(self, piece: Piece, priority: float) -> None:
        self.n_asked += 1
        self.queue[piece] = -priority, self.n_asked

    def hand_over(self) -> None:
        """Of what waits the best first, of equals who asked first, to links on which fewer copies than `depth` fly."""
        depth = self.depth or len(self.pieces.all)
        if self.queue and any(len(copies) >= depth for copies in self.flying):
            self.forget_ended()
        while ready := [one for one in self.queue if self.depth is None or len(self.flying[one.gpu]) < depth]:
            piece = min(ready, key=self.queue.__getitem__)
            del self.queue[piece]
            if piece not in self.resident and not self.copy(piece, speculative=True):
                self.count("prefetch_refused_n", piece)

    def forget_ended(self) -> None:
        for copies in self.flying:
            for copy in [copy for copy in copies.values() if self.has_arrived(copy)]:
                del copies[copy.piece]

    def cancel(self, piece: Piece) -> None:
        """Withdraw a prefetch that waits or has not begun; what has begun finishes."""
        if self.queue.pop(piece, None) is not None or piece not in self.resident:
            return
        copy = self.resident[piece]
        if copy.unused and self.may_withdraw(copy):
            self.leave(piece)
            self.count("cancel_n", piece)
            self.script.do("cancel", piece.layer, piece.expert)
            self.withdrawn(copy)
            self.tell("evicted", piece)

    def withdrawn(self, copy: Copy) -> None:
        """It moved no byte, and has no other fate."""
        self.judge(copy, "cancelled")
        self.flying[copy.piece.gpu].pop(copy.piece, None)

    def cancel_flying(self, up_to_layer: int) -> None:
        """Withdraw what was handed over for layers up to this one and has not begun."""
        aimed = [one for copies in self.flying for one in copies if one.layer <= up_to_layer]
        if aimed:
            self.forget_ended()
        for piece in aimed:
            if piece in self.flying[piece.gpu]:
                self.cancel(piece)

    def judge(self, copy: Copy, fate: str) -> None:
        """What became of a prefetch, once: useful, late, wasted or cancelled."""
        if copy.unused:
            copy.unused = False
            self.count_bytes(f"prefetch_{fate}", copy.piece)

    def why_missing(self, whole: Piece) -> str:
        """The first reason that holds; the prefetch that an expert had left for does harm by that, before its use."""
        copy = self.left_for.pop(whole, None)
        if copy is not None and copy.unused and not copy.harmful:
            copy.harmful = True
            self.count_bytes("prefetch_harmful", copy.piece)
        expert = whole.layer, whole.expert
        if self.left.get(expert) == self.pass_n:
            return "evicted_unused"
        if self.predicted.get(expert) == self.pass_n:
            return "too_late"
        if expert not in self.left:
            return "cold"
        return "wrong_prediction" if self.predicted_of.get(whole.layer) == self.pass_n else "capacity"
