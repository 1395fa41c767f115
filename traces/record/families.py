"""The Hugging Face classes that can be recorded: where each keeps its router, and how that router scores and weighs.

Read from the classes of transformers 5.23.0. They share one form: `layer.mlp` holds a router, whose forward returns
(logits, weights, expert ids), and one experts module, which is given the ids and weights to use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from traces.format.header import GateRule

if TYPE_CHECKING:
    import torch

TESTED_WITH = "5.23"


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    score: what the router makes of its logits, as `GateRule.score`.
    renormalised: whether the chosen scores are divided by their sum; None where the configuration says.
    ranked: whether the router hands out its choice heaviest first.
    router, shared, shared_gate: names of modules inside `layer.mlp`; empty where there is none. What `shared` puts
        out is multiplied by the sigmoid of `shared_gate`.
    """

    title: str
    score: str
    renormalised: bool | None = None
    ranked: bool = True
    router: str = "gate"
    shared: str = ""
    shared_gate: str = ""


FAMILIES: dict[str, Family] = {
    "mixtral": Family("Mixtral", "softmax", renormalised=True),
    "qwen2_moe": Family("Qwen2-MoE", "softmax", shared="shared_expert", shared_gate="shared_expert_gate"),
    "qwen3_moe": Family("Qwen3-MoE", "softmax"),
    "olmoe": Family("OLMoE", "softmax"),
    "phimoe": Family("PhiMoE", "sparsemixer", renormalised=False, router="router"),
    "gpt_oss": Family("gpt-oss", "softmax", renormalised=True, router="router"),
    # The class ignores norm_topk_prob; top-k is taken unsorted, as it is in the two below.
    "deepseek_v2": Family("DeepSeek-V2", "softmax", renormalised=False, ranked=False, shared="shared_experts"),
    "deepseek_v3": Family("DeepSeek-V3", "sigmoid", ranked=False, shared="shared_experts"),
    "glm4_moe": Family("GLM-4 MoE", "sigmoid", ranked=False, shared="shared_experts"),
}


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """The modules of one decoder layer that a probe watches; `shared` and `shared_gate` may be None."""

    router: Any
    experts: Any
    input_norm: Any
    post_norm: Any
    shared: Any = None
    shared_gate: Any = None


def family_of(model_type: str, where: str) -> Family:
    """Look a `model_type` up. Raises BadInput that lists what is supported."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    known = ", ".join(f"{family.title} ({name})" for name, family in FAMILIES.items())
    raise BadInput(f"{where}: model_type, got {model_type!r}: no router is known in it; supported are {known}")


def moe_layers(model: Any, where: str) -> list[MoeLayer]:
    """The layers that route, in order.

    Raises:
        BadInput: an unknown `model_type`, or a class that is not built as this page says.
    """
    family = family_of(str(model.config.model_type), where)
    decoder = getattr(model, model.base_model_prefix, model)
    found = [_moe_layer(layer, family) for layer in getattr(decoder, "layers", ()) if _routes(layer, family)]
    if not found:
        raise _built_otherwise(model, where, f"its layers have no mlp.{family.router} beside one mlp.experts module")
    if family.renormalised is None and not hasattr(found[0].router, "norm_topk_prob"):
        raise _built_otherwise(model, where, f"its mlp.{family.router} has no norm_topk_prob")
    return found


def _built_otherwise(model: Any, where: str, how: str) -> BadInput:
    import transformers

    return BadInput(
        f"{where}, got {type(model).__name__} of transformers {transformers.__version__}: {how}; recording is tested "
        f"with transformers {TESTED_WITH} (pip install 'transformers>={TESTED_WITH}')"
    )


def _routes(layer: Any, family: Family) -> bool:
    """Whether a decoder layer is an MoE layer of the form recorded here; experts in a list are an older form."""
    mlp = getattr(layer, "mlp", None)
    router, experts = getattr(mlp, family.router, None), getattr(mlp, "experts", None)
    norms = hasattr(layer, "input_layernorm") and hasattr(layer, "post_attention_layernorm")
    return norms and hasattr(router, "weight") and hasattr(experts, "down_proj")


def _moe_layer(layer: Any, family: Family) -> MoeLayer:
    mlp = layer.mlp
    return MoeLayer(
        router=getattr(mlp, family.router),
        experts=mlp.experts,
        input_norm=layer.input_layernorm,
        post_norm=layer.post_attention_layernorm,
        shared=getattr(mlp, family.shared, None) if family.shared else None,
        shared_gate=getattr(mlp, family.shared_gate, None) if family.shared_gate else None,
    )


def gate_of(model: Any, layers: list[MoeLayer]) -> GateRule:
    """How the model turns logits into choices and weights, from its class, its configuration and its buffers."""
    family, router = FAMILIES[model.config.model_type], layers[0].router
    renormalised = family.renormalised
    if renormalised is None:
        renormalised = bool(router.norm_topk_prob)
    n_groups, n_kept = getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1
    grouped = n_kept < n_groups and getattr(router, "topk_method", "group") != "greedy"
    biases = (getattr(layer.router, "e_score_correction_bias", None) for layer in layers)
    biased = any(bias is not None and bool(bias.any()) for bias in biases)
    return GateRule(
        score=family.score,
        renormalised=renormalised,
        selection="other" if grouped or biased else "topk",
        scaling=float(getattr(router, "routed_scaling_factor", 1.0)),
    )


def gate_scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    """The gate's score of every expert from its logits [..., E], in float32; `score` as in `GateRule.score`."""
    return logits.float().sigmoid() if score == "sigmoid" else logits.float().softmax(dim=-1)
