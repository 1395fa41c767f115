"""Tiny configurations of Hugging Face classes that keep the *routing shape* of published models.

Layers x experts x k, the routing function and the presence of shared experts are those of the named model; widths are
small enough to train in minutes and to ship (about 30 MB in bf16). Needs transformers >= 5 (experts as 3-D parameters).

| shape | class | layers x experts, k | routing |
|---|---|---|---|
| mixtral-8x7b | MixtralForCausalLM | 32 x 8, 2 | softmax, top-2, renormalised |
| qwen1.5-moe-a2.7b | Qwen2MoeForCausalLM | 24 x 60, 4 | softmax, top-4, not renormalised; gated shared expert |
| phi-3.5-moe | PhimoeForCausalLM | 32 x 16, 2 | sparsemixer |
| deepseek-moe-16b | Qwen2MoeForCausalLM | 27 (+1 dense) x 64, 6 | softmax, top-6, not renormalised; shared expert |

deepseek-moe-16b uses Qwen2Moe with `mlp_only_layers=[0]` and not DeepseekV2: DeepSeekMoE-16B has ordinary
multi-head attention where DeepseekV2 has latent attention, and DeepseekV2's router returns its top-k unsorted,
which loses the router order that traces record. What differs: Qwen2Moe scales the shared expert by a sigmoid gate,
DeepSeekMoE adds it as it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from sim.base.errors import BadInput, did_you_mean
from traces.record.checkpoint import of_config

SHARD_BYTES = 15_000_000
MAX_POSITIONS = 4096


@dataclass(frozen=True)
class Shape:
    """Geometry of one model. `layers` counts all decoder layers, `dense_layers` those at the front without experts."""

    family: str  # transformers' model_type: mixtral, qwen2_moe or phimoe
    layers: int
    experts: int
    top_k: int
    hidden: int = 128
    expert_width: int = 128
    heads: int = 4
    shared_width: int = 0
    dense_layers: int = 0
    # Load-balancing loss, on the mean over layers. Switch Transformer gives each layer 0.01; here all share 0.05,
    # because short training punishes an early collapse more than a router that is a little less free.
    aux_coef: float = 0.05

    @property
    def moe_layers(self) -> int:
        """Decoder layers that route: the L of a trace."""
        return self.layers - self.dense_layers


SHAPES: dict[str, Shape] = {  # widths that train on a CPU within two hours
    "mixtral-8x7b": Shape("mixtral", 32, 8, 2, hidden=64, expert_width=64, heads=2),
    "qwen1.5-moe-a2.7b": Shape("qwen2_moe", 24, 60, 4, hidden=64, expert_width=24, heads=2, shared_width=96),
    "phi-3.5-moe": Shape("phimoe", 32, 16, 2, hidden=64, expert_width=48, heads=2),
    "deepseek-moe-16b": Shape(
        "qwen2_moe", 28, 64, 6, hidden=64, expert_width=16, heads=2, shared_width=32, dense_layers=1
    ),
    # Many small experts in the one class that real runs read; half of the layers, so that it trains in minutes.
    "mixtral-fine": Shape("mixtral", 16, 32, 8, hidden=64, expert_width=16, heads=2),
    "toy": Shape("mixtral", 3, 4, 2, hidden=32, expert_width=16, heads=2),  # for trying the chain out in seconds
}


def get_shape(name: str, hidden: int = 0) -> Shape:
    """Look a shape up; another hidden size keeps the width of a head. Raises BadInput with a near name."""
    if name not in SHAPES:
        raise BadInput(f"shape {name!r}: unknown; {did_you_mean(name, SHAPES)}")
    shape = SHAPES[name]
    if hidden in (0, shape.hidden):
        return shape
    if hidden % (shape.hidden // shape.heads):
        raise BadInput(f"hidden size, got {hidden}: a multiple of a head's {shape.hidden // shape.heads}")
    return replace(shape, hidden=hidden, heads=hidden * shape.heads // shape.hidden)


def make_config(shape: Shape, vocab: int) -> Any:
    """The transformers configuration of a shape."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "num_experts_per_tok": shape.top_k,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "router_aux_loss_coef": shape.aux_coef,
        "initializer_range": 0.04,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
        "use_cache": True,
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    if shape.family in ("mixtral", "phimoe"):
        kind = transformers.MixtralConfig if shape.family == "mixtral" else transformers.PhimoeConfig
        return kind(
            num_local_experts=shape.experts, intermediate_size=shape.expert_width, rope_parameters=rope, **common
        )
    if shape.family == "qwen2_moe":
        return transformers.Qwen2MoeConfig(
            num_experts=shape.experts,
            moe_intermediate_size=shape.expert_width,
            shared_expert_intermediate_size=shape.shared_width,
            intermediate_size=4 * shape.hidden,
            mlp_only_layers=list(range(shape.dense_layers)),
            norm_topk_prob=False,
            rope_parameters=rope,
            **common,
        )
    raise BadInput(f"family {shape.family!r}: known are mixtral, phimoe, qwen2_moe")


def build(shape: Shape, vocab: int, seed: int) -> Any:
    """A freshly initialised model in float32 on the CPU; projections into the residual stream start small (GPT-2)."""
    torch.manual_seed(seed)
    model = of_config(make_config(shape, vocab))
    shrink = (2 * shape.layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.mul_(shrink)
            elif name.endswith(("gate.weight", "router.weight")):
                nn.init.normal_(parameter, std=0.04)  # Qwen2Moe starts its router at zero, where top-k is a tie
    return model


def moe_layers(model: Any) -> list[Any]:
    """The decoder layers that route, in order."""
    return [layer for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def router_of(layer: Any) -> Any:
    """The router module of a decoder layer; its forward returns (logits, weights, expert ids)."""
    return layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate


def renormalises(layer: Any) -> bool:
    """Whether the weights of a layer's chosen experts are divided by their sum. Raises BadInput for SparseMixer."""
    if hasattr(layer.mlp, "router"):
        raise BadInput("balance 'bias': PhiMoE's router takes the scores close to the highest; use 'aux' for it")
    return bool(getattr(router_of(layer), "norm_topk_prob", True))


def shared_output(layer: Any, gate_input: torch.Tensor) -> torch.Tensor | None:
    """What the layer's shared expert adds for this gate input [N,h], or None if it has none."""
    if not hasattr(layer.mlp, "shared_expert"):
        return None
    gated = torch.sigmoid(layer.mlp.shared_expert_gate(gate_input))
    return gated * layer.mlp.shared_expert(gate_input)  # type: ignore[no-any-return]


def save(model: Any, folder: Path) -> None:
    """Write config.json and bf16 weights in shards below `SHARD_BYTES`, named as Hugging Face names them."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        k: v.detach().to("cpu", torch.bfloat16).contiguous()
        for k, v in model.state_dict().items()
        if k != "lm_head.weight"
    }  # tied to the embedding
    shards: list[dict[str, torch.Tensor]] = [{}]
    used_bytes = 0
    for name, tensor in state.items():
        size_bytes = tensor.numel() * 2
        if used_bytes + size_bytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            used_bytes = 0
        shards[-1][name] = tensor
        used_bytes += size_bytes
    weight_map = {}
    for i, shard in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        total = {"total_size": sum(t.numel() * 2 for t in state.values())}
        index = json.dumps({"metadata": total, "weight_map": weight_map}, indent=1)
        (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    model.config.save_pretrained(folder)
