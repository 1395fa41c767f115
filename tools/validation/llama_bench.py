"""llama.cpp on an H200, measured by this project, beside what is simulated: `python -m tools.validation.llama_bench`.

`h200-llama-bench.jsonl` has one line per test of llama-bench (ggml-org/llama.cpp@0c1e570, 27 November 2026; a virtual
machine of 16 cores, driver 580, CUDA 13.0): model, layers (12: the model cut), experts used per token where the file
said another number than the model, threads, layers whose experts are on the CPU, tokens of a prompt, generated, and
before either (depth), and nanoseconds of each repeat. Weights were random, so that routers choose
experts nearly evenly; here they are drawn evenly.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import yaml

from sim.base.files import bundled
from sim.profiles.models import PACKAGE, Model, load_model
from tools.validation.remeasure import HERE

FILE = HERE / "h200-llama-bench.jsonl"
PRECISIONS = {"gpt-oss-20b": "mxfp4_moe"}  # the others: q4_k_m
CPU_BYTES_PER_S = 5.4e10  # experts on all cores, as `calibrate` measured on another such machine (h200-vm.yaml)
OUTPUTS = 17
WHOLE, CUT = (("gpt-oss-20b", 24), ("qwen3-30b-a3b", 48)), ("gemma-4-26b-a4b", "qwen3.6-35b-a3b", "glm-4.7-flash")
# Decoding, behind a context, eight tokens at once, prompts; layers on the CPU; more and fewer experts there; prompts
# from there.
SHOWN: tuple[dict[str, Any], ...] = (
    *({"model": m, "layers": n, "generated": 64, "depth": depth} for depth in (0, 16384) for m, n in WHOLE),
    *({"model": m, "layers": 12, "generated": 64} for m in CUT),
    *({"model": m, "layers": n, "prompt": prompt} for prompt in (8, 512, 2048) for m, n in WHOLE),
    *({"model": m, "layers": 12, "prompt": 2048} for m in CUT),
    *({"model": "gpt-oss-20b", "layers": 24, "generated": 32, "n_cpu_moe": n} for n in (8, 16, 24)),
    *({"model": "qwen3-30b-a3b", "experts_used": u, "generated": 32, "n_cpu_moe": 12} for u in (1, 2, 4, 8, 16)),
    *({"model": "gpt-oss-20b", "layers": 24, "prompt": n, "n_cpu_moe": 24} for n in (32, 512, 2048)),
)


class Measured(NamedTuple):
    """A test of llama-bench: what ran, and the median of its repeats, per token generated or for the whole prompt."""

    model: str
    layers: int
    experts_used: int | None
    n_cpu_moe: int
    prompt: int
    depth: int
    seconds: float

    @property
    def title(self) -> str:
        """What was timed."""
        return f"prompt of {self.prompt}" if self.prompt else f"token behind {self.depth}" if self.depth else "token"


@cache
def lines() -> list[dict[str, Any]]:
    """Every test, as it was kept."""
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def seconds(line: dict[str, Any]) -> float:
    """Of a token, or of the prompt: the median of the repeats."""
    middle_ns: float = statistics.median(line["samples_ns"])
    n_tokens: int = max(line["generated"], 1)
    return middle_ns / 1e9 / n_tokens


def measured(**asked: Any) -> Measured:
    """The test on a GPU and 16 threads, with graphs, that is this one."""
    wanted = {"threads": 16, "graphs": True, "n_cpu_moe": 0, "depth": 0, "experts_used": None, **asked}
    found = [line for line in lines() if all(line.get(key) == value for key, value in wanted.items())]
    one = found[0]
    fields = (one["model"], one["layers"], one.get("experts_used"), one["n_cpu_moe"], one["prompt"], one["depth"])
    return Measured(*fields, seconds(one))


def cut(model: str, layers: int, experts_used: int | None, folder: Path) -> str:
    """The model of this name with its first layers alone, and another number of experts used: a name or a file. Its id
    stays, by which the stack knows how many kernels a layer has."""
    whole = load_model(model)
    if layers == whole.n_layers and experts_used is None:
        return model
    data = yaml.safe_load(bundled(PACKAGE, ".yaml")[whole.id].read_text(encoding="utf-8"))
    for key in ("published", "formats", "aliases", "note"):
        data.pop(key, None)
    data |= {"n_layers": layers, "top_k": experts_used or whole.top_k}
    for part in (data.get("window"), *data.get("other_attention", ())):
        if part:
            part["layers"] = [layer for layer in part["layers"] if layer < layers]
    path = folder / f"{whole.id}-{layers}-{data['top_k']}.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return str(path)


def drawn(model: Model, prompt: int, folder: Path) -> str:
    """A trace of one request whose experts are drawn evenly."""
    from traces.synth.bare import bare_trace

    n_rows = prompt + OUTPUTS - 1
    scores = np.random.default_rng(0).random((n_rows, model.n_moe_layers, model.n_experts), dtype=np.float32)
    ids = np.argpartition(-scores, model.top_k - 1, axis=-1)[..., : model.top_k]
    name, made_by = f"{model.id}-{model.n_layers}-{model.top_k}-{prompt}", "tools.validation.llama_bench"
    path = folder / f"{name}.safetensors"
    return str(bare_trace(path, model.id, model.n_experts, ids, [prompt], OUTPUTS, "drawn evenly", made_by))


def simulated_s(test: Measured, folder: Path) -> float:
    """The same by the simulator: stack and card as they ship, the CPU's rate as `calibrate` measured it."""
    from sim.studies.simulate import simulate

    name = cut(test.model, test.layers, test.experts_used, folder)
    model = load_model(name)
    placed: dict[str, int | str] = {"placement": "n_cpu_moe", "n_cpu_moe": test.n_cpu_moe}
    result = simulate(
        policy="llama_cpp",
        hw="h200-sxm",
        engine="llama_cpp",
        model=name,
        precision=PRECISIONS.get(test.model, "q4_k_m"),
        trace=drawn(model, test.prompt or test.depth or 64, folder),
        split="all",
        set={**placed, "ubatch": 4096, "hw.cpu.memory_bandwidth_bytes_per_s": CPU_BYTES_PER_S},
    )
    mean = (result.ttft_s if test.prompt else result.tpot_s).mean
    assert mean is not None
    return float(mean)


LINE = "{:<17}{:>7}{:>6}{:>8}  {:<19}{:>12}{:>11}{:>7}"


@click.command(help=__doc__)
def command() -> None:
    """Simulate and print."""
    click.echo(LINE.format("model", "layers", "used", "on CPU", "", "measured ms", "simulated", "ratio"))
    with tempfile.TemporaryDirectory() as folder:
        for asked in SHOWN:
            test = measured(**asked)
            ours = simulated_s(test, Path(folder))
            used = test.experts_used or load_model(test.model).top_k
            figures = f"{1e3 * test.seconds:.2f}", f"{1e3 * ours:.2f}", f"{ours / test.seconds:.2f}"
            click.echo(LINE.format(test.model, test.layers, used, test.n_cpu_moe, test.title, *figures))


if __name__ == "__main__":
    command()
