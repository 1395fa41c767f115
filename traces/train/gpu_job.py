"""The whole chain unattended on a GPU machine: train (one process per shape), evaluate, record, bundle.

    python -m traces.train.gpu_job --out $OUT --data DIR --minutes N --shapes mixtral-8x7b,qwen1.5-moe-a2.7b

Work lies in `--work`; every minute and after every step the results so far are packed into `--out` (see `ship`), so a
job cut short still delivers the latest checkpoint. A second call with `--resume` and the same `--work` trains on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from traces.train.ship import pack

PACK_EVERY_S = 60.0


def _command(module: str, **options: object) -> list[str]:
    command = [sys.executable, "-m", f"traces.train.{module}"]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [] if value in (False, None) else [flag, str(value)]
    return command


class Job:
    """Folders and processes of one job."""

    def __init__(self, out: Path, work: Path, shapes: list[str]) -> None:
        self.out, self.work, self.shapes = out, work, shapes

    def files(self) -> list[tuple[str, Path]]:
        """What to ship, most important first: checkpoints of all shapes, their reports, then the recordings."""
        patterns = (
            "config.json",
            "*.safetensors",
            "*.index.json",
            "training_log.json",
            "evaluation.json",
            "tokenizer.json",
            "*.txt",
            "routing.npz",
            "routing_scores.npz",
            "routing_ahead1.npz",
            "routing_skip_attention.npz",
            "routing_ahead*.npz",
        )
        found: dict[str, Path] = {}
        for pattern in patterns:
            for shape in self.shapes:
                for path in sorted((self.work / shape).glob(pattern)):
                    found.setdefault(f"{shape}/{path.name}", path)
        return list(found.items())

    def ship(self) -> None:
        """Bundle what there is; a file being replaced at this moment is simply taken next time."""
        try:
            left_out = pack(self.files(), self.out)
        except FileNotFoundError:
            return
        if left_out:
            click.echo("left out of the bundle, which is full: " + ", ".join(left_out), err=True)

    def run_all(self, commands: dict[tuple[str, str], list[str]]) -> None:
        """Run a process per (shape, step) side by side, log to `<shape>/<step>.txt`, ship once a minute."""
        running = {}
        for (shape, step), command in commands.items():
            (self.work / shape).mkdir(parents=True, exist_ok=True)
            with (self.work / shape / f"{step}.txt").open("wb") as log:
                running[shape, step] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603
        last_ship = time.monotonic()
        while any(process.poll() is None for process in running.values()):
            time.sleep(0.5)
            if time.monotonic() - last_ship > PACK_EVERY_S:
                self.ship()
                last_ship = time.monotonic()
        for (shape, step), process in running.items():
            tail = (self.work / shape / f"{step}.txt").read_text(encoding="utf-8", errors="replace")[-1500:].strip()
            click.echo(f"== {step} {shape}: exit {process.returncode}\n{tail}")
        self.ship()

    def table(self) -> list[str]:
        """One line per shape that was evaluated."""
        heads = ("tokens/s", "tokens", "model", "trigram", "bigram", "dead", "reuse", "popular")
        lines = [f"{'shape':20s}" + "".join(f" {h:>12s}" for h in heads)]
        for shape in self.shapes:
            folder = self.work / shape
            if not (folder / "evaluation.json").exists():
                lines.append(f"{shape:20s} not evaluated")
                continue
            log = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
            result = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
            loss, routing = result["loss"], result["routing"]
            cells = [str(log["tokens_per_s"]), str(log["tokens_seen"])]
            cells += [f"{loss[name]['all']:.3f}" for name in ("model", "trigram", "bigram")]
            cells += [str(routing["dead_experts"])]
            cells += [f"{routing[name]:.3f}" for name in ("gate_reuse_accuracy", "popularity_accuracy")]
            lines.append(f"{shape:20s}" + "".join(f" {cell:>12s}" for cell in cells))
        return lines


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="folder that is handed back")
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="folder of tokens.py")
@click.option("--minutes", type=float, required=True, help="training time; evaluation and recording come on top")
@click.option("--shapes", default="mixtral-8x7b", show_default=True, help="comma-separated")
@click.option(
    "--work", type=click.Path(path_type=Path), help="scratch folder (default: a fixed one under the temporary)"
)
@click.option("--requests", default=120, show_default=True, help="requests to record per shape; 0: none")
@click.option("--batch-tokens", default=32_768, show_default=True)
@click.option("--eval-tokens", default=65_536, show_default=True, help="held-out tokens per task")
@click.option("--precision", default="u8", show_default=True, help="of recorded scores: f16 or u8")
@click.option("--max-steps", type=int)
@click.option("--device", help="default: cuda if there is one")
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True)
@click.option("--resume/--no-resume", default=False)
def main(
    out: Path,
    data: Path,
    minutes: float,
    shapes: str,
    work: Path | None,
    requests: int,
    batch_tokens: int,
    eval_tokens: int,
    precision: str,
    max_steps: int | None,
    device: str | None,
    compiled: bool,
    resume: bool,
) -> None:
    """Train, evaluate, record and bundle; evaluation and recording run side by side."""
    names = [name.strip() for name in shapes.split(",") if name.strip()]
    base = work or Path(tempfile.gettempdir()) / "moe-train"
    job = Job(out, base, names)
    job.run_all(
        {
            (name, "train"): _command(
                "train",
                shape=name,
                data=data,
                out=base / name,
                minutes=minutes,
                device=device,
                batch_tokens=batch_tokens,
                max_steps=max_steps,
                resume=resume,
                **{"compile" if compiled else "no-compile": True},
            )
            for name in names
        }
    )
    trained = [name for name in names if (base / name / "config.json").exists()]
    after = {
        (name, "evaluate"): _command(
            "evaluate",
            checkpoint=base / name,
            data=data,
            tokens=eval_tokens,
            out=base / name / "evaluation.json",
            device=device,
        )
        for name in trained
    }
    if requests:
        after |= {
            (name, "record"): _command(
                "record",
                checkpoint=base / name,
                data=data,
                out=base / name,
                device=device,
                requests=requests,
                precision=precision,
            )
            for name in trained
        }
    job.run_all(after)
    click.echo("\n".join(job.table()))
    for path in sorted(out.iterdir()):
        click.echo(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
