"""The arithmetic of one decoder pass in torch: attention with a KV cache, router, experts, head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.real.weights import latent

if TYPE_CHECKING:
    from sim.profiles.models import Model
    from sim.real.weights.weights import DenseLayer, Weights


@dataclass
class Span:
    """Rows of the iteration that belong to one request: where they start, how many, and its caches."""

    start: int
    n_tokens: int
    context: int
    keys: Any  # [layers, kv heads, positions, head size]
    values: Any


class Decoder:
    """State of one iteration's hidden rows, and the operations on them; each runs on the lane that calls it."""

    def __init__(self, model: Model, weights: Weights, torch: Any, device: str, max_positions: int) -> None:
        self.model, self.weights, self.torch, self.device = model, weights, torch, device
        size = model.head_dim if model.mla is None else model.mla.qk_rope_head_dim
        inverse = weights.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse)
        double = torch.cat((angles, angles), -1)
        self._cos = double.cos().to(weights.dtype).to(device)
        self._sin = double.sin().to(weights.dtype).to(device)
        self.spans: list[Span] = []
        self.hidden: Any = None  # [tokens, hidden]
        self.normed: Any = None  # what router and experts read
        self.logits: Any = None  # router's
        self.top: Any = None
        self.out: Any = None  # head's

    def cache(self, n_positions: int) -> tuple[Any, Any]:
        """Empty keys and values of one request over all layers."""
        model, mla = self.model, self.model.mla
        shape: tuple[int, ...] = (model.n_layers, model.n_kv_heads, n_positions, model.head_dim)
        if mla is not None:  # latents and rotary keys, one for all heads
            shape = (model.n_layers, n_positions, mla.kv_lora_rank + mla.qk_rope_head_dim)
        facts = {"dtype": self.weights.dtype, "device": self.device}
        return self.torch.zeros(shape, **facts), None if mla is not None else self.torch.zeros(shape, **facts)

    def embed(self, token_ids: Any) -> None:
        """Hidden rows of an iteration's tokens (ids [n] on the device)."""
        self.hidden = self.torch.nn.functional.embedding(token_ids, self.weights.embedding)

    def _norm(self, x: Any, scale: Any) -> Any:
        return self.torch.nn.functional.rms_norm(x, (x.shape[-1],), scale, self.weights.norm_eps)

    def _rope(self, x: Any, start: int) -> Any:
        """Rotary embedding of [heads, tokens, head size] at positions from `start` on."""
        n, half = x.shape[1], x.shape[2] // 2
        cos, sin = self._cos[start : start + n], self._sin[start : start + n]
        return x * cos + self.torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def attention(self, number: int) -> None:
        """Norm, projections, rotary embedding, cache append, attention, output projection, residual."""
        layer, model = self.weights.layers[number], self.model
        functional = self.torch.nn.functional
        y = self._norm(self.hidden, layer.norm1)
        if layer.latent is not None:
            self._add_attention(self._latent_attention(y, layer.latent, number), layer)
            return
        query, key, value = (functional.linear(y, w) for w in (layer.q, layer.k, layer.v))
        mixed = []
        grouped = {"enable_gqa": True} if model.n_heads != model.n_kv_heads else {}
        for span in self.spans:
            rows = slice(span.start, span.start + span.n_tokens)
            stop = span.context + span.n_tokens
            q, k, v = (
                part[rows].view(span.n_tokens, -1, model.head_dim).transpose(0, 1) for part in (query, key, value)
            )
            keys, values = span.keys[number], span.values[number]
            keys[:, span.context : stop] = self._rope(k, span.context)
            values[:, span.context : stop] = v
            # A prompt is whole in its iteration, so its own tokens are all it attends to.
            seen = functional.scaled_dot_product_attention(
                self._rope(q, span.context)[None],
                keys[None, :, :stop],
                values[None, :, :stop],
                is_causal=span.n_tokens > 1,
                **grouped,
            )[0]
            mixed.append(seen.transpose(0, 1).reshape(span.n_tokens, -1))
        self._add_attention(mixed, layer)

    def _add_attention(self, mixed: list[Any], layer: DenseLayer) -> None:
        """Project what each span's heads read, and add it."""
        joined = mixed[0] if len(mixed) == 1 else self.torch.cat(mixed)
        self.hidden = self.hidden + self.torch.nn.functional.linear(joined, layer.o)

    def _latent_attention(self, y: Any, layer: latent.LatentLayer, number: int) -> list[Any]:
        """What the heads of each span read [tokens, heads x value] from latents that are cached."""
        mla, torch, mixed = self.model.mla, self.torch, []
        assert mla is not None
        query = latent.queries(y, layer, self._norm, torch)
        compressed = torch.nn.functional.linear(y, layer.kv_down)
        for span in self.spans:
            rows, stop = slice(span.start, span.start + span.n_tokens), span.context + span.n_tokens
            own = compressed[rows]
            key = self._rope(own[None, :, mla.kv_lora_rank :], span.context)[0]
            cache = span.keys[number]
            cache[span.context : stop] = torch.cat((self._norm(own[:, : mla.kv_lora_rank], layer.kv_norm), key), -1)
            q = query[rows].view(span.n_tokens, self.model.n_heads, -1).transpose(0, 1)
            turned = self._rope(q[..., mla.qk_nope_head_dim :], span.context)
            q = torch.cat((q[..., : mla.qk_nope_head_dim], turned), -1)
            mixed.append(latent.attend(q, cache[:stop], layer, mla, span.n_tokens > 1, torch))
        return mixed

    def gate(self, number: int) -> None:
        """Norm, router, softmax or sigmoid, top-k and renormalisation; the choice is left in `top` = (weights, ids)."""
        layer, torch = self.weights.layers[number], self.torch
        self.normed = self._norm(self.hidden, layer.norm2)
        self.logits = torch.nn.functional.linear(self.normed, layer.gate)
        logits = self.logits.float()
        shares = torch.sigmoid(logits) if self.model.gate.score == "sigmoid" else torch.softmax(logits, -1)
        share, ids = torch.topk(shares, self.model.top_k, -1)
        if self.model.gate.renormalised:
            share = share / share.sum(-1, keepdim=True)
        self.top = (share, ids)

    def dense_ffn(self, number: int) -> None:
        """A dense layer's own FFN."""
        layer = self.weights.layers[number]
        self.hidden = self.hidden + self.ffn(self._norm(self.hidden, layer.norm2), layer.ffn)

    def shared(self, number: int) -> Any:
        """What the shared experts add."""
        layer: DenseLayer = self.weights.layers[number]
        out = self.ffn(self.normed, layer.ffn)
        if layer.shared_gate is not None:
            out = out * self.torch.sigmoid(self.torch.nn.functional.linear(self.normed, layer.shared_gate))
        return out

    def ffn(self, x: Any, matrices: Any) -> Any:
        """A gated feed-forward block over matrices [3, columns, hidden] (see `sim.real.weights.weights`)."""
        functional = self.torch.nn.functional
        inner = functional.silu(functional.linear(x, matrices[0])) * functional.linear(x, matrices[1])
        return inner @ matrices[2]

    def head(self) -> None:
        """Final norm and logits of each request's last token, and the most likely next one."""
        last = [span.start + span.n_tokens - 1 for span in self.spans]
        if len(last) == 1:
            x = self.hidden[last[0] : last[0] + 1]
        elif len(last) == len(self.hidden):  # one token each: nothing to pick, and no list of ids to send up
            x = self.hidden
        else:
            x = self.hidden[last]
        logits = self.torch.nn.functional.linear(self._norm(x, self.weights.final_norm), self.weights.head)
        self.out = (logits, logits.argmax(-1))
