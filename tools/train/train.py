"""Train one shape on the token files within a time budget.

    python -m tools.train.train --shape mixtral-8x7b --data .traindata/tokens --out run --minutes 8

Weights, optimizer and log are written as it goes (`--resume` continues); `model*.safetensors`, `config.json`,
`tokenizer.json` and `training_log.json` in `--out` are the checkpoint.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import click
import torch

from tools.train.trainer import Settings, Trainer


def work(rank: int, settings: Settings, data: Path, out: Path, resume: bool, rendezvous: str) -> None:
    """One of several training processes on this machine, a thread each."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # torch sends it when the first process is gone
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=settings.workers)
    trainer = Trainer(settings, data, out, rank)
    if resume:
        trainer.restore()
    trainer.run()
    torch.distributed.destroy_process_group()


@click.command()
@click.option("--shape", required=True, help="mixtral-8x7b, qwen1.5-moe-a2.7b, phi-3.5-moe or deepseek-moe-16b")
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="folder of tokens.py")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--minutes", type=float, default=0.0, help="training time, earlier runs that --resume continues included")
@click.option("--steps", default=0, help="train for so many steps in place of --minutes: resumes exactly")
@click.option("--decay-steps", default=0, help="the last of --steps, over which the rate falls to 5 %")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--batch-tokens", default=32_768, show_default=True)
@click.option("--lr", default=2e-3, show_default=True)
@click.option("--length", default=256, show_default=True, help="tokens per window")
@click.option("--long-length", default=0, help="tokens per window in every eighth step (0: as ever)")
@click.option("--hidden", default=0, help="hidden size (0: the shape's own)")
@click.option("--balance", type=click.Choice(["aux", "bias"]), default="aux", show_default=True, help="loss or bias")
@click.option("--optimizer", type=click.Choice(["adamw", "muon"]), default="adamw", show_default=True)
@click.option("--half/--no-half", default=False, help="linear products in bfloat16 on a CPU")
@click.option("--bias-step", default=8e-3, show_default=True, help="of the bias, in equal shares of the scores")
@click.option("--aux-coef", default=0.0, show_default=True, help="of a loss on the load beside the bias")
@click.option("--by-window/--by-batch", default=False, show_default=True, help="what that loss wants balanced")
@click.option("--turning-coef", default=0.0, show_default=True, help="of a loss on tokens routed unlike the one before")
@click.option("--begin-from", default="", help="checkpoint of this shape or another, of this size or half of it")
@click.option("--save-every", "save_every_s", default=300.0, show_default=True, help="seconds between saved states")
@click.option("--threads", default=0, help="threads of one process (0: torch's choice)")
@click.option("--seed", default=1, show_default=True)
@click.option("--max-steps", default=1_000_000_000)
@click.option("--experts", default="", help="dense or sorted (default: dense on a GPU, sorted on a CPU)")
@click.option("--workers", default=1, show_default=True, help="processes sharing each batch, one thread each (CPU)")
@click.option("--compile/--no-compile", "compiled", default=False)
@click.option("--resume/--no-resume", default=False)
def main(
    shape: str,
    data: Path,
    out: Path,
    minutes: float,
    device: str,
    batch_tokens: int,
    lr: float,
    steps: int,
    decay_steps: int,
    length: int,
    long_length: int,
    hidden: int,
    balance: str,
    optimizer: str,
    bias_step: float,
    aux_coef: float,
    by_window: bool,
    turning_coef: float,
    half: bool,
    begin_from: str,
    save_every_s: float,
    threads: int,
    seed: int,
    max_steps: int,
    experts: str,
    workers: int,
    compiled: bool,
    resume: bool,
) -> None:
    """Train one model of a published routing shape."""
    if (minutes > 0) == (steps > 0):
        raise click.UsageError("give --minutes or --steps, one of the two")
    if threads:
        torch.set_num_threads(threads)
    settings = Settings(
        shape,
        minutes,
        batch_tokens=batch_tokens,
        peak_lr=lr,
        seed=seed,
        device=device,
        compiled=compiled,
        max_steps=max_steps,
        experts=experts,
        workers=workers,
        steps=steps,
        decay_steps=decay_steps,
        length=length,
        long_length=long_length,
        hidden=hidden,
        balance=balance,
        optimizer=optimizer,
        bias_step=bias_step,
        aux_coef=aux_coef,
        by_window=by_window,
        turning_coef=turning_coef,
        half=half,
        begin_from=begin_from,
        save_every_s=save_every_s,
    )
    if workers > 1:
        out.mkdir(parents=True, exist_ok=True)
        meeting = out / f".rendezvous-{time.monotonic_ns()}"
        spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
        spawn(work, (settings, data, out, resume, meeting.resolve().as_uri()), nprocs=workers)
        meeting.unlink(missing_ok=True)
        return
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    trainer = Trainer(settings, data, out)
    try:
        if resume and trainer.restore():
            click.echo(f"{shape}: continuing at step {trainer.step}, {trainer.earlier_s:.0f} s")
        trainer.run()
    except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
        if not compiled:
            raise
        click.echo(f"{shape}: compiled training failed ({str(error)[:300]}); continuing without compilation", err=True)
        del trainer
        torch._dynamo.reset()
        settings.compiled = False
        trainer = Trainer(settings, data, out)
        trainer.restore()
        trainer.run()


if __name__ == "__main__":
    main()
