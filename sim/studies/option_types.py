"""Keywords of `moesim.simulate` and `moesim.sweep`, as type checkers and editors read them.

Written by `python -m tools.generate_options` from the table in `sim/options.py`: edit that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TypedDict

Name = str | os.PathLike[str]
Value = bool | int | float | str | None
Several = Value | os.PathLike[str] | Iterable[Value | os.PathLike[str]]
Limits = str | Mapping[str, Mapping[str, float | str]]


class Options(TypedDict, total=False):
    """What decides a run beside policy and hardware. Sizes are bytes, or `8GB`."""

    model: Name | None
    """Geometry: see `moesim models`; a file, or the folder or config.json of a checkpoint."""
    precision: str
    """Type of the weights: bf16, q4_k_m ... (`moesim models MODEL` lists them)."""
    trace: Name | None
    """Routing trace: see `moesim traces`."""
    engine: Name
    """Serving engine and what it costs: bare, hf, llama_cpp, vllm ... (docs/engine_stacks.md)."""
    requests: int | None
    """The first N of the split; more are drawn where requests arrive."""
    split: str
    """Requests to score: test, train or all."""
    predictor: Name | None
    """What a policy predicts with: trained, a file, or surrogate:0.85, right so often (labelled), which also draws
    what a log of expert ids lacks."""
    seed: int
    """For whatever is drawn: arrivals, requests, choices of policies."""
    set: Mapping[str, Value]
    """Any option by its dotted name (docs/options.md), a parameter of the policy by its bare name, or hw.*, model.*,
    engine.*: a field of a profile; repeat it."""
    cpu: str | None
    """Put the card into a machine with another CPU: epyc-7302, ryzen-7950x ... (hwprofiles/cpus)."""
    gpus: int
    """GPUs that hold experts."""
    gpus_map: Name | None
    """A file: which GPU each expert lives on."""
    gpus_dispatch: str
    """How tokens cross to experts on other GPUs: per-expert, or all-to-all: together, in a queue."""
    gpus_host_bandwidth: str
    """The host's bandwidth for copies to several GPUs: per-link (no limit), shared, or split equally."""
    parallel: str | None
    """Attention and all that is no expert: gpu0, tensor (1/N on each), data (requests dealt out) or layers (whole
    ones, experts included; layers:3/1: by shares)."""
    pcie: str | None
    """Put the card on another link: gen3x4 to gen6x16."""
    vram: int | str | None
    """Cap the memory of each whole GPU."""
    cache: float | str | None
    """Room for experts, on all GPUs together."""
    ram: int | str | None
    """RAM for experts, in which GB is GiB, as it is sold."""
    drive: str | None
    """Read from a drive what RAM does not hold: gen3x4, gen4x4, gen5x4, own; with terms, e.g.
    gen4x4:depth=8:block=256KiB:reads=buffered:ahead=2:start=warm:evict=lfu."""
    drive_evict: Name | None
    """A cache policy: which experts stay in RAM above a drive."""
    drive_depth: int | None
    """Reads under way at a time."""
    drive_block: int | str | None
    """Bytes of each read, a sector at least."""
    drive_reads: str | None
    """direct, into page-locked memory, or buffered, through the page cache."""
    drive_ahead: int | None
    """Experts that follow in the file, read after each that was missing."""
    drive_start: str | None
    """What RAM holds at first: nothing (cold), or the end of the file, as loading leaves it (warm)."""
    kv_memory: int | str | None
    """A pool for keys and values, given out page by page."""
    kv_page: int
    """Tokens of a page of --kv-memory."""
    kv_preempt: str
    """What becomes of the last to come where --kv-memory is full: recompute or swap."""
    batch: int
    """Requests decoded together."""
    batch_static: bool
    """Fill a batch only when the last of it is done; off: continuous batching."""
    arrivals: Name | None
    """When requests come: poisson:RATE, gamma:RATE,CV, closed:CLIENTS, an Azure, Mooncake or BurstGPT log, none (back
    to back)."""
    arrivals_scale: float
    """Times the rate of --arrivals."""
    scheduler: Name | None
    """Whose prompt runs next."""
    prefill_chunk: int | None
    """At most N tokens an iteration: decode tokens first, then prompts, in chunks."""
    draft: str | None
    """Speculative decoding: k=4,acceptance=0.7 (by position 0.8/0.7/...; accepted=FILE); draft_s=SECONDS or
    model=NAME, else n-grams at no cost."""
    replicas: int
    """Equal machines behind a router, each with its own --gpus."""
    router: Name | None
    """Which replica a request goes to."""
    slo: Limits | None
    """What requests are promised, 'ttft_s <= 2s, tpot_s <= 200ms'; or a YAML with limits by task."""
    sim_simulator: str | None
    """Simulate by SimPy events, where what shares a memory does so at every instant."""
    sim_contention: bool
    """Whether what runs at once shares the bandwidth of memory."""
    sim_energy: str | None
    """Count joules: of the GPUs, or of CPU, RAM and drive too, by the profile's watts."""
    sim_hit: str
    """What is a hit: gate, slot, cached or token."""


class Axes(TypedDict, total=False):
    """What may vary beside policy and hardware: one value, several, or a range as text (`"20%:80%:20%"`). What each
    means stands in `Options`."""

    model: Several
    precision: Several
    trace: Several
    engine: Several
    requests: Several
    split: Several
    predictor: Several
    seed: Several
    set: Mapping[str, Several]
    cpu: Several
    gpus: Several
    gpus_map: Several
    gpus_dispatch: Several
    gpus_host_bandwidth: Several
    parallel: Several
    pcie: Several
    vram: Several
    cache: Several
    ram: Several
    drive: Several
    drive_evict: Several
    drive_depth: Several
    drive_block: Several
    drive_reads: Several
    drive_ahead: Several
    drive_start: Several
    kv_memory: Several
    kv_page: Several
    kv_preempt: Several
    batch: Several
    batch_static: Several
    arrivals: Several
    arrivals_scale: Several
    scheduler: Several
    prefill_chunk: Several
    draft: Several
    replicas: Several
    router: Several
    slo: Limits | None
    sim_simulator: Several
    sim_contention: Several
    sim_energy: Several
    sim_hit: Several
