"""Parameters, bytes and arithmetic of an MoE transformer, as pure functions of its geometry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal

import msgspec

from sim.profiles.precisions import BITS_PER_PARAM as BITS_PER_PARAM
from sim.profiles.precisions import MIXES
from sim.profiles.precisions import bytes_of as bytes_of
from sim.profiles.stored import Mixed, StoredAs, parts_of

MAX_LAYERS = 4096  # layers get listed, so a number that no model has would be a list that no memory holds

MAX_TOKENS = 2**30  # of a window: more than any context has, and so few that sums of them stay whole numbers in C

Positive = Annotated[int, msgspec.Meta(ge=1)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Mla(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one latent and one rotary key."""

    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: Positive
    v_head_dim: Positive
    q_lora_rank: Positive | None = None


class OtherAttention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers whose attention is not the one of the other fields: linear, compressed, of other heads."""

    layers: tuple[Count, ...]
    matrices: tuple[tuple[str, Positive, Positive], ...]  # what llama.cpp's rules call it, rows, weights in a row
    small_params: Count = 0  # norms, biases, convolutions: not quantised
    kv_values_per_token: Count  # what one token adds to the cache of one such layer; 0 for a state of constant size
    products_per_key: Count  # products of one token with one cached key and its value, all heads together

    def params(self) -> int:
        """Parameters of one such layer."""
        return sum(rows * columns for _, rows, columns in self.matrices) + self.small_params


class Window(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers whose tokens attend to the last `tokens` positions alone, their own among them, and cache no more."""

    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    layers: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]


class Encoder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Encoder half of an encoder-decoder model: same block shape, runs once per request, never in a decode step."""

    n_layers: Layers
    dense_layers: tuple[Count, ...] = ()


class Geometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape of a model. Layers are those a decode step runs: of an encoder-decoder model, the decoder's."""

    hidden_size: Positive
    n_layers: Layers
    dense_layers: tuple[Count, ...] = ()  # layers whose FFN is dense; every other layer holds routed experts
    dense_intermediate_size: Count = 0
    n_experts: Positive
    top_k: Positive
    expert_intermediate_size: Positive
    matrices_per_expert: Literal[2, 3, 4] = 3  # 2: plain FFN; 3: gated; 4: gated, with a gate of double width
    ffn_bias: bool = False
    activation: str = "silu"
    n_shared_experts: Count = 0
    shared_intermediate_size: Count = 0  # sum over the shared experts, which run as one FFN
    shared_gate: bool = False  # a sigmoid of one linear unit scales the shared expert's output
    attention: Literal["gqa", "mla"] = "gqa"
    n_heads: Positive
    n_kv_heads: Positive
    head_dim: Positive
    mla: Mla | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    attention_sinks: bool = False  # one learnt logit per head
    qk_norm: Literal["none", "head", "full"] = "none"
    vocab_size: Positive
    tied_embeddings: bool = False
    head_bias: bool = False
    router_bias: bool = False
    norm_bias: bool = False
    extra_norms_per_moe_layer: Count = 0
    relative_position_buckets: Count = 0  # T5: a (buckets x heads) table in the first block of each stack
    encoder: Encoder | None = None
    other_attention: tuple[OtherAttention, ...] = ()
    window: Window | None = None
    extra_params: Count = 0  # of parts that no other field describes, e.g. hyper-connections; used in every step
    host_params: Count = 0  # of tables that stay in host memory and are read by the row, e.g. n-gram embeddings
    formats: tuple[StoredAs, ...] = ()

    # Layers -----------------------------------------------------------------------------------------------------

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Indices, among the `n_layers` of a decode step, of the layers that hold routed experts."""
        dense = set(self.dense_layers)
        return tuple(layer for layer in range(self.n_layers) if layer not in dense)

    @property
    def n_moe_layers(self) -> int:
        """Layers with routed experts that a decode step runs."""
        return self.n_layers - len(self.dense_layers)

    @property
    def n_encoder_moe_layers(self) -> int:
        """Layers with routed experts in the encoder, 0 for a decoder-only model."""
        return 0 if self.encoder is None else self.encoder.n_layers - len(self.encoder.dense_layers)

    @property
    def n_routed(self) -> int:
        """Routed experts of all layers, the encoder's included."""
        return (self.n_moe_layers + self.n_encoder_moe_layers) * self.n_experts

    # Parameters -------------------------------------------------------------------------------------------------

    def _ffn_params(self, intermediate_size: int) -> int:
        weights = self.matrices_per_expert * self.hidden_size * intermediate_size
        biases = (self.matrices_per_expert - 1) * intermediate_size + self.hidden_size
        return weights + (biases if self.ffn_bias else 0)

    def expert_params(self) -> int:
        """Parameters of one routed expert."""
        return self._ffn_params(self.expert_intermediate_size)

    def shared_expert_params(self) -> int:
        """Parameters of the shared experts of one layer, with their gate."""
        if not self.shared_intermediate_size:
            return 0
        return self._ffn_params(self.shared_intermediate_size) + (self.hidden_size if self.shared_gate else 0)

    def dense_ffn_params(self) -> int:
        """Parameters of the FFN of one dense layer."""
        return self._ffn_params(self.dense_intermediate_size) if self.dense_intermediate_size else 0

    def gate_params(self) -> int:
        """Parameters of one router (selection-only correction biases are left out)."""
        return self.n_experts * (self.hidden_size + (1 if self.router_bias else 0))

    def self_attention_params(self) -> int:
        """Parameters of one self-attention block, norms inside the block included."""
        if self.mla is not None:
            return self._mla_params(self.mla)
        q_size, kv_size = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        params = self.hidden_size * (q_size + 2 * kv_size) + q_size * self.hidden_size
        params += (q_size + 2 * kv_size if self.qkv_bias else 0) + (self.hidden_size if self.out_bias else 0)
        params += self.n_heads if self.attention_sinks else 0
        return params + {"none": 0, "head": 2 * self.head_dim, "full": q_size + kv_size}[self.qk_norm]

    def _mla_params(self, mla: Mla) -> int:
        q_size = self.n_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        if mla.q_lora_rank is None:
            params = self.hidden_size * q_size
        else:
            params = mla.q_lora_rank * (self.hidden_size + 1 + q_size)  # 1: the norm between the two matrices
        params += self.hidden_size * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
        params += mla.kv_lora_rank * self.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        params += self.n_heads * mla.v_head_dim * self.hidden_size
        return params + (self.hidden_size if self.out_bias else 0)

    def attention_matrices(self) -> Iterator[tuple[str, int, int]]:
        """Matrices of one self-attention block: what llama.cpp calls it, rows, and weights in a row."""
        hidden, mla = self.hidden_size, self.mla
        if mla is None:
            q_size, kv_size = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
            yield from (("q", q_size, hidden), ("k", kv_size, hidden), ("v", kv_size, hidden), ("o", hidden, q_size))
            return
        q_size = self.n_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        if mla.q_lora_rank is None:
            yield "q", q_size, hidden
        else:
            yield from (("q_a", mla.q_lora_rank, hidden), ("q_b", q_size, mla.q_lora_rank))
        yield "kv_a", mla.kv_lora_rank + mla.qk_rope_head_dim, hidden
        yield "k_b", self.n_heads * mla.kv_lora_rank, mla.qk_nope_head_dim
        yield "v_b", self.n_heads * mla.v_head_dim, mla.kv_lora_rank
        yield "o", hidden, self.n_heads * mla.v_head_dim

    def attention_params_by_layer(self) -> list[int]:
        """Parameters of the self-attention of each decode layer."""
        params = [self.self_attention_params()] * self.n_layers
        for other in self.other_attention:
            for layer in other.layers:
                params[layer] = other.params()
        return params

    def attention_params(self) -> int:
        """Parameters of the attention of one decode layer: self-attention, and cross-attention behind an encoder.

        Where layers differ it is their mean, rounded up.
        """
        if self.other_attention:
            return -(-sum(self.attention_params_by_layer()) // self.n_layers)
        return self.self_attention_params() * (1 if self.encoder is None else 2)

    def embedding_params(self) -> int:
        """Parameters of the input embedding."""
        return self.vocab_size * self.hidden_size

    def head_params(self) -> int:
        """Parameters of the output head beyond the embedding it may share."""
        weights = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return weights + (self.vocab_size if self.head_bias else 0)

    def norm_params(self) -> int:
        """Parameters of the norms before the blocks and at the end of each stack."""
        n_norms = self.n_layers * (2 if self.encoder is None else 3) + 1
        n_norms += self.extra_norms_per_moe_layer * self.n_moe_layers
        if self.encoder is not None:
            n_norms += 2 * self.encoder.n_layers + 1
        return n_norms * self.hidden_size * (2 if self.norm_bias else 1)

    def routed_params(self) -> int:
        """Parameters of all routed experts, the encoder's included."""
        return self.n_routed * self.expert_params()

    def dense_params(self) -> int:
        """Parameters of everything that is not a routed expert, the encoder included."""
        n_moe, n_dense = self.n_moe_layers + self.n_encoder_moe_layers, len(self.dense_layers)
        params = self.embedding_params() + self.head_params() + self.norm_params()
        params += sum(self.attention_params_by_layer()) * (1 if self.encoder is None else 2) + self.extra_params
        if self.encoder is not None:
            n_dense += len(self.encoder.dense_layers)
            params += self.encoder.n_layers * self.self_attention_params()
        params += self.relative_position_buckets * self.n_heads * (1 if self.encoder is None else 2)
        return params + n_moe * (self.gate_params() + self.shared_expert_params()) + n_dense * self.dense_ffn_params()

    def total_params(self) -> int:
        """All parameters."""
        return self.dense_params() + self.routed_params() + self.host_params

    def active_params(self, embeddings: Literal["all", "head", "none"] = "all") -> int:
        """Parameters one token uses, both stacks of an encoder-decoder model included.

        Vendors count differently: with both embedding matrices ("all": Mixtral, Qwen, Phi), without the input
        embedding ("head": gpt-oss, DeepSeek-V2/V3), or with neither ("none": GLM-4.5).
        """
        n_moe = self.n_moe_layers + self.n_encoder_moe_layers
        params = self.dense_params() + n_moe * self.top_k * self.expert_params()
        if embeddings == "none":
            return params - self.embedding_params() - self.head_params()
        return params - (self.embedding_params() if embeddings == "head" and not self.tied_embeddings else 0)

    # Bytes ------------------------------------------------------------------------------------------------------

    def expert_bytes(self, precision: str = "bf16") -> int:
        """Bytes of one routed expert; the mean over layers, rounded up, where a mix gives them different types."""
        return parts_of(self, precision).expert

    def expert_bytes_by_layer(self, precision: str = "bf16") -> list[int]:
        """Bytes of one routed expert of each MoE layer of a decode step."""
        if precision in MIXES and not any(stored.precision == precision for stored in self.formats):
            return [Mixed(self, precision).expert(layer) for layer in self.moe_layer_ids]
        return [self.expert_bytes(precision)] * self.n_moe_layers

    def shared_expert_bytes(self, precision: str = "bf16") -> int:
        """Bytes of the shared experts of one layer."""
        return parts_of(self, precision).shared

    def attention_bytes(self, precision: str = "bf16") -> int:
        """Weight bytes of the attention of one decode layer."""
        return parts_of(self, precision).attention

    def gate_bytes(self, precision: str = "bf16") -> int:
        """Bytes of one router."""
        return parts_of(self, precision).gate

    def dense_ffn_bytes(self, precision: str = "bf16") -> int:
        """Bytes of the FFN of one dense layer, 0 for a model without one."""
        return parts_of(self, precision).dense_ffn

    def embedding_bytes(self, precision: str = "bf16") -> int:
        """Bytes of the input embedding."""
        return parts_of(self, precision).embedding

    def head_bytes(self, precision: str = "bf16") -> int:
        """Weight bytes read to compute logits; with tied embeddings these are the embedding's own bytes."""
        return parts_of(self, precision).head

    def dense_bytes(self, precision: str = "bf16") -> int:
        """Bytes of everything that is not a routed expert."""
        return parts_of(self, precision).dense

    def routed_bytes(self, precision: str = "bf16") -> int:
        """Bytes of all routed experts, each rounded up on its own as it is copied on its own; of a mix, exact."""
        return parts_of(self, precision).routed

    def host_bytes(self, precision: str = "bf16") -> int:
        """Bytes of the tables that stay in host memory beside the experts; of a mix, in the type of its embedding."""
        dense = [stored.tables or stored.dense for stored in self.formats if stored.precision == precision]
        if dense:
            precision = dense[0]
        elif precision in MIXES:
            mix = MIXES[precision]
            precision = mix.embedding or mix.base
        return bytes_of(self.host_params, precision) if self.host_params else 0

    def kv_bytes_per_token_per_layer(self, precision: str = "bf16") -> int:
        """Bytes one token adds to the self-attention cache of one decode layer: K and V, or MLA's latent and key."""
        return bytes_of(-(-self._kv_values() // self.n_layers), precision)

    def kv_bytes_per_token(self, precision: str = "bf16") -> int:
        """The same for all decode layers, until a window is full (`kv_bytes`)."""
        if self.other_attention:
            return bytes_of(self._kv_values(), precision)
        return self.n_layers * self.kv_bytes_per_token_per_layer(precision)

    def kv_bytes(self, contexts: Iterable[int], precision: str = "bf16", layers: Sequence[int] | None = None) -> int:
        """Bytes of the caches of requests of so many tokens each: layers with a window keep no more than it has.

        Args:
            layers: of these alone.
        """
        every = self.kv_bytes_per_token(precision) if layers is None else bytes_of(self._kv_values(layers), precision)
        if self.window is None:
            return every * sum(contexts)
        those = self.window.layers if layers is None else set(self.window.layers).intersection(layers)
        windowed = bytes_of(self._kv_values(those), precision)
        return sum(every * n - windowed * max(0, n - self.window.tokens) for n in contexts)

    def window_kv_bytes_per_token_per_layer(self, precision: str = "bf16") -> int:
        """What of `kv_bytes_per_token_per_layer` lies in layers with a window; the mean over all layers, rounded up."""
        if self.window is None:
            return 0
        return bytes_of(-(-self._kv_values(self.window.layers) // self.n_layers), precision)

    def _kv_values(self, layers: Iterable[int] | None = None) -> int:
        """Values one token adds to the caches of these decode layers; of all, if none are named."""
        own = 2 * self.n_kv_heads * self.head_dim
        if self.mla is not None:
            own = self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        of_layer = {layer: other.kv_values_per_token for other in self.other_attention for layer in other.layers}
        return sum(of_layer.get(layer, own) for layer in (range(self.n_layers) if layers is None else layers))

    def all_miss_bytes_per_token(self, precision: str = "bf16") -> int:
        """Bytes copied for one token of decode when no expert is resident."""
        return self.n_moe_layers * self.top_k * self.expert_bytes(precision)

    # Arithmetic: floating-point operations, a multiply-add counted as two ----------------------------------------

    def expert_flops(self, n_tokens: int) -> int:
        """Operations of one routed expert on `n_tokens`."""
        return 2 * n_tokens * self.matrices_per_expert * self.hidden_size * self.expert_intermediate_size

    def shared_expert_flops(self, n_tokens: int) -> int:
        """Operations of the shared experts of one layer."""
        gate = self.hidden_size if self.shared_gate and self.shared_intermediate_size else 0
        return 2 * n_tokens * (self.matrices_per_expert * self.hidden_size * self.shared_intermediate_size + gate)

    def dense_ffn_flops(self, n_tokens: int) -> int:
        """Operations of the FFN of one dense layer."""
        return 2 * n_tokens * self.matrices_per_expert * self.hidden_size * self.dense_intermediate_size

    def gate_flops(self, n_tokens: int) -> int:
        """Operations of one router."""
        return 2 * n_tokens * self.hidden_size * self.n_experts

    def head_flops(self, n_tokens: int) -> int:
        """Operations of the logits of `n_tokens`."""
        return 2 * n_tokens * self.hidden_size * self.vocab_size

    def attention_flops(self, n_tokens: int, context_tokens: float) -> float:
        """Operations of one decode layer's attention: projections and scores.

        Args:
            context_tokens: keys each of the tokens attends to, on average; (n + 1) / 2 for a causal prompt of n. Of
                a window's layers, too: what they do not attend to is left to the caller.

        MLA is counted in its absorbed form, which reads the cached latent directly. Cross-attention counts its
        projections only, because the encoder's length is not an argument.
        """
        return 2 * n_tokens * (self.attention_params() + self.products_per_key() * context_tokens)

    def products_per_key(self) -> int:
        """Products of one token with one key and its value, all heads; the mean over layers, rounded up."""
        return -(self._products(range(self.n_layers)) // -self.n_layers)

    def window_products_per_key(self) -> int:
        """What of `products_per_key` layers with a window do; the mean over all layers, rounded up."""
        return 0 if self.window is None else -(self._products(self.window.layers) // -self.n_layers)

    def _products(self, layers: Iterable[int]) -> int:
        own = self.n_heads * self.width_per_key()
        of_layer = {layer: other.products_per_key for other in self.other_attention for layer in other.layers}
        return sum(of_layer.get(layer, own) for layer in layers)

    def width_per_key(self) -> int:
        """Products of one head of one token with one key and its value."""
        if self.mla is not None:
            return 2 * self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        return 2 * self.head_dim
