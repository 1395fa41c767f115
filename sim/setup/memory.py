"""What fits where: VRAM and host memory as one table, and the budget left for experts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import asdict, replace

from sim.base.errors import BadInput, DoesNotFit
from sim.base.kinds import BYTES, EXPERTS, Capacity
from sim.base.units import GIB, show_bytes, show_ram
from sim.machine.cost import key_share
from sim.machine.several import TENSOR, Several
from sim.options import OPTIONS, RunSpec
from sim.workload.kv_memory import KvPool

if TYPE_CHECKING:
    from sim.profiles.hardware import Hardware
    from sim.profiles.models import Model
    from sim.workload.iterations import RequestInfo

RESERVE_BYTES = GIB  # assumed: CUDA context, library workspaces, fragmentation


class Demand(msgspec.Struct, frozen=True):
    """What the workload asks of memory: the longest contexts alive together, and the widest iteration."""

    contexts: tuple[int, ...]  # tokens of each; of a pool those that it has pages for, as one
    iteration_tokens: int
    batch: int
    kv_bytes: int | None = None  # of a pool that was given; it may hold part of a page more than so many tokens
    step_tokens: int = 1  # that a request decodes at once: more than one with drafts
    draft_bytes: int = 0  # of a model that drafts

    @property
    def kv_tokens(self) -> int:
        return sum(self.contexts)

    def kv_cache_bytes(self, model: Model, precision: str, layers: Sequence[int] | None = None) -> int:
        """Keys and values of all of it, or of these layers; a page of a pool has as much room for each."""
        if self.kv_bytes is not None:
            return self.kv_bytes if layers is None else math.ceil(self.kv_bytes * len(layers) / model.n_layers)
        return model.kv_bytes(self.contexts, _kept_in(precision), layers)


class BudgetRule(msgspec.Struct, frozen=True):
    """How GPU memory and the expert part are capped; None: not at all."""

    vram_bytes: int | None = None
    cache: Capacity | None = None

    def described(self) -> str:
        """The rule as words for messages and results."""
        if self.cache is not None:
            return f"--cache {self.cache.words}"
        return "all VRAM left" if self.vram_bytes is None else f"--vram {show_bytes(self.vram_bytes)}"


class DenseParts(msgspec.Struct, frozen=True):
    """What GPU 0 holds besides experts, and how many tokens two of the items are for."""

    dense_bytes: int
    kv_cache_bytes: int
    kv_tokens: int
    activation_bytes: int
    iteration_tokens: int
    reserve_bytes: int = RESERVE_BYTES
    draft_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """What is really held; the reserve is for what others take."""
        return self.dense_bytes + self.kv_cache_bytes + self.activation_bytes + self.draft_bytes

    @property
    def all_bytes(self) -> int:
        return self.held_bytes + self.reserve_bytes

    def sizes(self) -> dict[str, int]:
        """By item; a draft model only where there is one."""
        return {name: value for name, value in asdict(self).items() if value or name != "draft_bytes"}


class MemoryPlan(msgspec.Struct, frozen=True):
    """The division of GPU 0's memory, and the expert budget of each GPU (predictors still to be taken off)."""

    parts: DenseParts
    vram_bytes: int
    expert_bytes: tuple[int, ...]
    hypothetical: bool
    needs_bytes: int  # what a GPU would have to have at most
    every: tuple[DenseParts, ...] = ()  # parts by GPU

    def holds_all(self, model: Model, precision: str, several: Several) -> bool:
        """Whether every expert fits the GPU that it lives on."""
        homes, size = several.homes_of(model.n_moe_layers * model.n_experts), model.expert_bytes(precision)
        return all(n_bytes >= homes.count(gpu) * size for gpu, n_bytes in enumerate(self.expert_bytes))

    def parts_of(self, gpu: int) -> DenseParts:
        """What a GPU holds besides experts."""
        return self.every[gpu] if self.every else self.parts

    def sizes(self, predictor_bytes: int = 0, gpu: int = 0) -> dict[str, int]:
        """A GPU's memory by item, for `DoesNotFit`; the predictor is GPU 0's."""
        predictor = {"predictor_bytes": predictor_bytes} if predictor_bytes and not gpu else {}
        return {**self.parts_of(gpu).sizes(), "cache_capacity_bytes": self.expert_bytes[gpu], **predictor}


def activation_bytes(model: Model, n_tokens: int, batch: int, precision: str) -> int:
    """Working set of one iteration (assumed): per token eight hidden vectors and two FFN rows, plus fp32 logits."""
    element = 4 if precision == "fp32" else 2
    widest = max(model.expert_intermediate_size * model.top_k, model.hidden_size)
    return n_tokens * element * (8 * model.hidden_size + 2 * widest) + 4 * batch * model.vocab_size


def kv_token_bytes(model: Model, precision: str) -> int:
    """Keys and values of one token in all layers."""
    return model.kv_bytes_per_token(_kept_in(precision))


def _kept_in(precision: str) -> str:
    return "fp32" if precision == "fp32" else "bf16"


def plan(
    model: Model,
    hw: Hardware,
    precision: str,
    demand: Demand,
    rule: BudgetRule,
    n_gpus: int,
    hypothetical: bool,
    whole_model: bool,
    several: Several | None = None,
) -> MemoryPlan:
    """Divide VRAM.

    Args:
        demand: of the GPU that serves most, where requests are dealt out. several: how the GPUs work together.
        hypothetical: run even if it does not fit (bounds only), saying what it would need.
        whole_model: give the expert part room for every expert, whatever the cap (policies that keep all resident).

    Raises:
        DoesNotFit: with the table, when dense parts or the requested expert budget exceed VRAM.
        BadInput: a budget of nothing, or beyond the model.
    """
    size = model.expert_bytes(precision)
    n_total = model.n_moe_layers * model.n_experts
    several = several or Several(n_gpus)
    every = _dense_parts(model, precision, demand, several)
    parts = every[0]
    vram_bytes = int(hw.vram_bytes.value) if rule.vram_bytes is None else rule.vram_bytes
    if rule.vram_bytes is not None and rule.vram_bytes > hw.vram_bytes.value and not hypothetical:
        raise BadInput(
            f"--vram, got {show_bytes(rule.vram_bytes)}: {hw.id} has {show_bytes(hw.vram_bytes.value)}; "
            "lower it, or describe another GPU with --set hw.vram_bytes=..."
        )
    room = [vram_bytes - one.all_bytes for one in every]
    if min(room) <= 0 and not hypothetical:
        pool = demand.kv_bytes is not None  # lengths of requests change nothing about it
        fullest = every[room.index(min(room))]
        raise DoesNotFit(
            f"{model.id} in {precision} on {hw.id}: dense parts{' and --kv-memory' if pool else ''} need "
            f"{show_bytes(fullest.all_bytes)} of {show_bytes(vram_bytes)}; take a smaller model, a lower precision, "
            f"{'less --kv-memory' if pool else 'shorter requests'} or a larger GPU",
            {**fullest.sizes(), "vram_bytes": vram_bytes},
        )
    homes = several.homes_of(n_total)
    living = [homes.count(gpu) for gpu in range(n_gpus)]
    all_of_it = [n * size for n in living]
    # A cap is checked even where it has no say.
    wanted = _wanted(rule, size, n_total, living if several.in_turn else [1] * n_gpus)
    if whole_model:
        wanted = all_of_it
    if wanted is None:
        wanted = [min(bytes_, limit) for bytes_, limit in zip(room, all_of_it, strict=True)]
        if hypothetical:
            wanted = [max(bytes_, size) for bytes_ in wanted]
    if several.homes is not None:  # no more than lives there
        wanted = [min(bytes_, limit) for bytes_, limit in zip(wanted, all_of_it, strict=True)]
    for gpu, (asked, has) in enumerate(zip(wanted, room, strict=True)):
        if asked > has and not hypothetical:
            raise DoesNotFit(
                f"expert budget, got {rule.described()} ({show_bytes(asked)} on GPU {gpu}): {hw.id} has "
                f"{show_bytes(has)} left; lower it, or take a larger GPU",
                {**every[gpu].sizes(), "cache_capacity_bytes": asked, "vram_bytes": vram_bytes},
            )
    needs_bytes = max(one.all_bytes + bytes_ for one, bytes_ in zip(every, wanted, strict=True))
    return MemoryPlan(parts, vram_bytes, tuple(wanted), needs_bytes > vram_bytes, needs_bytes, tuple(every))


def _dense_parts(model: Model, precision: str, demand: Demand, several: Several) -> list[DenseParts]:
    """What each GPU holds besides experts; of those that hold nothing else the reserve alone."""
    n_gpus, whole, kv_bytes = several.n_gpus, model.dense_bytes(precision), demand.kv_cache_bytes(model, precision)
    working_bytes = activation_bytes(model, demand.iteration_tokens, demand.batch * demand.step_tokens, precision)
    first = DenseParts(
        whole, kv_bytes, demand.kv_tokens, working_bytes, demand.iteration_tokens, draft_bytes=demand.draft_bytes
    )
    if several.in_turn:
        of_layer = several.stages_of(model.n_layers)
        of_layers = dense_bytes_by_gpu(model, precision, of_layer)
        on_gpu = [[layer for layer in range(model.n_layers) if of_layer[layer] == gpu] for gpu in range(n_gpus)]
        kept = [demand.kv_cache_bytes(model, precision, layers) for layers in on_gpu]
        every = [replace(first, dense_bytes=n, kv_cache_bytes=kv) for n, kv in zip(of_layers, kept, strict=True)]
        return [every[0], *[replace(one, draft_bytes=0) for one in every[1:]]]
    if several.dense == TENSOR:
        routers = model.n_moe_layers * model.gate_bytes(precision)  # whole on each
        first = replace(
            first,
            dense_bytes=routers - (routers - whole) // n_gpus,
            kv_cache_bytes=math.ceil(kv_bytes * key_share(model, n_gpus)),
        )
    return [first, *[first if several.together else DenseParts(0, 0, 0, 0, 0)] * (n_gpus - 1)]


def dense_bytes_by_gpu(model: Model, precision: str, of_layer: Sequence[int]) -> list[int]:
    """Everything that is no routed expert by the GPU that has its layer; the first has the input embedding, the last
    the head (with tied embeddings both have it) and what lies in no layer.

    Args:
        of_layer: the GPU of each layer and of the head.
    """
    n_gpus, moe = of_layer[-1] + 1, frozenset(model.moe_layer_ids)
    of_moe = model.gate_bytes(precision) + model.shared_expert_bytes(precision)
    found = [0] * n_gpus
    for layer in range(model.n_layers):
        of_ffn = of_moe if layer in moe else model.dense_ffn_bytes(precision)
        found[of_layer[layer]] += model.attention_bytes(precision) + of_ffn
    rest = model.dense_bytes(precision) - sum(found) - model.embedding_bytes(precision)  # norms; the head, if untied
    found[0] += model.embedding_bytes(precision)
    found[-1] += max(0, rest) + (model.head_bytes(precision) if model.tied_embeddings else 0)
    return found


def _dealt(n_experts: int, shares: list[int]) -> list[int]:
    """So many experts by GPU, in proportion to these shares; what is left over goes to whom most of one is due."""
    whole = [n_experts * share // sum(shares) for share in shares]
    due = [n_experts * share % sum(shares) for share in shares]
    for gpu in sorted(range(len(shares)), key=lambda gpu: -due[gpu])[: n_experts - sum(whole)]:
        whole[gpu] += 1
    return whole


def _wanted(rule: BudgetRule, size: int, n_total: int, shares: list[int]) -> list[int] | None:
    """Bytes of each GPU's cache by the cap that is given, of which each has its share; None where there is none."""
    n_gpus = len(shares)
    if rule.cache is None:
        return None
    unit, amount = rule.cache
    if unit == EXPERTS and amount > n_total:
        raise BadInput(f"--cache, got {rule.cache}: the model has {n_total} experts; give 1 to {n_total}")
    if unit != BYTES:
        return [n * size for n in _dealt(rule.cache.experts(n_total, size), shares)]
    given_bytes = [int(amount) * share // sum(shares) for share in shares]
    if min(given_bytes) < size:
        raise BadInput(
            f"--cache, got {rule.cache.words}: one expert takes {show_bytes(size)} on each of {n_gpus} GPU(s); give at "
            f"least {show_bytes(-(-size * sum(shares) // min(shares)))}"
        )
    return [min(n_bytes, n * size) for n_bytes, n in zip(given_bytes, _dealt(n_total, shares), strict=True)]


def host_need(model: Model, precision: str, kept: Collection[int] = ()) -> int:
    """Bytes of host memory for experts and tables, without the experts of layers that are kept on GPUs."""
    sizes = model.expert_bytes_by_layer(precision)
    on_gpus = sum(sizes[layer] for layer in kept) * model.n_experts
    return model.routed_bytes(precision) + model.host_bytes(precision) - on_gpus


def check_host(
    model: Model,
    hw: Hardware,
    precision: str,
    given_bytes: int | None = None,
    less_bytes: int | None = None,
    mapped: bool = False,
    sure: bool = True,
) -> None:
    """Raises DoesNotFit where host memory is too small, and says what would make it fit.

    Args:
        given_bytes: `--ram`, in place of what the profile's host has. less_bytes: what is needed without what
            lies on GPUs for good; None: as much. mapped: experts are pages of a mapped file, all of which is then
            needed. sure: False where it is only known that no fewer than `less_bytes` are.
    """
    all_bytes = host_need(model, precision)
    less_bytes = all_bytes if less_bytes is None else less_bytes
    need_bytes = all_bytes if mapped else less_bytes
    has_bytes = int(hw.cpu.memory_bytes.value) if given_bytes is None else given_bytes
    if need_bytes <= has_bytes:
        return
    what = "experts and tables" if model.host_params else "experts"
    beside = " that stay off the GPU" if need_bytes < all_bytes else ""
    whose, option = f"{hw.id}'s host has", "--set hw.cpu.memory_bytes="
    if given_bytes is not None:
        whose, option = "--ram gives", "--ram "
    raised = f"{option}{math.ceil(need_bytes / GIB)}GiB"  # rounded up: to the nearest it may be too little
    least = "" if sure else "at least "
    pinned = (
        "--set engine.pinned=true (llama.cpp's --no-mmap: what stays on the GPU needs no host memory, which leaves "
        f"{least}{_both(less_bytes)})"
    )
    ways, note = [f"more RAM ({raised})"], ""
    if mapped and less_bytes < all_bytes:
        if less_bytes <= has_bytes:
            ways.append(pinned)
        else:
            note = f"; engine.pinned=true alone is not enough, it leaves {least}{_both(less_bytes)}"
    ways += ["a lower --precision", "a drive to read them from (--drive gen4x4)"]
    raise DoesNotFit(
        f"{model.id} in {precision}: its {what}{beside} need {_both(need_bytes)} of host memory, {whose} "
        f"{_both(has_bytes)}; take {', '.join(ways[:-1])} or {ways[-1]}{note}",
        {"host_experts_bytes": need_bytes, "host_memory_bytes": has_bytes},
    )


def _both(n_bytes: int) -> str:
    """In the unit of models, and in that of RAM."""
    return f"{show_bytes(n_bytes)} ({show_ram(n_bytes)})"


def kv_pool(spec: RunSpec, model: Model, requests: Sequence[RequestInfo]) -> KvPool | None:
    """The pool that was asked for; None where none was.

    Raises:
        BadInput: options of a pool without one, or a request larger than all of it.
    """
    if spec.kv_memory is None:
        for row in (OPTIONS.by_field["kv_page"], OPTIONS.by_field["kv_preempt"]):
            if (value := getattr(spec, row.field)) != row.default:
                raise BadInput(f"{row.said}, got {value!r} without a pool, where nobody is refused; add --kv-memory")
        return None
    pool = KvPool.of(spec.kv_memory, spec.kv_page, kv_token_bytes(model, spec.precision), spec.kv_preempt)
    pool.check(requests, spec.kv_memory)
    return pool


def demand_of(pool: KvPool, spec: RunSpec, requests: Sequence[RequestInfo], without: Demand) -> Demand:
    """What the workload asks of memory with a pool, in place of `without` one."""
    widest = without.iteration_tokens
    if without.batch > 1 and not pool.swaps and spec.prefill_chunk is None:
        # Who made room is prefilled with all that it has put out.
        widest = max(widest, *(r.prompt_len + r.outputs - 1 for r in requests))
    n_tokens = pool.n_pages * pool.page_tokens
    return replace(without, contexts=(n_tokens,), iteration_tokens=widest, kv_bytes=spec.kv_memory)


def check_host_room(
    pool: KvPool, hw: Hardware, experts_bytes: int, requests: Sequence[RequestInfo], batch: int, above_drive: bool
) -> None:
    """Raises DoesNotFit where host memory, besides experts, cannot take all pages that may lie there at a time.

    Args:
        batch: requests that run together at most; one of them always stays. above_drive: experts may have less of it.
    """
    if not pool.swaps:
        return
    away = sorted((pool.most_pages(r) for r in requests), reverse=True)[: batch - 1]
    has_bytes, swapped_bytes = int(hw.cpu.memory_bytes.value), sum(away) * pool.page_bytes
    if experts_bytes + swapped_bytes > has_bytes:
        less = "less --ram for experts, " if above_drive else ""
        raise DoesNotFit(
            f"--set kv.preempt, got 'swap': up to {show_bytes(swapped_bytes)} of KV cache may go to host memory, "
            f"{hw.id}'s "
            f"host has {show_bytes(has_bytes)}, {show_bytes(experts_bytes)} of it for experts; take --set kv.preempt "
            f"recompute, a smaller --batch, {less}or --set hw.cpu.memory_bytes=...",
            {"host_experts_bytes": experts_bytes, "swapped_bytes": swapped_bytes, "host_memory_bytes": has_bytes},
        )
