"""The types that weights are stored in: bits of one weight, scales included, and what a number of weights takes.

Block sizes are those of ggml (ggml-org/llama.cpp, gguf-py/gguf/constants.py, GGML_QUANT_SIZES; ggml-common.h asserts
them). Which matrix gets which type in a file of llama.cpp is the rule of src/llama-quant.cpp at commit 007dbbf
(`llama_tensor_get_type_impl`, `tensor_type_fallback`), for a file made with an importance matrix where the two differ.
"""

from __future__ import annotations

from typing import NamedTuple

from sim.base.errors import BadInput, did_you_mean


class Block(NamedTuple):
    """Weights of one block, and its bytes, scales included."""

    weights: int
    n_bytes: int


BLOCKS = {
    "q8_0": Block(32, 34),
    "q6_k": Block(256, 210),
    "q5_1": Block(32, 24),
    "q5_k": Block(256, 176),
    "q5_0": Block(32, 22),
    "q4_k": Block(256, 144),
    "q4_0": Block(32, 18),
    "iq4_nl": Block(32, 18),
    "iq4_xs": Block(256, 136),
    "q3_k": Block(256, 110),
    "iq3_s": Block(256, 110),
    "iq3_xxs": Block(256, 98),
    "q2_k": Block(256, 84),
    "iq2_s": Block(256, 82),
    "iq2_xs": Block(256, 74),
    "iq2_xxs": Block(256, 66),
    "mxfp4": Block(32, 17),
}
"""Uniform block types: as a precision, one of them is taken for every weight."""

_SMALLER_BLOCKS = {
    **dict.fromkeys(("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"), "iq4_nl"),
    "q2_k": "q4_0",
    "q3_k": "q4_0",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
}
"""What a type of 256 weights falls back to where a row of the matrix does not divide into such blocks."""


class Mix(NamedTuple):
    """One type of file.

    Attributes:
        base: type of every matrix that no rule names. rules: (matrix, layers, type), the first that holds; matrices
            are q, k, v, o, gate, up, down; layers are "all", "more" (`use_more_bits`), "eighth" and "sixteenth" of the
            layers from the start, the "first 2" or "first 4", or "shared keys" (all, if 4 heads or more share a key).
        embedding, head: their types. experts: of all matrices of routed experts, where they have one of their own.
    """

    base: str
    rules: tuple[tuple[str, str, str], ...] = ()
    head: str = "q6_k"
    embedding: str = ""
    experts: str = ""


MIXES = {
    "gguf-q8_0": Mix("q8_0", head="q8_0"),
    "gguf-q6_k": Mix("q6_k"),
    "q5_k_m": Mix("q5_k", (("v", "more", "q6_k"), ("down", "more", "q6_k"))),
    "q5_k_s": Mix("q5_k"),
    "q4_k_m": Mix("q4_k", (("v", "more", "q6_k"), ("down", "more", "q6_k"))),
    "q4_k_s": Mix("q4_k", (("v", "first 4", "q5_k"), ("down", "eighth", "q5_k"))),
    "gguf-iq4_xs": Mix("iq4_xs", (("v", "shared keys", "q5_k"),)),
    "mxfp4_moe": Mix("q8_0", head="q8_0", experts="mxfp4"),
    "q3_k_l": Mix("q3_k", (("v", "all", "q5_k"), ("down", "all", "q5_k"), ("o", "all", "q5_k"))),
    "q3_k_m": Mix(
        "q3_k",
        (
            ("v", "first 2", "q5_k"),
            ("v", "all", "q4_k"),
            ("down", "sixteenth", "q5_k"),
            ("down", "all", "q4_k"),
            ("o", "all", "q4_k"),
        ),
    ),
    "q3_k_s": Mix("q3_k"),
    "gguf-iq3_xxs": Mix(
        "iq3_xxs",
        (
            ("v", "shared keys", "q4_k"),
            ("k", "all", "iq2_s"),
            ("q", "all", "iq2_s"),
            ("o", "all", "iq3_s"),
        ),
        head="q5_k",
        embedding="iq3_s",
    ),
    "gguf-q2_k": Mix(
        "q2_k",
        (("v", "shared keys", "q4_k"), ("v", "all", "q3_k"), ("down", "all", "q3_k"), ("o", "all", "q3_k")),
    ),
}
"""Files of llama-quantize. `gguf-` is set before those that are called as the block type they are mostly made of."""


def bits_of_block(name: str) -> float:
    """Bits of one weight, exact: all are whole multiples of a power of two."""
    weights, n_bytes = BLOCKS[name]
    return 8 * n_bytes / weights


def bits_of_mix(name: str) -> float:
    """Bits of one weight of a gated expert, where half of the layers are given more: the usual share, to order by."""
    mix = MIXES[name]
    if mix.experts:
        return bits_of_block(mix.experts)
    of_down = [rule for rule in mix.rules if rule[0] == "down"]
    more = next((bits_of_block(kind) for _, layers, kind in of_down if layers in ("more", "all")), None)
    base = bits_of_block(mix.base)
    down = base if more is None else more if of_down[-1][1] == "all" else (base + more) / 2
    return (2 * base + down) / 3


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


def held_in(kind: str, columns: int) -> str:
    """A block type, or what it falls back to where rows of so many weights do not divide into it (at last fp16)."""
    if columns % BLOCKS[kind].weights:
        kind = _SMALLER_BLOCKS.get(kind, kind)
    return "fp16" if columns % BLOCKS[kind].weights else kind


def stored(kind: str, rows: int, columns: int) -> int:
    """Bytes of a matrix in a block type, or in what the type falls back to."""
    kind = held_in(kind, columns)
    if kind == "fp16":
        return 2 * rows * columns
    weights, n_bytes = BLOCKS[kind]
    return rows * (columns // weights) * n_bytes
