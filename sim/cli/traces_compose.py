"""`moesim traces compose`: give the requests of a trace arrival times, so that a run shows waiting under load."""

from __future__ import annotations

from pathlib import Path

import click

from sim.base.errors import BadInput
from sim.base.units import show_count
from sim.cli.output_place import OutputFile
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions

_EPILOG = (
    "Example: moesim traces compose mixtral-8x7b-small -o load.safetensors --arrivals poisson:0.01, and then "
    "simulate --trace load.safetensors. docs/convert.md goes on."
)


@click.command("compose", cls=UniqueOptions, short_help="Give the requests of TRACE arrival times.", epilog=_EPILOG)
@click.argument("trace")
@click.option("-o", "--out", required=True, metavar="FILE", type=OutputFile(), help="The trace to write.")
@click.option(
    "--arrivals",
    "source",
    required=True,
    metavar="SOURCE",
    help="poisson:RATE, gamma:RATE,CV (requests per second), or an Azure, Mooncake or BurstGPT log.",
)
@click.option("--rate-scale", type=float, default=1.0, show_default=True, metavar="X", help="Times the source's rate.")
@click.option(
    "--lengths",
    type=click.Choice(["recorded", "arrivals"]),
    default="recorded",
    show_default=True,
    help="Keep each request's recorded lengths, or splice requests of the log's lengths (label `spliced`).",
)
@click.option(
    "--requests",
    "n_requests",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many requests arrive; default: all of the split.",
)
@click.option(
    "--split",
    type=click.Choice(["test", "all"]),
    default="test",
    show_default=True,
    help="Which requests arrive; those of the training split come before, at time 0.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of the process.")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
def command(
    trace: str,
    out: Path,
    source: str,
    rate_scale: float,
    lengths: str,
    n_requests: int | None,
    split: str,
    seed: int,
    overwrite: bool,
) -> None:
    """Write TRACE, a bundled name or a file, with arrival times; `simulate` honours them."""
    from sim.cli.progress import bar
    from traces.format.catalogue import open_trace
    from traces.synth.arrivals import arrivals
    from traces.synth.compose import compose, plan

    if out.exists() and not overwrite:
        raise BadInput(f"{out}: exists; replace it with --overwrite, or name another file")
    if not out.parent.is_dir():
        raise BadInput(f"{out}: there is no folder {out.parent}; create it, or name another file")
    with open_trace(trace) as opened:
        if out.exists() and out.samefile(opened.path):
            raise BadInput(f"{out}: is the trace itself; name another file")
        present = len(opened.requests.in_split("test")) if split == "test" else opened.n_requests
        wanted = n_requests or max(1, present)
        times = arrivals(source, wanted, seed, rate_scale)
        if len(times) < wanted:
            raise BadInput(
                f"{source}, got {len(times)} arrivals: {wanted} requests need one each; give --requests {len(times)}"
            )
        kept = [one for one in times if lengths == "recorded" or (one.prompt_len != 0 and one.outputs != 0)]
        if not kept:
            raise BadInput(f"{source}: lengths, got only requests without prompt or output; use --lengths recorded")
        plans = plan(opened, kept, lengths, split)
        origin = f"{Path(source).name if Path(source).exists() else source}, rate scale {rate_scale:g}, seed {seed}"
        with bar(f"writing {out.name}") as progress:
            compose(opened, plans, out, origin, lengths == "arrivals", progress)
    span_s = kept[-1].at_s if kept else 0.0
    rate = f", {(len(kept) - 1) / span_s:.3g} per second" if span_s else ""
    arrive = "arrives" if len(kept) == 1 else "arrive"
    say(f"{out}: {show_count(len(kept), 'request')} {arrive} in {span_s:.6g} s{rate}; lengths {lengths}")
    if lengths == "arrivals":
        say("labels: spliced")
    if len(kept) < len(times):
        say(f"note: requests without prompt or output tokens, left out: {len(times) - len(kept)}")
