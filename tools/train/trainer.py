"""One training run: model, optimizer, data and log, from its settings to a checkpoint that can be resumed.

The learning rate follows the clock or the steps (`schedule.py`), experts are kept in use by a loss or by a bias
(`balance.py`), and a run may begin from a narrower model (`grow.py`) or one of another shape (`upcycle.py`). Several
workers share each batch and meet at every step.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch

from sim.base.errors import BadInput
from sim.base.files import write_json
from tools.train import log
from tools.train import model as models
from tools.train.balance import FADES_FROM, SelectionBias
from tools.train.batches import WindowSampler, heldout_windows
from tools.train.fast import FastModel, Losses, dense_experts
from tools.train.kernels import halve_products, sorted_experts
from tools.train.muon import Muon
from tools.train.schedule import learning_rate, rate_of_step, settled_by_clock, settled_frac
from tools.train.state import load_state, save_state
from tools.train.tokens import load_split
from tools.train.upcycle import begin
from traces.record.checkpoint import load

HELDOUT_TOKENS_PER_TASK = 4_096  # while training; evaluate.py judges on more


@dataclass
class Settings:
    """One training run; times are wall-clock minutes and seconds, `peak_lr` is AdamW's.

    `steps` above 0 ends the run by steps in place of `minutes`, and makes it one that resumes exactly.
    """

    shape: str
    minutes: float
    batch_tokens: int = 32_768
    length: int = 256
    peak_lr: float = 2e-3
    weight_decay: float = 0.1
    seed: int = 1
    device: str = "cpu"
    compiled: bool = False
    max_steps: int = 1_000_000_000
    eval_every_s: float = 1200.0
    save_every_s: float = 300.0
    experts: str = ""  # dense or sorted; default: dense on a GPU, sorted on a CPU
    workers: int = 1  # processes that share each batch (CPU); small matrices leave threads little to do
    steps: int = 0
    decay_steps: int = 0  # the last of `steps`, over which the rate falls
    long_length: int = 0  # windows of every `long_every`-th step, for positions that short windows never reach
    long_every: int = 8
    hidden: int = 0  # default: the shape's
    balance: str = "aux"  # or bias
    bias_step: float = 8e-3  # in equal shares of the scores, 1 / experts
    optimizer: str = "adamw"  # or muon: for attention's and experts' matrices, beside AdamW for the rest
    half: bool = False  # linear products in bfloat16 on a CPU; a GPU's are by themselves
    aux_coef: float = 0.0  # of the loss beside a bias: takes over from it while it fades
    by_window: bool = False  # whether that loss asks every window to be balanced, or all of a batch together
    turning_coef: float = 0.0  # of a loss on tokens that are routed unlike the one before (`fast.turning_loss`)
    begin_from: str = ""  # checkpoint of half the hidden size, of this one, or of another shape


def hardware(device: str) -> str:
    """What the run ran on, in words."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


class Trainer:
    """Model, optimizer, data and log of one run."""

    def __init__(self, settings: Settings, data: Path, out: Path, rank: int = 0) -> None:
        self.settings, self.data, self.out, self.rank = settings, data, out, rank
        out.mkdir(parents=True, exist_ok=True)
        shape = models.get_shape(settings.shape, settings.hidden)
        vocab = int(json.loads((data / "tokens.json").read_text(encoding="utf-8"))["vocab"])
        self.model = models.build(shape, vocab, settings.seed)
        if settings.begin_from:
            begin(load(Path(settings.begin_from)), self.model, settings.seed)
        self.labels = log.labels_at(Path(settings.begin_from)) if settings.begin_from else ()
        self.model = self.model.to(settings.device).train()
        if settings.balance not in ("aux", "bias"):
            raise BadInput(f"balance, got {settings.balance!r}: aux or bias")
        by_bias = settings.balance == "bias"
        self.aux_coef = settings.aux_coef if by_bias else shape.aux_coef
        size = (shape.moe_layers, shape.experts)
        self.bias = SelectionBias(*size, settings.bias_step / shape.experts, settings.device) if by_bias else None
        on_gpu = settings.device.startswith("cuda")
        dense = settings.experts == "dense" or (on_gpu and settings.experts != "sorted")
        experts = dense_experts if dense else sorted_experts
        self.fast = FastModel(self.model, experts, settings.compiled)
        if settings.half:
            halve_products(self.model)
        self.plain = FastModel(self.model, experts)  # evaluation: rare, and not worth a second compilation
        self.optimizers = optimizers(self.model, settings)
        seed = settings.seed + 1000 * rank  # every worker draws windows of its own
        self.sampler = WindowSampler(load_split(data, "train"), settings.length, seed, settings.device)
        self.heldout = {
            task: heldout_windows(ids, settings.length, HELDOUT_TOKENS_PER_TASK).to(settings.device)
            for task, ids in load_split(data, "heldout").items()
        }
        self.phases = log.continued([], 0, asdict(settings))
        self.autocast = torch.autocast("cuda", torch.bfloat16, enabled=on_gpu)
        self.step, self.tokens, self.earlier_s, self.entries = 0, 0, 0.0, list[dict[str, Any]]()

    def evaluate(self) -> dict[str, float]:
        """Held-out cross entropy in nats per token, by task."""
        self.model.eval()
        result = {}
        with torch.no_grad(), self.autocast:
            for task, windows in self.heldout.items():
                sums = [float(self.plain(w[:, :-1], w[:, 1:])[0]) * len(w) for w in torch.split(windows, 64)]
                result[task] = sum(sums) / len(windows)
        self.model.train()
        return result

    def rate(self, progress: float) -> float:
        """Learning rate of the next step."""
        cfg = self.settings
        if cfg.steps:
            return rate_of_step(self.step, cfg.steps, cfg.decay_steps, cfg.peak_lr)
        return learning_rate(progress, cfg.peak_lr)

    def progress(self, spent_s: float) -> float:
        """Share of the budget that is behind the run."""
        cfg = self.settings
        return self.step / cfg.steps if cfg.steps else max(spent_s / (60 * cfg.minutes), self.step / cfg.max_steps)

    def settled(self, progress: float) -> float:
        """Share of the decay that is behind the run."""
        cfg = self.settings
        return settled_frac(self.step, cfg.steps, cfg.decay_steps) if cfg.steps else settled_by_clock(progress)

    def train_step(self, rate: float, settled_frac: float) -> Losses:
        """One optimizer step."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        cfg = self.settings
        long = cfg.long_length > 0 and self.step % cfg.long_every == cfg.long_every - 1
        length = cfg.long_length if long else cfg.length
        ids, labels = self.sampler.draw(cfg.batch_tokens // length // cfg.workers, length)
        if self.bias is not None:
            self.fast.bias = self.bias.applied(settled_frac)
        with self.autocast:
            found = self.fast(ids, labels, cfg.turning_coef > 0, cfg.by_window)
        loss = found.entropy + self.aux_coef * found.balance
        if found.turning is not None:
            loss = loss + cfg.turning_coef * found.turning
        if self.bias is not None and settled_frac < FADES_FROM:
            self.bias.update(found.load.detach())
        torch.autograd.backward(loss)
        if cfg.workers > 1:
            average_gradients(self.model, cfg.workers)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        turning = None if found.turning is None else found.turning.detach()
        return Losses(found.entropy.detach(), found.balance.detach(), found.load.detach(), turning)

    def run(self) -> None:
        """Train until the minutes or the steps are used up, then evaluate and save."""
        cfg = self.settings
        begin = last_eval = last_save = time.monotonic()
        while True:
            now = time.monotonic()
            spent_s = self.earlier_s + now - begin
            progress = agreed(self.progress(spent_s), cfg.workers)
            if progress >= 1:
                break
            if self.rank == 0 and cfg.decay_steps and self.step == cfg.steps - cfg.decay_steps:
                save_state(self, self.out / "resume" / "before_decay.bin")
            found = self.train_step(self.rate(progress), self.settled(progress))
            self.step, self.tokens = self.step + 1, self.tokens + cfg.batch_tokens
            if self.rank > 0:
                continue  # the first worker logs, evaluates and saves; the others meet it at the next step
            if self.step % 20 == 1 or cfg.max_steps <= 20:
                self.note(spent_s, found)
            if now - last_eval > cfg.eval_every_s:
                last_eval = now
                self.entries.append({"step": self.step, "seconds": round(spent_s, 1), "heldout": self.evaluate()})
                click.echo(f"{cfg.shape} {json.dumps(self.entries[-1])}")
            if now - last_save > cfg.save_every_s:
                last_save = now
                self.earlier_s, begin = self.earlier_s + now - begin, now
                self.save(resumable=True)
        if self.rank > 0:
            return
        self.earlier_s += time.monotonic() - begin
        entry = {"step": self.step, "seconds": round(self.earlier_s, 1), "heldout": self.evaluate()}
        self.entries.append(entry)
        click.echo(f"{cfg.shape} {json.dumps(entry)}")
        self.save(resumable=True)

    def note(self, spent_s: float, found: Losses) -> None:
        """Append one row; reading the tensors waits for the device, so this is not done every step."""
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

    def description(self) -> dict[str, Any]:
        """The training log: settings, where and how long it ran, and the loss curve."""
        return {
            "schema": "moe-train-log/1",
            "settings": asdict(self.settings),
            "phases": self.phases,
            "begun_labels": list(self.labels),
            "hardware": hardware(self.settings.device),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "steps": self.step,
            "tokens_seen": self.tokens,
            "seconds": round(self.earlier_s, 1),
            "tokens_per_s": round(self.tokens / max(self.earlier_s, 1e-9)),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "curve": self.entries,
        }

    def save(self, resumable: bool) -> None:
        """Write the checkpoint; with `resumable` also what `restore` needs (float32 weights and moments)."""
        models.save(self.model, self.out)
        shutil.copyfile(self.data / "tokenizer.json", self.out / "tokenizer.json")
        write_json(self.out / log.NAME, self.description())
        if resumable:
            save_state(self, self.out / "resume" / "state.bin")

    def restore(self) -> bool:
        """Continue from what `save` left in the folder; False if there is nothing."""
        path = self.out / "resume" / "state.bin"
        if not path.exists():
            return False
        load_state(self, path)
        self.phases = log.continued(self.phases, self.step, asdict(self.settings))
        return True


def optimizers(model: torch.nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices inside layers, routers apart, and AdamW for what is left."""
    if settings.optimizer not in ("adamw", "muon"):
        raise BadInput(f"optimizer, got {settings.optimizer!r}: adamw or muon")
    named = list(model.named_parameters())
    inner = ("_proj",) if settings.optimizer == "muon" else ()
    by_muon = [p for name, p in named if p.ndim > 1 and any(part in name for part in inner)]
    taken = {id(p) for p in by_muon}
    rest = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    result: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=settings.peak_lr, betas=(0.9, 0.95), fused=True)
    ]
    if by_muon:
        result.append(Muon(by_muon, settings.peak_lr, settings.weight_decay))
    return result


def average_gradients(model: torch.nn.Module, workers: int) -> None:
    """Replace every gradient by its mean over the workers, in one exchange."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    torch.distributed.all_reduce(flat)
    flat /= workers
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):  # type: ignore[no-untyped-call]
        gradient.copy_(part.view_as(gradient))


def agreed(progress: float, workers: int) -> float:
    """The first worker's clock, so that all stop at the same step."""
    if workers == 1:
        return progress
    value = torch.tensor([progress], dtype=torch.float64)
    torch.distributed.broadcast(value, src=0)
    return float(value)
