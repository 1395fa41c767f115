"""Hugging Face configurations of models whose layers do not all attend alike: Qwen3-Next to Qwen3.6, and Gemma 4.

Shapes follow the modelling files of transformers 5.23.0; the tests count the parameters of its classes.
"""

from __future__ import annotations

from typing import Any

from sim.base.errors import BadInput
from sim.profiles.geometry import MAX_TOKENS
from sim.profiles.hf_config import Config

Fields = dict[str, Any]
Matrix = tuple[str, int, int]


def layer_types(config: Config, other: str, every: int) -> list[str]:
    """What each layer attends with: `full_attention`, or the `other` word. Where the list is missing each `every`-th
    layer is full, as the model's class has it."""
    n_layers = config.layer_count("num_hidden_layers")
    given = config.get("layer_types", default=None)
    if given is None:
        return ["full_attention" if (layer + 1) % every == 0 else other for layer in range(n_layers)]
    if not isinstance(given, list) or len(given) != n_layers or not all(isinstance(kind, str) for kind in given):
        raise BadInput(f"{config.where}: layer_types, got {given!r}: a word for each of {n_layers} layers; correct it")
    for kind in sorted(set(given) - {"full_attention", other}):
        raise BadInput(f"{config.where}: layer_types, got {kind!r}: full_attention or {other}; use a model file")
    return given


def window(config: Config, kinds: list[str], default: int) -> Fields | None:
    """The layers that attend to a sliding window; None where none does. default: tokens, as its class has them."""
    layers = [at for at, kind in enumerate(kinds) if kind == "sliding_attention"]
    if not layers or config.data.get("sliding_window", default) is None:
        return None
    tokens = config.count("sliding_window", default=default)
    if not 1 <= tokens <= MAX_TOKENS:
        raise BadInput(f"{config.where}: sliding_window, got {tokens}: 1 to {MAX_TOKENS} tokens; correct the field")
    return {"tokens": tokens, "layers": layers}


def _other(layers: list[int], matrices: list[Matrix], small: int, kv_values: int, products: int) -> Fields:
    return {
        "layers": layers,
        "matrices": [list(matrix) for matrix in matrices],
        "small_params": small,
        "kv_values_per_token": kv_values,
        "products_per_key": products,
    }


def gated_delta_nets(config: Config, common: Fields) -> Fields:
    """Qwen3-Next, Qwen3.5 and Qwen3.6: linear layers, and full ones whose queries carry a gate."""
    hidden, heads, kv_heads, width = (common[key] for key in ("hidden_size", "n_heads", "n_kv_heads", "head_dim"))
    full: list[Matrix] = [
        ("q", 2 * heads * width, hidden),
        ("k", kv_heads * width, hidden),
        ("v", kv_heads * width, hidden),
        ("o", hidden, heads * width),
    ]
    n_keys, n_values = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    key_size = n_keys * config.count("linear_key_head_dim")
    value_size = n_values * config.count("linear_value_head_dim")
    mixed = 2 * key_size + value_size
    linear: list[Matrix] = [
        ("v", mixed, hidden),
        ("z", value_size, hidden),
        ("a", n_values, hidden),
        ("b", n_values, hidden),
        ("out", hidden, value_size),
    ]
    states = mixed * config.count("linear_conv_kernel_dim") + 2 * n_values + config.count("linear_value_head_dim")
    shared = config.count("shared_expert_intermediate_size")
    kinds = layer_types(config, "linear_attention", max(config.count("full_attention_interval", default=4), 1))
    nets = [at for at, kind in enumerate(kinds) if kind == "linear_attention"]
    others = [
        _other(
            [at for at in range(len(kinds)) if at not in nets], full, 2 * width, 2 * kv_heads * width, 2 * heads * width
        ),
        _other(nets, linear, states, 0, 0),
    ]
    return {
        "n_experts": config.count("num_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_intermediate_size": config.count("moe_intermediate_size"),
        "n_shared_experts": 1 if shared else 0,
        "shared_intermediate_size": shared,
        "shared_gate": bool(shared),
        "qk_norm": "head",
        "other_attention": [other for other in others if other["layers"]],
        "gate": {"score": "softmax", "renormalised": True},
    }


def gemma4(config: Config, common: Fields) -> Fields:
    """Gemma 4: sliding layers as the common fields say, global ones of fewer and wider heads without a value matrix."""
    if not config.flag("enable_moe_block"):
        raise BadInput(f"{config.where}: enable_moe_block, got false: a model without experts; nothing to offload")
    if config.count("hidden_size_per_layer_input", default=0):
        raise BadInput(
            f"{config.where}: hidden_size_per_layer_input: embeddings per layer; describe it in a model file"
        )
    hidden, heads = common["hidden_size"], common["n_heads"]
    kinds = [*layer_types(config, "sliding_attention", 6)[:-1], "full_attention"]  # the last one whatever it is called
    layers = [at for at, kind in enumerate(kinds) if kind == "full_attention"]
    by_layer = config.get("per_layer_config", default={})  # transformers writes it in place of `global_*`
    own = by_layer.get(str(layers[0]), {}) if isinstance(by_layer, dict) and layers else {}
    own = own if isinstance(own, dict) else {}
    globally = Config({**config.data, **{f"global_{key}": own[key] for key in own}}, config.where)
    width = globally.count("global_head_dim", "head_dim")
    alike = config.flag("attention_k_eq_v")
    keys = ("num_global_key_value_heads", "global_num_key_value_heads") if alike else ()
    kv_heads = globally.count(*keys, "num_key_value_heads")
    matrices: list[Matrix] = [("q", heads * width, hidden), ("k", kv_heads * width, hidden)]
    matrices += [] if alike else [("v", kv_heads * width, hidden)]
    matrices.append(("o", hidden, heads * width))
    other = _other(layers, matrices, 2 * width, 2 * kv_heads * width, 2 * heads * width)
    n_layers, n_experts = config.layer_count("num_hidden_layers"), config.count("num_experts")
    return {
        "n_experts": n_experts,
        "top_k": config.count("top_k_experts"),
        "expert_intermediate_size": config.count("moe_intermediate_size"),
        "n_shared_experts": 1,
        "shared_intermediate_size": config.count("intermediate_size"),
        "qk_norm": "head",
        "extra_norms_per_moe_layer": 6,
        "extra_params": n_layers * n_experts,
        "activation": str(config.get("hidden_activation", default="gelu_pytorch_tanh")),
        "tied_embeddings": config.flag("tie_word_embeddings", default=True),
        "other_attention": [other] if layers else [],
        "window": window(config, kinds, 512),
        "gate": {"score": "softmax", "renormalised": True},
    }
