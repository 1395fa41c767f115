"""How llama.cpp stores a model: block types, and the files that mix them by matrix and by layer.

Block sizes are those of ggml (ggml-org/llama.cpp, gguf-py/gguf/constants.py, GGML_QUANT_SIZES; ggml-common.h asserts
them). Which matrix gets which type is the rule of src/llama-quant.cpp at commit 007dbbf (`llama_tensor_get_type_impl`,
`tensor_type_fallback`), for a file made with an importance matrix where the two differ. What stays unquantised there
(norms, biases, routers) is counted in fp32, as the converter writes it. `Mixed` gives the bytes of one model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sim.profiles.geometry import Geometry


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

_OF_EIGHT_EXPERTS = {"k": "q8_0", "v": "q8_0"}
_OUTPUT_OF_EIGHT = {"gguf-q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "gguf-iq3_xxs", "gguf-iq4_xs"}


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


def _given_more(layer: int, n_layers: int) -> bool:
    """llama.cpp's `use_more_bits`."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def _holds(layers: str, layer: int, model: Geometry) -> bool:
    n = model.n_layers
    match layers:
        case "more":
            return _given_more(layer, n)
        case "eighth":
            return layer < n // 8
        case "sixteenth":
            return layer < n // 16
        case "first 2" | "first 4":
            return layer < int(layers[-1])
        case "shared keys":
            return model.n_heads // model.n_kv_heads >= 4
        case _:
            return True


class Mixed:
    """Bytes of one model in one type of file."""

    def __init__(self, model: Geometry, name: str) -> None:
        self._model, self._name, self._mix = model, name, MIXES[name]

    # Matrices ---------------------------------------------------------------------------------------------------

    def type_of(self, matrix: str, layer: int) -> str:
        """The type the rule asks for, before rows are looked at."""
        if self._model.n_experts == 8:
            if matrix in _OF_EIGHT_EXPERTS:
                return _OF_EIGHT_EXPERTS[matrix]
            if matrix == "o":
                return "q5_k" if self._name in _OUTPUT_OF_EIGHT else self._mix.base
        for of, layers, kind in self._mix.rules:
            if of == matrix and _holds(layers, layer, self._model):
                return kind
        return self._mix.base

    def matrix(self, matrix: str, layer: int, rows: int, columns: int) -> int:
        """Bytes of a matrix whose rows are `columns` weights long."""
        return stored(self.type_of(matrix, layer), rows, columns)

    def _ffn_types(self, layer: int, routed: bool) -> tuple[str, str]:
        """Types of the matrices into a feed-forward network and of the one out of it, before rows are looked at."""
        if routed and self._mix.experts:
            return self._mix.experts, self._mix.experts
        return self.type_of("up", layer), self.type_of("down", layer)

    def _ffn(self, width: int, layer: int, routed: bool = False) -> int:
        model = self._model
        hidden, n_in = model.hidden_size, model.matrices_per_expert - 1  # a gate of double width counts as two
        up, down = self._ffn_types(layer, routed)
        n_bytes = n_in * stored(up, width, hidden) + stored(down, hidden, width)
        return n_bytes + (4 * (n_in * width + hidden) if model.ffn_bias else 0)

    # Parts ------------------------------------------------------------------------------------------------------

    def expert(self, layer: int) -> int:
        """One routed expert of a layer (of all layers, dense ones counted)."""
        return self._ffn(self._model.expert_intermediate_size, layer, routed=True)

    def expert_types(self, layer: int) -> list[tuple[str, int]]:
        """What the matrices of a routed expert of a layer are held in, and how many weights those are."""
        model = self._model
        hidden, width = model.hidden_size, model.expert_intermediate_size
        up, down = self._ffn_types(layer, routed=True)
        n_in = (model.matrices_per_expert - 1) * width * hidden
        return [(held_in(up, hidden), n_in), (held_in(down, width), width * hidden)]

    def shared(self, layer: int) -> int:
        """The shared experts of a layer, with their gate."""
        model = self._model
        if not model.shared_intermediate_size:
            return 0
        return self._ffn(model.shared_intermediate_size, layer) + (4 * model.hidden_size if model.shared_gate else 0)

    def dense_ffn(self, layer: int) -> int:
        """The FFN of a dense layer."""
        return self._ffn(self._model.dense_intermediate_size, layer) if self._model.dense_intermediate_size else 0

    def router(self) -> int:
        """One router: never quantised."""
        return 4 * self._model.gate_params()

    def attention(self, layer: int) -> int:
        """Self-attention of a layer, with the norms inside."""
        model = self._model
        other = next((other for other in model.other_attention if layer in other.layers), None)
        matrices = list(model.attention_matrices() if other is None else other.matrices)
        params = model.self_attention_params() if other is None else other.params()
        small = params - sum(rows * columns for _, rows, columns in matrices)
        return 4 * small + sum(self.matrix(name, layer, rows, columns) for name, rows, columns in matrices)

    def embedding(self) -> int:
        """The input embedding, which takes the type of the head where the two are one."""
        if self._model.tied_embeddings:
            return self.head()
        return stored(self._mix.embedding or self._mix.base, self._model.vocab_size, self._model.hidden_size)

    def head(self) -> int:
        """The output head: the embedding's own bytes where the two are one."""
        model = self._model
        fits = model.hidden_size % BLOCKS[self._mix.base].weights == 0
        kind = self._mix.head if fits else "q8_0"
        return stored(kind, model.vocab_size, model.hidden_size) + (4 * model.vocab_size if model.head_bias else 0)

    def routed(self) -> int:
        """All routed experts."""
        return self._model.n_experts * sum(self.expert(layer) for layer in self._model.moe_layer_ids)


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
