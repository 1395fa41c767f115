"""`moesim traces squeeze` and `unsqueeze`: the same trace in fewer bytes, and back."""

from __future__ import annotations

from pathlib import Path

import click

from sim.base.errors import BadInput
from sim.base.units import show_bytes
from sim.cli.output_place import OutputFile
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions


@click.command("squeeze", cls=UniqueOptions, short_help="Write TRACE in fewer bytes.")
@click.argument("trace")
@click.argument("out", type=OutputFile())
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
def squeeze(trace: str, out: Path, overwrite: bool) -> None:
    """Write TRACE, a bundled name or a file, to OUT in blocks that are unpacked as they are read.

    Nothing else changes, the checksum neither: a run on either is the same run.
    """
    _write(trace, out, overwrite, squeezed=True)


@click.command("unsqueeze", cls=UniqueOptions, short_help="Write TRACE as a plain file again.")
@click.argument("trace")
@click.argument("out", type=OutputFile())
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
def unsqueeze(trace: str, out: Path, overwrite: bool) -> None:
    """Write TRACE, squeezed or not, to OUT as a plain file, whose tensors any safetensors reader can read."""
    _write(trace, out, overwrite, squeezed=False)


def _write(trace: str, out: Path, overwrite: bool, squeezed: bool) -> None:
    from sim.cli.progress import bar
    from traces.format import squeeze as ways
    from traces.format.catalogue import open_trace

    if out.exists() and not overwrite:
        raise BadInput(f"{out}: exists; replace it with --overwrite, or name another file")
    if not out.parent.is_dir():
        raise BadInput(f"{out}: there is no folder {out.parent}; create it, or name another file")
    with open_trace(trace) as opened, bar(f"writing {out.name}") as progress:
        if out.exists() and out.samefile(opened.path):
            raise BadInput(f"{out}: is the trace itself; name another file")
        n_bytes = opened.path.stat().st_size
        (ways.squeeze if squeezed else ways.unsqueeze)(opened, out, progress)
    say(f"{out}: {show_bytes(out.stat().st_size)}, before {show_bytes(n_bytes)}")
