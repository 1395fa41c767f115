"""Speculative decoding: how many tokens a decode step verifies, how many of them it takes, and what drafting costs.

A step runs the last token that came out and k drafted ones as k + 1 rows of one pass (Leviathan et al., "Fast Inference
from Transformers via Speculative Decoding", ICML 2023, arXiv 2211.17192). Drafts are taken up to the first that is
rejected, and one token of the model's own comes out after them.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sim.base.errors import BadInput, did_you_mean
from sim.workload.iterations import DECODE, PREFILL, Range

if TYPE_CHECKING:
    from sim.base.quantities import Source
    from sim.workload.iterations import Iteration, RequestInfo

NEXT, ELSEWHERE = "next", "elsewhere"
REJECTED = {
    NEXT: "rejected drafts are routed as the tokens that come out next",
    ELSEWHERE: "rejected drafts are routed as tokens of the same answer, drawn by the seed",
}
"""Routing that no trace has: what stands in for it."""
NGRAM = "ngram"
KEYS = ("k", "acceptance", "accepted", "draft_s", "model", "rejected")
MOST = 64  # drafted tokens a step
MOST_COUNTS = 10_000_000  # of a file
EXAMPLE = "--draft k=4,acceptance=0.7"
_STREAM = 0xD4AF7  # draws of drafts, apart from those of arrivals and policies


@dataclass(frozen=True)
class Draft:
    """What `--draft` asks for.

    Attributes:
        k: drafted tokens a step. acceptance: that a draft is taken where all before it are: one for all positions, or
            one for each. accepted: a CSV of recorded counts instead. draft_s: for each drafted token. model: that
            drafts; with neither, drafts cost nothing (n-grams). rejected: what stands in for their routing.
    """

    k: int
    acceptance: tuple[float, ...] = ()
    accepted: str | None = None
    draft_s: float | None = None
    model: str | None = None
    rejected: str = NEXT

    @property
    def text(self) -> str:
        """As `--draft` takes it, in one form."""
        said = [f"k={self.k}"]
        if self.acceptance:
            said.append(
                f"acceptance={'/'.join(f'{a:g}' if float(f'{a:g}') == a else repr(a) for a in self.acceptance)}"
            )
        said += [f"accepted={self.accepted}"] * (self.accepted is not None)
        said += [f"draft_s={self.draft_s!r}"] * (self.draft_s is not None)
        said += [f"model={self.model}"] * (self.model is not None)
        return ",".join([*said, *([f"rejected={self.rejected}"] * (self.rejected != NEXT))])

    @property
    def title(self) -> str:
        """The same, with files by their names alone."""
        accepted, model = (None if name is None else Path(name).name for name in (self.accepted, self.model))
        return replace(self, accepted=accepted, model=model).text

    def chance(self, position: int) -> float:
        """That the draft at a position, from 0, is taken where all before it are."""
        return self.acceptance[position if len(self.acceptance) > 1 else 0]

    def expected(self) -> float | None:
        """Tokens that a step puts out on average where the answer goes on; None where counts were recorded."""
        if not self.acceptance:
            return None
        return 1.0 + math.fsum(math.prod(self.chance(at) for at in range(n + 1)) for n in range(self.k))


def parse_draft(text: str) -> Draft | None:
    """`k=4,acceptance=0.7` as a draft; None for k=0, which is decoding as ever. Raises BadInput."""
    found: dict[str, str] = {}
    for word in text.split(","):
        key, equals, value = (part.strip() for part in word.partition("="))
        if key == NGRAM and not equals:
            key, value = "cost", NGRAM
        elif key not in KEYS:
            raise BadInput(f"--draft, got {word.strip()!r}: no such part; {did_you_mean(key, (*KEYS, NGRAM))}")
        elif not value:
            raise BadInput(f"--draft, got {text!r}: {key} without a value; write e.g. {EXAMPLE}")
        if key in found:
            raise BadInput(f"--draft, got {text!r}: {key} twice; keep one")
        found[key] = value
    if "k" not in found:
        raise BadInput(f"--draft, got {text!r}: k, the drafted tokens of a step, is missing; write e.g. {EXAMPLE}")
    k = _k(found["k"])
    costs = [key for key in ("cost", "draft_s", "model") if key in found]
    if len(costs) > 1:
        raise BadInput(f"--draft, got {text!r}: one cost at a time: draft_s=SECONDS, model=ID or ngram; keep one")
    rejected = found.get("rejected", NEXT)
    if rejected not in REJECTED:
        raise BadInput(f"--draft, got rejected={rejected}: no such stand-in; {did_you_mean(rejected, REJECTED)}")
    acceptance = _acceptance(found["acceptance"]) if "acceptance" in found else ()
    draft = Draft(k, acceptance, found.get("accepted"), _draft_s(found.get("draft_s")), found.get("model"), rejected)
    if bool(acceptance) == (draft.accepted is not None) and k:
        wrong = "both acceptance and accepted: keep one" if acceptance else f"no acceptance: write e.g. {EXAMPLE}"
        raise BadInput(f"--draft, got {text!r}: {wrong}")
    if 1 < len(acceptance) < k:
        raise BadInput(
            f"--draft, got {text!r}: {k} drafted tokens, acceptance of {len(acceptance)} positions; give one for each "
            "position, or one for all"
        )
    return draft if k else None


def _k(text: str) -> int:
    try:
        k = int(text)
    except ValueError:
        k = -1
    if not 0 <= k <= MOST:
        raise BadInput(f"--draft, got k={text}: a whole number from 0 to {MOST}; write e.g. {EXAMPLE}")
    return k


def _acceptance(text: str) -> tuple[float, ...]:
    found = []
    for part in text.split("/"):
        try:
            share = float(part)
        except ValueError:
            share = math.nan
        if not 0.0 <= share <= 1.0:
            raise BadInput(
                f"--draft, got acceptance={text}: shares in [0, 1], one for all positions or one for each; write e.g. "
                "acceptance=0.7 or acceptance=0.8/0.7/0.6/0.5"
            )
        found.append(share)
    return tuple(found)


def _draft_s(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds < math.inf:
        raise BadInput(f"--draft, got draft_s={text}: seconds for each drafted token; write e.g. draft_s=0.002")
    return seconds


def ks_of(text: str) -> list[str]:
    """A draft once for each k of `k=0/1/2/4,...`: the values of a sweep's axis."""
    words = text.split(",")
    for at, word in enumerate(words):
        key, _, value = word.partition("=")
        if key.strip() == "k" and "/" in value:
            return [",".join([*words[:at], f"k={k.strip()}", *words[at + 1 :]]) for k in value.split("/")]
    return [text]


def read_accepted(path: Path) -> list[list[int]]:
    """Accepted drafts by step, of each request in the file in turn; of one that names none, all together.

    Raises:
        BadInput: naming file, row and what is wrong.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if "accepted" not in (rows.fieldnames or ()):
                raise BadInput(
                    f"{path}: no column accepted; a CSV with the drafts that each step took, and with request"
                )
            found: dict[str, list[int]] = {}
            for at, row in enumerate(rows):
                text = row["accepted"] or ""
                if not text.strip().isdecimal() or len(text) > 6 or at >= MOST_COUNTS:
                    wrong = "not a whole number from 0" if at < MOST_COUNTS else f"more than {MOST_COUNTS:,} rows"
                    raise BadInput(f"{path}, row {at + 1}: accepted, got {text!r}: {wrong}; mend it")
                found.setdefault(row.get("request") or "", []).append(int(text))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"--draft, got accepted={path}: {error}; name a CSV with a column accepted") from None
    if not found:
        raise BadInput(f"{path}: no rows; it needs the drafts that each step took, in a column accepted")
    return list(found.values())


class Drafts:
    """The decode steps of one run.

    Whether a draft is taken is drawn by the seed, the request and the token's place: the same for every policy, every
    machine and every k, so that a longer draft takes whatever a shorter one takes.

    Args:
        recorded: counts that `read_accepted` has read. seconds: what each of the drafted tokens of an iteration takes.
    """

    def __init__(
        self,
        draft: Draft,
        seed: int,
        recorded: Sequence[Sequence[int]] = (),
        seconds: Callable[[Iteration, int], list[float]] | None = None,
        basis: Source = "assumed",
    ) -> None:
        self.draft = draft
        self.k = draft.k
        self.basis: Source = basis
        self._seed = seed
        self._recorded = recorded
        self._seconds = seconds
        self.took_s = 0.0  # drafting, so far
        self._draws: dict[int, list[float]] = {}
        self._steps: dict[int, int] = {}

    def step(self, request: RequestInfo, row: int, stop_row: int) -> list[Range]:
        """The rows of a request's next step: the last range is what is taken of it, and goes on at `taken_row`.

        A draft is no longer than what is left of the answer.
        """
        context, n_drafted = row - request.first_row, min(self.k, stop_row - row - 1)
        n_rejected = n_drafted - self._taken(request, row, n_drafted)
        stop = row + 1 + n_drafted
        found: list[Range] = []
        if n_rejected and self.draft.rejected == ELSEWHERE:
            stop -= n_rejected
            first = request.first_row + request.prompt_len
            at = first + int(self._of(request)[row - first] * (stop_row - first - n_rejected + 1))
            found.append(Range(request, at, at + n_rejected, DECODE, context + stop - row, True, n_rejected))
            n_rejected = 0
        found.append(Range(request, row, stop, DECODE, context, True, n_rejected))
        return found

    def each_s(self, iteration: Iteration) -> list[float]:
        """What each of the tokens that are drafted for an iteration takes, one after the other."""
        if self._seconds is None:
            return []
        rows: dict[int, int] = {}
        for r in iteration.ranges:
            if r.phase != PREFILL:
                rows[r.request.index] = rows.get(r.request.index, -1) + r.stop_row - r.start_row
        found = self._seconds(iteration, max(rows.values(), default=0))
        self.took_s += math.fsum(found)
        return found

    def _taken(self, request: RequestInfo, row: int, n_drafted: int) -> int:
        if self._recorded:
            at = self._steps.get(request.index)
            if at is None:
                at = 0 if len(self._recorded) > 1 else int(self._of(request)[0] * len(self._recorded[0]))
            counts = self._recorded[request.index % len(self._recorded)]
            self._steps[request.index] = at + 1
            return min(counts[at % len(counts)], n_drafted)
        draws, first = self._of(request), row + 1 - request.first_row - request.prompt_len
        for position in range(n_drafted):
            if draws[first + position] >= self.draft.chance(position):
                return position
        return n_drafted

    def _of(self, request: RequestInfo) -> list[float]:
        """A draw for each token that is decoded, as an input."""
        found = self._draws.get(request.index)
        if found is None:
            source = np.random.default_rng((self._seed, _STREAM, request.index))
            found = self._draws[request.index] = source.random(max(1, request.outputs)).tolist()
        return found


class Drafted:
    """What came of drafts: counted as steps end."""

    def __init__(self, of: Sequence[Drafts] = ()) -> None:
        self._of = of
        self.n_steps = 0
        self.n_drafted = 0
        self.n_accepted = 0
        self.tried: list[int] = []  # by position, drafts all before which were taken
        self.taken: list[int] = []
        self.n_beside = 0  # tokens put out beside prompts
        self._elsewhere = 0  # rows of the step that runs which stand elsewhere

    def verified(self, r: Range, by_itself: bool) -> None:
        """A range of a decode step is over, without prompts beside it or with some; one whose rows stand elsewhere
        belongs to the next."""
        n_rows = r.stop_row - r.start_row
        if r.n_rejected == n_rows:
            self._elsewhere = n_rows
            return
        n_drafted, n_accepted = n_rows - 1 + self._elsewhere, n_rows - 1 - r.n_rejected
        self._elsewhere = 0
        self.n_steps += 1
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        self.n_beside += 0 if by_itself else n_accepted + 1
        while len(self.tried) < n_drafted:
            self.tried.append(0)
            self.taken.append(0)
        for position in range(min(n_accepted + 1, n_drafted)):
            self.tried[position] += 1
            self.taken[position] += position < n_accepted

    @property
    def took_s(self) -> float:
        """Drafting, in all."""
        return math.fsum(drafts.took_s for drafts in self._of)

    @classmethod
    def summed(cls, several: Sequence[Drafted]) -> Drafted:
        """Of several replicas."""
        found = cls([drafts for one in several for drafts in one._of])
        for one in several:
            found.n_steps += one.n_steps
            found.n_drafted += one.n_drafted
            found.n_accepted += one.n_accepted
            found.n_beside += one.n_beside
            while len(found.tried) < len(one.tried):
                found.tried.append(0)
                found.taken.append(0)
            for position, (tried, taken) in enumerate(zip(one.tried, one.taken, strict=True)):
                found.tried[position] += tried
                found.taken[position] += taken
        return found
