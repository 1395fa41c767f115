"""Measure the CPU backend anew: `python -m tools.validation.remeasure`, about twelve minutes on four quiet cores.

It calibrates this machine for two models, runs every case of `PLANS` in both worlds, keeps all comparisons as
`cpu-backend.json` beside the profiles, and prints the accuracy table anew into docs/validate.md. `cpu-small` is where
the accuracy of times is asked for; `cpu-medium` has experts so large that policies differ by more than the noise.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import click

from calibrate.runner import PROBES as ALONE
from calibrate.session import LANES
from tools.paste import pasted, refreshed

if TYPE_CHECKING:
    from sim.real.comparison import Report

HERE = Path(str(resources.files("reports"))) / "validation"
PROBES = (*(probe.name for probe in ALONE), LANES)
NAME = "cpu-backend"


@dataclass(frozen=True)
class Measurement:
    """One model: its profile's name, the probes that make it, and the cases that are compared."""

    model: str
    profile: str
    probes: tuple[str, ...]
    policies: tuple[str, ...]
    experts: tuple[int, ...]
    requests: int
    outputs: int
    repeat: int
    minutes: float  # of calibration: for single operations, and as much again for those on the lanes

    def calibrate(self, folder: Path) -> list[str]:
        """Arguments of `moesim`."""
        words = f"calibrate --device cpu --model {self.model} --name {self.profile} --minutes {self.minutes} --rounds 1"
        chosen = [word for probe in self.probes for word in ("--probe", probe)]
        return [*words.split(), "--out", str(folder), *chosen]

    def validate(self, folder: Path, tolerance: float) -> list[str]:
        """Arguments of `moesim`; `--repeat` takes all cases in turn."""
        words = f"validate --model {self.model} --real=cpu --requests {self.requests} --outputs {self.outputs}"
        words += f" --repeat {self.repeat} --tolerance {tolerance}"
        cases = [word for policy in self.policies for word in ("--policy", policy)]
        cases += [word for n in self.experts for word in ("--cache", f"{n}experts")]
        places = ["--hw", str(folder / f"{self.profile}.yaml"), "--out", str(self.kept(folder))]
        return [*words.split(), *cases, *places]

    def kept(self, folder: Path) -> Path:
        """Where the comparisons of this model alone are kept until they are put together."""
        return folder / f"{self.profile}.part.json"


SIX = ("lru", "lfu", "mixtral_offloading", "fine_moe", "moe_infinity", "belady")
PLANS = (
    Measurement("cpu-small", NAME, PROBES, SIX, (64, 96, 128), 2, 24, 2, 1.0),
    Measurement("cpu-medium", f"{NAME}-medium", ("lanes",), ("on_demand", *SIX), (64, 128), 1, 32, 2, 2.0),
)
QUICK = (Measurement("cpu-small", NAME, ("lanes",), ("lru", "lfu", "on_demand"), (64,), 1, 3, 2, 0.7),)


def moesim(words: Sequence[str]) -> int:
    """Run a command in a process of its own, so that one calibration leaves the next no memory and no threads."""
    return subprocess.run([sys.executable, "-m", "sim", *words], check=False).returncode  # noqa: S603


def together(parts: Sequence[Report]) -> Report:
    """Comparisons of several models as one: cases in a row, errors and orders worked out anew."""
    from sim.real.order import order
    from sim.real.validate import summary

    # What was asked for serves --resume alone, and names files of the machine it ran on.
    comparisons = [case.copy() for part in parts for case in part["comparisons"]]
    for case in comparisons:
        case.pop("case", None)
    names = list(dict.fromkeys(name for part in parts for name in part["profile"].split(", ")))
    loads = [part["load"] for part in parts]
    return {
        **parts[0],
        "profile": ", ".join(names),
        "comparisons": comparisons,
        "order": order(comparisons),
        "load": [max(column) for column in zip(*loads, strict=True)],
        **summary(comparisons),
        "distinct_host_experts": min(part["distinct_host_experts"] for part in parts),
        "wrong": [line for part in parts for line in part["wrong"]],
    }


def measure(
    folder: Path,
    plans: Sequence[Measurement],
    run: Callable[[Sequence[str]], int] = moesim,
    tell: Callable[[str], object] = click.echo,
) -> Report:
    """Calibrate and compare every plan, and keep all comparisons in `folder`. Raises ClickException when a step fails.

    A comparison beyond the tolerance of `validate` (exit 1) is a result, not a failure.
    """
    from sim.base.files import write_json
    from sim.real.comparison import read_report

    began_s, parts = time.monotonic(), []
    for plan in plans:
        for words in (plan.calibrate(folder), plan.validate(folder, 0.25)):
            tell(f"[{time.monotonic() - began_s:4.0f} s] moesim {' '.join(words)}")
            status = run(words)
            if status not in ((0, 1) if words[0] == "validate" else (0,)):
                raise click.ClickException(f"moesim {words[0]} for {plan.model} ended with {status}")
        parts.append(read_report(plan.kept(folder)))
        plan.kept(folder).unlink()
    data = together(parts)
    write_json(folder / f"{NAME}.json", data)
    tell(f"[{time.monotonic() - began_s:4.0f} s] wrote {folder / f'{NAME}.json'}")
    return data


def refresh(page: Path, table: str, name: str = NAME) -> None:
    """Put a table in the place of the one that the page has. Raises ClickException where it has none of this name."""
    from sim.base.files import replacing

    command, text = f"moesim validate --table {name}", page.read_text(encoding="utf-8")
    if command not in dict(pasted(text)):
        raise click.ClickException(f"{page}: no block that begins with <!-- output of: {command} -->")
    with replacing(page) as part:
        part.write_text(refreshed(text, {command: table.rstrip("\n")}), encoding="utf-8")


@click.command(help=__doc__)
@click.option(
    *("--out", "folder"),
    type=click.Path(file_okay=False, path_type=Path),
    default=HERE,
    help="Where profiles and comparisons go; default: reports/validation, and docs/validate.md is printed anew.",
)
@click.option("--quick", is_flag=True, help="Three cases of a few tokens: does it work here at all?")
def command(folder: Path, quick: bool) -> None:
    """Calibrate, compare, keep, print."""
    from sim.base.tables import IN_A_PIPE
    from sim.real.validate_text import kept_text

    folder.mkdir(parents=True, exist_ok=True)
    data = measure(folder, QUICK if quick else PLANS)
    table = kept_text([data], IN_A_PIPE)
    page = HERE.parents[1] / "docs" / "validate.md"
    if folder == HERE and page.is_file():
        refresh(page, table)
        click.echo(f"printed anew: {page}")
    click.echo(table)


if __name__ == "__main__":
    command()
