"""Bytes of a model's parts where its matrices are not all of one type: files of llama.cpp, and other released files."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from sim.base.errors import BadInput
from sim.profiles.gguf import BLOCKS, MIXES, Mixed
from sim.profiles.precisions import BITS_PER_PARAM, PLAIN, bytes_of

if TYPE_CHECKING:
    from sim.profiles.geometry import Geometry

Count = Annotated[int, msgspec.Meta(ge=0)]


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
    """Bytes of a model's parts where its matrices are not all alike; those of one layer are means, rounded up."""

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
def parts_of(model: Geometry, precision: str) -> Parts | None:
    """Bytes by part, or None where every parameter takes the precision's own bits.

    Raises:
        BadInput: a llama.cpp file of an encoder-decoder model, for which it has no such files; a file that only some
            models list.
    """
    for stored in model.formats:
        if stored.precision == precision:
            return _released(model, stored)
    if precision not in MIXES:
        if precision in PLAIN or precision in BLOCKS or precision not in BITS_PER_PARAM:
            return None
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


def _released(model: Geometry, stored: StoredAs) -> Parts:
    """A released file: experts in one precision, everything else in another, which no file of its own describes."""
    plain = msgspec.structs.replace(model, formats=())
    expert = stored.expert_bytes or plain.expert_bytes(stored.precision)
    ends = stored.embedding or stored.dense
    two = plain.embedding_params() + plain.head_params()
    dense = bytes_of(plain.dense_params() - two, stored.dense) + bytes_of(two, ends)
    whole = stored.dense_bytes or dense

    def share(n_bytes: int) -> int:  # of what was measured as a whole, each part has the share that the types give it
        return -(-n_bytes * whole // dense)

    return Parts(
        expert=expert,
        routed=(model.n_moe_layers + model.n_encoder_moe_layers) * model.n_experts * expert,
        shared=share(plain.shared_expert_bytes(stored.dense)),
        attention=share(plain.attention_bytes(stored.dense)),
        gate=share(plain.gate_bytes(stored.dense)),
        dense_ffn=share(plain.dense_ffn_bytes(stored.dense)),
        embedding=share(plain.embedding_bytes(ends)),
        head=share(plain.head_bytes(ends)),
        dense=whole,
    )
