"""The traces a row may rest on: (a) bundled, (b) synthetic, fitted to published statistics, (c) public.

(b) starts from the default bundled trace. Where a paper prints statistics of the model's routing, it is fitted to them;
elsewhere only the shape is the model's. (c) is whatever `MOESIM_EXTRA_TRACES` holds that `moesim traces convert` reads.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from reports.reproduce.closed import model_of
from reports.reproduce.rows import TraceKind
from sim.errors import BadInput
from sim.models import Model
from sim.setup import shape_of
from traces.catalogue import DEFAULT, open_trace, resolve, traces_that_fit
from traces.reader import Trace
from traces.synth.profile import Profile

TITLES: dict[TraceKind, str] = {
    "a": "bundled, of the model's routing shape",
    "b": "synthetic, fitted to published statistics where there are any",
    "c": "public, of the same model (MOESIM_EXTRA_TRACES)",
}
EXTRA = "MOESIM_EXTRA_TRACES"
TARGETS = {"qwen1.5-moe-a2.7b": "moepic-table1", "mixtral-8x7b": "adapmoe-accuracy"}
SYNTH_REQUESTS = 40  # so many that both splits have some
SYNTH_SEED = 0
SUFFIX = ".safetensors"
Shape = tuple[int, int, int]


def bundled_for(model: Model) -> Path | None:
    """The bundled trace of the model's shape, its own model's first; None where there is none."""
    names = traces_that_fit(*shape_of(model))
    named = [name for name in names if name.startswith(model.id)]
    return resolve((named or names)[0]) if names else None


def synthetic_path(model: Model, folder: Path, prompt_tokens: int = 0) -> Path:
    """Where the synthetic trace of a model lies, or will."""
    prompts = f"-prompts{prompt_tokens}" if prompt_tokens else ""
    return folder / "traces" / f"{model.id}-synthetic{prompts}{SUFFIX}"


def with_prompts(profile: Profile, prompt_tokens: int) -> Profile:
    """The same routing, with every prompt longer or shorter by one factor, so that their mean is `prompt_tokens`."""
    mean = sum(like.prompt for like in profile.requests) / len(profile.requests)
    longer = [msgspec.structs.replace(like, prompt=max(1, round(like.prompt * prompt_tokens / mean)))
              for like in profile.requests]  # fmt: skip
    rule = f"prompts are scaled to a mean of {prompt_tokens} tokens"
    return msgspec.structs.replace(profile, requests=longer, assumptions=[*profile.assumptions, rule])


def synthesise(name: str, folder: str, prompt_tokens: int = 0) -> str:
    """Draw the synthetic trace of a model unless it is there; returns its path.

    Args:
        prompt_tokens: mean length of its prompts; 0: as in the default trace.
    """
    from traces.synth import published, scale
    from traces.synth.fit import fit
    from traces.synth.write import write

    model = model_of(name)
    path = synthetic_path(model, Path(folder), prompt_tokens)
    if path.exists():
        return str(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_trace(DEFAULT) as trace:
        profile = fit(trace)
    figures = TARGETS.get(model.id)
    if figures is not None:
        profile = published.fit_to(profile, published.load(figures), SYNTH_SEED)
    else:
        profile = scale.scaled(profile, *shape_of(model))
    if prompt_tokens:
        profile = with_prompts(profile, prompt_tokens)
    write(path, profile, seed=SYNTH_SEED, n_requests=SYNTH_REQUESTS, model=model.id)
    return str(path)


def public_traces(folder: Path) -> dict[Shape, Path]:
    """Routing shape -> the largest public trace of it, converted into `folder`; empty where none are named.

    Raises:
        BadInput: MOESIM_EXTRA_TRACES is not a folder.
    """
    named = os.environ.get(EXTRA, "")
    if not named:
        return {}
    if not Path(named).is_dir():
        raise BadInput(f"{EXTRA}, got {named!r}: not a folder; name one with routing logs, or unset it")
    found: dict[Shape, tuple[int, Path]] = {}
    for path in sorted(Path(named).glob("*/*")):
        converted = _converted(path, folder / "public")
        if converted is None:
            continue
        with Trace(converted) as trace:
            shape = (trace.n_layers, trace.n_experts, trace.top_k)
            if trace.n_tokens > found.get(shape, (0, converted))[0]:
                found[shape] = (trace.n_tokens, converted)
    return {shape: path for shape, (_, path) in found.items()}


def _converted(path: Path, folder: Path) -> Path | None:
    """The log as a trace; None for files that are no routing log, or leave out what a trace must say."""
    from traces.convert import convert

    out = folder / f"{path.parent.name}-{path.name.split('.')[0]}{SUFFIX}"
    if out.exists():
        return out
    folder.mkdir(parents=True, exist_ok=True)
    try:
        convert([path], out)
    except BadInput:
        return None
    return out


def scratch() -> Path:
    """A folder of this process for what nobody asked to keep."""
    return Path(tempfile.mkdtemp(prefix="moesim-reproduce-"))
