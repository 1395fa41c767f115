"""eMoE's task types from keywords (arXiv 2503.06823, section 3.2.1): the type with most matches in a prompt.

Words are anything that can be compared: text, or the token ids by which a trace holds its prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

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
    return {task: frozenset(word for _, word in sorted(words, key=lambda item: -item[0])[:n])
            for task, words in found.items()}  # fmt: skip
