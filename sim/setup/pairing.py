"""Which trace a model is replayed on, and which model a trace is one of: they agree in routing shape."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sim.base import index
from sim.base.errors import BadInput, did_you_mean
from sim.base.paths import mode_of
from sim.profiles.find import called
from sim.profiles.models import PACKAGE, load_model, model_names
from sim.workload.load import NONE
from traces.format.bundled import DEFAULT, bundled_traces, traces_that_fit
from traces.format.shapes import family

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.profiles.models import Model
    from sim.profiles.overrides import Overrides
    from traces.format.reader import Trace

MOST_EXPERTS_DRAWN = 32_768  # of all layers; a minute or two, some hundred megabytes
UNASKED = 30  # requests of a log of chats that a model's name alone takes: as many tokens as the small traces score


def shape_of(model: Model) -> tuple[int, int, int]:
    """MoE layers, experts, k."""
    return model.n_moe_layers, model.n_experts, model.top_k


def check_shape(model: Model, trace: Trace) -> None:
    """Trace and model must agree on MoE layers, experts and k; the error lists traces that fit."""
    mine = shape_of(model)
    if mine == (trace.n_layers, trace.n_experts, trace.top_k):
        return
    fitting = ", ".join(traces_that_fit(*mine)) or "none bundled; record one, or leave --model out"
    changed = _changed_to_fit(model, trace)
    rest = f"; to run this one, add {changed}" if changed else ""
    raise BadInput(
        f"--model {model.id} is {mine[0]}x{mine[1]}, k={mine[2]}, the trace {trace.path.name} is {trace.header.shape}: "
        f"routing shapes must agree; traces that fit: {fitting}{rest}"
    )


def _changed_to_fit(model: Model, trace: Trace) -> str:
    """`--set model.n_layers=47 --set model.top_k=6`, with which the model has the trace's shape; '' where it has other
    experts, which is another model."""
    n_moe, n_experts, top_k = shape_of(model)
    if n_experts != trace.n_experts or trace.n_layers > n_moe:
        return ""
    layers = [f"--set model.n_layers={model.n_layers - n_moe + trace.n_layers}"] * (trace.n_layers != n_moe)
    return " ".join([*layers, *([f"--set model.top_k={trace.top_k}"] * (trace.top_k != top_k))])


def default_model(trace: Trace) -> str:
    """The catalogue's model that the trace's header names, or the first of its routing shape.

    Raises:
        BadInput: the header names one that the catalogue lacks, or names none and there is none of its shape.
    """
    named = trace.header.stands_for
    if named and named not in model_names():
        raise BadInput(
            f"{trace.path}: metadata stands_for, got {named!r}: no model of the catalogue; name one with --model NAME; "
            f"{did_you_mean(named, model_names())}"
        )
    found = model_named(named or trace.header.model, (trace.n_layers, trace.n_experts, trace.top_k))
    if found is not None:
        return found
    raise BadInput(
        f"{trace.path}: {trace.header.shape} is the shape of no model in the catalogue; "
        f"name one with --model FILE (its own YAML or a Hugging Face config.json){_nearest(trace)}"
    )


def _nearest(trace: Trace) -> str:
    """Another way out: a model of the catalogue with as many experts, fewer of its layers or another k."""
    models = [load_model(name) for name in model_names() if not name.startswith("cpu-")]
    fitting = [(model, changed) for model in models if (changed := _changed_to_fit(model, trace))]
    if not fitting:
        return ""

    def apart(one: tuple[Model, str]) -> tuple[int, int, str]:
        n_moe, _, top_k = shape_of(one[0])
        return n_moe - trace.n_layers, abs(top_k - trace.top_k), one[0].id

    model, changed = min(fitting, key=apart)
    return f"; or part of one: --model {model.id} {changed}"


def model_named(named: str, shape: tuple[int, int, int]) -> str | None:
    """The catalogue's model of that name, which may be an alias, or the first of that routing shape."""
    if named in model_names():
        return named
    if len(meant := called(PACKAGE, named)) == 1:
        return meant[0].stem
    fitting = (name for name in model_names() if not name.startswith("cpu-") and _bundled_shape(name) == shape)
    return next(fitting, None)


@cache
def _bundled_shape(name: str) -> tuple[int, int, int]:
    """Of a model in the catalogue."""
    known = index.facts(model_names()[name])
    if known is None:
        return shape_of(load_model(name))
    n_layers, n_experts, top_k = known["shape"]
    return n_layers, n_experts, top_k


@cache
def known_families() -> frozenset[str]:
    """Families of the models in the catalogue."""
    return frozenset(family(name) for name in model_names())


def family_of(model: Model) -> str:
    """By its name, or by its architecture where no family of the catalogue is named so: a checkpoint has any name."""
    named = family(model.id)
    return named if named in known_families() else family(model.architecture)


def trace_for(model_name: str | None, overrides: Overrides) -> str:
    """The default trace; with --model and no --trace the best one for the model.

    That is a bundled one of its shape, else one drawn from a bundled fit of its shape, else one scaled from the fit or
    trace that `traces.synth.drawn.by_nearness` names first. Raises BadInput for a shape that takes too long to draw
    unasked.
    """
    if model_name is None:
        return DEFAULT
    model = load_model(model_name, overrides.model)
    shape = shape_of(model)
    fitting = traces_that_fit(*shape) or fits_for(model.id, shape)
    if not fitting:
        from traces.synth.drawn import nearest, scaled_name, sources  # slow to load, and mostly not needed

        source = nearest(shape, family_of(model), sources()).name
        if model.n_moe_layers * model.n_experts > MOST_EXPERTS_DRAWN:
            raise BadInput(
                f"--model {model_name}, got {model.n_moe_layers} layers of {model.n_experts} experts: no bundled trace "
                f"or fit has its routing shape, and more than {MOST_EXPERTS_DRAWN} experts are not drawn unasked; draw "
                f"one: moesim traces synth {source} --model {model_name} -o FILE, or give one with --trace FILE"
            )
        return scaled_name(source, shape)
    return fitting[0]


def unhurried(spec: RunSpec, trace: Trace) -> RunSpec:
    """The specification as it is, or, of a model's name alone, with the first requests of a log back to back.

    Who names neither trace nor arrivals asks what a token takes, not how a queue grows, and not for an hour's log.
    """
    if spec.trace is not None or spec.arrivals is not None or trace.requests.arrival_s is None:
        return spec
    return msgspec.structs.replace(spec, arrivals=NONE, requests=spec.requests or UNASKED)


def said_of_requests(asked: RunSpec, taken: RunSpec, trace: Trace) -> str | None:
    """What `unhurried` took of the requests where nobody said how many; None where it left them."""
    if taken is asked or asked.requests is not None:
        return None
    of_split = len([1 for request in trace.requests if asked.split in ("all", request.split)])
    if of_split <= UNASKED:
        return None
    return (
        f"note: --model {asked.model} alone takes the first {UNASKED} of {of_split} requests of {trace.name}, back to "
        f"back; --requests {of_split} takes all, --trace {trace.name} their arrivals"
    )


def fits_for(model: str, shape: tuple[int, int, int]) -> list[str]:
    """Ids of the bundled fits drawn in this shape, the model's own first."""
    from traces.synth.drawn import of_shape  # slow to load, and mostly not needed

    return sorted(of_shape(*shape), key=lambda name: name != model)


def drawn_anew(name: str) -> bool:
    """Whether opening this trace draws it."""
    if name in bundled_traces() or mode_of(Path(name)):
        return False
    from traces.synth.drawn import drawn_path

    path = drawn_path(name)
    return path is not None and not path.exists()
