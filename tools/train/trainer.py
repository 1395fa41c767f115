"""One training run on a CPU: model, optimizers, data and log, from its settings to a checkpoint that can be resumed.

What a killed run needs to go on as if it had not been is one file, replaced whole: weights and moments in float32, the
generators of windows and of torch, the balancing bias and the log, so that none of them can be of another step than the
rest. On one process and one machine it ends in the bits of one that was not killed. Several workers share each batch
and meet at every step.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sim.base.errors import BadInput
from sim.base.files import replacing, write_json
from tools.train import log
from tools.train import model as models
from tools.train.begin import begin
from tools.train.fast import FastModel, Losses
from tools.train.muon import Muon
from tools.train.schedule import FADES_FROM, SelectionBias, rate_of_step, settled_frac
from tools.train.tokens import WindowSampler, heldout_windows, load_split
from traces.record.checkpoint import load

HELDOUT_TOKENS_PER_TASK = 4_096  # while training; evaluate.py judges on more
EVAL_EVERY_S, LONG_EVERY, WEIGHT_DECAY = 1200.0, 8, 0.1
MOMENTS = ("exp_avg", "exp_avg_sq")


def _option(default: Any, help: str, *choices: str) -> Any:  # noqa: A002 - click's word
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class Settings:
    """One training run; every field is an option of `python -m tools.train.train`."""

    shape: str = _option("", "of the table in tools/train/model.py", *models.SHAPES)
    steps: int = _option(0, "how long")
    decay_steps: int = _option(0, "the last of them, over which the rate falls to 5 %")
    batch_tokens: int = _option(32_768, "of all workers together")
    lr: float = _option(2e-3, "the highest")
    length: int = _option(256, "tokens per window")
    long_length: int = _option(0, "tokens per window in every eighth step, for positions further on (0: as ever)")
    hidden: int = _option(0, "hidden size (0: the shape's own)")
    balance: str = _option("aux", "keep experts in use by a loss or a bias", "aux", "bias")
    optimizer: str = _option("adamw", "muon: for matrices of attention and experts", "adamw", "muon")
    bias_step: float = _option(8e-3, "of the bias, in equal shares of the scores, 1 / experts")
    aux_coef: float = _option(0.0, "of a loss on the load beside the bias, which takes over while that fades")
    by_window: bool = _option(False, "whether that loss wants every window balanced, or all of a batch together")
    turning_coef: float = _option(0.0, "of a loss on tokens routed unlike the one before (fast.turning_loss)")
    begin_from: str = _option("", "checkpoint of this shape or another, of this hidden size or half of it")
    save_every_s: float = _option(300.0, "seconds between saved states")
    seed: int = _option(1, "of all draws")
    workers: int = _option(1, "processes that share each batch, one thread each")


class Trainer:
    """Model, optimizer, data and log of one run. Raises BadInput for settings that do not fit."""

    def __init__(self, settings: Settings, data: Path, out: Path, rank: int = 0) -> None:
        self.settings, self.data, self.out, self.rank = settings, data, out, rank
        out.mkdir(parents=True, exist_ok=True)
        shape = models.get_shape(settings.shape, settings.hidden)
        vocab = int(json.loads((data / "tokens.json").read_text(encoding="utf-8"))["vocab"])
        self.model = models.build(shape, vocab, settings.seed).train()
        if settings.begin_from:
            begin(load(Path(settings.begin_from)), self.model, settings.seed)
        self.labels = log.labels_at(Path(settings.begin_from)) if settings.begin_from else ()
        for name, known in (("balance", ("aux", "bias")), ("optimizer", ("adamw", "muon"))):
            if getattr(settings, name) not in known:
                raise BadInput(f"{name}, got {getattr(settings, name)!r}: {' or '.join(known)}")
        by_bias = settings.balance == "bias"
        self.aux_coef = settings.aux_coef if by_bias else shape.aux_coef
        size = (shape.moe_layers, shape.experts)
        self.bias = SelectionBias(*size, settings.bias_step / shape.experts) if by_bias else None
        self.fast = FastModel(self.model)
        self.optimizers = optimizers(self.model, settings)
        seed = settings.seed + 1000 * rank  # every worker draws windows of its own
        self.sampler = WindowSampler(load_split(data, "train"), settings.length, seed)
        self.heldout = {
            task: heldout_windows(ids, settings.length, HELDOUT_TOKENS_PER_TASK)
            for task, ids in load_split(data, "heldout").items()
        }
        self.phases = log.continued([], 0, asdict(settings))
        self.step, self.tokens, self.earlier_s, self.entries = 0, 0, 0.0, list[dict[str, Any]]()

    def evaluate(self) -> dict[str, float]:
        """Held-out cross entropy in nats per token, by task."""
        self.model.eval()
        before, self.fast.bias = self.fast.bias, None  # judged as the checkpoint will choose
        result = {}
        with torch.no_grad():
            for task, windows in self.heldout.items():
                sums = [float(self.fast(w[:, :-1], w[:, 1:])[0]) * len(w) for w in torch.split(windows, 64)]
                result[task] = sum(sums) / len(windows)
        self.fast.bias = before
        self.model.train()
        return result

    def train_step(self) -> Losses:
        """One optimizer step."""
        cfg = self.settings
        settled = settled_frac(self.step, cfg.steps, cfg.decay_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate_of_step(self.step, cfg.steps, cfg.decay_steps, cfg.lr)
        long = cfg.long_length > 0 and self.step % LONG_EVERY == LONG_EVERY - 1
        length = cfg.long_length if long else cfg.length
        ids, labels = self.sampler.draw(cfg.batch_tokens // length // cfg.workers, length)
        if self.bias is not None:
            self.fast.bias = self.bias.applied(settled)
        found = self.fast(ids, labels, cfg.turning_coef > 0, cfg.by_window)
        loss = found.entropy + self.aux_coef * found.balance
        if found.turning is not None:
            loss = loss + cfg.turning_coef * found.turning
        if self.bias is not None and settled < FADES_FROM:
            self.bias.update(found.load.detach())
        torch.autograd.backward(loss)
        if cfg.workers > 1:
            average_gradients(self.model, cfg.workers)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return Losses(*(None if part is None else part.detach() for part in found))  # type: ignore[arg-type]

    def run(self) -> None:
        """Train until the steps are used up, then evaluate and save."""
        cfg = self.settings
        begin = last_eval = last_save = time.monotonic()
        while self.step < cfg.steps:
            now = time.monotonic()
            spent_s = self.earlier_s + now - begin
            if self.rank == 0 and cfg.decay_steps and self.step == cfg.steps - cfg.decay_steps:
                self.save_state(self.out / "resume" / "before_decay.bin")
            found = self.train_step()
            self.step, self.tokens = self.step + 1, self.tokens + cfg.batch_tokens
            if self.rank > 0:
                continue  # the first worker logs, evaluates and saves; the others meet it at the next step
            if self.step % 20 == 1:
                self.note(spent_s, found)
            if now - last_eval > EVAL_EVERY_S:
                last_eval = now
                self.note_heldout(spent_s)
            if now - last_save > cfg.save_every_s:
                last_save = now
                self.earlier_s, begin = self.earlier_s + now - begin, now
                self.save()
        if self.rank == 0:
            self.earlier_s += time.monotonic() - begin
            self.note_heldout(self.earlier_s)
            self.save()

    def note(self, spent_s: float, found: Losses) -> None:
        """Append the losses of a step to the log."""
        shares = found.load * found.load.shape[-1]  # 1 = an equal share
        row = {
            "step": self.step,
            "seconds": round(spent_s, 1),
            "loss": round(float(found.entropy), 4),
            "balance": round(float(found.balance), 4),
            "least_load": round(float(shares.min()), 3),
        }
        if found.turning is not None:
            row["turning"] = round(float(found.turning), 4)
        self.entries.append(row)

    def note_heldout(self, spent_s: float) -> None:
        """Append the held-out losses to the log, and say them."""
        self.entries.append({"step": self.step, "seconds": round(spent_s, 1), "heldout": self.evaluate()})
        click.echo(f"{self.settings.shape} {json.dumps(self.entries[-1])}")

    def description(self) -> dict[str, Any]:
        """The training log: settings, where and how long it ran, and the loss curve."""
        return {
            "schema": "moe-train-log/1",
            "settings": asdict(self.settings),
            "phases": self.phases,
            "begun_labels": list(self.labels),
            "hardware": f"CPU {platform.machine()}, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "steps": self.step,
            "tokens_seen": self.tokens,
            "seconds": round(self.earlier_s, 1),
            "tokens_per_s": round(self.tokens / max(self.earlier_s, 1e-9)),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "curve": self.entries,
        }

    def save(self) -> None:
        """Write the checkpoint, and what `restore` needs (float32 weights and moments)."""
        models.save(self.model, self.out)
        shutil.copyfile(self.data / "tokenizer.json", self.out / "tokenizer.json")
        write_json(self.out / log.NAME, self.description())
        self.save_state(self.out / "resume" / "state.bin")

    def save_state(self, path: Path) -> None:
        """Write everything the next step depends on."""
        state = {"sampler": self.sampler.generator.get_state(), "torch_rng": torch.get_rng_state()}
        if self.bias is not None:
            state["bias"] = self.bias.values
        for name, parameter in self.model.named_parameters():
            state[f"weight.{name}"] = parameter.detach()
            for optimizer in self.optimizers:
                kept = optimizer.state.get(parameter, {})
                state |= {f"{key}.{name}": kept[key] for key in MOMENTS if key in kept}
        kept = {"seconds": self.earlier_s, "phases": self.phases, "curve": self.entries}
        told = json.dumps({"step": self.step, "tokens": self.tokens, **kept})
        with replacing(path) as part:
            save_file({k: v.contiguous() for k, v in state.items()}, part, metadata={"log": told})

    def restore(self) -> bool:
        """Bring a fresh trainer to where `save` was called; False if there is nothing in the folder."""
        path = self.out / "resume" / "state.bin"
        if not path.exists():
            return False
        with safe_open(path, framework="pt") as stored:
            told = json.loads(stored.metadata()["log"])
            state = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118 - not a dict
        self.step, self.tokens, self.earlier_s = told["step"], told["tokens"], told["seconds"]
        self.entries, phases = told["curve"], told["phases"]
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(state[f"weight.{name}"])
            moments = {key: state[f"{key}.{name}"] for key in MOMENTS if f"{key}.{name}" in state}
            for optimizer in self.optimizers:
                if moments and any(parameter is p for group in optimizer.param_groups for p in group["params"]):
                    optimizer.state[parameter] = {"step": torch.tensor(float(self.step)), **moments}
        if self.bias is not None:
            self.bias.values.copy_(state["bias"])
        if self.rank == 0:
            self.sampler.generator.set_state(state["sampler"])
            torch.set_rng_state(state["torch_rng"])
        else:  # only the first worker's is kept; the others draw new windows, not the first ones again
            self.sampler.generator.manual_seed(self.settings.seed + 1000 * self.rank + self.step)
        self.phases = log.continued(phases, self.step, asdict(self.settings))
        return True


def optimizers(model: torch.nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices inside layers, routers apart, and AdamW for what is left."""
    muon = settings.optimizer == "muon"
    by_muon = [p for name, p in model.named_parameters() if muon and p.ndim > 1 and "_proj" in name]
    taken = {id(p) for p in by_muon}
    rest = [p for p in model.parameters() if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)
    return [adamw, Muon(by_muon, settings.lr, WEIGHT_DECAY)] if by_muon else [adamw]


def average_gradients(model: torch.nn.Module, workers: int) -> None:
    """Replace every gradient by its mean over the workers, in one exchange."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    torch.distributed.all_reduce(flat)
    flat /= workers
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):  # type: ignore[no-untyped-call]
        gradient.copy_(part.view_as(gradient))
