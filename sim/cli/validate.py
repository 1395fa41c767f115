"""`moesim validate`: simulate and carry out the same runs, and say how far apart they are and where."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.errors import BadInput
from sim.base.interrupts import answered
from sim.base.tables import fold
from sim.cli.output_place import OutputFile
from sim.cli.say import say
from sim.cli.spec_options import Value
from sim.cli.unique_options import UniqueOptions
from sim.options import OPTIONS
from sim.real.validate_text import kept_text, read, read_report, report, talk_report

if TYPE_CHECKING:
    from sim.real.comparison import Comparison, Report, Talk

TALK_OUTPUTS = 32
CACHES = OPTIONS.by_field["cache"]


@click.command(
    cls=UniqueOptions,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: moesim validate --policy lru --policy fine_moe --cache 25% --cache 50% --hw my-cpu.yaml",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME|FILE.py",
    help="What decides; repeat it. With --checkpoint parameters may follow the name: 'emoe p=1'.",
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
    "--requests",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="First N requests of the test split.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Requests decoded together."
)
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
    hw: str | None,
    device: str | None,
    model: str,
    trace: str | None,
    precision: str | None,
    requests: int,
    batch: int,
    settings: tuple[str, ...],
    checkpoint: str | None,
    outputs: int | None,
    repeat: int,
    tolerance: float,
    out: Path | None,
    resume: bool,
    as_json: bool,
    tables: tuple[str, ...],
) -> int:
    """Simulate and really run: predicted, measured and error of TTFT, TPOT, hits, bytes and lanes; exit 1 beyond F."""
    if tables:
        from sim.base.files import bundled

        kept = bundled("reports.validation", ".json")
        click.echo(kept_text([read(kept.get(name, Path(name))) for name in tables]), nl=False)
        return 0
    if not policies or hw is None:
        missing = "--policy" if not policies else "--hw"
        raise BadInput(
            f"{missing}, got none: it is needed; e.g. moesim validate --policy lru --cache 64experts --hw my-cpu.yaml, "
            "whose profile `calibrate --device cpu --model cpu-small --name my-cpu` writes"
        )
    if checkpoint is not None:
        talked = _talk(
            checkpoint, policies, caches or (None,), hw, device, trace, requests, settings, outputs or TALK_OUTPUTS
        )
        _keep(talked, out)
        click.echo(json.dumps(talked) if as_json else fold(talk_report(talked)), nl=as_json)
        return 1 if talked["wrong"] else 0
    if resume and out is None:
        raise BadInput("--resume, got no --out: it continues the file that --out names; give both")
    earlier = read_report(out)["comparisons"] if resume and out is not None and out.is_file() else []
    try:
        data = _measure(
            policies,
            caches or (None,),
            hw,
            device,
            model,
            trace,
            precision,
            requests,
            batch,
            settings,
            tolerance,
            as_json,
            outputs,
            repeat,
            earlier,
            out,
        )
    except KeyboardInterrupt:
        raise click.Abort from None
    _keep(data, out)
    if as_json:
        click.echo(json.dumps(data))
    else:
        say(report(data), nl=False)
    if data["interrupted"]:
        click.echo("interrupted; what was compared until then is above", err=True)
        return 130
    return 1 if data["wrong"] else 0


def _measure(
    policies: tuple[str, ...],
    caches: tuple[str | None, ...],
    hw: str,
    device: str | None,
    model: str,
    trace: str | None,
    precision: str | None,
    requests: int,
    batch: int,
    settings: tuple[str, ...],
    tolerance: float,
    quiet: bool,
    outputs: int | None,
    repeat: int,
    kept: list[Comparison],
    out: Path | None,
) -> Report:
    """Every policy with every cache, on lanes and weights that are opened once. `kept`: comparisons made earlier."""
    import msgspec

    from sim.base.json import finite
    from sim.cli.run_real import prepare_real
    from sim.figures import SCHEMA
    from sim.options import spec_of
    from sim.real.devices import environment
    from sim.real.devices.lanes import cores
    from sim.real.devices.open import usable_device
    from sim.real.order import order
    from sim.real.run import opened
    from sim.real.validate import Case, compared, judge, summary

    place = usable_device(device)
    asked: dict[str, Any] = {"hw": hw, "model": model, "trace": trace, "precision": precision or "bf16"}
    asked |= {"requests": requests, "batch": batch, "set": OPTIONS.settings(settings)}
    cases = [
        spec_of({**asked, "policy": policy, "cache": cache}, "moesim validate")
        for cache in caches
        for policy in policies
    ]
    largest: Any = None
    for number, spec in enumerate(cases):  # everything that may be refused is refused before anything runs
        setup = prepare_real(spec, place, precision is not None)
        setup.close()
        if number == 0 and not quiet:
            for note in setup.notes():
                click.echo(note, err=True)
        cases[number] = setup.spec
        if largest is None or sum(setup.memory.expert_bytes) > sum(largest.memory.expert_bytes):
            largest = setup
    runs, machine = [Case(spec, outputs) for spec in cases], environment.machine()
    title, distinct = "", 0
    known: list[Comparison | None] = [None] * len(runs)
    wanted = [{**msgspec.to_builtins(spec), "outputs": outputs} for spec in cases]

    def so_far(interrupted: bool) -> Report:
        comparisons: list[Comparison] = [
            earlier or {**compared(run), "case": case}
            for run, case, earlier in zip(runs, wanted, known, strict=True)
            if earlier or run.reals
        ]
        wrong = [
            f"{c['policy']}, cache {c['case']['cache'] or 'default'}: {text}"
            for c in comparisons
            for text in judge(c, tolerance)
        ]
        found: Report = finite(
            {
                "schema": SCHEMA,
                "device": title,
                "cores": cores(),
                "machine": machine,
                "distinct_host_experts": distinct,
                "profile": Path(hw).stem if hw.endswith((".yaml", ".yml")) else hw,
                "load": list(_load()),
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "tolerance_frac": tolerance,
                "comparisons": comparisons,
                "order": order(comparisons),
                **summary(comparisons),
                "repeats": repeat,
                "interrupted": interrupted,
                "wrong": wrong,
            }
        )
        return found

    with opened(largest, place, largest.spec.seed) as (lanes, weights):
        if largest.hw.name != lanes.title:
            click.echo(
                f"note: the profile {largest.hw.id} describes another device than {lanes.title}, so errors are "
                "not the simulator's; `calibrate` writes one of this device",
                err=True,
            )
        title, distinct = lanes.title, weights.distinct
        known = [
            next(
                (
                    c
                    for c in kept
                    if c.get("case") == case and c["device"] == title and len(c["repeats"]["ttft_s"]) >= repeat
                ),
                None,
            )
            for case in wanted
        ]
        todo = [run for run, earlier in zip(runs, known, strict=True) if earlier is None]
        try:
            for run in todo:
                run.predict()
            for number in range(repeat):  # in turn, so that a machine that drifts does so for all of them
                for run in todo:
                    if not quiet:
                        of = f", run {number + 1} of {repeat}" if repeat > 1 else ""
                        click.echo(f"{run.spec.policy}, room {run.spec.cache or 'default'}{of} ...", err=True)
                    run.carry_out(lanes, weights)
                    _keep(so_far(True), out)
        except KeyboardInterrupt:
            if any(known) or any(run.reals for run in runs):
                answered()
                return so_far(True)
            raise
    return so_far(False)


def _keep(data: Report | Talk, out: Path | None) -> None:
    if out is not None:
        from sim.base.files import replacing

        with replacing(out) as part:
            part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _talk(
    checkpoint: str,
    policies: tuple[str, ...],
    caches: tuple[str | None, ...],
    hw: str,
    device: str | None,
    trace: str | None,
    requests: int,
    settings: tuple[str, ...],
    outputs: int,
) -> Talk:
    """The real small model under every policy; what a lossless one changes is wrong."""
    from sim.base.json import finite
    from sim.base.kinds import EXPERTS, amount_in
    from sim.cli.run_real import checkpoint_folder
    from sim.options import spec_of
    from sim.policy.policy_file import split
    from sim.real.devices.open import usable_device
    from sim.real.generate import talk

    folder = checkpoint_folder(checkpoint)
    specs, named_so = [], []
    for cache in caches:
        for item in policies:
            policy, *own = split(item) or [""]
            asked: dict[str, Any] = {
                "policy": policy,
                "hw": hw,
                "model": str(folder),
                "trace": trace,
                "precision": "fp32",
            }
            asked |= {"requests": requests, "set": OPTIONS.settings((*settings, *own))}
            specs.append(spec_of({**asked, "cache": cache}, "moesim validate"))
            named_so.append(" ".join((policy, *own)))
    rows = talk(specs, folder, usable_device(device), outputs)
    for row, name, spec in zip(rows, named_so, specs, strict=True):
        row |= {"policy": name, "experts": amount_in(EXPERTS, spec.capacity)}
    wrong = [
        f"{row['policy']}: lossless, yet its tokens differ from the resident model's"
        for row in rows
        if not row["lossy"] and not row["tokens_identical"]
    ]
    from sim.figures import SCHEMA

    found: Talk = finite({"schema": SCHEMA, "checkpoint": folder.name, "policies": rows, "wrong": wrong})
    return found


def _load() -> tuple[float, ...]:
    import os

    return os.getloadavg() if hasattr(os, "getloadavg") else ()
