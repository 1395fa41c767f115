"""eMoE's task types (arXiv 2503.06823, section 3.2.1): from keywords, the type with most matches in a prompt.

Words are anything that can be compared: text, or the token ids by which a trace holds its prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from sim.policy import RequestInfo, StoreSplit

KEYWORDS_PER_TASK = 64

# The task types of Table 1. The profiled keywords are not published; these are assumed, from the two examples on.
KEYWORDS: dict[str, frozenset[str]] = {
    "SUM": frozenset({"summarize", "summarise", "summary", "synopsis", "condense", "brief", "tldr"}),
    "CLSFY": frozenset({"classify", "sentiment", "positive", "negative", "neutral", "category", "label"}),
    "QA": frozenset({"question", "answer", "what", "who", "when", "where", "why", "context"}),
    "COMP": frozenset({"compare", "similar", "similarity", "same", "difference", "pair", "equivalent"}),
    "CONV": frozenset({"conversation", "chat", "assistant", "human", "hello", "reply", "respond"}),
}


def words_of(text: str) -> list[str]:
    """Lower-case words of a text, without punctuation around them."""
    return [word for raw in text.lower().split() if (word := raw.strip(".,;:!?\"'()[]"))]


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
