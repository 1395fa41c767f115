"""A result as people read it: the verdict first, human units, about thirty lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from sim.base.lanes import CHARGED
from sim.base.tables import listed, pairs, plain
from sim.base.tables import render as laid_out
from sim.base.units import (
    RAM,
    show_bytes,
    show_count,
    show_frac,
    show_fracs,
    show_number,
    show_ram,
    show_seconds,
    show_value,
)
from sim.engine.counts import CLASSES
from sim.figures import Copies, with_lines
from sim.results.by_layer_text import lines
from sim.results.energy_text import at_once, joules
from sim.results.figure import label_of, show_figure
from sim.results.grounds import TOP_FIGURES, show_ground
from sim.results.load_text import under_load
from sim.results.record import of_bound
from sim.results.routing_words import routing_words
from sim.results.scheduler_text import scheduler_line
from sim.setup.naming import machine_of, policy_of, words
from sim.workload.slo import slo_text

if TYPE_CHECKING:
    from sim.base.tables import Table
    from sim.figures import Contention, Drafting, HostMemory, KvUse, Lengths, Phased, Replica, SizesByLayer, Timed
    from sim.results.record import Result

_LANE = {lane.resource: lane for _, lane in CHARGED.values()}
# GPU 0's memory, or the host's, where a run does not fit (`DoesNotFit.sizes`).
_SIZES = {
    "dense_bytes": "dense weights",
    "kv_cache_bytes": "KV cache, {kv_tokens} tokens",
    "draft_bytes": "draft model, with its KV cache",
    "activation_bytes": "activations, {iteration_tokens} tokens",
    "reserve_bytes": "reserve (assumed)",
    "cache_capacity_bytes": "expert budget",
    "predictor_bytes": "of which the predictor takes",
    "vram_bytes": "VRAM",
    "host_experts_bytes": "experts in host memory",
    "swapped_bytes": "KV cache that may go there",
    "host_memory_bytes": "host memory",
}
_ACTIVITY = {
    "cpu": "experts on the CPU",
    "h2d": "copies to the GPU",
    "d2h": "copies back",
    "gpu": "kernels",
    "nvme": "reads of the drive",
}
WORTH_TELLING = 0.005
"""Share of a run's time that shared memory has to add to an activity before a line says so."""


BOUND_IS_OF = "is of these figures and requests: with better ones it is lower, too"
"""Why a band may begin below a bound."""
FEW_STATS = 4  # of a policy, in a line
LABEL = 13  # characters of the labels on the left, at least


def memory_lines(sizes: Mapping[str, int]) -> list[str]:
    """A line for each item of a memory that is too small."""
    shown = (
        (words, (show_ram if key in RAM else show_bytes)(sizes[key])) for key, words in _SIZES.items() if key in sizes
    )
    return [f"  {words.format(**sizes):<34}{size:>12}" for words, size in shown]


def verdict(result: Result) -> str:
    """One sentence: how fast, and what bounds it."""
    own = words(result.overrides, "model")
    model = f"{result.model} {result.precision}" + (f" with {own}" if own else "")
    file = result.policy_file
    policy = policy_of(result.policy, None if file is None else file.name, result.overrides)
    who = f"{policy} on {_machines(result)} ({model})"
    tpot_s, bound, throughput_per_s = result.tpot_s.mean, result.bottleneck, result.throughput_tokens_per_s
    phase: Phased = "prefill" if tpot_s is None else result.phases.main
    if tpot_s is None:
        speed = f"{show_value(result.ttft_s.mean, 's')} to the first token"
    elif (decoding := decoding_per_s(result)) is not None:
        speed = f"{show_seconds(tpot_s)} per token ({_rate(decoding)} tokens/s decoding)"
    else:
        throughput = "-" if throughput_per_s is None else _rate(throughput_per_s)
        over = f"{throughput} tokens/s over all requests, prefill included"
        together = min(result.batch, result.n_requests)
        at = f" at batch {together}" if together > 1 else ""
        speed = f"{show_seconds(tpot_s)} per token{at} ({over})"
    if result.draft is not None and result.draft.tokens_per_step is not None:
        speed += f", {result.draft.tokens_per_step:.2f} tokens a step by drafts of k={result.draft.k}"
    speed += at_once(result)
    # What turns the figure into a bound rather than a forecast belongs into the same sentence.
    catch = "".join(f"; {label}" for label in result.caveats if label == "lossy" or of_bound(label))
    rests_on = routing_words(result.caveats, result.model)
    catch += f"; {rests_on}" if rests_on else ""
    if bound.resource is None:
        return f"{who}: {speed}{catch}"
    lanes = [_LANE[name] for name in bound.resource.split(" and ")]
    share = bound.of(phase).by_part()[lanes[0].share or ""]
    things, each = " and ".join(lane.thing for lane in lanes), "each " if len(lanes) > 1 else ""
    doing = " and ".join(lane.doing for lane in lanes)
    return f"{who}: {speed}, bound by {things} ({each}{100 * (share or 0.0):.0f} % of {phase} time {doing}){catch}"


def decoding_per_s(result: Result) -> float | None:
    """Tokens per second that one request sees in decode, the inverse of the mean TPOT; None where several run at once,
    whose tokens per second are the throughput's."""
    tpot_s = result.tpot_s.mean
    return 1 / tpot_s if tpot_s and result.batch == 1 and result.replicas is None else None


def render(result: Result, width: int | None = None) -> str:
    """Everything below the verdict, as wide as the terminal unless told."""
    drawn = (
        _facts(result),
        _times(result),
        _rates(result),
        *([] if result.load is None else [under_load(result)]),
        *([] if (result.load, result.scheduling, result.slo) == (None, None, None) else [_load(result)]),
        *([] if result.draft is None else [_drafts(result, result.draft)]),
        *([] if result.host_memory is None else [_host(result, result.host_memory)]),
        *([] if result.kv is None else [_kv(result.kv)]),
        _hits(result),
        *([_replicas(result.replicas)] if result.replicas else []),
        _by_layer(result),
        *([_union(result)] if result.batch > 1 or result.draft is not None else []),
        _copies(result),
        *([] if result.contention is None else [_shared(result, result.contention)]),
        _memory(result),
        _grounds(result),
        *([] if result.energy is None else [_energy(result)]),
        _lines(result),
    )
    return "\n".join(laid_out(block, width) for block in drawn if block.row_count)


def _facts(result: Result) -> Table:
    shape = result.shape
    settings = ", ".join(f"{key}={_plain(value)}" for key, value in result.params.items())
    rows = pairs(LABEL)
    file = result.policy_file
    own = f" of {file.name}, sha256 {file.sha256[:12]}" if file else ""
    rows.add_row("policy", result.policy + own + (f" ({settings})" if settings else ""))
    if 0 < len(result.policy_stats) <= FEW_STATS:  # more of them: --json
        rows.add_row("what it did", ", ".join(f"{key} {_stat(value)}" for key, value in result.policy_stats.items()))
    gpus = f", {result.gpus} GPUs" if result.gpus > 1 else ""
    routing = f"{shape.layers} layers x {shape.experts} experts, k = {shape.top_k}"
    own = words(result.overrides, "model")
    by = f", requests sent by {result.router}" if result.router is not None else ""
    rows.add_row("hardware", f"{_machines(result)}{gpus}, engine {result.engine}{by}")
    rows.add_row("model", f"{result.model}{f' with {own}' if own else ''} in {result.precision}, {routing}")
    batch = f", batch {result.batch}" if result.batch > 1 else ""
    batch += f", batching {result.batching}" if result.batching is not None else ""
    if result.prefill_chunk is not None:
        batch += f", at most {show_count(result.prefill_chunk, 'token')} an iteration"
    come = {"back to back": "", "trace": ", at the trace's arrival times"}
    arrivals = come.get(result.arrivals, f", arriving {result.arrivals}")
    counts = f"{show_count(result.n_requests, 'request')}, {show_count(result.decode_tokens, 'decode token')}"
    requests = f"{counts}{batch}{arrivals}"
    rows.add_row("trace", f"{result.trace}, split {result.split}: {requests}")
    rows.add_row("lengths", show_lengths(result.lengths))
    if result.caveats:
        rows.add_row("caveats", "; ".join(result.caveats))
    if "lossy" in result.caveats:
        changed, kept = show_frac(result.activations_changed_frac), show_frac(result.gate_mass_kept)
        lowered = result.activations_lowered_frac
        lower = f", {show_frac(lowered)} in a lower precision" if lowered else ""
        rows.add_row("loss", f"{changed} of activations changed{lower}, {kept} of gate mass kept (open-loop replay)")
    return rows


def _times(result: Result) -> Table:
    bound = result.bottleneck
    lanes = ["copies" if part == "copy" else part for part in bound.decode.by_part()]
    rows = plain("", "mean", "p50", "p95", "n", "", *lanes)
    for title, stat, phase, parts in (
        (label_of("ttft_s.mean"), result.ttft_s, "prefill", bound.prefill),
        (label_of("tpot_s.mean"), result.tpot_s, "decode", bound.decode),
    ):
        cells = [show_value(value, "s") for value in (stat.mean, stat.p50, stat.p95)]
        shares = [show_frac(share) for share in parts.by_part().values()]
        rows.add_row(title, *cells, str(stat.n), f"   {phase} time:", *shares)
    if bound.mixed is not None:
        shares = [show_frac(share) for share in bound.mixed.by_part().values()]
        rows.add_row("", "", "", "", "", "   mixed time:", *shares)
    return rows


def _rates(result: Result) -> Table:
    """Output over the whole run, and how far the result lies above what no lossless policy can beat."""
    rows, bound, throughput = pairs(LABEL), result.lower_bound, result.throughput_tokens_per_s
    if throughput is not None:
        outputs = show_count(result.n_outputs, "output token")
        waits = " and waiting for arrivals" if result.load is not None else ""
        each = f" ({_rate(throughput / len(result.replicas))} per replica)" if result.replicas else ""
        said = f"{outputs} in the whole run, prefill{waits} included"
        rows.add_row(label_of("throughput_tokens_per_s"), f"{_rate(throughput)} tokens/s{each}: {said}")
    if bound is None or bound.above_frac is None:
        return rows
    above = bound.above_frac
    where = f"{100 * abs(above):.{0 if abs(above) >= 0.095 else 1}f} % {'above' if above >= 0 else 'below'}"
    lanes = {"copy": "this link and room", "copy + cpu": "this link, CPU and room"}[bound.resource]
    lanes += " and these drafts" if result.draft is not None else ""
    rows.add_row(
        "lower bound", f"TPOT {show_value(bound.tpot_s, 's')} for any lossless policy with {lanes}; this is {where} it"
    )
    return rows


def _drafts(result: Result, draft: Drafting) -> Table:
    """What decode steps verified, and what they took of it."""
    rows = pairs(LABEL)
    if draft.tokens_per_step is None:
        return rows
    by = ", ".join(show_frac(share) for share in draft.acceptance_by_position)
    each = f" (by position, of those before which all were: {by})" if len(draft.acceptance_by_position) > 1 else ""
    taken = f"{show_frac(draft.acceptance)} of {draft.drafted:,} drafts taken{each}" if draft.drafted else "no drafts"
    rows.add_row("speculation", f"{draft.tokens_per_step:.2f} tokens a step in {draft.steps:,} steps; {taken}")
    each_s = draft.draft_time_s / result.decode_tokens
    cost = f"{show_seconds(each_s)} per token put out" if draft.draft_time_s else "at no cost"
    room = f", {show_bytes(draft.draft_bytes)} of GPU memory" if draft.draft_bytes else ""
    rows.add_row("", f"drafting {cost}{room}; {show_bytes(draft.h2d_bytes_per_token or 0.0)} copied per decode token")
    return rows


def _load(result: Result) -> Table:
    """How requests come and are served, and which kept to what they were promised."""
    rows, load, slo = pairs(LABEL), result.load, result.slo
    if load is not None:
        came, taken = load.arrivals_per_s, load.capacity_per_s
        arrive = f"arrives {show_number(came)}/s, " if came is not None else ""
        there, waiting = load.requests_in_system or 0.0, load.requests_waiting or 0.0
        slot = " for a slot" if result.batch > 1 else ""
        none = f"too few waited{slot} to say how fast they are served" if waiting else "none had to wait"
        serve = f"serves {show_number(taken)}/s while some wait" if taken is not None else none
        rows.add_row(
            "load",
            f"{arrive}{serve}; {show_number(there)} requests there on average, {show_number(waiting)} of them waiting",
        )
        queue, service = result.queue_s, result.service_s
        ends = "" if queue.p95 is None else f" (p50 {show_value(queue.p50, 's')}, p95 {show_value(queue.p95, 's')})"
        waited, served = show_value(queue.mean, "s"), show_value(service.mean, "s")
        rows.add_row("of the TTFT", f"{waited} in the queue{ends}, {served} served")
    if result.scheduling is not None:
        rows.add_row("scheduler", scheduler_line(result.scheduling))
    if slo is not None and slo.attained_frac is not None:
        good, tokens = slo.goodput_requests_per_s or 0.0, slo.goodput_tokens_per_s or 0.0
        kept = show_frac(slo.attained_frac)
        kept += "" if slo.attained_ends is None else f", {show_fracs(slo.attained_ends)} at 95 %"
        rows.add_row("SLO", slo_text(slo.limits))
        rows.add_row(
            "",
            f"kept by {slo.met:,} of {show_count(slo.requests, 'request')} ({kept}); goodput {show_number(good)} "
            f"requests/s, {show_number(tokens)} tokens/s",
        )
        if slo.met < slo.requests:
            why = {name: n for name, n in structs.asdict(slo.violations).items() if n}
            told = ", ".join(f"{name} {n:,}" for name, n in why.items())
            rows.add_row("", f"broken, by what took most of the time: {told}")
        if len(slo.tasks) > 1:
            each = (f"{name or 'no task'} {show_frac(task.attained_frac)}" for name, task in slo.tasks.items())
            rows.add_row("", "kept by task: " + ", ".join(each))
    return rows


def _host(result: Result, host: HostMemory) -> Table:
    """Host memory above a drive: what it held, what it was asked for, and what was read."""
    rows = pairs(LABEL)
    rate = "no time at all" if host.bytes_per_s is None else f"{show_bytes(host.bytes_per_s)}/s in a row"
    reads = f"{show_bytes(host.read_bytes)} in {show_count(host.reads, 'read')}"
    rows.add_row("drive", f"{host.drive}, {host.reads_are} reads, {rate}: {reads}")
    found = host.by_phase.get("decode")
    parts = [f"{phase} {show_frac(one.hit / one.asked)} of {one.asked:,}" for phase, one in host.by_phase.items()]
    held = f"{show_ram(host.peak_bytes)} of {show_ram(host.bytes)} held at most, by {host.ram_policy}"
    if host.start == "cold" and not host.evicted and not host.passed:  # a rest that holds no expert more is no room
        held += ", which began empty and had room left"
    rows.add_row("experts there", f"{', '.join(parts) or 'none asked for'}; {held}")
    if found is not None and result.decode_tokens:
        rows.add_row("read per token", f"{show_bytes(found.read_bytes / result.decode_tokens)} of decode")
    if host.passed:
        rows.add_row("read past it", f"{show_count(host.passed, 'expert')}, which host memory had no room for")
    return rows


def _kv(kv: KvUse) -> Table:
    """Of a pool of pages: how full it was, and who had to make room."""
    rows = pairs(LABEL)
    pages = show_count(kv.pages, "page")
    mean = "" if kv.mean_pages is None else f", {kv.mean_pages:,.1f} on average"
    rows.add_row("KV memory", f"{pages} of {kv.page_tokens} tokens; {kv.peak_pages:,} held at most{mean}")
    if not kv.preemptions:
        rows.add_row("pre-empted", "nobody")
        return rows
    who = f"{show_count(kv.preemptions, 'time')}, {show_count(kv.preempted_requests, 'request')} in all; "
    swapped = f"{show_bytes(kv.kv_swap_out_bytes)} to host memory, {show_bytes(kv.kv_swap_in_bytes)} back"
    again = f"{show_count(kv.recomputed_tokens, 'token')} computed again"
    rows.add_row("pre-empted", who + (swapped if kv.kv_swap_out_bytes else again))
    return rows


def _hits(result: Result) -> Table:
    rates = {phase: found.by_class() for phase, found in result.hit_rates_by_phase.items()}
    # The three that every policy has, and whichever of the others occur.
    shown = [
        name
        for name in CLASSES
        if name in ("hit", "late_hit", "miss") or any(shares[name] for shares in rates.values())
    ]
    rows = plain("experts found", *(name.replace("_", " ") for name in shown), "")
    notes = {"decode": f"   definition: {result.hit_definition}", "prefill": "   looked up a layer at a time"}
    for phase, shares in rates.items():
        rows.add_row(phase, *(show_frac(shares[name]) for name in shown), notes.get(phase, ""))
    return rows


def _replicas(replicas: Sequence[Replica]) -> Table:
    """What each replica was sent and made of it."""
    rows = plain(
        "replica", "requests", "tokens", "throughput, tokens/s", "hit", "busy", "there", "waiting", "mean wait"
    )
    for one in replicas:
        there = ("-" if n is None else show_number(n) for n in (one.requests_in_system, one.requests_waiting))
        per_s = "-" if one.throughput_tokens_per_s is None else _rate(one.throughput_tokens_per_s)
        counts = f"{one.requests:,}", f"{one.output_tokens:,}", per_s
        unstable = "" if one.stable else ", grows"
        rows.add_row(
            str(one.replica),
            *counts,
            show_frac(one.hit_rate),
            show_frac(one.busy_frac),
            *there,
            show_value(one.queue_mean_s, "s") + unstable,
        )
    return rows


def _by_layer(result: Result) -> Table:
    rows = pairs(LABEL)
    for title, text in lines(result):
        rows.add_row(title, text)
    return rows


def _union(result: Result) -> Table:
    """Of batches and drafts: how many experts a layer of an iteration wants together, beside its share of the room."""
    rows, found = pairs(LABEL), result.distinct_experts
    if found.per_layer is not None and found.per_slot is not None:
        experts, slots, over = (show_number(value) for value in (found.per_layer, found.slots, found.per_slot))
        rows.add_row("wanted together", f"{experts} experts per layer and iteration, for {slots} slots: r_bar {over}")
    return rows


def _copies(result: Result) -> Table:
    rows, prefetch, demand = pairs(LABEL), result.prefetch, result.demand_copies
    outputs = result.n_outputs
    per_token = f", {show_bytes(result.h2d_bytes / outputs)} per output token" if outputs else ""
    back = f"; {show_bytes(result.d2h_bytes)} back" if result.d2h_bytes else ""
    rows.add_row(label_of("h2d_bytes"), f"{show_bytes(result.h2d_bytes)} to the GPU{per_token}{back}")
    rows.add_row("on demand", f"{demand.n:,} copies, {show_bytes(demand.bytes)}")
    issued, cancelled = prefetch.issued, prefetch.cancelled
    if issued.n:
        fates = f"useful {_count(prefetch.useful)}, late {_count(prefetch.late)}, wasted {_count(prefetch.wasted)}"
        rows.add_row("prefetched", f"{_count(Copies(issued.n - cancelled.n, issued.bytes - cancelled.bytes))}: {fates}")
        unmoved = (("cancelled", cancelled), ("refused", prefetch.refused))
        less = ", ".join(f"{kind} {copies.n:,}" for kind, copies in unmoved if copies.n)
        harm = f"harmful {_count(prefetch.harmful)}, counted among those above"
        rows.add_row("", harm + (f"; before moving a byte: {less}" if less else ""))
    else:
        rows.add_row("prefetched", "nothing")
    return rows


def _shared(result: Result, found: Contention) -> Table:
    """What memory that is shared by what runs at once added to whose time."""
    rows = pairs(LABEL)
    parts = [
        f"{show_seconds(one.added_s)} to {_ACTIVITY[name]} ({show_frac(one.of_busy_frac)} of their time, "
        + one.by.replace("law", "by law, assumed")
        + ")"
        for name, one in found.by_activity().items()
        if one.added_s >= WORTH_TELLING * result.simulated_s
    ]
    if parts:
        rows.add_row("shared memory", "added " + ", ".join(parts))
    return rows


def _memory(result: Result) -> Table:
    memory, size, shape, rows = result.memory, result.expert_bytes, result.shape, pairs(LABEL)
    budget, peak = sum(result.cache_capacity_bytes), sum(result.cache_peak_bytes)
    n_whole = sum(n_bytes // size for n_bytes in result.cache_capacity_bytes)
    n_all = shape.layers * shape.experts
    unlike = result.sizes_by_layer
    mean = "" if unlike is None else " (a mean: layers differ)"
    where = f" over {result.gpus} GPUs" if result.gpus > 1 else ""
    rows.add_row(
        "expert budget",
        f"{show_bytes(budget)}{where}: {n_whole:,} of {n_all:,} whole experts of "
        f"{show_bytes(size)}{mean}; {show_bytes(budget - peak)} never used",
    )
    if unlike is not None:
        rows.add_row("expert sizes", _unlike(unlike))
    peak_vram = f"{show_bytes(result.peak_vram_bytes)} of {show_bytes(memory.vram_bytes)}"
    items = (
        ("experts", memory.cache_peak_bytes),
        ("dense", memory.dense_bytes),
        ("KV", memory.kv_cache_bytes),
        ("activations", memory.activation_bytes),
        ("reserve", memory.reserve_bytes),
        ("predictor", memory.predictor_bytes),
        ("draft model", memory.draft_bytes),
    )
    parts = ", ".join(f"{name} {show_bytes(n_bytes)}" for name, n_bytes in items if n_bytes)
    which = "" if result.gpus == 1 else " (fullest GPU)" if "gpu" in result.lane_utilisation else " (GPU 0)"
    rows.add_row(f"{label_of('peak_vram_bytes')}{which}", f"{peak_vram}: {parts}")
    each = " in each replica; the lines above are of one, its peak of the fullest" if result.replicas else ""
    rows.add_row("host memory", f"{show_bytes(result.ram_peak_bytes)} of experts{each}")
    return rows


def _unlike(sizes: SizesByLayer) -> str:
    """What it leaves out to take experts of unlike size for their mean; shares that round to nothing are not told."""
    lanes = (
        (sizes.h2d_frac, "copy {} more", "copy {} less"),
        (sizes.cpu_frac, "read {} more for experts on the CPU", "read {} less for experts on the CPU"),
        (sizes.gpu_frac, "read {} more for experts on the GPU", "read {} less for experts on the GPU"),
        (sizes.tpot_frac, "take about {} longer", "take about {} less time"),
    )
    parts = [
        (more if frac > 0.0 else less).format(show_frac(abs(frac)))
        for frac, more, less in lanes
        if frac is not None and show_frac(abs(frac)) != show_frac(0.0)
    ]
    span = f"{show_bytes(sizes.least_bytes)} to {show_bytes(sizes.most_bytes)}; told apart, decode would "
    return span + (listed(parts) or "move and take as much")


def _stat(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _grounds(result: Result) -> Table:
    rows, origin, band = pairs(LABEL), result.provenance, result.uncertainty
    if not origin.figures:  # a real run rests on the clock
        return rows
    shares = ", ".join(f"{show_frac(share)} {source}" for source, share in origin.by_source().items())
    rows.add_row("rests on", f"{shares} figures, by share of simulated time; the largest:")
    for figure in origin.figures[:TOP_FIGURES]:
        rows.add_row("", show_ground(figure))
    time: Timed = "tpot_s" if band.tpot_s else "ttft_s"
    ends = band.tpot_s or band.ttft_s
    if ends:
        low, high = (show_seconds(end) for end in ends)
        title = label_of(f"{time}.mean")
        rows.add_row(
            "uncertainty",
            f"{title} {low} to {high}, were every figure off at once to the end of its range"
            + _sampled(result, time)
            + _below_bound(result, time, ends[0]),
        )
    return rows


def _energy(result: Result) -> Table:
    rows = pairs(LABEL)
    for title, text in joules(result):
        rows.add_row(title, text)
    return rows


def _lines(result: Result) -> Table:
    """Figures whose row says that they have a line of their own."""
    rows = pairs(LABEL)
    for row in with_lines():
        if (value := row.read(result)) is not None:
            rows.add_row(row.label or row.key, show_figure(row.key, value) if row.number else str(value))
    return rows


def _below_bound(result: Result, time: Timed, low_s: float) -> str:
    """What it means that the band of a lossless policy begins below what none can beat."""
    least_s = None if result.lower_bound is None else getattr(result.lower_bound, time)
    took_s = result.time_s(time).mean
    if least_s is None or took_s is None or not low_s < least_s <= took_s:
        return ""
    return f"; it begins below the lower bound of {show_seconds(least_s)}, which {BOUND_IS_OF}"


def _sampled(result: Result, time: Timed) -> str:
    """What the band holds for the choice of requests."""
    over, n_units = result.uncertainty.sampling.of(time)
    n = show_units(result.time_s(time).n, n_units, "batch" if result.load is None else "block")
    if over is None:
        return f"; n = {n}: no sampling error can be given"
    low, high = (show_seconds(end) for end in over)
    return f"; of it {low} to {high} for the choice of requests (95 %, n = {n})"


def show_units(n_requests: int, n_units: int, word: str = "batch") -> str:
    """How many independent ones there are: requests, or batches or blocks of them."""
    if n_units == n_requests:
        return str(n_requests)
    return f"{n_requests} in {n_units} {word}{('es' if word == 'batch' else 's') * (n_units != 1)}"


def show_lengths(lengths: Lengths) -> str:
    """Prompt and output tokens of what was served, and the longest context."""
    said = []
    for length, what in ((lengths.prompt_tokens, "prompts"), (lengths.output_tokens, "outputs")):
        low, high, mean = length.min, length.max, length.mean
        if mean is None:
            return "no request was served to its end"
        said.append(f"{what} of {low:,} tokens" if low == high else f"{what} of {low:,} to {high:,} (mean {mean:,.0f})")
    return f"{said[0]}, {said[1]}; longest context {lengths.longest_context_tokens:,} tokens"


def _rate(per_s: float) -> str:
    return f"{per_s:.0f}" if per_s >= 99.95 else f"{per_s:.1f}" if per_s >= 9.995 else f"{per_s:.2f}"


def _count(copies: Copies) -> str:
    return f"{copies.n:,} ({show_bytes(copies.bytes)})"


def _plain(value: object) -> str:
    """A parameter as it is typed after --set."""
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _machines(result: Result) -> str:
    """`3 replicas of rtx3090`."""
    one = machine_of(result.hw, result.overrides)
    return f"{len(result.replicas)} replicas of {one}" if result.replicas else one
