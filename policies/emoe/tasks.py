"""eMoE's task types (arXiv 2503.06823, section 3.2.1) and the experts that it keeps for them (section 3.4).

A prompt is of the type of which most keywords match. Words are anything that can be compared: text, or the token ids by
which a trace holds its prompts. A layer keeps the top L experts by expected tokens.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.policy import BadInput

if TYPE_CHECKING:
    from random import Random

    from sim.policy import RequestInfo, StoreSplit


Counts = NDArray[np.int64]


def expected_tokens(inputs: int, requests: int, outputs: int, sensitive: NDArray[np.bool_], shares: Counts) -> Counts:
    """Equation 2 for one task type and every layer: N = (sum of W_j + T x W_o) x s x f, [L, E].

    Args:
        inputs: input tokens of the requests that run or are to be scheduled. requests: T, their number. outputs: W_o,
            output tokens expected of one. sensitive: s by layer. shares: f [L, E] in 1 / 65536.
    """
    return np.asarray((inputs + requests * outputs) * (shares * sensitive[:, None]))


def insensitive_layers(similarity: NDArray[np.float64], threshold: float) -> NDArray[np.bool_]:
    """Sections 2.2.3 and 3.4: the layers, from the input on, whose random routing leaves the output similar enough.

    Args:
        similarity: of the output with random routing in the first 1, 2 ... L layers.
    """
    return np.asarray(np.logical_and.accumulate(similarity > threshold))


def profiled(path: Path, tasks: Sequence[str], n_layers: int) -> list[int]:
    """By task, the layers from the input on that a profile says are insensitive (section 3.4).

    Raises:
        BadInput: no JSON of task -> whole number, an unknown or missing task, or more layers than there are.
    """
    where = f"parameter emoe.sensitivity, got {path}"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{where}: {error}; write JSON of task -> layers") from None
    if not isinstance(found, dict) or {type(n) for n in found.values()} - {int}:
        raise BadInput(f"{where}: no JSON of task -> whole number; write JSON of task -> layers")
    if set(found) != set(tasks):
        odd = ", ".join(sorted(set(found) ^ set(tasks)))
        raise BadInput(f"{where}: {odd}, in the file or in the trace alone; give each task of the trace once")
    for task, n in found.items():
        if not 0 <= n <= n_layers:
            raise BadInput(f"{where}: {task} {n}: the trace has {n_layers} layers; write 0 to {n_layers}")
    return [found[task] for task in tasks]


def choose(expected: NDArray[np.int64], n: int, home: Callable[[int], int], quota: list[int]) -> set[int]:
    """The top `n` experts of a layer by expected tokens [E], ties to the lowest id; no GPU beyond its quota."""
    left, chosen = list(quota), set[int]()
    for expert in np.argsort(-expected, kind="stable").tolist():
        gpu = home(expert)
        if len(chosen) < n and left[gpu]:
            left[gpu] -= 1
            chosen.add(expert)
    return chosen


def by_tokens(experts: set[int], expected: NDArray[np.int64]) -> list[int]:
    """Experts in the order they are loaded in: most expected tokens [E] first, ties to the lowest id."""
    return sorted(experts, key=lambda e: (-int(expected[e]), e))


def reroute(scores: NDArray[np.float64], ids: NDArray[np.int64], resident: set[int]) -> NDArray[np.int64]:
    """Section 3.2.2: a choice that is not on the GPU goes to the next-ranked expert that is; -1 where none is left.

    Args:
        scores: [n, E]. ids: [n, k] as the router chose. resident: experts on the GPUs.
    """
    out = ids.tolist()
    for row, chosen in zip(scores, out, strict=True):
        if resident.issuperset(chosen):
            continue
        of = row.tolist()
        ranked = iter(sorted(resident.difference(chosen), key=lambda e: (-of[e], e)))
        chosen[:] = [e if e in resident else next(ranked, -1) for e in chosen]
    return np.array(out, dtype=np.int64)


KEYWORDS_PER_TASK = 64


def classify(words: Iterable[Hashable], keywords: Mapping[str, frozenset[Hashable]]) -> str | None:
    """The task type with most keyword occurrences in the prompt, the first listed among equals; None without any."""
    seen = Counter(words)
    matches = {task: sum(seen[word] for word in known) for task, known in keywords.items()}
    best = max(matches, key=lambda task: matches[task], default=None)
    return best if best is not None and matches[best] else None


def profile(
    prompts: Mapping[str, Sequence[Sequence[Hashable]]], n: int = KEYWORDS_PER_TASK
) -> dict[str, frozenset[Hashable]]:
    """At most `n` keywords per task, from prompts whose task is known.

    A word is a keyword of the task in most of whose prompts it stands, when it stands there in a larger share of
    prompts than in all other tasks together; the most telling ones are kept, ties in order of first appearance.
    """
    present: dict[Hashable, Counter[str]] = {}
    for task, texts in prompts.items():
        for text in texts:
            for word in dict.fromkeys(text):
                present.setdefault(word, Counter())[task] += 1
    found: dict[str, list[tuple[float, Hashable]]] = {task: [] for task in prompts}
    for word, tasks in present.items():
        share = {task: tasks[task] / len(prompts[task]) for task in tasks}
        best = max(share, key=lambda task: share[task])
        lead = share[best] - math.fsum(value for task, value in share.items() if task != best)
        if lead > 0:
            found[best].append((lead, word))
    return {
        task: frozenset(word for _, word in sorted(words, key=lambda item: -item[0])[:n])
        for task, words in found.items()
    }


class Recogniser:
    """Which task a request is taken for, rightly or not (sections 3.2.1 and 5.6.1).

    Args:
        store: requests whose tasks are known. by_keywords: profile them, and tell tasks by the tokens of a prompt;
            else a request's label says it. accuracy: share of requests that are recognised, the others are taken for
            another task, drawn by `chance`.
    """

    def __init__(self, store: StoreSplit, by_keywords: bool, accuracy: float, chance: Random) -> None:
        self._trace = store.trace
        self._tasks = tuple(store.trace.header.tasks)
        self._accuracy, self._chance = accuracy, chance
        self._keywords: dict[str, frozenset[Hashable]] | None = None
        if by_keywords:
            prompts: dict[str, list[list[int]]] = {task: [] for task in self._tasks}
            for r in store.requests:
                prompts[r.task].append(self._prompt(r))
            self._keywords = profile(prompts)

    def _prompt(self, request: RequestInfo) -> list[int]:
        rows = slice(request.first_row, request.first_row + request.prompt_len)
        return [int(token) for token in self._trace.token_ids[rows]]

    def task_of(self, request: RequestInfo) -> int:
        """Its number in the trace's list of tasks; the first one where nothing tells."""
        found: str | None = request.task
        if self._keywords is not None:
            found = classify(self._prompt(request), self._keywords)
        task = self._tasks.index(found) if found is not None else 0
        if self._accuracy < 1.0 and len(self._tasks) > 1 and self._chance.random() >= self._accuracy:
            task = (task + self._chance.randrange(1, len(self._tasks))) % len(self._tasks)
        return task
