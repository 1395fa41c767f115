"""What the user says about a conversion, and what a file says about itself."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from sim.base.errors import BadInput
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
            raise BadInput(
                f"--train-frac, got {self.store_frac}: from 0 to below 1, so that something is left to "
                f"score; correct it"
            )


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
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name not in ("notes", "labels", "model_source") and mine != theirs:
                raise BadInput(
                    f"{where}: {field.name}, got {mine!r} after {theirs!r}: the inputs of one trace come from "
                    f"one model and recorder; convert them one by one"
                )
        return replace(
            self,
            model_source=other.model_source,
            labels=tuple(dict.fromkeys(other.labels + self.labels)),
            notes=tuple(dict.fromkeys(other.notes + self.notes)),
        )
