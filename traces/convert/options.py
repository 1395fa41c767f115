"""What a kind of log is, what the user says about a conversion, and what a file says about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from sim.base.errors import BadInput
from traces.convert.text import has_keys
from traces.format.layout import MAX_EXPERTS


@dataclass(frozen=True, slots=True)
class Options:
    """Facts that files leave out; None means "as the file says", and an error where it does not.

    n_experts, top_k: routed experts per MoE layer, and how many serve a token.
    model, model_source: what the header names; model_source defaults to the source format and the file's name.
    task: label of every request that the file gives none. store_frac: share of requests for the `store` split.
    gate, scaling, renormalised, weights_kind, selection: as FORMAT.md's header facts of the same names.
    ranked: whether ids without weights are in router order.
    prompt_len: prefill rows of each request, where the file does not mark phases.
    one_stream: take a log whose requests cannot be told apart as one request of prefill rows.
    """

    n_experts: int | None = None
    top_k: int | None = None
    model: str | None = None
    model_source: str | None = None
    task: str = ""
    store_frac: float = 0.0
    seed: int = 0
    gate: str | None = None
    renormalised: bool | None = None
    weights_kind: str | None = None
    selection: str | None = None
    scaling: float | None = None
    ranked: bool | None = None
    prompt_len: int | None = None
    one_stream: bool = False

    def __post_init__(self) -> None:
        for name, most in (("n_experts", MAX_EXPERTS), ("top_k", MAX_EXPERTS), ("prompt_len", 2**31 - 1)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise BadInput(f"--{name.replace('_', '-')}, got {value}: from 1 to {most}; correct it")
        if not 0.0 <= self.store_frac < 1.0:
            rule = "from 0 to below 1, so that something is left to score"
            raise BadInput(f"--train-frac, got {self.store_frac}: {rule}; correct it")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a source tells about its model and its routing; empty or None where it is silent.

    expert_order: `router` when ids come heaviest first even without weights.
    labels: words that every result on the trace must carry. notes: sentences for the header.
    """

    model: str = ""
    model_source: str = ""
    n_experts: int | None = None
    gate: str = "softmax"
    renormalised: bool | None = None
    weights_kind: str = "applied"
    selection: str = "topk"
    scaling: float = 1.0
    expert_order: str = "unranked"
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def over(self, other: Facts | None, where: str) -> Facts:
        """These facts and those of the file before, which must not contradict them.

        Raises:
            BadInput: two inputs of one trace differ in what has to be equal.
        """
        if other is None:
            return self
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if one.name not in ("notes", "labels", "model_source") and mine != theirs:
                rule = "the inputs of one trace come from one model and recorder; convert them one by one"
                raise BadInput(f"{where}: {one.name}, got {mine!r} after {theirs!r}: {rule}")
        return replace(
            self,
            model_source=other.model_source,
            labels=tuple(dict.fromkeys(other.labels + self.labels)),
            notes=tuple(dict.fromkeys(other.notes + self.notes)),
        )


@dataclass
class Source:
    """A kind of log.

    title: in words; origin: what its reader was built from.
    sniff(path, head): whether a file or folder looks like it, by the first bytes.
    read(path, spool, options): puts every token into the spool. Raises BadInput with file, place and field. Where
        `runs` finds that several files are one run, further files follow: `read(path, spool, options, others)`.
    silent: options without which it cannot be converted, whatever the file holds; `hint` is what to say of them.
    first_line: option -> the key by which a first line of facts may tell it.
    phased: whether it marks, or settles, what is prefill and what decode.
    """

    name: str
    title: str
    origin: str
    sniff: Callable[[Path, bytes], bool]
    read: Callable[..., Facts]
    silent: tuple[str, ...] = ()
    hint: str = ""
    first_line: Mapping[str, str] = field(default_factory=dict)
    phased: bool = False
    runs: Callable[[Sequence[Path]], list[list[Path]]] = lambda paths: [[path] for path in paths]

    def ask(self, path: Path, head: bytes, options: Options) -> None:
        """Refuse at once what would be refused after reading.

        Raises:
            BadInput: naming every option that is missing, or one that would change nothing.
        """
        silent = [name for name in self.silent if getattr(options, name) is None]
        for name, key in self.first_line.items():
            if head and getattr(options, name) is None and not has_keys(head, key):
                silent.append(name)
        refuse_missing(silent, f"{path} ({self.name})", self.hint)
        if options.prompt_len is not None and self.phased:
            refuse_prompt_len(options.prompt_len, f"{path} ({self.name})")


SHAPE = ("model", "n_experts")  # what logs of ids alone never tell
_WORDS = {"model": "--model NAME", "n_experts": "--n-experts N", "top_k": "--top-k K"}
_WORDS["renormalised"] = "--renormalised or --no-renormalised"


def refuse_missing(names: list[str], where: str, hint: str = "") -> None:
    """One line that asks for all of them. Raises BadInput when there are any."""
    if names:
        flags = " and ".join(_WORDS[name].split()[0] for name in names)
        raise BadInput(f"{flags}, got none: {where} does not tell; give {', '.join(_WORDS[n] for n in names)}{hint}")


def refuse_prompt_len(prompt_len: int, where: str) -> None:
    """Where phases are known there is nothing to mark. Raises BadInput."""
    raise BadInput(f"--prompt-len, got {prompt_len}: {where} says itself which rows are prefill; leave it out")
