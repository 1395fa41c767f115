"""Runs of the simulator as jobs: each is done once, in any order, in one process or several, and kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from reports.reproduce.rows import HERE, Experiment, Scalar
from sim import __version__
from sim.base import digests
from sim.base.errors import MoesimError
from sim.base.files import parse_yaml
from sim.options import RunSpec
from sim.options import spec_of as named
from sim.policy.registry import find
from sim.studies.runner.records import Records
from sim.studies.runner.runner import recorded
from sim.workload.load import NONE

SEED = 0
CODE = ("sim", "policies", "hwprofiles", "traces")
NOT_KEPT = ("wall_s",)  # what differs from run to run
RUNS = "runs"
DEFECT = "a defect of the program:"
MISSES_PER_ACTIVATION = "misses_per_activation"
PREFILL_RATE = "prefill_tokens_per_s"
# What a system may say about its run, beside its policy's parameters.
OF_RUN = ("batch", "prefill_chunk", "scheduler", "cache", "precision", "engine", "draft", "hw")
Progress = Callable[[int, int], None]
Result = dict[str, Any]


def spec_of(
    experiment: Experiment, case: int, system: str, trace: Path, constant: dict[str, float], stack: str = "bare"
) -> RunSpec:
    """The configuration of one system in one case, on one trace."""
    policy, *words = experiment.systems[system].split()
    settings: dict[str, Scalar] = dict(constant)
    fields = dict(experiment.cases[case])
    own_words = {param.name for param in find(policy).params}  # a word that is both is the policy's
    for word in words:
        key, _, text = word.partition("=")
        of_run = key in OF_RUN and key not in own_words
        (fields if of_run else settings)[key] = parse_yaml(text, f"system {system}, {key}")
    model = str(fields.pop("model"))
    own = HERE / "models" / f"{model}.yaml"
    return named(
        {
            "policy": policy,
            "model": str(own) if own.exists() else model,
            "trace": str(trace),
            "set": settings,
            "requests": experiment.requests or None,
            "arrivals": NONE,  # whatever the trace's own are: a case names those of its paper
            "seed": SEED,
            "engine": stack,
            "slo": experiment.slo,
            **fields,
        }
    )


@lru_cache(maxsize=1)
def code_digest() -> str:
    """A digest of the code and profiles that runs depend on: kept results of an edited checkout are not used."""
    digest = hashlib.sha256()
    for package in CODE:
        folder = Path(str(resources.files(package)))
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".yaml")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=256)
def file_digest(path: str) -> str:
    return digests.of_file(Path(path))


def key_of(spec: RunSpec) -> str:
    """A digest of everything that decides a run's numbers: configuration, trace, version, code and profiles."""
    fields = msgspec.to_builtins(spec)
    fields["trace"] = file_digest(fields["trace"])
    fields["model"] = Path(fields["model"]).name
    return hashlib.sha256(json.dumps([__version__, code_digest(), fields], sort_keys=True).encode()).hexdigest()[:32]


def simulate(spec: RunSpec) -> Result:
    """Run a configuration: every figure of the result by its dotted name, or why it cannot run."""
    from sim.figures import numbers
    from sim.run import execute, prepare

    try:
        setup = prepare(spec)
        try:
            result = execute(setup, bounds=False).result
        finally:
            setup.close()
    except MoesimError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{DEFECT} {type(error).__name__}: {error}", "kept": False}
    return {name: value for name, value in numbers(result.to_dict()) if name not in NOT_KEPT}


def figure_of(result: Result, key: str) -> float | None:
    """A figure of a run by its dotted name, the mean where the name has several; None where it is null or absent.

    `misses_per_activation` is none of a result's: experts missing while decoding, each once however many tokens of a
    step want it, over all that tokens ask for. Nor is `prefill_tokens_per_s`: prompts' tokens over their time.
    """
    if key == PREFILL_RATE:
        return float(result["phases.prefill.tokens"] / result["phases.prefill.time_s"])
    if key == MISSES_PER_ACTIVATION:
        decode = "phases.decode."
        asked = result[f"{decode}iterations"] * result["distinct_experts.per_layer"]
        activations = result[f"{decode}tokens"] * result["shape.top_k"]
        return float(result["miss_rate"] * asked / activations) if activations else None
    value = result.get(key, result.get(f"{key}.mean"))
    return None if value is None else float(value)


def size_of(spec: RunSpec) -> float:
    """What a run takes, in arbitrary units, so that the longest can start first: activations it serves."""
    if spec.trace is None:
        return 0.0
    n_layers, top_k, rows = _served(spec.trace, spec.split)
    return float(n_layers * top_k * sum(rows[: spec.requests]))


@lru_cache(maxsize=256)
def _served(path: str, split: str) -> tuple[int, int, list[int]]:
    from traces.format.reader import Trace

    with Trace(path) as trace:
        rows = [request.end_row - request.first_row for request in trace.requests if split in ("all", request.split)]
        return trace.n_layers, trace.top_k, rows


def run_all(specs: list[RunSpec], folder: Path, workers: int, done: Progress) -> list[Result]:
    """Results in the order of the configurations; equal ones run once, and those kept in `folder` not at all.

    The longest start first, so that no process waits long for another at the end.
    """
    keys = [key_of(spec) for spec in specs]
    unique = dict(sorted(zip(keys, specs, strict=True), key=lambda item: (-size_of(item[1]), item[0])))
    calls = {key: (simulate, (spec,)) for key, spec in unique.items()}
    results = recorded(Records(folder), RUNS, calls, workers, done)
    return [_placeless(results[key], spec) for key, spec in zip(keys, specs, strict=True)]


def _placeless(result: Result, spec: RunSpec) -> Result:
    """Without the folder of the trace, which is this machine's and would make equal results differ."""
    if "error" not in result or spec.trace is None:
        return result
    return {**result, "error": result["error"].replace(spec.trace, Path(spec.trace).name)}
