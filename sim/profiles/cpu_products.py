"""What a CPU spends on a product with weights that are stored in ggml's blocks: unpacking them is arithmetic, too.

Rates are those of llama.cpp's own kernels (build 4384, 16 cores of a Ryzen 9 7950X, LLaMA-3.1-8B, prompts of 512
tokens; ikawrakow/ik_llama.cpp, discussion 164). Unpacked weights are not kept: where unpacking is slow, a weight costs
as much per token of a prompt as in decode (IQ3_S on a core: 1.89 and 1.86 tokens/s). Set against bf16, whose 78.58
tokens/s are 1.1 TFLOP/s, what the profile of a 7950X has (1.15). So a type's share of `cpu.flops_per_s` is measured on
one CPU and assumed of others. Engines that repack weights are faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.profiles.precisions import MIXES
from sim.profiles.stored import Mixed

if TYPE_CHECKING:
    from sim.profiles.geometry import Geometry

BF16_TOKENS_PER_S = 78.58
TOKENS_PER_S = {
    "q8_0": 147.92,
    "q6_k": 82.56,
    "q5_k": 75.52,
    "q5_0": 111.68,
    "q5_1": 111.68,  # assumed: q5_0 with an offset
    "q4_k": 108.40,
    "q4_0": 153.52,
    "iq4_nl": 123.36,
    "mxfp4": 123.36,  # assumed: iq4_nl with another table of 16 values
    "iq4_xs": 74.39,
    "q3_k": 85.19,
    "iq3_s": 30.20,
    "iq3_xxs": 34.17,
    "q2_k": 122.37,
    "iq2_s": 43.80,  # of a file called IQ2_M
    "iq2_xs": 49.72,
    "iq2_xxs": 45.78,
}


def flops_per_weight(kind: str) -> float:
    """Operations of one weight and token, at the rate of bf16: 2 for whatever is not one of ggml's block types."""
    return 2.0 * BF16_TOKENS_PER_S / TOKENS_PER_S.get(kind, BF16_TOKENS_PER_S)


def expert_flops_frac(model: Geometry, precision: str) -> float:
    """Operations of a product with a routed expert, against one in bf16; the mean over layers where a file mixes types.

    1 where nobody says which types the matrices have (a released file of one maker's choice).
    """
    if precision not in MIXES or any(stored.precision == precision for stored in model.formats):
        return flops_per_weight(precision) / 2.0
    mixed, layers = Mixed(model, precision), model.moe_layer_ids
    held = [held for layer in layers for held in mixed.expert_types(layer)]
    weights = sum(n for _, n in held)
    return sum(n * flops_per_weight(kind) for kind, n in held) / weights / 2.0
