"""Muon: momentum whose matrices are made orthogonal before they are taken as a step, beside AdamW for the rest.

Jordan et al., Muon (kellerjordan.github.io/posts/muon, 2024), scaled as in Liu et al. (arXiv 2502.16982): a step's root
mean square is `RMS` times the rate, as AdamW's is, so that one rate and one weight decay serve both. Experts are stacks
of matrices, each made orthogonal by itself; embedding, routers, norms and biases are AdamW's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

RMS = 0.2  # AdamW's steps have a root mean square of 0.2 to 0.4 of the rate
MOMENTUM = 0.95
ROUNDS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # of the quintic that drives singular values towards 1


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """About U V^T for each matrix U S V^T of [..., m, n]: singular values between 0.7 and 1.2, directions kept."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).reshape(-1, *sorted(matrices.shape[-2:]))
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        square = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if tall else x).reshape(matrices.shape)


class Muon(torch.optim.Optimizer):
    """Steps of orthogonal momentum (Nesterov's) for parameters [..., m, n]."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                mean = state["exp_avg"].lerp_(parameter.grad, 1 - MOMENTUM)
                step = orthogonal(parameter.grad.lerp(mean, MOMENTUM))
                size = RMS * max(parameter.shape[-2:]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(step, alpha=-group["lr"] * size)
