"""Rows that need no trace: bytes, counts and single operations, from the catalogue's geometry and hardware profiles.

A method takes the row and the settings of its constant; it returns label -> figure (or [least, most]) in the row's
unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from policies.duoserve.predictor import PUBLISHED_BYTES
from reports.reproduce.rows import HERE, Figure, Row
from sim.machine.cost import Cost
from sim.profiles.geometry import bytes_of
from sim.profiles.hardware import load_hardware
from sim.profiles.models import Model, load_model
from sim.profiles.stack import load_stack

Settings = dict[str, float]
Method = Callable[[Row, Settings], dict[str, Figure]]
METHODS: dict[str, Method] = {}
GB, GIB = 1e9, 1024.0**3
KEPT_FRAC = 0.6  # eMoE keeps 60 % of the experts in most of its figures
EMOE_LOADED_FRAC = {"openmoe-8b": 0.67, "mixtral-8x7b": 0.78}  # section 2.1.1
EMOE_HW = "a100-40g-pcie"
EMOE_PREDICTOR_PARAMS = 0.108e9  # section 5.3
MIXTRAL_POSITIONS = 32768  # max_position_embeddings of Mixtral-8x7B's configuration
# What PyTorch sees of these cards (`total_memory`; in its messages, "total capacity"), ECC off: TU102 and AD102.
VISIBLE_GIB = {"24 GB": 23.65, "48 GB": 47.5}
# AdapMoE's sizes by layer as its public code computes them: total -> without and with adaptive gating.
ADAPMOE_SIZES = {
    "64": "82222222222221121122222222112222",
    "64 gated": "84333332222222222221111111111111",
    "128": "85444444444444343344444444334444",
    "128 gated": "87665555555555555544433322111111",
}


def method(function: Method) -> Method:
    """Make a function known under its own name."""
    METHODS[function.__name__] = function
    return function


def model_of(name: str) -> Model:
    """A model of the catalogue, or one described beside the rows."""
    own = HERE / "models" / f"{name}.yaml"
    return load_model(own if own.exists() else name, {})


def cost_of(
    hw: str,
    model: str,
    precision: str = "bf16",
    settings: Settings | None = None,
    stack: str = "bare",
    shares: bool = False,
) -> Cost:
    """Prices on a bundled GPU; `settings` are dotted overrides such as `hw.h2d.latency_s`.

    Args:
        shares: what runs at once shares memory.
    """
    own: dict[str, dict[str, object]] = {"hw": {}, "engine": {}}
    for key, value in (settings or {}).items():
        group, _, path = key.partition(".")
        own[group][path] = value
    return Cost(
        load_hardware(hw, own["hw"]), model_of(model), load_stack(stack, own["engine"]), precision, shares=shares
    )


def awq_dense_bytes(model: Model) -> int:
    """Weights outside the experts as AWQ leaves them: attention in 4 bits, embedding, head, gates and norms in 16."""
    attention = model.n_layers * model.attention_params()
    return bytes_of(attention, "int4_g128") + bytes_of(model.dense_params() - attention, "fp16")


@method
def duoserve_peaks(row: Row, _: Settings) -> dict[str, Figure]:
    model = model_of(row.model)
    dense, expert = awq_dense_bytes(model), model.expert_bytes("int4_g128")
    acc, moesys = dense + model.top_k * expert, dense + model.n_experts * expert
    found: dict[str, Figure] = {
        "ACC": acc / GB,
        "MoESys": moesys / GB,
        "DuoServe": (acc + PUBLISHED_BYTES) / GB,
        "MoESys - ACC": (moesys - acc) / GB,
        "DuoServe - ACC": PUBLISHED_BYTES / GB,
    }
    return {label: found[label] for label in row.published}


@method
def duoserve_share(row: Row, _: Settings) -> dict[str, Figure]:
    """Of a GPU's memory with all weights there, what DuoServe-MoE takes: weights and predictor, and nothing else."""
    model = model_of(row.model)
    dense, expert = awq_dense_bytes(model), model.expert_bytes("int4_g128")
    whole = dense + model.routed_bytes("int4_g128")
    return {"DuoServe": 100 * (dense + model.top_k * expert + PUBLISHED_BYTES) / whole}


@method
def emoe_load(row: Row, settings: Settings) -> dict[str, Figure]:
    cost = cost_of(EMOE_HW, row.model, settings=settings)
    n_copies = EMOE_LOADED_FRAC[row.model] * cost.model.n_moe_layers * cost.model.n_experts
    return {"load": n_copies * cost.copies.expert_s(cost.model.expert_bytes())}


@method
def emoe_saved(_row: Row, _: Settings) -> dict[str, Figure]:
    shares = [model.routed_bytes() / bytes_of(model.total_params()) for model in map(model_of, EMOE_LOADED_FRAC)]
    return {"saved": [20 * min(shares), 80 * max(shares)]}


def _emoe_bytes(model: Model, kept_frac: float, n_tokens: int) -> float:
    weights = bytes_of(model.dense_params()) + kept_frac * model.routed_bytes()
    return weights + n_tokens * model.kv_bytes_per_token()


def _emoe_fits(n_tokens: int) -> dict[str, Figure]:
    """How many times as much fits beside fewer experts, by what so many tokens keep."""
    models = {"OpenMoE": model_of("openmoe-8b"), "Mixtral": model_of("mixtral-8x7b")}
    freed = {label: (1 - KEPT_FRAC) * model.routed_bytes() for label, model in models.items()}
    return {label: 1 + freed[label] / (n_tokens * model.kv_bytes_per_token()) for label, model in models.items()}


@method
def emoe_longest(_row: Row, _: Settings) -> dict[str, Figure]:
    return _emoe_fits(512)


@method
def emoe_larger_batch(_row: Row, _: Settings) -> dict[str, Figure]:
    return _emoe_fits(4 * 1512)


@method
def emoe_predictor(_row: Row, _: Settings) -> dict[str, Figure]:
    shares = [100 * EMOE_PREDICTOR_PARAMS / model_of(name).routed_params() for name in EMOE_LOADED_FRAC]
    return {"share": [min(shares), max(shares)]}


@method
def importance_ratio(_row: Row, _: Settings) -> dict[str, Figure]:
    pairs = (("rtx3080ti", "deepseek-moe-16b"), ("rtx4060ti", "xverse-moe-a4.2b"), ("a6000", "qwen2-57b-a14b"))
    costs = [cost_of(*pair) for pair in pairs]
    return {"ratio": sum(c.copies.expert_s(c.model.expert_bytes()) / c.expert_gpu_s(1) for c in costs) / len(costs)}


@method
def map_counts(_row: Row, _: Settings) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    for label, name in (("Qwen", "qwen1.5-moe-a2.7b"), ("Mixtral", "mixtral-8x7b"), ("Phi", "phi-3.5-moe")):
        model = model_of(name)
        n = model.n_moe_layers * model.n_experts
        found |= {f"{label} 75 %": 2 * n, f"{label} 98 %": 0.5 * n * math.log(n)}
    return found


@method
def adapmoe_sizes(row: Row, _: Settings) -> dict[str, Figure]:
    from policies.adapmoe import ACCURACY, SINGLE, cache_sizes

    model = model_of(row.model)
    layers, found = [model.n_experts] * model.n_moe_layers, {}
    for label, text in ADAPMOE_SIZES.items():
        single = SINGLE if "gated" in label else [Fraction(0)] * len(layers)
        sizes = cache_sizes(int(label.split()[0]), layers, model.top_k, ACCURACY, single)
        found[label] = float(sum(a == int(b) for a, b in zip(sizes, text, strict=True)))
    return dict(found)


@method
def promoe_bandwidth(_row: Row, _: Settings) -> dict[str, Figure]:
    return {"h2d": load_hardware("rtx4090").h2d.bandwidth_bytes_per_s.value / GB}


def fastertransformer_params(model: Model) -> int:
    """Parameters as FasterTransformer holds a T5: embedding of the encoder, of the decoder and output are three tables.

    The model ties them. Its decoding weights have both `embedding_table` and `lm_head`, its encoder a table of its own
    (ranggihwang/Pregated_MoE@7236587, examples/pytorch/t5/utils/ft_decoding.py and ft_encoder.py).
    """
    return model.total_params() + 2 * model.vocab_size * model.hidden_size


@method
def switch_weights(row: Row, _: Settings) -> dict[str, Figure]:
    models = {label: model_of(f"switch-{label}") for label in row.published}
    return {label: bytes_of(fastertransformer_params(model), "fp32") / GB for label, model in models.items()}


@method
def pregated_memory(_row: Row, _: Settings) -> dict[str, Figure]:
    """Weights of the decoder, which is what the artifact measures (scripts/eval_all.py, `peak_mem_decoder`)."""
    found: dict[str, Figure] = {}
    for label in ("Pre-gated", "MoE-Prefetch"):
        shares = []
        for model in map(model_of, ("switch-base-8", "switch-base-64", "switch-base-128")):
            held = 2 * (model.n_experts if label == "MoE-Prefetch" else model.top_k)
            tables = 2 * model.vocab_size * model.hidden_size
            layers = model.n_layers * model.attention_params() + len(model.dense_layers) * model.expert_params()
            dense = tables + layers
            whole = dense + model.n_moe_layers * model.n_experts * model.expert_params()
            shares.append(100 * (dense + held * model.expert_params()) / whole)
        found[label] = sum(shares) / len(shares)
    return found


@method
def ring_saving(_row: Row, _: Settings) -> dict[str, Figure]:
    model = model_of("mixtral-8x7b")
    saved = 50 * model.routed_bytes() / bytes_of(model.total_params())
    return {"saved": [saved, saved]}


@method
def infinity_copy(row: Row, _: Settings) -> dict[str, Figure]:
    cost = cost_of("a5000", row.model)
    n = cost.model.n_moe_layers * cost.model.top_k
    return {"GB": n * cost.model.expert_bytes() / GB, "ms": 1000 * n * cost.copies.expert_s(cost.model.expert_bytes())}


@method
def fiddler_experts(row: Row, _: Settings) -> dict[str, Figure]:
    """`calc_n_expert_on_gpu` (efeslab/fiddler@00e70f0, src/fiddler/mixtral.py): 0.95 of what is visible, less held.

    Held are the dense weights, the placeholder of one expert, and the rotary tables that transformers 4.36.2, which it
    requires, keeps per layer: cosine and sine of every position in 16 bits.
    """
    model = model_of(row.model)
    rotary_bytes = model.n_layers * 2 * MIXTRAL_POSITIONS * model.head_dim * 2
    held = model.dense_bytes() + model.expert_bytes() + rotary_bytes
    return {label: float((0.95 * VISIBLE_GIB[label] * GIB - held) // model.expert_bytes()) for label in row.published}


@method
def fiddler_ratio(row: Row, _: Settings) -> dict[str, Figure]:
    cost = cost_of("quadro-rtx-6000", row.model)
    return {"ratio": (cost.copies.expert_s(cost.model.expert_bytes()) + cost.expert_gpu_s(1)) / cost.expert_cpu_s(1)}


@method
def floe_copy(row: Row, _: Settings) -> dict[str, Figure]:
    cost = cost_of("rtx3090", row.model)
    return {"copy": 1000 * cost.copies.expert_s(cost.model.expert_bytes())}


def _gb(n_bytes: float) -> float:
    return n_bytes / GB


FORMS: dict[str, Callable[[Model, Row], dict[str, Figure]]] = {
    "awq_weights": lambda model, _: {"weights": _gb(awq_dense_bytes(model) + model.routed_bytes("int4_g128"))},
    "awq_dense": lambda model, _: {"dense": _gb(awq_dense_bytes(model))},
    "emoe_memory": lambda model, _: {
        "all": _gb(_emoe_bytes(model, 1, 512)),
        "60 %": _gb(_emoe_bytes(model, KEPT_FRAC, 512)),
    },
    "emoe_batch": lambda model, _: {
        "all": _gb(_emoe_bytes(model, 1, 4 * 512)),
        "eMoE": _gb(_emoe_bytes(model, KEPT_FRAC, 4 * 512)),
    },
    "emoe_table3": lambda model, _: {
        "eMoE": _gb(_emoe_bytes(model, KEPT_FRAC, 512)),
        **{f"{bits} bits": _gb(bytes_of(model.total_params(), f"int{bits}")) for bits in (8, 4)},
    },
    "inactive": lambda model, _: {
        "share": 100 * (idle := model.total_params() - model.active_params()) / model.total_params(),
        "GB": _gb(bytes_of(idle)),
    },
    "store_bytes": lambda model, _: {"store": 32 * 1024 * model.n_moe_layers * model.n_experts * 4 / 1e6},
    "random_hits": lambda model, row: {label: 100 * int(label) / model.n_experts for label in row.published},
    "all_weights": lambda model, _: {"weights": bytes_of(model.total_params()) / GIB},
}
"""Those that are an expression of the row's model."""


def _of_model(form: Callable[[Model, Row], dict[str, Figure]]) -> Method:
    return lambda row, _: form(model_of(row.model), row)


METHODS |= {name: _of_model(form) for name, form in FORMS.items()}
