"""Where routing rests on little, or on another model's, in five words for the first line of an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from sim.setup.pairing import known_families
from traces.format.header import ONE_PROMPT
from traces.format.shapes import family

if TYPE_CHECKING:
    from traces.format.reader import Trace

FITTED = "fitted-to-"


class Labelled(Protocol):
    """A result, or what is read of one."""

    @property
    def caveats(self) -> list[str]: ...

    @property
    def model(self) -> str: ...


def labels_of(trace: Trace) -> tuple[str, ...]:
    """Words that every result on a trace carries: its own, and whether it is of a single prompt."""
    own = trace.header.labels
    return (*own, ONE_PROMPT) if trace.of_one_prompt and not {"synthetic", ONE_PROMPT} & set(own) else own


def routing_words(labels: Iterable[str], model: str) -> str:
    """`routing rests on one prompt`, `routing from another model family`, or both; nothing where neither is so."""
    every = list(labels)
    other = any(_another(label.removeprefix(FITTED), model) for label in every if label.startswith(FITTED))
    if ONE_PROMPT in every:
        return "routing: another family's one prompt" if other else "routing rests on one prompt"
    return "routing from another model family" if other else ""


def of_results(results: Iterable[Labelled]) -> str:
    """The words for several runs, as they stand behind an answer; where they hold for some, which is said, too."""
    every = [routing_words(result.caveats, result.model) for result in results]
    found = dict.fromkeys(words for words in every if words)
    part = "" if len(set(every)) == 1 else " in part"
    return "".join(f"; {words}{part}" for words in found)


def _another(source: str, model: str) -> bool:
    """Whether both are of families in the catalogue, and not of the same one."""
    one, two = family(source), family(model)
    return one != two and {one, two} <= known_families()
