"""The forward of the Hugging Face classes, arranged for training on a CPU, on the same parameters.

A layer of 60 small experts is some 360 products a step, and autograd's bookkeeping is a good part of what each costs:
here every expert's rows are gathered once and its products are written where they belong, in a backward of its own.
The rest of a layer is the class's own modules, called in the class's own order; router logits come back as values, not
through hooks. `test_train_model` holds forward and gradients to the classes'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from tools.train.model import renormalises, router_of, shared_output

FAR_WEIGHT = 0.5  # of what far tokens share, in the loss on what neighbours do not
FAR = 16  # tokens apart, at which routing that is published shares what popularity and subject make it share


def _products(rows: torch.Tensor, matrices: torch.Tensor, sizes: list[int], out: torch.Tensor) -> None:
    """Write rows w^T into `out`, for matrices w of which each has the next so many rows."""
    for x, y, w in zip(torch.split(rows, sizes), torch.split(out, sizes), matrices.unbind(), strict=True):
        torch.mm(x, w.t(), out=y)


def _gradients(
    grad: torch.Tensor, rows: torch.Tensor, matrices: torch.Tensor, sizes: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows and matrices, given that of what `_products` wrote."""
    d_rows, d_matrices = torch.empty_like(rows), torch.empty_like(matrices)
    parts = (torch.split(each, sizes) for each in (grad, rows, d_rows))
    for g, x, d_x, w, d_w in zip(*parts, matrices.unbind(), d_matrices.unbind(), strict=True):
        torch.mm(g, w, out=d_x)
        torch.mm(g.t(), x, out=d_w)
    return d_rows, d_matrices


class GatedExperts(torch.autograd.Function):
    """Sum of the chosen experts' outputs [N,h] for rows [N,h], ids and weights [N,k], up [E,2i,h] and down [E,h,i]."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        count, k = ids.shape
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        sizes = torch.bincount(flat, minlength=len(up)).tolist()
        token = order // k
        scale = weights.reshape(-1, 1).index_select(0, order)
        taken = rows.index_select(0, token)
        both = taken.new_empty(len(taken), up.shape[1])
        _products(taken, up, sizes, both)
        gate, value = both.chunk(2, dim=-1)
        inner = F.silu(gate).mul_(value)
        scaled = inner * scale
        out = torch.empty_like(taken)
        _products(scaled, down, sizes, out)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        ctx.save_for_backward(taken, both, inner, scaled, scale, back, token, up, down)
        ctx.sizes, ctx.k = sizes, k
        return out.index_select(0, back).view(count, k, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        taken, both, inner, scaled, scale, back, token, up, down = ctx.saved_tensors
        sizes, k = ctx.sizes, ctx.k
        d_scaled, d_down = _gradients(grad.index_select(0, token), scaled, down, sizes)
        d_scale = (d_scaled * inner).sum(-1)
        d_inner = d_scaled.mul_(scale)
        gate, value = both.chunk(2, dim=-1)
        d_both = torch.empty_like(both)
        d_gate, d_value = d_both.chunk(2, dim=-1)
        torch.mul(d_inner, F.silu(gate), out=d_value)
        torch.mul(torch.ops.aten.silu_backward(d_inner, gate), value, out=d_gate)
        d_taken, d_up = _gradients(d_both, taken, up, sizes)
        d_rows = d_taken.index_select(0, back).view(-1, k, taken.shape[1]).sum(1)
        return d_rows, None, d_scale.index_select(0, back).view(-1, k), d_up, d_down


def route(layer: Any, flat: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits, weights, expert ids) of gate inputs [N,h]; a bias [E] is added to the scores for the choice alone."""
    router = router_of(layer)
    if bias is None:
        return router(flat)  # type: ignore[no-any-return]
    renormalised = renormalises(layer)
    logits = F.linear(flat, router.weight)
    scores = logits.float().softmax(-1)
    ids = (scores.detach() + bias).topk(router.top_k, dim=-1, sorted=False).indices
    chosen = scores.gather(1, ids)
    if renormalised:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return logits, chosen.to(flat.dtype), ids


def layer_forward(
    layer: Any, hidden: torch.Tensor, position: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One decoder layer on [B,S,h]; returns its output and the router logits [B*S,E] (None for a dense layer)."""
    attended, _ = layer.self_attn(
        hidden_states=layer.input_layernorm(hidden), position_embeddings=position, attention_mask=None
    )
    hidden = hidden + attended
    gate_input = layer.post_attention_layernorm(hidden)
    if not hasattr(layer.mlp, "experts"):
        return hidden + layer.mlp(gate_input), None
    flat = gate_input.reshape(-1, gate_input.shape[-1])
    logits, weights, ids = route(layer, flat, bias)
    experts = layer.mlp.experts
    out = GatedExperts.apply(flat, ids, weights.to(flat.dtype), experts.gate_up_proj, experts.down_proj)  # type: ignore[no-untyped-call]
    shared = shared_output(layer, flat)
    if shared is not None:
        out = out + shared
    return hidden + out.view_as(hidden), logits


class Losses(NamedTuple):
    """What a forward is judged by. entropy: nats per token; balance: 1 = balanced; load [L,E]: shares of 1."""

    entropy: torch.Tensor
    balance: torch.Tensor
    load: torch.Tensor
    turning: torch.Tensor | None = None


class FastModel:
    """Callable view on a Hugging Face MoE model: token ids and next ids [B,S] -> `Losses`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.top_k = int(model.config.num_experts_per_tok)
        self.bias: torch.Tensor | None = None  # [L,E], while a run balances by it

    def hidden(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Final normalised hidden states [B,S,h] and the router logits of each MoE layer."""
        body = self.model.model
        hidden = body.embed_tokens(ids)
        position = body.rotary_emb(hidden, position_ids=torch.arange(ids.shape[1])[None])
        logits: list[torch.Tensor] = []
        for layer in body.layers:
            routes = hasattr(layer.mlp, "experts")
            bias = self.bias[len(logits)] if self.bias is not None and routes else None
            hidden, router_logits = layer_forward(layer, hidden, position, bias)
            if router_logits is not None:
                logits.append(router_logits)
        return body.norm(hidden), logits

    def __call__(
        self, ids: torch.Tensor, labels: torch.Tensor, turning: bool = False, by_window: bool = False
    ) -> Losses:
        """`turning` asks for that loss, too, `by_window` for balance in each of the B windows."""
        hidden, logits = self.hidden(ids)
        head = self.model.lm_head
        return losses(head, hidden, labels, torch.stack(logits), self.top_k, self.bias, turning, by_window)


def losses(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    router_logits: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None = None,
    turning: bool = False,
    by_window: bool = False,
) -> Losses:
    """What a forward is judged by, from final hidden states [B,S,h], router logits [L,B*S,E] and a bias [L,E].

    The balance loss is Switch Transformer's, per layer and averaged (1 = balanced). transformers' own averages the
    loads over layers first, so that an expert dead in one layer can hide behind a busy one in another. `by_window` asks
    it of every window, which leaves texts less freedom to prefer experts: so do micro-batches of a few sequences, by
    which most published models were trained (arXiv 2501.11873).
    """
    entropy = F.cross_entropy(head(hidden).float().flatten(0, 1), labels.flatten())
    shares = router_logits.float().softmax(-1)
    judged = router_logits.detach() if bias is None else shares.detach() + bias[:, None]
    bar = judged.topk(top_k, dim=-1).values[..., -1:]
    chosen = (judged >= bar).float()
    load = chosen.mean(dim=1) / top_k
    if by_window:
        of_each = (len(shares), *labels.shape, -1)
        taken, mean = (each.reshape(of_each).mean(dim=2) for each in (chosen / top_k, shares))  # [L,B,E]
    else:
        taken, mean = load, shares.mean(dim=1)
    balance = (taken * mean).sum(-1).mean() * router_logits.shape[-1]
    return Losses(entropy, balance, load, turning_loss(shares, *labels.shape) if turning else None)


def turning_loss(shares: torch.Tensor, sequences: int, length: int) -> torch.Tensor:
    """How little more two tokens in a row are routed alike than two `FAR` apart, from router scores [L,B*S,E].

    Alike is the chance that two tokens, each drawing one expert by its scores, draw the same. Per layer, the logarithm
    of that chance `FAR` tokens apart, times `FAR_WEIGHT`, less that of neighbours; a mean over layers, so that none
    excuses another. The first term is there because always choosing the same experts would do for the second.
    """
    rows = shares.view(len(shares), sequences, length, -1)
    far, near = ((rows[:, :, lag:] * rows[:, :, :-lag]).sum(-1).mean(dim=(1, 2)).log().mean() for lag in (FAR, 1))
    return FAR_WEIGHT * far - near
