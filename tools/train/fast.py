"""The forward of the Hugging Face classes, arranged for training speed on the same parameters.

On a GPU, gathering tokens per expert costs more than computing every expert when they are this small: `dense_experts`
is two plain matrix products over all experts, with the routing weight (zero for experts not chosen) applied in between.
On a CPU arithmetic is what costs: `kernels.sorted_experts` gathers each expert's rows once.
The rest of a layer is the class's own modules, called in the class's own order; `test_train_model` holds the two
forwards equal. Layers are compiled one by one: 32 equal layers share one compilation, and router logits come back
as values, not through hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from tools.train.model import renormalises, router_of, shared_output


def dense_experts(experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Output [N,h] of gated experts for inputs [N,h], ids and weights [N,k]; every expert is computed for every row."""
    rows, width = hidden.shape
    gate_up = experts.gate_up_proj  # [E, 2i, h]
    count, two_inner, _ = gate_up.shape
    up = F.linear(hidden, gate_up.reshape(count * two_inner, width)).view(rows, count, two_inner)
    gate, value = up.chunk(2, dim=-1)
    route = torch.zeros(rows, count, dtype=weights.dtype, device=hidden.device).scatter(1, ids, weights)
    inner = experts.act_fn(gate) * value * route.to(up.dtype)[..., None]
    down = experts.down_proj.permute(1, 0, 2).reshape(width, -1)  # [E, h, i] -> [h, E*i]
    return F.linear(inner.reshape(rows, -1), down)


FAR_WEIGHT = 0.5  # of what far tokens share, in the loss on what neighbours do not
FAR = 16  # tokens apart, at which routing that is published shares what popularity and subject make it share
Experts = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
LayerFn = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


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
    layer: Any,
    hidden: torch.Tensor,
    position: tuple[torch.Tensor, torch.Tensor],
    experts: Experts,
    bias: torch.Tensor | None = None,
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
    out = experts(layer.mlp.experts, flat, ids, weights)
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
    """Callable view on a Hugging Face MoE model: token ids [B,S] -> (final hidden states [B,S,h], router logits)."""

    def __init__(self, model: Any, experts: Experts, compiled: bool = False) -> None:
        self.model = model
        self.experts = experts
        self.run_layer: LayerFn = torch.compile(layer_forward, dynamic=False) if compiled else layer_forward
        self.loss = torch.compile(losses, dynamic=False) if compiled else losses
        self.top_k = int(model.config.num_experts_per_tok)
        self.bias: torch.Tensor | None = None  # [L,E], while a run balances by it

    def hidden(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Final normalised hidden states and the router logits of each MoE layer."""
        body = self.model.model
        hidden = body.embed_tokens(ids)
        position = body.rotary_emb(hidden, position_ids=torch.arange(ids.shape[1], device=ids.device)[None])
        logits: list[torch.Tensor] = []
        for layer in body.layers:
            routes = hasattr(layer.mlp, "experts")
            bias = self.bias[len(logits)] if self.bias is not None and routes else None
            hidden, router_logits = self.run_layer(layer, hidden, position, self.experts, bias)
            if router_logits is not None:
                logits.append(router_logits)
        return body.norm(hidden), logits

    def __call__(
        self, ids: torch.Tensor, labels: torch.Tensor, turning: bool = False, by_window: bool = False
    ) -> Losses:
        """Losses and load for ids and next ids [B,S]; `turning` asks for that loss, too, `by_window` for balance in
        each of the B."""
        hidden, router_logits = self.hidden(ids)
        head = self.model.lm_head
        logits = torch.stack(router_logits)
        return self.loss(head, hidden, labels, logits, self.top_k, self.bias, turning, by_window)


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
