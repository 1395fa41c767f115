"""What the memory of GPU 0, or of the fullest GPU, held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.base.errors import MoesimError
from sim.base.files import to_struct
from sim.base.units import show_bytes
from sim.options import RunSpec
from sim.pages.page import Column, Plot, Section, Table
from sim.pages.plots import axis, bars, line, said
from sim.setup.config_file import read_spec

if TYPE_CHECKING:
    from sim.pages.inputs import Run

ITEMS = {
    "dense_bytes": "dense weights",
    "cache_peak_bytes": "experts, at most",
    "kv_cache_bytes": "KV cache",
    "activation_bytes": "activations",
    "predictor_bytes": "predictor",
    "draft_bytes": "draft model",
    "reserve_bytes": "reserve (assumed)",
}


MOST_TOKENS = 3_000  # of output, up to which a run is replayed for what no table of it holds
MOST_POINTS = 1_500


def memory(run: Run) -> Section:
    """The parts of the peak, beside what the card has, and what experts took over time."""
    sizes = run.result.memory
    which = "the fullest GPU" if run.in_turn else "GPU 0"
    parts = [(title, int(getattr(sizes, key) or 0)) for key, title in ITEMS.items()]
    free = sizes.vram_bytes - sum(n_bytes for _, n_bytes in parts)
    shown = [*((title, n_bytes) for title, n_bytes in parts if n_bytes), *([("free", free)] if free > 0 else [])]
    traces = [
        bars(title, [which], [n_bytes], at, across=True, **said("", title, "bytes", name=False))
        for at, (title, n_bytes) in enumerate(shown)
    ]
    layout = {
        "barmode": "stack",
        "xaxis": axis("bytes at the peak", "bytes"),
        "yaxis": {"type": "category", "fixedrange": True},
    }
    rows: list[list[Any]] = [
        *([title, n_bytes] for title, n_bytes in shown),
        ["the card, or its cap", sizes.vram_bytes],
        ["expert budget", sizes.cache_capacity_bytes],
        ["one expert", run.result.expert_bytes],
        ["experts in host memory", run.result.ram_peak_bytes],
    ]
    table = Table(f"Bytes of {which}, and of the host.", [Column("what"), Column("size", "bytes")], rows)
    sentence = (
        f"{show_bytes(run.result.peak_vram_bytes)} of {show_bytes(sizes.vram_bytes)} in use at most; "
        "experts take what the rest leaves."
    )
    plots = [Plot("memory", f"Memory of {which} at the peak.", traces, layout, 170)]
    over_time = held(run)
    if isinstance(over_time, str):
        sentence += f" {over_time}"
    else:
        plots.append(_over_time(run, *over_time))
        sentence += " Below, what they took at the end of each iteration, from a replay of this very run."
    return Section("memory", "Memory", sentence, [*plots, table])


def held(run: Run) -> tuple[list[float], list[list[int]]] | str:
    """When each iteration ended, and what experts took then, by GPU; or why that is not known.

    The run is replayed from its configuration, which must give the very same run. A policy or a scheduler in a file is
    not: a report of somebody's folder runs none of their code.
    """
    from sim.base.plug_ins import is_file
    from sim.run import assemble, prepare, run_through

    if run.config is None:
        return "A run kept with `--out DIR` shows here what experts took over time."
    if run.result.n_outputs > MOST_TOKENS or run.result.real:
        return f"What they took over time is shown of simulated runs of at most {MOST_TOKENS:,} output tokens."
    try:
        spec = to_struct(read_spec(run.config)[0], RunSpec, str(run.config))
        if is_file(spec.policy) or is_file(spec.scheduler or "") or is_file(spec.router or ""):
            return "What they took over time is not shown: it takes a replay, and reports run no code from a file."
        if spec.replicas > 1:
            return "What they took over time is shown of runs of one replica."
        setup = prepare(spec)
        try:
            if setup.run_id != run.result.run_id:
                return "What they took over time is not shown: this version or its files give another run by now."
            engine, machine = assemble(setup)
            ends_s: list[float] = []
            sizes: list[list[int]] = [[] for _ in range(spec.gpus)]

            def look(step: Any) -> None:
                ends_s.append(step.end_s)
                for gpu, own in enumerate(sizes):
                    own.append(int(engine.residency.used_bytes[gpu]))

            run_through(setup, engine, machine, look, None)
        finally:
            setup.close()
    except MoesimError as error:
        return f"What they took over time is not shown: {error}."
    return ends_s, sizes


def _over_time(run: Run, ends_s: list[float], sizes: list[list[int]]) -> Plot:
    every = max(1, -(-len(ends_s) // MOST_POINTS))
    at = sorted({*range(0, len(ends_s), every), len(ends_s) - 1})
    times = [ends_s[i] for i in at]
    traces = [
        line(f"experts on GPU {gpu}", times, [own[i] for i in at], gpu, line={"shape": "hv"})
        for gpu, own in enumerate(sizes)
    ]
    ends = [times[0], times[-1]]
    budgets = list(dict.fromkeys(run.result.cache_capacity_bytes))
    traces += [line("budget", ends, [n_bytes] * 2, 6, line={"dash": "dash", "width": 1.5}) for n_bytes in budgets]
    layout = {"xaxis": axis("time", "s"), "yaxis": axis("experts", "bytes", rangemode="tozero")}
    return Plot("memory-over-time", "Bytes that experts took over time, and their budget.", traces, layout, 300)
