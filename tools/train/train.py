"""Train one shape on the token files for so many steps.

    python -m tools.train.train --shape mixtral-8x7b --data .traindata/tokens --out run --steps 2600

Weights, optimizer and log are written as it goes (`--resume` continues); `model*.safetensors`, `config.json`,
`tokenizer.json` and `training_log.json` in `--out` are the checkpoint.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import fields
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


def settings_options(command: Callable[..., None]) -> Callable[..., None]:
    """An option for every field of `Settings`; shape and steps are asked for."""
    for one in reversed(fields(Settings)):
        asked: dict[str, Any] = {"required": True}
        if one.name not in ("shape", "steps"):
            asked = {"default": one.default, "show_default": True}
        if isinstance(one.default, bool):
            asked["is_flag"] = True
        else:
            choices = one.metadata["choices"]
            asked["type"] = click.Choice(choices) if choices else type(one.default)
        flag = f"--{one.name.removesuffix('_s').replace('_', '-')}"
        command = click.option(flag, one.name, help=one.metadata["help"], **asked)(command)
    return command


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="folder of tokens.py")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@settings_options
@click.option("--threads", default=0, help="threads of one process (0: torch's choice)")
@click.option("--resume", is_flag=True)
def main(data: Path, out: Path, threads: int, resume: bool, **told: Any) -> None:
    """Train one model of a published routing shape."""
    settings = Settings(**told)
    if threads:
        torch.set_num_threads(threads)
    if settings.workers > 1:
        out.mkdir(parents=True, exist_ok=True)
        meeting = out / f".rendezvous-{time.monotonic_ns()}"
        spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
        spawn(work, (settings, data, out, resume, meeting.resolve().as_uri()), nprocs=settings.workers)
        meeting.unlink(missing_ok=True)
        return
    trainer = Trainer(settings, data, out)
    if resume and trainer.restore():
        click.echo(f"{settings.shape}: continuing at step {trainer.step}, {trainer.earlier_s:.0f} s")
    trainer.run()


if __name__ == "__main__":
    main()
