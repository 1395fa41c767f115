"""`moesim validate`: simulate and carry out the same runs, and say how far apart they are and where."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.errors import BadInput
from sim.base.extras import need
from sim.cli.output_place import OutputFile
from sim.cli.say import note, say
from sim.cli.spec_options import Value
from sim.cli.unique_options import UniqueOptions
from sim.options import OPTIONS

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.real.comparison import Report, Talk

TALK_OUTPUTS = 32
CACHES = OPTIONS.by_field["cache"]
AT_LEAST_1 = click.IntRange(min=1)


@click.command(
    cls=UniqueOptions,
    epilog="Example: moesim validate --policy lru --policy fine_moe --cache 25% --cache 50% --hw my-cpu.yaml",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="'NAME KEY=VALUE ...'",
    help="What decides; repeat it. Parameters may follow the name: 'emoe p=1'.",
)
@click.option(
    "--cache", "caches", multiple=True, metavar=CACHES.metavar, type=Value(CACHES), help=f"{CACHES.help}; repeat it."
)
@click.option("--hw", metavar="NAME|FILE", help="Profile of this device: `calibrate` writes one.")
@click.option(
    "--real",
    "device",
    metavar="DEVICE",
    help="Where to run: --real=cpu, --real=cuda:1; default: a GPU if there is one, else the CPU.",
)
@click.option("--model", metavar="NAME|FILE", default="cpu-small", show_default=True, help="Geometry.")
@click.option("--trace", metavar="NAME|FILE", help="Routing trace; default: a bundled one of the model's shape.")
@click.option("--precision", metavar="TYPE", help="Type of the weights; default: what the device computes in.")
@click.option(
    "--requests", type=AT_LEAST_1, default=1, show_default=True, metavar="N", help="First N requests of the test split."
)
@click.option("--batch", type=AT_LEAST_1, default=1, show_default=True, metavar="N", help="Requests decoded together.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="hw.*, model.*, engine.* or POLICY.*")
@click.option(
    "--checkpoint",
    metavar="NAME|FOLDER",
    help="Let this model generate under each policy, routing itself: "
    "tokens and perplexity against the resident model's.",
)
@click.option(
    "--outputs",
    type=click.IntRange(min=2),
    metavar="N",
    help="At most N tokens a request; default: all of the trace's, with --checkpoint 32.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1, max=100),
    default=1,
    show_default=True,
    metavar="N",
    help="Real runs of each case, all cases in turn; times are medians.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.0),
    default=0.25,
    show_default=True,
    metavar="F",
    help="Largest relative error of TPOT and TTFT.",
)
@click.option(
    "--out",
    type=OutputFile(),
    metavar="FILE",
    help="Keep every comparison as JSON, written anew after each run.",
)
@click.option("--resume", is_flag=True, help="Leave out what --out holds already, measured on this device as often.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparisons as one JSON object and nothing else.")
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="NAME|FILE",
    help="Run nothing: print the accuracy table of kept comparisons as Markdown; cpu-backend is bundled.",
)
def command(
    policies: tuple[str, ...],
    caches: tuple[str, ...],
    device: str | None,
    precision: str | None,
    settings: tuple[str, ...],
    checkpoint: str | None,
    outputs: int | None,
    repeat: int,
    tolerance: float,
    out: Path | None,
    resume: bool,
    as_json: bool,
    tables: tuple[str, ...],
    **run: Any,
) -> int:
    """Simulate and really run: predicted, measured and error of TTFT, TPOT, hits, bytes and lanes; exit 1 beyond F."""
    from sim.real.comparison import read, read_report
    from sim.real.validate_text import kept_text

    if tables:
        from sim.base.files import bundled

        kept = bundled("reports.validation", ".json")
        click.echo(kept_text([read(kept.get(name, Path(name))) for name in tables]), nl=False)
        return 0
    if not policies or run["hw"] is None:
        missing = "--policy" if not policies else "--hw"
        raise BadInput(
            f"{missing}, got none: it is needed; e.g. moesim validate --policy lru --cache 64experts --hw my-cpu.yaml, "
            "whose profile `calibrate --device cpu --model cpu-small --name my-cpu` writes"
        )
    if resume and out is None:
        raise BadInput("--resume, got no --out: it continues the file that --out names; give both")
    need("validate", "torch", *(() if checkpoint else ("scipy",)))
    from sim.real.devices.open import usable_device

    keep = partial(_keep, out)
    if checkpoint is not None:
        from sim.cli.run_real import checkpoint_folder
        from sim.real.generate import generated

        folder = checkpoint_folder(checkpoint)
        specs = _specs(policies, caches, settings, run | {"model": str(folder), "precision": "fp32"})
        data: Report | Talk = generated(specs, folder, usable_device(device), outputs or TALK_OUTPUTS)
    else:
        from sim.real.validation import Asked, validate

        specs = _specs(policies, caches, settings, run | {"precision": precision or "bf16"})
        earlier = read_report(out)["comparisons"] if resume and out is not None and out.is_file() else []
        asked = Asked(specs, usable_device(device), precision is not None, outputs, repeat, tolerance, earlier)
        try:
            data = validate(asked, (lambda _: None) if as_json else note, note, keep)
        except KeyboardInterrupt:
            raise click.Abort from None
    keep(data)
    if as_json:
        click.echo(json.dumps(data))
    else:
        say(kept_text([data]), nl=False)
    if data.get("interrupted"):
        note("interrupted; what was compared until then is above")
        return 130
    return 1 if data["wrong"] else 0


def _specs(
    policies: tuple[str, ...], caches: tuple[str, ...], settings: tuple[str, ...], run: dict[str, Any]
) -> list[RunSpec]:
    """Every policy with every capacity. Raises BadInput."""
    from sim.cli.spec_options import stated
    from sim.options import spec_of

    return [
        spec_of(stated({**run, "policy": policy, "cache": cache}, settings), "moesim validate")
        for cache in caches or (None,)
        for policy in policies
    ]


def _keep(out: Path | None, data: Report | Talk) -> None:
    if out is not None:
        from sim.base.files import replacing

        with replacing(out) as part:
            part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
