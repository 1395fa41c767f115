"""The types that weights are stored in: bits of one weight, scales included, and what a number of weights takes."""

from __future__ import annotations

from sim.base.errors import BadInput, did_you_mean
from sim.profiles.gguf import BLOCKS, MIXES, bits_of_block, bits_of_mix

# Bits per parameter, scales included, of formats that are the same for every matrix. All are dyadic, so floats hold
# them exactly.
PLAIN: dict[str, float] = {
    "fp32": 32.0,
    "bf16": 16.0,
    "fp16": 16.0,
    "fp8": 8.0,  # block scales of DeepSeek-V3 (fp32 per 128 x 128 weights) add 0.02 % and are left out
    "int8": 8.0,
    "mxfp4": 4.25,  # 4 bits + one 8-bit scale per 32 (OCP Microscaling Formats specification 1.0)
    "q4_k": 4.5,  # ggml: 144 bytes per 256 weights; Q4_K_M files mix in larger blocks: `q4_k_m`
    "nvfp4": 4.5,  # 4 bits + one fp8 scale per 16 (NVIDIA); the fp32 scale per tensor is left out
    "int4_g128": 4.15625,  # AWQ / GPTQ: fp16 scale and 4-bit zero per 128
    "int4": 4.0,  # no scales: the figure many papers use
    "int2": 2.0,  # no scales
    "hqq2": 3.0625,  # HQQ 2 bits, 8-bit scale and zero per 16, each with an fp32 scale and zero per 128 groups
}
BITS_PER_PARAM: dict[str, float] = {
    **PLAIN,
    **{name: bits_of_block(name) for name in BLOCKS if name not in PLAIN},
    **{name: bits_of_mix(name) for name in MIXES},
    # Whose maker (Unsloth) chose matrix by matrix: known of the models that list them in `formats`.
    "ud-q4_k_xl": 4.875,
    "ud-q4_k_m": 4.8125,
}
"""Every precision. Of a mix, the bits of an expert where half of the layers are given more; its bytes are exact."""


WHOLE = ("fp32", "bf16", "fp16", "fp8", "int8")


def multiplied_in_blocks(precision: str) -> bool:
    """Whether engines multiply such weights block by block as they are stored. NVFP4 has units of its own on the GPUs
    that it is made for."""
    return precision not in WHOLE and precision != "nvfp4"


def bytes_of(n_params: int, precision: str = "bf16") -> int:
    """Bytes of `n_params` parameters: params x bits / 8, rounded up to a whole byte once, in exact arithmetic.

    Every parameter is counted at `precision`, the few biases and norms of a quantised block included.

    Raises:
        BadInput: unknown precision.
    """
    if precision not in BITS_PER_PARAM:
        known = did_you_mean(precision, BITS_PER_PARAM)
        raise BadInput(f"precision, got {precision!r}: unknown; {known} (`moesim models NAME` lists a model's)")
    numerator, denominator = BITS_PER_PARAM[precision].as_integer_ratio()
    return -(-n_params * numerator // (8 * denominator))
