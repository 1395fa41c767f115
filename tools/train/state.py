"""What a killed run needs to go on as if it had not been: one file, replaced whole.

Weights and moments in float32, the generators of windows and of torch, the balancing bias, and the log, so that none
of them can be of another step than the rest. On one process and one machine a run that was killed and continued ends
in the bits of one that was not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sim.base.files import replacing

if TYPE_CHECKING:
    from tools.train.trainer import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")


def save_state(trainer: Trainer, path: Path) -> None:
    """Write everything the next step depends on."""
    state = {"sampler": trainer.sampler.generator.get_state(), "torch_rng": torch.get_rng_state()}
    if trainer.bias is not None:
        state["bias"] = trainer.bias.values
    for name, parameter in trainer.model.named_parameters():
        state[f"weight.{name}"] = parameter.detach()
        for optimizer in trainer.optimizers:
            kept = optimizer.state.get(parameter, {})
            state |= {f"{key}.{name}": kept[key] for key in MOMENTS if key in kept}
    log = json.dumps(
        {
            "step": trainer.step,
            "seconds": trainer.earlier_s,
            "tokens": trainer.tokens,
            "phases": trainer.phases,
            "curve": trainer.entries,
        }
    )
    with replacing(path) as part:
        save_file({k: v.contiguous().cpu() for k, v in state.items()}, part, metadata={"log": log})


def load_state(trainer: Trainer, path: Path) -> None:
    """Bring a fresh trainer of the same settings to where `save_state` was called."""
    with safe_open(path, framework="pt") as stored:
        log = json.loads(stored.metadata()["log"])
        state = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118 - not a dict
    trainer.step, trainer.earlier_s, trainer.entries = log["step"], log["seconds"], log["curve"]
    # states written before batches could change within a run name neither
    trainer.tokens = log.get("tokens", trainer.step * trainer.settings.batch_tokens)
    trainer.phases = log.get("phases", trainer.phases)
    for name, parameter in trainer.model.named_parameters():
        parameter.data.copy_(state[f"weight.{name}"])
        moments = {key: state[f"{key}.{name}"].to(parameter.device) for key in MOMENTS if f"{key}.{name}" in state}
        for optimizer in trainer.optimizers:
            if moments and any(parameter is p for group in optimizer.param_groups for p in group["params"]):
                step = torch.tensor(float(trainer.step), device=parameter.device)
                optimizer.state[parameter] = {"step": step, **moments}
    if trainer.bias is not None:
        trainer.bias.values.copy_(state["bias"])
    if trainer.rank == 0:
        trainer.sampler.generator.set_state(state["sampler"])
        torch.set_rng_state(state["torch_rng"])
    else:  # only the first worker's is kept; the others draw new windows, not the first ones again
        trainer.sampler.generator.manual_seed(trainer.settings.seed + 1000 * trainer.rank + trainer.step)
