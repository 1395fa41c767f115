"""What `--draft` means on a machine: who drafts, what that takes, and the memory that it takes from experts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from sim.base import digests
from sim.base.errors import BadInput
from sim.machine.cost import Cost
from sim.profiles.models import load_model
from sim.setup.memory import Demand
from sim.workload.draft_options import REJECTED, Draft, parse_draft, read_accepted
from sim.workload.draft_steps import Drafts
from sim.workload.iterations import DECODE, PREFILL, Iteration, Range

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.profiles.hardware import Hardware
    from sim.profiles.models import Model
    from sim.profiles.stack import Stack


class Drafter:
    """A draft that was asked for, with its model and recorded counts where it has them."""

    def __init__(self, draft: Draft, model: Model | None, recorded: list[list[int]]) -> None:
        self.draft = draft
        self.model = model
        self.recorded = recorded

    @classmethod
    def of(cls, spec: RunSpec) -> Drafter | None:
        """What a specification asks for; None where nothing is drafted. Raises BadInput."""
        draft = None if spec.draft is None else parse_draft(spec.draft)
        if draft is None:
            return None
        if spec.prefill_chunk is not None and spec.prefill_chunk < spec.batch * (draft.k + 1):
            raise BadInput(
                f"--prefill-chunk, got {spec.prefill_chunk} with --draft k={draft.k} and --batch {spec.batch}: a step "
                f"of all that decode has {spec.batch * (draft.k + 1)} tokens; give at least so many"
            )
        model = None if draft.model is None else load_model(draft.model, {})
        if model is not None and spec.gpus > 1:
            raise BadInput(
                f"--draft, got model={draft.model} with --gpus {spec.gpus}: a draft model lies on one GPU; give its "
                "time with draft_s=SECONDS"
            )
        return cls(draft, model, [] if draft.accepted is None else read_accepted(Path(draft.accepted)))

    def bytes(self, precision: str, without: Demand) -> int:
        """GPU memory of the draft model: all its weights, and its own keys and values of as many tokens."""
        if self.model is None:
            return 0
        weights = self.model.dense_bytes(precision) + self.model.routed_bytes(precision)
        return weights + without.kv_cache_bytes(self.model, precision)

    def demand(self, without: Demand, precision: str) -> Demand:
        """What the workload asks of memory with drafts."""
        step_tokens = self.draft.k + 1
        widest = max(without.iteration_tokens, without.batch * step_tokens)
        n_bytes = self.bytes(precision, without)
        return replace(without, iteration_tokens=widest, step_tokens=step_tokens, draft_bytes=n_bytes)

    def drafts(self, spec: RunSpec, hw: Hardware, stack: Stack) -> Drafts:
        """The decode steps of a run, with their prices."""
        if self.model is not None:
            model = DraftModel(Cost(hw, self.model, stack, spec.precision))
            return Drafts(self.draft, spec.seed, self.recorded, model.seconds, "datasheet")
        each_s = self.draft.draft_s
        return Drafts(self.draft, spec.seed, self.recorded, None if not each_s else lambda _, n: [each_s] * n)

    def labels(self) -> list[str]:
        """What a reader has to know of the figures."""
        draft = self.draft
        found = [f"speculative decoding, {draft.title}; {REJECTED[draft.rejected]} (assumed)"]
        most = max((max(counts) for counts in self.recorded), default=draft.k)
        if most < draft.k:
            found.append(f"recorded counts end at {most} accepted drafts, with k={draft.k} there may have been more")
        if self.model is not None and self.model.top_k < self.model.n_experts:
            found.append("experts of the draft model: as many as its tokens can ask for, all resident (assumed)")
        return found

    def terms(self, seed: int) -> dict[str, Any]:
        """What decides the numbers of a run by it, wherever files lie."""
        draft = self.draft
        terms = {"seed": seed, "k": draft.k, "acceptance": list(draft.acceptance), "draft_s": draft.draft_s or 0.0}
        terms["rejected"] = draft.rejected
        terms["accepted_sha256"] = None if draft.accepted is None else digests.of_file(Path(draft.accepted))
        return {**terms, "model_sha256": None if self.model is None else digests.of_data(self.model)}

    def explicit(self, models: Any) -> str:
        """As `--draft` takes it from any folder."""
        draft = self.draft
        accepted = None if draft.accepted is None else str(Path(draft.accepted).resolve())
        model = None if draft.model is None else models(draft.model)
        return Draft(draft.k, draft.acceptance, accepted, draft.draft_s, model, draft.rejected).text


class DraftModel:
    """A model that drafts on the GPU where all of it lies, by the same prices as the one that verifies."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost

    def seconds(self, iteration: Iteration, n_drafted: int) -> list[float]:
        """What each drafted token takes: one pass of the model for everybody whose draft is still to grow."""
        one_by_one = [
            Range(r.request, r.start_row, r.start_row + 1, DECODE, r.context)
            for r in iteration.ranges
            if r.phase != PREFILL and r.n_rejected < r.stop_row - r.start_row
        ]
        found = []
        for after in range(n_drafted):
            ranges = [Range(r.request, r.start_row, r.stop_row, DECODE, r.context + after) for r in one_by_one]
            found.append(self._pass_s(Iteration(0, ranges, None)))  # type: ignore[arg-type]  # its routing is unknown
        return found

    def _pass_s(self, iteration: Iteration) -> float:
        cost, model, n = self.cost, self.cost.model, iteration.n_tokens
        launches = cost.launches
        n_layers, n_dense = model.n_moe_layers, sum(cost.n_dense_before)
        counts = [1] * min(model.n_experts, n * model.top_k)  # no more than its tokens can ask for
        layer_s = (
            cost.attention(iteration).duration_s + cost.gate(n).duration_s + experts_s(cost, cost.precision, counts)
        )
        layer_host_s = launches.attention.all_s + launches.gate.all_s + launches.experts_s(len(counts))
        if cost.has_shared:
            layer_s, layer_host_s = layer_s + cost.shared(n).duration_s, layer_host_s + launches.shared.all_s
        gpu_s = n_layers * layer_s + cost.head(n).duration_s
        host_s = n_layers * layer_host_s + launches.head.all_s
        if n_dense:
            gpu_s, host_s = (
                gpu_s + n_dense * cost.dense_layer(iteration).duration_s,
                host_s + n_dense * launches.dense.all_s,
            )
        return max(gpu_s, host_s)


def experts_s(cost: Cost, precision: str, counts: list[int]) -> float:
    """A layer's experts, each for so many tokens."""
    if not cost.launches.grouped:
        return sum(cost.expert(n, precision).duration_s for n in counts)
    leader, slack_s = cost.leader(counts[0], precision)
    experts_s = leader.duration_s
    for n in counts[1:]:
        member, slack_s = cost.member(slack_s, n, precision)
        experts_s += member.duration_s
    return experts_s
