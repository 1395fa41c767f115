"""The traces a row may rest on: (a) bundled, (b) synthetic, fitted to published statistics, (c) public.

(b) starts from the default bundled trace. Where a paper prints statistics of the model's routing, it is fitted to them;
elsewhere only the shape is the model's. (c) is whatever `MOESIM_EXTRA_TRACES` holds that `moesim traces convert` reads.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from reports.reproduce.closed_form import model_of
from reports.reproduce.rows import TraceKind
from sim.base.errors import BadInput
from sim.profiles.models import Model
from sim.setup.pairing import shape_of
from traces.format.bundled import DEFAULT, traces_that_fit
from traces.format.catalogue import open_trace, resolve
from traces.format.reader import Trace
from traces.synth.fitted import fitted, load

TITLES: dict[TraceKind, str] = {
    "a": "bundled, of the model's routing shape",
    "b": "synthetic, fitted to published statistics where there are any",
    "c": "public, of the same model (MOESIM_EXTRA_TRACES)",
}
EXTRA = "MOESIM_EXTRA_TRACES"
TARGETS = {"qwen1.5-moe-a2.7b": "moepic-table1", "mixtral-8x7b": "adapmoe-accuracy"}
SYNTH_SEED = 0
SUFFIX = ".safetensors"
Shape = tuple[int, int, int]


def bundled_for(model: Model) -> Path | None:
    """The bundled trace of the model's shape, its own model's first; None where there is none."""
    names = traces_that_fit(*shape_of(model))
    named = [name for name in names if name.startswith(model.id)]
    return resolve((named or names)[0]) if names else None


class Drawn(NamedTuple):
    """A synthetic trace as experiments ask for it: of a model, so many requests, of mean lengths (0: default).

    fit: the bundled fit it is drawn from; "": the default trace's, fitted to what papers print of the model.
    """

    model: str
    n_requests: int = 40
    prompt_tokens: int = 0
    output_tokens: int = 0
    fit: str = ""

    @property
    def title(self) -> str:
        """What it is called in results: the model, and what is not as in the default trace."""
        lengths = {"prompts": self.prompt_tokens, "outputs": self.output_tokens}
        told = [f"{what} of {n} tokens" for what, n in lengths.items() if n]
        more = [f"{self.n_requests} requests"] if self.n_requests != Drawn._field_defaults["n_requests"] else []
        fit = [f"from the fit {self.fit}"] if self.fit else []
        return ", ".join([self.model, *told, *more, *fit])


@lru_cache(maxsize=1)
def drawn_by() -> str:
    """A digest of what synthetic traces are made with, so that a kept one of other code is not taken for it."""
    digest = hashlib.sha256()
    package = Path(str(resources.files("traces")))
    for path in (*sorted(package.rglob("*.py")), *fitted().values(), resolve(DEFAULT)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def synthetic_path(asked: Drawn, folder: Path) -> Path:
    """Where a synthetic trace lies, or will."""
    lengths = {"prompts": asked.prompt_tokens, "outputs": asked.output_tokens}
    told = "".join(f"-{what}{n}" for what, n in lengths.items() if n) + (f"-from-{asked.fit}" if asked.fit else "")
    return folder / "traces" / drawn_by() / f"{asked.model}-synthetic{asked.n_requests}{told}{SUFFIX}"


def synthesise(asked: Drawn, folder: str) -> str:
    """Draw a synthetic trace unless it is there; returns its path."""
    from traces.synth import published, scale
    from traces.synth.fit import fit
    from traces.synth.write import write

    model = model_of(asked.model)
    path = synthetic_path(asked, Path(folder))
    if path.exists():
        return str(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if asked.fit:
        profile, figures = load(asked.fit).profile, None
    else:
        with open_trace(DEFAULT) as trace:
            profile = fit(trace, routes=False)  # what figures and other shapes are drawn by
        figures = TARGETS.get(model.id)
    if figures is not None:
        profile = published.fit_to(profile, published.load(figures), SYNTH_SEED)
    else:
        profile = scale.scaled(profile, *shape_of(model))
    profile = scale.with_lengths(profile, asked.prompt_tokens, asked.output_tokens)
    write(path, profile, seed=SYNTH_SEED, n_requests=asked.n_requests, model=model.id)
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
