"""`moesim report`: a calibration's curves, samples and fits as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from sim.cli.say import say


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Where to; default: beside the profile.")
def command(profile: Path, out: Path | None) -> None:
    """Draw PROFILE (the NAME.yaml that `calibrate` wrote) with the samples beside it; opens in any browser, offline."""
    from calibrate.report import write
    from sim.base.errors import BadInput

    if profile.suffix not in (".yaml", ".yml"):
        raise BadInput(f"profile, got {str(profile)!r}: not a YAML file; give the NAME.yaml that `calibrate` wrote")
    say(f"written: {write(profile, out)}")
