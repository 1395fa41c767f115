"""llama.cpp: the experts of a layer lie on the GPU or in host memory for good; the CPU computes where they lie there.

Source: ggml-org/llama.cpp@4fc4ec554: common/fit (automatic placement), common/arg.cpp (`--cpu-moe`, `--n-cpu-moe`),
ggml/src/ggml-backend.cpp (`ggml_backend_sched`: op offload, copies of used experts). Whole tensors of a layer are
placed, so that in no layer both CPU and GPU have routed experts to compute: they take turns.

`placement=ngl` is `-ngl N` in what it does to experts: the output and the last N - 1 layers are on the GPU, and every
expert of the layers before is computed on the CPU. There llama.cpp also keeps and computes what is dense (attention,
norms, a shared expert); here that stays on the GPU, in time and in memory, and results say so (label `dense layers on
the GPU`). Dense layers of a model count as being in front. Without a number it is what Ollama does by itself.

Not modelled: the one layer that automatic placement may split by matrix; files whose layers differ in size, of which
one layer more or fewer may fit (docs/formats.md); the merging of neighbouring used experts into one copy (some
microseconds each).
With its own stack copies are pageable, as out of a mapped file; `--set engine.pinned=true` is `--no-mmap`, whose host
memory is page-locked (src/llama-model-loader.cpp@0c1e570, make_cpu_buft_list). A model's shared experts run on the GPU
beside the CPU's routed ones, where llama.cpp runs them after.

Several GPUs: llama.cpp splits by layers (`--split-mode layer`; by shares, `--tensor-split`), which is
`--parallel layers` (`layers:3/1`); without it experts are dealt out. With `ngl` llama.cpp deals out the layers on GPUs
alone, here all. A layer counts as placed when all of it fits where it lives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import gcd

import numpy as np

from policies.common.op_offload import OpOffload
from policies.common.placement import beside, homes
from sim.policy import BadInput, Decisions, DoesNotFit, Gate, Piece, RunCpu, RunGpu, View, param


class LlamaCpp(OpOffload):
    """Layers of experts on the GPU as far as they fit; the others on the CPU, or copied for large batches."""

    name = "llama_cpp"
    title = "llama.cpp: experts of whole layers on GPU or CPU"
    source = "ggml-org/llama.cpp@4fc4ec554: common/fit, ggml/src/ggml-backend.cpp (ggml_backend_sched)"
    aliases = ("llamacpp",)
    traits = frozenset({"cpu"})
    copies_mapped = True
    placement: str = param(
        "fit",
        "fit: experts of the first layers on the GPU, as many layers as fit (automatic placement); n_cpu_moe: of the "
        "last ones; cpu_moe: none; ngl: of the last n_gpu_layers - 1. Left out, what n_cpu_moe or n_gpu_layers asks "
        "for",
        ("fit", "n_cpu_moe", "cpu_moe", "ngl"),
    )
    n_gpu_layers: int | None = param(
        None,
        "layers on the GPU from the last one on, the output counted as one (-ngl); with placement ngl and without it "
        "all that fit",
        within=(0, 4096),
    )
    n_cpu_moe: int | None = param(
        None,
        "the first layers, this many, keep their experts on the CPU (--n-cpu-moe); with placement n_cpu_moe and "
        "without it the fewest that leave the rest room",
        within=(0, 4096),
    )
    copy_used_only: bool = param(True, "copy the experts that a batch uses; older versions copied all of a layer")

    def __init__(self, **values: object) -> None:
        numbers = {"n_cpu_moe": "n_cpu_moe", "n_gpu_layers": "ngl"}  # what asks for which placement
        asked = [number for number in numbers if values.get(number) is not None]
        if asked and "placement" not in values:
            values["placement"] = numbers[asked[0]]
        super().__init__(**values)
        for number in asked:
            if self.placement != numbers[number] and not (number == "n_gpu_layers" and self.placement == "n_cpu_moe"):
                raise BadInput(
                    f"parameter {self.name}.{number}, got {values[number]} with placement={self.placement}: that asks "
                    f"for another placement; leave one of them out"
                )
        self._n_layers = 0

    def keeps_all_if_room(self, n_layers: int) -> bool:
        if self.placement == "ngl":
            return self.n_gpu_layers is None or self.n_gpu_layers > n_layers
        return self.placement == "fit" or (self.placement == "n_cpu_moe" and not self.n_cpu_moe)

    def initial(self, view: View) -> Iterable[Piece]:
        layers = list(self._layers(view))
        self._on_gpu, self._n_layers = frozenset(layers), view.n_layers
        self.labels = ("dense layers on the GPU",) if self.placement == "ngl" and len(layers) < view.n_layers else ()
        return [view.piece(layer, expert) for layer in layers for expert in range(view.n_experts)]

    def kept_layers(self, view: View) -> Collection[int]:
        return self._on_gpu

    def _layers(self, view: View) -> Iterator[int]:
        """Layers whose experts are on the GPU, in the order they are placed."""
        if self.placement == "n_cpu_moe" and self.n_gpu_layers is not None and self.n_gpu_layers <= view.n_layers:
            raise BadInput(
                f"parameter {self.name}.n_gpu_layers, got {self.n_gpu_layers} with n_cpu_moe: what both do is known "
                f"with all layers on the GPU alone (-ngl 99); set it to {view.n_layers + 1} or more, or leave one out"
            )
        if self.placement == "cpu_moe":
            return
        spare = self.spare(view)
        room = np.array([beside(spare, gpu, view) for gpu in range(view.n_gpus)])
        of_experts = homes(view)
        order, asked = range(view.n_layers - 1, -1, -1), None
        if self.placement == "fit":
            order = range(view.n_layers)
        elif self.placement == "ngl":
            asked = None if self.n_gpu_layers is None else min(max(0, self.n_gpu_layers - 1), view.n_layers)
        else:
            asked = None if self.n_cpu_moe is None else max(0, view.n_layers - self.n_cpu_moe)
        for placed, layer in enumerate(order):
            if placed == asked:
                return
            left = room - np.bincount(of_experts[layer], minlength=view.n_gpus)
            if min(left) >= 0:
                room = left
                yield layer
            elif asked is not None:
                raise self._too_many(placed, asked, view)

    def _too_many(self, placed: int, asked: int, view: View) -> DoesNotFit:
        """What to set instead, where more layers are asked for than fit."""
        if self.placement == "ngl":
            name, got, advice = "n_gpu_layers", self.n_gpu_layers, f"{placed + 1} or less"
        else:
            name, got, advice = "n_cpu_moe", self.n_cpu_moe, f"{view.n_layers - placed} or more"
            if shares := self._shares(asked, view):
                advice += f", give the first GPU more layers (--parallel layers:{shares})"
        spare = self.spare(view)
        size = f"{spare} expert{'s' * (spare != 1)} ({spare * view.expert_bytes / 1e6:,.0f} MB)"
        staging = f" beside staging room of {size} for copies of prompts (op_offload)" if spare else ""
        without = ", set op_offload=false, which needs none" if spare else ""
        return DoesNotFit(
            f"parameter {self.name}.{name}, got {got}: it leaves {asked} layers on the GPU, and {placed} fit{staging}; "
            f"set it to {advice}{without}, or leave it out"
        )

    def _shares(self, asked: int, view: View) -> str:
        """Shares of the layers by which each GPU has as many with experts on it as another, give or take one; "" where
        GPUs have no whole layers, or have no room for two more each: what is dense moves with its layer."""
        n_gpus, most = view.n_gpus, -(-asked // view.n_gpus)
        whole_layers = all(len(set(row)) == 1 for row in homes(view).tolist())
        room = min(beside(self.spare(view), gpu, view) for gpu in range(n_gpus))
        if n_gpus == 1 or not whole_layers or asked < 2 * n_gpus or room < (most + 2) * view.n_experts:
            return ""
        shares = [(view.n_layers - asked) * n_gpus + asked, *[asked] * (n_gpus - 1)]
        common = gcd(*shares)
        return "/".join(str(share // common) for share in shares)

    def gate_done(self, gate: Gate, view: View) -> Decisions:
        if gate.layer in self._on_gpu:
            return [RunGpu(expert) for expert in gate.needs]
        return super().gate_done(gate, view)

    def serve(self, gate: Gate, view: View) -> Decisions:
        return [RunCpu(expert) for expert in gate.needs]

    def stats(self) -> dict[str, float]:
        """Layers whose experts are on the GPU, and the `--n-cpu-moe` that this is."""
        n_on_gpu = len(self._on_gpu)
        of_last = {"n_cpu_moe": self._n_layers - n_on_gpu} if self.placement == "n_cpu_moe" else {}
        return {"layers_on_gpu": n_on_gpu, **of_last}
