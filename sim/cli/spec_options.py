"""What makes a run: the options that `simulate` and `moesim compare` share, and the run they ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.errors import BadInput
from sim.base.units import parse_size
from sim.workload import routers
from sim.workload.schedulers import DEFAULT, schedulers

if TYPE_CHECKING:
    from sim.run import Setup
    from sim.setup.spec import RunSpec

LEAST_MEANT = 1000  # bytes without a unit: fewer hold no expert of any model


class Size(click.ParamType[int]):
    """Bytes, written with or without a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        option = param.opts[0] if param else self.name
        n_bytes = parse_size(value, param.name or "" if param else "", option)
        if 0 < n_bytes < LEAST_MEANT and value.strip().isdigit():
            raise BadInput(f"{option}, got {value!r}: that is {n_bytes} bytes; did you mean {value.strip()}GB?")
        return n_bytes


# What makes a run besides its policy; `moesim compare` takes the same.
SPEC_OPTIONS = (
    click.option("--hw", metavar="NAME|FILE", help="GPU and its machine: see `moesim hw`."),
    click.option("--model", metavar="NAME|FILE", help="Geometry; default: a model of the trace's routing shape."),
    click.option("--trace", metavar="NAME|FILE", help="Routing trace; default: the bundled one."),
    click.option(
        "--precision", metavar="TYPE", help="Type of the weights: bf16 (default), q4_k_m ... (`moesim models MODEL`)."
    ),
    click.option("--link", metavar="WORD", help="Put the card on another link: pcie3x4 to pcie6x16."),
    click.option("--vram", "vram_bytes", type=Size(), help="Cap the GPU's whole memory."),
    click.option("--expert-cache", "expert_cache_bytes", type=Size(), help="Cap the expert part, in bytes."),
    click.option("--experts", type=int, metavar="N", help="Cap the expert part, in whole experts over all GPUs."),
    click.option("--cache-frac", type=float, metavar="F", help="Cap the expert part, as a share of all experts."),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="A parameter of the policy, or hw.*, model.*, stack.*; repeat it.",
    ),
    click.option("--stack", metavar="NAME|FILE", help="Serving framework and what it costs; default: bare."),
    click.option("--gpus", type=int, metavar="N", help="GPUs that hold experts; default: 1."),
    click.option(
        "--peer",
        metavar="WAY",
        help="How tokens cross to experts on other GPUs: per-expert (default), or all-to-all: together, in a queue.",
    ),
    click.option("--placement", metavar="FILE", help="Which GPU each expert lives on; default: dealt round-robin."),
    click.option(
        "--dense",
        metavar="WAY",
        help="Attention and all that is no expert: gpu0, tensor (1/N on each), data (requests dealt out) or layers "
        "(whole ones, experts included; layers:3/1: by shares); default: gpu0, or what the stack's engine does "
        "(llama_cpp: layers).",
    ),
    click.option(
        "--host-links",
        metavar="WAY",
        help="Its bandwidth for copies to several GPUs: apart (default: no limit), shared, or split in equal parts.",
    ),
    click.option(
        "--host-memory",
        "host_memory_bytes",
        type=Size(),
        help="RAM for experts, in which GB is GiB, as it is sold; default: what the profile's host has.",
    ),
    click.option(
        "--nvme",
        metavar="DRIVE",
        help="Read from a drive what host memory does not hold: gen3x4, gen4x4, gen5x4, own; with terms, e.g. "
        "gen4x4:depth=8:block=256KiB:reads=buffered:ahead=2:start=warm.",
    ),
    click.option(
        "--ram-policy", metavar="NAME|FILE", help="Which experts stay in host memory above --nvme; default: lru."
    ),
    click.option("--replicas", type=int, metavar="N", help="Equal machines, each with its own --gpus; default: 1."),
    click.option(
        "--router",
        metavar="NAME",
        help=f"Which replica a request goes to: {', '.join(routers.routers())}, or ./mine.py; default: "
        f"{routers.DEFAULT}.",
    ),
    click.option("--batch", type=int, metavar="N", help="Requests decoded together; default: 1."),
    click.option(
        "--arrivals",
        metavar="SOURCE",
        help="When requests come: poisson:RATE, gamma:RATE,CV, closed:CLIENTS, an Azure, Mooncake or BurstGPT log, "
        "none (back to back); default: as the trace has it.",
    ),
    click.option("--rate-scale", type=float, metavar="X", help="Times the rate of --arrivals; default: 1."),
    click.option(
        "--scheduler",
        metavar="NAME|FILE",
        help=f"Whose prompt runs next: {', '.join(schedulers())}, or ./mine.py; default: {DEFAULT}.",
    ),
    click.option(
        "--kv-memory",
        "kv_memory_bytes",
        type=Size(),
        help="A pool for keys and values, given out page by page; default: all that the longest contexts need.",
    ),
    click.option("--kv-page", type=int, metavar="TOKENS", help="Tokens of a page of --kv-memory; default: 16."),
    click.option(
        "--preempt", metavar="HOW", help="Where --kv-memory is full, the last to come: recompute (default) or swap."
    ),
    click.option(
        "--batching", metavar="NAME", help="continuous (default), or static: a batch is filled when the last is done."
    ),
    click.option(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help="At most N tokens an iteration: decode tokens first, then prompts, in chunks.",
    ),
    click.option(
        "--draft",
        metavar="K,ACCEPTANCE",
        help="Speculative decoding: k=4,acceptance=0.7 (by position 0.8/0.7/...; accepted=FILE); draft_s=SECONDS or "
        "model=NAME, else n-grams at no cost.",
    ),
    click.option(
        "--slo",
        metavar="LIMITS|FILE",
        help="What requests are promised, 'ttft_s <= 2s, tpot_s <= 200ms'; or a YAML with limits by task.",
    ),
    click.option("--split", metavar="NAME", help="Requests to score: test (default), store or all."),
    click.option(
        "--requests", type=int, metavar="N", help="The first N of the split; more are drawn where requests arrive."
    ),
    click.option(
        "--predictor",
        metavar="P",
        help="What a policy predicts with: trained (default), a file, or surrogate:0.85, right so often (labelled), "
        "which also draws what a log of expert ids lacks.",
    ),
    click.option(
        "--engine",
        metavar="NAME",
        help="arithmetic (default) or simpy: by SimPy events, where what shares a memory does so at every instant.",
    ),
    click.option(
        "--contention",
        metavar="on|off",
        help="Whether what runs at once shares the bandwidth of memory; default: on.",
    ),
    click.option(
        "--energy",
        metavar="gpu|machine",
        help="Count joules: of the GPUs, or of CPU, host memory and drive too, by the profile's watts.",
    ),
    click.option("--hit-definition", metavar="NAME", help="What is a hit: gate (default), room, cached or token."),
    click.option(
        "--seed",
        type=int,
        metavar="N",
        help="For whatever is drawn: arrivals, requests, choices of policies; default: 0.",
    ),
)


def spec_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `SPEC_OPTIONS`, in their order."""
    for option in reversed(SPEC_OPTIONS):
        command = option(command)
    return command


def specify(given: dict[str, Any], settings: tuple[str, ...], config: Path | None) -> tuple[RunSpec, dict[str, Any]]:
    """The run the command line asks for, over a saved configuration where one is named.

    Returns:
        The specification, and the saved configuration's `resolved` block.

    Raises:
        BadInput: an unreadable configuration, a malformed `--set`, a parameter given behind the policy's name and by
            `--set`, or no policy or hardware named.
    """
    from sim.base.files import parse_yaml, to_struct
    from sim.policy.policy_file import split
    from sim.profiles.overrides import parse_set
    from sim.setup.spec import RunSpec, read_spec
    from sim.setup.words import without_caps, words_of

    fields: dict[str, Any] = {}
    meant: dict[str, Any] = {}
    if config is not None:
        fields, meant = read_spec(config)
    typed = {name: value for name, value in given.items() if value is not None}
    if "slo" in typed:
        from sim.workload.slo import parse_slo

        typed["slo"] = parse_slo(typed["slo"])
    own: dict[str, Any] = {}
    said = typed.get("policy")
    if isinstance(said, str) and len(words := split(said)) > 1:
        own, shared = words_of(words[0], words[1:])
        typed = {**without_caps(typed, shared), "policy": words[0], **shared}
    fields = without_caps(fields, typed)
    parse_set([*settings, *(f"{key}=" for key in own)])
    if settings or "link" in typed:
        meant = {}  # what the command line changes on purpose needs no warning
    pairs = ((key.strip(), text) for key, _, text in (item.partition("=") for item in settings))
    changes = {key: parse_yaml(text, f"--set {key}") for key, text in pairs}
    fields = {**fields, **typed, "set": {**fields.get("set", {}), **changes, **own}}
    _require_names(fields)
    return to_struct(fields, RunSpec, "--set" if config is None else f"{config} and command line"), meant


def tell_drawing(spec: RunSpec) -> None:
    """Say on standard error that a trace is drawn before anything runs, where one has to be: it takes a while, once."""
    from sim.setup.prepare import to_draw

    name = to_draw(spec)
    if name is not None:
        click.echo(f"drawing the trace {name}: it takes up to some minutes, and is kept for the next time", err=True)


def _require_names(fields: dict[str, Any]) -> None:
    """Neither policy nor hardware has a default: which one is meant decides everything."""
    missing = []
    if "policy" not in fields:
        from sim.policy.registry import policies

        missing.append(f"--policy, got none: name what to replay ({', '.join(policies())})")
    if "hw" not in fields:
        missing.append("--hw, got none: name the GPU (rtx3090, rtx4090, a100-80g-sxm ...; `moesim hw` lists all)")
    if missing:
        raise BadInput("; ".join(missing) + "; e.g. simulate --policy fine_moe --hw rtx3090")


def warn_if_changed(setup: Setup, meant: dict[str, Any], config: Path | None) -> None:
    """Say so when what a saved configuration names is no longer what it was saved with."""
    now = setup.resolved()
    before, digests = meant.get("params_sha256"), now.get("params_sha256", {})
    for name, sha256 in before.items() if isinstance(before, dict) else ():
        if digests.get(name, sha256) != sha256:
            path = now["params"][name]
            click.echo(f"note: {config}: {name} {path} has changed since this was saved; figures may differ", err=True)
    for what in ("policy", "trace", "hw", "model", "stack"):
        key = f"{what}_sha256"
        if meant.get(what) == now[what] and meant.get(key) != now.get(key):
            click.echo(
                f"note: {config}: {what} {now[what]} has changed since this was saved; figures may differ", err=True
            )
