"""Bytes of a model's parts in a precision: of one type, in files of llama.cpp, which mix them, and in released files.

What stays unquantised in files of llama.cpp (norms, biases, routers) is counted in fp32, as the converter writes it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from sim.base.errors import BadInput
from sim.profiles.precisions import BITS_PER_PARAM, BLOCKS, MIXES, PLAIN, bytes_of, held_in, stored

if TYPE_CHECKING:
    from sim.profiles.geometry import Geometry

Count = Annotated[int, msgspec.Meta(ge=0)]

_OF_EIGHT_EXPERTS = {"k": "q8_0", "v": "q8_0"}
_OUTPUT_OF_EIGHT = {"gguf-q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "gguf-iq3_xxs", "gguf-iq4_xs"}


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


class StoredAs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A released file that holds experts in one precision and everything else in another."""

    precision: str  # the name under which it is asked for
    source: str
    expert_bytes: Count = 0  # 0: as the precision's own bits say
    dense: str  # precision of everything else
    dense_bytes: Count = 0  # of everything else, where it was measured; 0: as `dense` says
    embedding: str = ""  # of input embedding and head, where they have one of their own
    tables: str = ""  # of tables in host memory, where they have one of their own


class Parts(NamedTuple):
    """Bytes of a model's parts; those of one layer are means, rounded up, where matrices are not all alike."""

    expert: int
    routed: int
    shared: int
    attention: int
    gate: int
    dense_ffn: int
    embedding: int
    head: int
    dense: int


@lru_cache(maxsize=256)
def parts_of(model: Geometry, precision: str) -> Parts:
    """Bytes by part. Each expert is rounded up on its own, as it is copied on its own; of a mix, all are exact.

    Raises:
        BadInput: an unknown precision; a llama.cpp file of an encoder-decoder model, for which it has no such files; a
            file that only some models list.
    """
    for file in model.formats:
        if file.precision == precision:
            return _released(model, file)
    if precision not in MIXES:
        if precision in PLAIN or precision in BLOCKS or precision not in BITS_PER_PARAM:
            expert = bytes_of(model.expert_params(), precision)
            return Parts(
                expert=expert,
                routed=model.n_routed * expert,
                shared=bytes_of(model.shared_expert_params(), precision),
                attention=bytes_of(model.attention_params(), precision),
                gate=bytes_of(model.gate_params(), precision),
                dense_ffn=bytes_of(model.dense_ffn_params(), precision),
                embedding=bytes_of(model.embedding_params(), precision),
                head=bytes_of(model.head_params() + model.tied_embeddings * model.embedding_params(), precision),
                dense=bytes_of(model.dense_params(), precision),
            )
        raise BadInput(
            f"precision, got {precision!r}: no rule gives its bytes, and of this model none are known; take 'q4_k_m' "
            f"or one that `moesim models NAME` lists"
        )
    if model.encoder is not None:
        raise BadInput(
            f"precision, got {precision!r}: a file of llama.cpp, which has none of encoder-decoder models; "
            f"take {MIXES[precision].base!r}, one type for every matrix"
        )
    mixed, layers, moe = Mixed(model, precision), range(model.n_layers), model.moe_layer_ids
    attention = sum(map(mixed.attention, layers))
    n_moe, routed = len(moe), mixed.routed()
    shared, ffn = sum(map(mixed.shared, moe)), sum(map(mixed.dense_ffn, model.dense_layers))
    dense = mixed.embedding() + (0 if model.tied_embeddings else mixed.head()) + 4 * model.norm_params()
    dense += attention + shared + ffn + n_moe * mixed.router() + bytes_of(model.extra_params, MIXES[precision].base)
    return Parts(
        expert=-(-routed // (n_moe * model.n_experts)),
        routed=routed,
        shared=-(-shared // n_moe),
        attention=-(-attention // model.n_layers),
        gate=mixed.router(),
        dense_ffn=-(-ffn // max(len(model.dense_layers), 1)),
        embedding=mixed.embedding(),
        head=mixed.head(),
        dense=dense,
    )


def _released(model: Geometry, file: StoredAs) -> Parts:
    """A released file: experts in one precision, everything else in another, which no file of its own describes."""
    plain = msgspec.structs.replace(model, formats=())
    expert = file.expert_bytes or plain.expert_bytes(file.precision)
    ends = file.embedding or file.dense
    two = plain.embedding_params() + plain.head_params()
    dense = bytes_of(plain.dense_params() - two, file.dense) + bytes_of(two, ends)
    whole = file.dense_bytes or dense

    def share(n_bytes: int) -> int:  # of what was measured as a whole, each part has the share that the types give it
        return -(-n_bytes * whole // dense)

    return Parts(
        expert=expert,
        routed=model.n_routed * expert,
        shared=share(plain.shared_expert_bytes(file.dense)),
        attention=share(plain.attention_bytes(file.dense)),
        gate=share(plain.gate_bytes(file.dense)),
        dense_ffn=share(plain.dense_ffn_bytes(file.dense)),
        embedding=share(plain.embedding_bytes(ends)),
        head=share(plain.head_bytes(ends)),
        dense=whole,
    )
