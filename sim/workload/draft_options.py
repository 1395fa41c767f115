"""Speculative decoding as it is asked for: tokens drafted for a step, how many are taken, and what drafting costs.

A step runs the last token that came out and k drafted ones as k + 1 rows of one pass (Leviathan et al., "Fast Inference
from Transformers via Speculative Decoding", ICML 2023, arXiv 2211.17192). Drafts are taken up to the first that is
rejected, and one token of the model's own comes out after them.
"""

from __future__ import annotations

import math
import os
from decimal import Decimal
from itertools import product
from pathlib import Path

import msgspec

from sim.base.errors import BadInput, did_you_mean

NEXT, ELSEWHERE = "next", "elsewhere"
REJECTED = {
    NEXT: "rejected drafts are routed as the tokens that come out next",
    ELSEWHERE: "rejected drafts are routed as tokens of the same answer, drawn by the seed",
}
"""Routing that no trace has: what stands in for it."""
NGRAM = "ngram"
KEYS = ("k", "acceptance", "accepted", "draft_s", "model", "rejected")
FILES = ("accepted", "model")
MOST = 64  # drafted tokens a step
MOST_SHARES = 1000  # of a range of acceptances
MOST_COUNTS, MOST_COUNT_BYTES = 1_000_000, 64_000_000  # of a file
MOST_DRAFT_S = 3600.0
EXAMPLE = "--draft k=4,acceptance=0.7"


class Draft(msgspec.Struct, frozen=True):
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
        return msgspec.structs.replace(self, accepted=accepted, model=model).text

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
    for word in _words(text):
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


def _words(text: str) -> list[str]:
    """The parts of a draft; what is no part behind a file's name belongs to the name (`accepted=a,b.csv`)."""
    words: list[str] = []
    for word in text.split(","):
        part = word.partition("=")[0].strip() in KEYS or word.strip() == NGRAM
        if not part and words and words[-1].partition("=")[0].strip() in FILES:
            words[-1] += f",{word}"
        else:
            words.append(word)
    return words


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
    if not 0.0 <= seconds <= MOST_DRAFT_S:
        raise BadInput(
            f"--draft, got draft_s={text}: seconds for each drafted token, at most {MOST_DRAFT_S:g}; write e.g. "
            "draft_s=0.002"
        )
    return seconds


def each_of(text: str) -> list[str]:
    """The values of a sweep's axis: a draft for each k of `k=0/1/2/4` and each acceptance of `acceptance=0.3:0.9:0.2`.

    Raises:
        BadInput: a range without a step that leads to its end.
    """
    ways: list[list[str]] = []
    for word in _words(text):
        key, _, value = (part.strip() for part in word.partition("="))
        several = [word]
        if key == "k" and "/" in value:
            several = [f"k={k.strip()}" for k in value.split("/")]
        elif key == "acceptance" and ":" in value:
            several = [f"acceptance={share:g}" for share in _spread(value)]
        ways.append(several)
    return [",".join(words) for words in product(*ways)]


def _spread(text: str) -> list[float]:
    """FROM:TO:STEP, both ends included, in steps of decimals."""
    try:
        first, last, step = (Decimal(part) for part in text.split(":"))
        steps = (last - first) / step
        n = int(steps) + 1 if 0 <= steps < MOST_SHARES else 0  # the number of a huge one would take minutes to write
    except (ValueError, ArithmeticError):
        n = 0
    if not 0 < n <= MOST_SHARES:
        raise BadInput(
            f"--draft, got acceptance={text}: FROM:TO:STEP of at most {MOST_SHARES} shares; write e.g. "
            "acceptance=0.3:0.9:0.2"
        )
    return [float(first + at * step) for at in range(n)]


def read_accepted(path: Path) -> list[list[int]]:
    """Accepted drafts by step, of each request in the file in turn; of one that names none, all together.

    Raises:
        BadInput: naming file, row and what is wrong.
    """
    import csv

    way_out = "name a CSV with a column accepted"
    try:
        if path.exists() and not path.is_file():  # a pipe would block, and is read more than once
            what = "a folder" if path.is_dir() else "a device or a pipe"
            raise BadInput(f"--draft, got accepted={path}: {what}; {way_out}")
        with path.open(newline="", encoding="utf-8-sig") as file:
            if (n_bytes := os.fstat(file.fileno()).st_size) > MOST_COUNT_BYTES:
                raise BadInput(
                    f"--draft, got accepted={path}, of {n_bytes:,} bytes: at most {MOST_COUNT_BYTES:,} are read; "
                    f"{way_out}"
                )
            rows = csv.DictReader(file)
            if "accepted" not in (rows.fieldnames or ()):
                raise BadInput(
                    f"{path}: no column accepted; a CSV with the drafts that each step took, and with request"
                )
            found: dict[str, list[int]] = {}
            for at, row in enumerate(rows):
                text = row["accepted"] or ""
                if not (text.isascii() and text.strip().isdecimal()) or len(text) > 6 or at >= MOST_COUNTS:
                    wrong = "not a whole number from 0" if at < MOST_COUNTS else f"more than {MOST_COUNTS:,} rows"
                    raise BadInput(f"{path}, row {at + 1}: accepted, got {text!r}: {wrong}; mend it")
                found.setdefault(row.get("request") or "", []).append(int(text))
    except OSError as error:
        raise BadInput(f"--draft, got accepted={path}: {error.strerror or error}; {way_out}") from None
    except (ValueError, csv.Error) as error:  # of a path, too
        raise BadInput(f"--draft, got accepted={str(path)!r}: {error}; {way_out}") from None
    if not found:
        raise BadInput(f"{path}: no rows; it needs the drafts that each step took, in a column accepted")
    return list(found.values())
