"""Experts and linear products with backwards of their own, for training small models on a CPU.

A layer of 60 small experts is some 360 products a step, and autograd's bookkeeping is a good part of what each costs.
Here every expert's rows are gathered once and its products are written where they belong. Linear products may be taken
in bfloat16, which recent processors multiply twice as fast. `test_train_model` holds both to the classes' gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows


class _HalfProduct(torch.autograd.Function):
    """x w^T in bfloat16, summed in float32 by the processor, for x [...,a] and w [b,a] in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x16, w16 = x.bfloat16(), w.bfloat16()
        ctx.save_for_backward(x16, w16)
        return (x16 @ w16.t()).float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x16, w16 = ctx.saved_tensors
        g16 = grad.bfloat16()
        flat = g16.reshape(-1, g16.shape[-1])
        return (g16 @ w16).float(), (flat.t() @ x16.reshape(-1, x16.shape[-1])).float()


def half_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` on float32 tensors, the product and the two of its gradient in bfloat16."""
    out: torch.Tensor = _HalfProduct.apply(x, weight)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


def halve_products(model: torch.nn.Module) -> None:
    """Let a model's linear modules compute with `half_linear`; routers, classes of their own, stay as they are."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = partial(half_linear_module, module)  # type: ignore[method-assign]


def half_linear_module(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What `halve_products` puts in place of a linear module's forward."""
    return half_linear(x, module.weight, module.bias)


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
        back[order] = torch.arange(len(order), device=order.device)
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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sorted_experts(experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Output [N,h] of SiLU-gated experts for inputs [N,h], ids and weights [N,k], each expert's rows gathered once."""
    return GatedExperts.apply(hidden, ids, weights.to(hidden.dtype), experts.gate_up_proj, experts.down_proj)  # type: ignore[no-untyped-call, no-any-return]
