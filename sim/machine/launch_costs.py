"""What the host spends: launching each operation and each copy, waiting for the GPU, and the framework around them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sim.machine.price import Launch, kernels_of
from sim.profiles.stack import calls_of

if TYPE_CHECKING:
    from sim.machine.figures import Figures
    from sim.machine.measured import Measured
    from sim.profiles.hardware import Hardware
    from sim.profiles.models import Model
    from sim.profiles.stack import Stack


class Launches:
    """A `Launch` for each operation of one (hardware, model, stack), and host seconds of what has no kernels.

    `grouped`: experts of a layer share kernels. `member`: launching an expert that joins a group. `parts`: launching
    slices of an expert's matrices, by their share of its kernels and whether they come first. `kernel_s`: host seconds
    of one kernel. `enqueue_s`: of handing a copy to its engine. `cpu_s`: of handing an expert to the CPU.
    `hybrid_layer_s`: of a layer in which there is one. `overlap_layer_s`: besides, where both compute at once.
    `begin_s`: before an iteration's first operation. `q_*`: indices of the figures behind them.
    """

    def __init__(self, hw: Hardware, model: Model, stack: Stack, measured: Measured, figures: Figures) -> None:
        self.enqueue_s = hw.host.copy_launch_s.value
        self._per_copy_s = stack.per_copy_s.value
        self._copy_calls = stack.copy_calls
        self.hybrid_layer_s, self.overlap_layer_s = stack.hybrid_layer_s.value, stack.overlap_layer_s.value
        # Curves were measured on a loop that runs experts one by one and launches kernel by kernel.
        self.grouped = stack.grouped and measured.found is None
        self._graphs = stack.graphs and measured.found is None
        self.kernel_s = hw.host.launch_s.value
        self.sync_s = hw.host.sync_s.value
        self._read_s = 0.0  # of an iteration's end, where nothing is read in its layers
        if not stack.reads_routers and measured.found is None:
            self.sync_s, self._read_s = 0.0, self.sync_s
        self._one_graph = self._graphs and not stack.reads_routers  # from the first layer to the head
        self.copy_s = self.copy_part_s(1.0)
        self.cpu_s = self.enqueue_s + self._per_copy_s
        self.begin_s = 0.0
        self.q_kernel = figures.enter("host.launch_s", hw.host.launch_s)
        self.q_sync = figures.enter("host.sync_s", hw.host.sync_s)
        self.q_copy = figures.enter("host.copy_launch_s", hw.host.copy_launch_s)
        self.q_stack_layer = figures.enter("engine.per_layer_s", stack.per_layer_s)
        self.q_stack_expert = figures.enter("engine.per_expert_s", stack.per_expert_s)
        self.q_stack_copy = figures.enter("engine.per_copy_s", stack.per_copy_s)
        self.q_stack_iteration = figures.enter("engine.per_iteration_s", stack.per_iteration_s)
        self.q_stack_hybrid = figures.enter("engine.hybrid_layer_s", stack.hybrid_layer_s)
        self.q_stack_overlap = figures.enter("engine.overlap_layer_s", stack.overlap_layer_s)
        kernels, per_layer_s = stack.kernels, stack.per_layer_s.value
        self.attention = self._launch(kernels.attention, per_layer_s)
        self.dense = self._launch(kernels.attention + kernels.dense_ffn, per_layer_s)
        self.gate = self._launch(kernels.gate, 0.0, replayed=True)
        self.shared = self._launch(kernels.shared_expert, 0.0, replayed=True)
        self.expert = self._launch(kernels.expert, stack.per_expert_s.value)
        self.member = Launch(0, self.kernel_s, stack.per_expert_s.value)  # joins a group: no kernels of its own
        self.head = self._launch(kernels.head, stack.per_iteration_s.value + self._read_s)
        if self._one_graph:  # launched once; where in the iteration that is charged does not matter
            self.head = Launch(1, self.kernel_s, self.head.extra_s)
        self.joined = self._launch(1, 0.0, replayed=True)  # a collective: after what a graph holds, in that graph
        self.joining = self._launch(1, 0.0)
        self.meeting = Launch(0, self.kernel_s, 0.0)
        # A copy to the next GPU, which no graph holds; what was one graph goes on there as another.
        self.handing_over = Launch(2 if self._one_graph else 1, self.kernel_s, 0.0)
        self.parts: dict[tuple[float, bool], Launch] = {}
        self._take(measured)
        self.no_head = Launch(0, self.kernel_s, self.head.extra_s)  # no kernels; the framework's time all the same

    def head_of(self, n_out: int) -> Launch:
        """The output head of an iteration that puts out so many tokens: none where all are parts of prompts."""
        return self.head if n_out else self.no_head

    def _launch(self, n_kernels: float, extra_s: float, replayed: bool = False) -> Launch:
        """Launching kernels, or the graph they are part of; `replayed`: by the graph of the operation before."""
        if self._graphs:
            n_kernels = 0 if replayed or self._one_graph else min(1, n_kernels)
        return Launch(n_kernels, self.kernel_s, extra_s)

    def _take(self, measured: Measured) -> None:
        """Launches as measured on the real machine's lanes, in place of kernel by kernel."""
        found = measured.launches

        def launched(name: str, otherwise: Launch) -> Launch:
            return Launch(1, found[name].value, otherwise.extra_s) if name in found else otherwise

        self.attention = launched("attention", self.attention)
        self.dense = launched("dense_layer", self.dense)
        self.gate = launched("gate", self.gate)
        self.shared = launched("shared_expert", self.shared)
        self.expert = launched("expert", self.expert)
        self.head = launched("head", self.head)
        if "begin" in found:
            self.begin_s = found["begin"].value
        if "cpu_expert" in found:
            self.cpu_s = found["cpu_expert"].value + self._per_copy_s

    def copy_part_s(self, frac: float) -> float:
        """Host seconds of enqueuing the copy of this share of an expert.

        Enqueuing costs the same however small the copy is. What the framework spends is known per expert: its parts
        share it, so that nobody gains or loses by splitting.
        """
        return self.calls(frac) * self.enqueue_s + self._per_copy_s * frac

    def calls(self, frac: float) -> int:
        """Calls that copy this share of an expert."""
        return calls_of(self._copy_calls, frac)

    def part(self, kernels_frac: float, first: bool) -> Launch:
        """Launching a slice of an expert's matrices: its share of the kernels, and at least one.

        What the framework spends on an expert it spends before the first of them. So launching all slices in turn is
        never quicker than launching the expert, on the host or on the stream.
        """
        launch = self.parts.get((kernels_frac, first))
        if launch is None:
            whole = self.expert
            n_kernels, extra_s = kernels_of(whole.n_kernels, kernels_frac), whole.extra_s if first else 0.0
            launch = self.parts[kernels_frac, first] = Launch(n_kernels, whole.launch_s, extra_s)
        return launch

    def experts_s(self, n_experts: int) -> float:
        """The host's least seconds for a layer's experts on one GPU."""
        if not self.grouped:
            return n_experts * self.expert.all_s
        return self.expert.all_s + (n_experts - 1) * self.member.all_s if n_experts else 0.0

    def spent(self, n_syncs: int, n_copies: int, experts_copied: float, n_hybrid: int) -> list[tuple[int, float]]:
        """The host's busy seconds by the figure they rest on.

        Args:
            n_syncs: waits for the GPU. n_copies: copies enqueued. experts_copied: what they add up to, in experts.
            n_hybrid: layers of which the CPU computed an expert.
        """
        layers = (self.attention, self.dense)
        experts = (self.expert, self.member, *self.parts.values())
        n_iterations = self.head.n + self.no_head.n
        joining = (self.joined, self.joining, self.handing_over)
        every = (*layers, self.gate, self.shared, *experts, self.head, *joining)
        return [
            (self.q_kernel, math.fsum([launch.n * launch.kernels_s for launch in every])),
            (self.q_stack_layer, math.fsum([launch.n * launch.extra_s for launch in layers])),
            (self.q_stack_expert, math.fsum([launch.n * launch.extra_s for launch in experts])),
            (self.q_stack_iteration, n_iterations * (self.head.extra_s - self._read_s)),
            (self.q_sync, n_syncs * self.sync_s + n_iterations * self._read_s),
            (self.q_copy, n_copies * self.enqueue_s),
            (self.q_stack_copy, experts_copied * self._per_copy_s),
            (self.q_stack_hybrid, n_hybrid * self.hybrid_layer_s),
        ]
