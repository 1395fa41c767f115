"""A result as people read it: the verdict first, human units, about thirty lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sim.base.lanes import CHARGED
from sim.base.quantities import show_figure as show_hardware
from sim.base.tables import Table, listed, pairs, plain
from sim.base.tables import render as laid_out
from sim.base.units import (
    RAM,
    show_bytes,
    show_count,
    show_frac,
    show_fracs,
    show_joules,
    show_number,
    show_ram,
    show_seconds,
    show_value,
    three_digits,
)
from sim.engine.counts import CLASSES
from sim.figures import label_of, values_of, with_lines
from sim.results.figure import show_figure
from sim.results.record import of_bound
from sim.results.routing_words import routing_words
from sim.results.sampling import SHARES
from sim.setup.naming import machine_of, policy_of, show, words

if TYPE_CHECKING:
    from sim.figures import Copies, Input, Lengths, Phased, PolicyFile, Provenance, Timed
    from sim.results.record import Result

Pairs = Iterator[tuple[str, str]]
"""Lines of an answer: a label, or nothing where a line goes on with the one above, and what it says."""

WORTH_TELLING = 0.005
"""Share of a run's time that shared memory has to add to an activity before a line says so."""
BOUND_IS_OF = "is of these figures and requests: with better ones it is lower, too"
"""Why a band may begin below a bound."""
TOP_FIGURES = 3  # that a result rests on
FEW_STATS = 4  # of a policy, in a line
MOST_LAYERS = 3
UNEVEN = 1.2
"""Times an even share: below that, which layer waits most says nothing."""
LABEL = 13  # characters of the labels on the left, at least

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
_PEAK = {
    "cache_peak_bytes": "experts",
    "dense_bytes": "dense",
    "kv_cache_bytes": "KV",
    "activation_bytes": "activations",
    "reserve_bytes": "reserve",
    "predictor_bytes": "predictor",
    "draft_bytes": "draft model",
}
_ACTIVITY = {
    "cpu": "experts on the CPU",
    "h2d": "copies to the GPU",
    "d2h": "copies back",
    "gpu": "kernels",
    "nvme": "reads of the drive",
}
_MISSES = {
    "cold": "cold",
    "capacity": "capacity",
    "evicted_unused": "evicted in the same pass",
    "wrong_prediction": "wrong prediction",
    "too_late": "predicted too late",
}
_POWER = {
    "gpu_waiting": "GPU waiting",
    "gpu_memory_bound": "GPU bound by memory",
    "gpu_compute_bound": "GPU bound by arithmetic",
    "cpu_waiting": "CPU waiting",
    "cpu_busy": "CPU on experts",
    "memory_waiting": "host memory waiting",
    "memory_busy": "host memory at work",
    "drive_waiting": "drive waiting",
    "drive_busy": "drive reading",
    "rest": "the rest",
}
_UNLIKE = {
    "h2d_frac": ("copy {} more", "copy {} less"),
    "cpu_frac": ("read {} more for experts on the CPU", "read {} less for experts on the CPU"),
    "gpu_frac": ("read {} more for experts on the GPU", "read {} less for experts on the GPU"),
    "tpot_frac": ("take about {} longer", "take about {} less time"),
}


def memory_lines(sizes: Mapping[str, int]) -> list[str]:
    """A line for each item of a memory that is too small."""
    shown = (
        (words, (show_ram if key in RAM else show_bytes)(sizes[key])) for key, words in _SIZES.items() if key in sizes
    )
    return [f"  {words.format(**sizes):<34}{size:>12}" for words, size in shown]


def verdict(result: Result) -> str:
    """One sentence: how fast, and what bounds it."""
    own, file = words(result.overrides, "model"), result.policy_file
    model = f"{result.model} {result.precision}" + (f" with {own}" if own else "")
    policy = policy_of(result.policy, None if file is None else file.name, result.overrides)
    who = f"{policy} on {_machines(result)} ({model})"
    tpot_s, bound, throughput_per_s = result.tpot_s.mean, result.bottleneck, result.throughput_tokens_per_s
    phase: Phased = "prefill" if tpot_s is None else result.phases.main
    if tpot_s is None:
        speed = f"{show_value(result.ttft_s.mean, 's')} to the first token"
    elif (decoding := decoding_per_s(result)) is not None:
        speed = f"{show_seconds(tpot_s)} per token ({three_digits(decoding)} tokens/s decoding)"
    else:
        throughput = "-" if throughput_per_s is None else three_digits(throughput_per_s)
        together = min(result.batch, result.n_requests)
        at = f" at batch {together}" if together > 1 else ""
        over = "over all requests, prefill included"
        speed = f"{show_seconds(tpot_s)} per token{at} ({throughput} tokens/s {over})"
    if result.draft is not None and result.draft.tokens_per_step is not None:
        speed += f", {result.draft.tokens_per_step:.2f} tokens a step by drafts of k={result.draft.k}"
    if result.energy is not None:
        each_j = result.energy.joules_per_token
        speed += ", joules not known" if each_j is None else f", {_joules(result, each_j)}"
    # What turns the figure into a bound rather than a forecast belongs into the same sentence.
    catches = [label for label in result.caveats if label == "lossy" or of_bound(label)]
    catch = "".join(f"; {one}" for one in (*catches, routing_words(result.caveats, result.model)) if one)
    if bound.resource is None:
        return f"{who}: {speed}{catch}"
    lanes = [_LANE[name] for name in bound.resource.split(" and ")]
    share = values_of(bound.of(phase))[lanes[0].share or ""]
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
    drawn = []
    for keys, block in _BLOCKS:
        if not keys or any(getattr(result, key) for key in keys):
            said = block(result)
            content = said if isinstance(said, Table) else pairs(said, LABEL)
            drawn += [laid_out(content, width)] if content.rows else []
    return "\n".join(drawn)


def _facts(result: Result) -> Pairs:
    shape, own = result.shape, words(result.overrides, "model")
    params = ((key, f"{one:g}" if isinstance(one, float) else show(key, one)) for key, one in result.params.items())
    settings = ", ".join(f"{key}={said}" for key, said in params)
    yield "policy", _of_file(result.policy, result.policy_file) + (f" ({settings})" if settings else "")
    if 0 < len(result.policy_stats) <= FEW_STATS:  # more of them: --json
        stats = result.policy_stats.items()
        yield "what it did", ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v:.4g}" for k, v in stats)
    gpus = f", {result.gpus} GPUs" if result.gpus > 1 else ""
    by = f", requests sent by {result.router}" if result.router is not None else ""
    yield "hardware", f"{_machines(result)}{gpus}, engine {result.engine}{by}"
    routing = f"{shape.layers} layers x {shape.experts} experts, k = {shape.top_k}"
    yield "model", f"{result.model}{f' with {own}' if own else ''} in {result.precision}, {routing}"
    counts = f"{show_count(result.n_requests, 'request')}, {show_count(result.decode_tokens, 'decode token')}"
    batch = f", batch {result.batch}" if result.batch > 1 else ""
    batch += f", batching {result.batching}" if result.batching is not None else ""
    if result.prefill_chunk is not None:
        batch += f", at most {show_count(result.prefill_chunk, 'token')} an iteration"
    come = {"back to back": "", "trace": ", at the trace's arrival times"}
    arrivals = come.get(result.arrivals, f", arriving {result.arrivals}")
    yield "trace", f"{result.trace}, split {result.split}: {counts}{batch}{arrivals}"
    yield "lengths", show_lengths(result.lengths)
    if result.caveats:
        yield "caveats", "; ".join(result.caveats)
    if "lossy" in result.caveats:
        changed, kept = show_frac(result.activations_changed_frac), show_frac(result.gate_mass_kept)
        lowered = result.activations_lowered_frac
        lower = f", {show_frac(lowered)} in a lower precision" if lowered else ""
        yield "loss", f"{changed} of activations changed{lower}, {kept} of gate mass kept (open-loop replay)"


def _times(result: Result) -> Table:
    bound = result.bottleneck
    lanes = ["copies" if part == "copy" else part for part in values_of(bound.decode)]
    rows = plain("", "mean", "p50", "p95", "n", "", *lanes)
    shares: dict[str, list[str]] = {
        phase: [show_frac(share) for share in values_of(parts).values()] for phase, parts in bound.by_phase().items()
    }
    for title, stat, phase in (("ttft_s", result.ttft_s, "prefill"), ("tpot_s", result.tpot_s, "decode")):
        cells = [show_value(value, "s") for value in (stat.mean, stat.p50, stat.p95)]
        rows.add_row(label_of(f"{title}.mean"), *cells, str(stat.n), f"   {phase} time:", *shares[phase])
    if bound.mixed is not None:
        rows.add_row("", "", "", "", "", "   mixed time:", *shares["mixed"])
    return rows


def _rates(result: Result) -> Pairs:
    """Output over the whole run, and how far the result lies above what no lossless policy can beat."""
    bound, throughput = result.lower_bound, result.throughput_tokens_per_s
    if throughput is not None:
        each = f" ({three_digits(throughput / len(result.replicas))} per replica)" if result.replicas else ""
        waits = " and waiting for arrivals" if result.load is not None else ""
        said = f"{show_count(result.n_outputs, 'output token')} in the whole run, prefill{waits} included"
        yield label_of("throughput_tokens_per_s"), f"{three_digits(throughput)} tokens/s{each}: {said}"
    if bound is None or bound.above_frac is None:
        return
    above = bound.above_frac
    where = f"{100 * abs(above):.{0 if abs(above) >= 0.095 else 1}f} % {'above' if above >= 0 else 'below'}"
    lanes = {"copy": "this link and room", "copy + cpu": "this link, CPU and room"}[bound.resource]
    lanes += " and these drafts" if result.draft is not None else ""
    least = show_value(bound.tpot_s, "s")
    yield "lower bound", f"TPOT {least} for any lossless policy with {lanes}; this is {where} it"


def _under_load(result: Result) -> Table:
    """TTFT, its queue, and end to end, each above the ends of its interval."""
    rows = plain("under load", "mean", *SHARES)
    for key in ("ttft_s", "queue_s", "e2e_s"):
        stat = getattr(result, key)
        if not stat.sampling:
            continue
        found = ((getattr(stat, name), getattr(stat.sampling, name)) for name in ("mean", *SHARES))
        values, ends = zip(*found, strict=True)
        rows.add_row(label_of(f"{key}.mean"), *(show_value(value, "s") for value in values))
        blocks = f"{show_count(stat.sampling.blocks, 'block')} of {stat.sampling.block_requests:,}"
        shown = ("-" if one is None else f"{show_seconds(one[0])} - {show_seconds(one[1])}" for one in ends)
        rows.add_row(f"  95 %, {blocks}", *shown)
    return rows


def _served(result: Result) -> Pairs:
    """How requests come and are served, and which kept to what they were promised."""
    load, slo = result.load, result.slo
    if load is not None:
        came, taken = load.arrivals_per_s, load.capacity_per_s
        arrive = f"arrives {show_number(came)}/s, " if came is not None else ""
        there, waiting = load.requests_in_system or 0.0, load.requests_waiting or 0.0
        slot = " for a slot" if result.batch > 1 else ""
        none = f"too few waited{slot} to say how fast they are served" if waiting else "none had to wait"
        serve = f"serves {show_number(taken)}/s while some wait" if taken is not None else none
        system = f"{show_number(there)} requests there on average, {show_number(waiting)} of them waiting"
        yield "load", f"{arrive}{serve}; {system}"
        queue, service = result.queue_s, result.service_s
        ends = "" if queue.p95 is None else f" (p50 {show_value(queue.p50, 's')}, p95 {show_value(queue.p95, 's')})"
        waited, served = show_value(queue.mean, "s"), show_value(service.mean, "s")
        yield "of the TTFT", f"{waited} in the queue{ends}, {served} served"
    if (scheduler := result.scheduling) is not None:
        stats = [_stat(name, value) for name, value in scheduler.stats.items() if value is not None]
        yield "scheduler", ": ".join(filter(None, (_of_file(scheduler.name, scheduler.file), "; ".join(stats))))
    if slo is None or slo.attained_frac is None:
        return
    from sim.workload.slo import slo_text

    good, tokens = slo.goodput_requests_per_s or 0.0, slo.goodput_tokens_per_s or 0.0
    ends = "" if slo.attained_ends is None else f", {show_fracs(slo.attained_ends)} at 95 %"
    kept = f"kept by {slo.met:,} of {show_count(slo.requests, 'request')} ({show_frac(slo.attained_frac)}{ends})"
    yield "SLO", slo_text(slo.limits)
    yield "", f"{kept}; goodput {show_number(good)} requests/s, {show_number(tokens)} tokens/s"
    if slo.met < slo.requests:
        why = ", ".join(f"{name} {n:,}" for name, n in values_of(slo.violations).items() if n)
        yield "", f"broken, by what took most of the time: {why}"
    if len(slo.tasks) > 1:
        each = (f"{name or 'no task'} {show_frac(task.attained_frac)}" for name, task in slo.tasks.items())
        yield "", "kept by task: " + ", ".join(each)


def _stat(name: str, value: Any) -> str:
    """A scheduler's figure under its name, whose ending is its unit: seconds, or a number."""

    def shown(value: Any) -> str:
        if not isinstance(value, int | float):
            return str(value)
        number = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
        return show_seconds(value) if name.endswith("_s") else number

    many = value if isinstance(value, dict) else {"": value}
    each = ", ".join(f"{key} {shown(one)}".lstrip() for key, one in many.items())
    return f"{name.removesuffix('_s').removesuffix('_n').replace('_', ' ')} {each}"


def _drafts(result: Result) -> Pairs:
    """What decode steps verified, and what they took of it."""
    draft = result.draft
    if draft is None or draft.tokens_per_step is None:
        return
    by = ", ".join(show_frac(share) for share in draft.acceptance_by_position)
    each = f" (by position, of those before which all were: {by})" if len(draft.acceptance_by_position) > 1 else ""
    taken = f"{show_frac(draft.acceptance)} of {draft.drafted:,} drafts taken{each}" if draft.drafted else "no drafts"
    yield "speculation", f"{draft.tokens_per_step:.2f} tokens a step in {draft.steps:,} steps; {taken}"
    each_s = draft.draft_time_s / result.decode_tokens
    cost = f"{show_seconds(each_s)} per token put out" if draft.draft_time_s else "at no cost"
    room = f", {show_bytes(draft.draft_bytes)} of GPU memory" if draft.draft_bytes else ""
    yield "", f"drafting {cost}{room}; {show_bytes(draft.h2d_bytes_per_token or 0.0)} copied per decode token"


def _host(result: Result) -> Pairs:
    """Host memory above a drive: what it held, what it was asked for, and what was read."""
    host = result.host_memory
    assert host is not None
    rate = "no time at all" if host.bytes_per_s is None else f"{show_bytes(host.bytes_per_s)}/s in a row"
    reads = f"{show_bytes(host.read_bytes)} in {show_count(host.reads, 'read')}"
    yield "drive", f"{host.drive}, {host.reads_are} reads, {rate}: {reads}"
    parts = [f"{phase} {show_frac(one.hit / one.asked)} of {one.asked:,}" for phase, one in host.by_phase.items()]
    held = f"{show_ram(host.peak_bytes)} of {show_ram(host.bytes)} held at most, by {host.ram_policy}"
    if host.start == "cold" and not host.evicted and not host.passed:  # a rest that holds no expert more is no room
        held += ", which began empty and had room left"
    yield "experts there", f"{', '.join(parts) or 'none asked for'}; {held}"
    if (found := host.by_phase.get("decode")) is not None and result.decode_tokens:
        yield "read per token", f"{show_bytes(found.read_bytes / result.decode_tokens)} of decode"
    if host.passed:
        yield "read past it", f"{show_count(host.passed, 'expert')}, which host memory had no room for"


def _kv(result: Result) -> Pairs:
    """Of a pool of pages: how full it was, and who had to make room."""
    kv = result.kv
    assert kv is not None
    mean = "" if kv.mean_pages is None else f", {kv.mean_pages:,.1f} on average"
    pages = f"{show_count(kv.pages, 'page')} of {kv.page_tokens} tokens"
    yield "KV memory", f"{pages}; {kv.peak_pages:,} held at most{mean}"
    if not kv.preemptions:
        yield "pre-empted", "nobody"
        return
    who = f"{show_count(kv.preemptions, 'time')}, {show_count(kv.preempted_requests, 'request')} in all; "
    swapped = f"{show_bytes(kv.kv_swap_out_bytes)} to host memory, {show_bytes(kv.kv_swap_in_bytes)} back"
    again = f"{show_count(kv.recomputed_tokens, 'token')} computed again"
    yield "pre-empted", who + (swapped if kv.kv_swap_out_bytes else again)


def _hits(result: Result) -> Table:
    rates = {phase: values_of(found) for phase, found in result.hit_rates_by_phase.items()}
    # The three that every policy has, and whichever of the others occur.
    always = ("hit", "late_hit", "miss")
    shown = [name for name in CLASSES if name in always or any(shares[name] for shares in rates.values())]
    rows = plain("experts found", *(name.replace("_", " ") for name in shown), "")
    notes = {"decode": f"   definition: {result.hit_definition}", "prefill": "   looked up a layer at a time"}
    for phase, shares in rates.items():
        rows.add_row(phase, *(show_frac(shares[name]) for name in shown), notes.get(phase, ""))
    return rows


def _replicas(result: Result) -> Table:
    """What each replica was sent and made of it."""
    head = ("replica", "requests", "tokens", "throughput, tokens/s", "hit", "busy", "there", "waiting", "mean wait")
    rows = plain(*head)
    for one in result.replicas or ():
        per_s = "-" if one.throughput_tokens_per_s is None else three_digits(one.throughput_tokens_per_s)
        rows.add_row(
            *(str(one.replica), f"{one.requests:,}", f"{one.output_tokens:,}", per_s),
            *(show_frac(one.hit_rate), show_frac(one.busy_frac)),
            *("-" if n is None else show_number(n) for n in (one.requests_in_system, one.requests_waiting)),
            show_value(one.queue_mean_s, "s") + ("" if one.stable else ", grows"),
        )
    return rows


def by_layer(result: Result) -> Pairs:
    """Misses of decode (of prefill, when nothing decodes) by why, and the layers that GPU 0 waits for most."""
    phase = result.phases.main
    rows = [row for row in result.by_layer if row["phase"] == phase]
    whys = {why: sum(row[f"miss_{why}_n"] for row in rows) for why in _MISSES}
    if total := sum(row["miss_n"] for row in rows):
        most = sorted(whys, key=lambda why: -whys[why])
        shares = ", ".join(f"{_MISSES[why]} {show_frac(whys[why] / total)}" for why in most if whys[why])
        yield "misses", f"{total:,} in {phase}: {shares}"
    waits_s = {row["layer"]: sum(row[name] for name in row if name.startswith("wait_")) for row in rows}
    total_s = sum(waits_s.values())
    if len(rows) > MOST_LAYERS and total_s and max(waits_s.values()) >= UNEVEN * total_s / len(rows):
        worst = sorted(waits_s, key=lambda layer: (-waits_s[layer], layer))[:MOST_LAYERS]
        layers = ", ".join(f"{layer} ({show_frac(waits_s[layer] / total_s)})" for layer in worst)
        even = show_frac(1 / len(rows))
        yield "waits", f"{show_seconds(total_s)} of {phase}, most in layers {layers}; an even share is {even}"


def _together(result: Result) -> Pairs:
    """Of batches and drafts: how many experts a layer of an iteration wants together, beside its share of the room."""
    found = result.distinct_experts
    if (result.batch > 1 or result.draft is not None) and found.per_layer is not None and found.per_slot is not None:
        experts, slots, over = (show_number(value) for value in (found.per_layer, found.slots, found.per_slot))
        yield "wanted together", f"{experts} experts per layer and iteration, for {slots} slots: r_bar {over}"


def _copies(result: Result) -> Pairs:
    prefetch, demand, outputs = result.prefetch, result.demand_copies, result.n_outputs
    per_token = f", {show_bytes(result.h2d_bytes / outputs)} per output token" if outputs else ""
    back = f"; {show_bytes(result.d2h_bytes)} back" if result.d2h_bytes else ""
    yield label_of("h2d_bytes"), f"{show_bytes(result.h2d_bytes)} to the GPU{per_token}{back}"
    yield "on demand", f"{demand.n:,} copies, {show_bytes(demand.bytes)}"
    issued, cancelled = prefetch.issued, prefetch.cancelled
    if not issued.n:
        yield "prefetched", "nothing"
        return

    def count(copies: Copies) -> str:
        return f"{copies.n:,} ({show_bytes(copies.bytes)})"

    moved = f"{issued.n - cancelled.n:,} ({show_bytes(issued.bytes - cancelled.bytes)})"
    fates = f"useful {count(prefetch.useful)}, late {count(prefetch.late)}, wasted {count(prefetch.wasted)}"
    yield "prefetched", f"{moved}: {fates}"
    unmoved = (("cancelled", cancelled), ("refused", prefetch.refused))
    less = ", ".join(f"{kind} {copies.n:,}" for kind, copies in unmoved if copies.n)
    harm = f"harmful {count(prefetch.harmful)}, counted among those above"
    yield "", harm + (f"; before moving a byte: {less}" if less else "")


def _shared(result: Result) -> Pairs:
    """What memory that is shared by what runs at once added to whose time."""
    found = result.contention
    assert found is not None
    parts = [
        f"{show_seconds(one.added_s)} to {_ACTIVITY[name]} ({show_frac(one.of_busy_frac)} of their time, "
        + one.by.replace("law", "by law, assumed")
        + ")"
        for name, one in values_of(found).items()
        if one is not None and one.added_s >= WORTH_TELLING * result.simulated_s
    ]
    if parts:
        yield "shared memory", "added " + ", ".join(parts)


def _memory(result: Result) -> Pairs:
    memory, size, shape, unlike = result.memory, result.expert_bytes, result.shape, result.sizes_by_layer
    budget, peak = sum(result.cache_capacity_bytes), sum(result.cache_peak_bytes)
    n_whole = sum(n_bytes // size for n_bytes in result.cache_capacity_bytes)
    mean = "" if unlike is None else " (a mean: layers differ)"
    where = f" over {result.gpus} GPUs" if result.gpus > 1 else ""
    experts = f"{n_whole:,} of {shape.layers * shape.experts:,} whole experts of {show_bytes(size)}{mean}"
    yield "expert budget", f"{show_bytes(budget)}{where}: {experts}; {show_bytes(budget - peak)} never used"
    if unlike is not None:  # what it leaves out to take them for their mean; shares that round to nothing are not told
        fracs = ((getattr(unlike, key) or 0.0, said) for key, said in _UNLIKE.items())
        parts = [said[frac <= 0.0].format(show_frac(abs(frac))) for frac, said in fracs if abs(frac) >= 0.0005]
        span = f"{show_bytes(unlike.least_bytes)} to {show_bytes(unlike.most_bytes)}"
        yield "expert sizes", f"{span}; told apart, decode would {listed(parts) or 'move and take as much'}"
    held = ((name, getattr(memory, key)) for key, name in _PEAK.items())
    items = ", ".join(f"{name} {show_bytes(n_bytes)}" for name, n_bytes in held if n_bytes)
    which = "" if result.gpus == 1 else " (fullest GPU)" if "gpu" in result.lane_utilisation else " (GPU 0)"
    peak_vram = f"{show_bytes(result.peak_vram_bytes)} of {show_bytes(memory.vram_bytes)}"
    yield f"{label_of('peak_vram_bytes')}{which}", f"{peak_vram}: {items}"
    each = " in each replica; the lines above are of one, its peak of the fullest" if result.replicas else ""
    yield "host memory", f"{show_bytes(result.ram_peak_bytes)} of experts{each}"


def _grounds(result: Result) -> Pairs:
    origin, band = result.provenance, result.uncertainty
    if not origin.figures:  # a real run rests on the clock
        return
    yield "rests on", f"{shares_of(origin)} figures, by share of simulated time; the largest:"
    for figure in origin.figures[:TOP_FIGURES]:
        yield "", _ground(figure)
    time: Timed = "tpot_s" if band.tpot_s else "ttft_s"
    ends = band.tpot_s or band.ttft_s
    if not ends:
        return
    title, (low, high) = label_of(f"{time}.mean"), (show_seconds(end) for end in ends)
    over, n_units = band.sampling.of(time)
    stat = getattr(result, time)
    n = show_units(stat.n, n_units, "batch" if result.load is None else "block")
    sampled = f"; n = {n}: no sampling error can be given"
    if over is not None:
        least, most = (show_seconds(end) for end in over)
        sampled = f"; of it {least} to {most} for the choice of requests (95 %, n = {n})"
    least_s, below = None if result.lower_bound is None else getattr(result.lower_bound, time), ""
    if least_s is not None and stat.mean is not None and ends[0] < least_s <= stat.mean:  # of a lossless policy
        below = f"; it begins below the lower bound of {show_seconds(least_s)}, which {BOUND_IS_OF}"
    yield (
        "uncertainty",
        f"{title} {low} to {high}, were every figure off at once to the end of its range{sampled}{below}",
    )


def shares_of(origin: Provenance) -> str:
    """`80.0 % measured, 20.0 % datasheet, 0.0 % assumed`."""
    return ", ".join(f"{show_frac(share)} {source}" for source, share in origin.by_source().items())


def _ground(figure: Input) -> str:
    """A figure that a result rests on: its share, name, value, source and references."""
    value = "" if figure.value is None else f" = {show_hardware(figure.figure, figure.value)}"
    ref = f" [{figure.ref}]" if figure.ref else ""
    return f"{show_frac(figure.share):>7}  {figure.figure}{value} ({figure.source}){ref}"


def no_joules(result: Result) -> str:
    """Why a run that was asked for joules has none, and what would help; empty where it has."""
    if result.energy is None or not result.energy.missing:
        return ""
    blocks = " and ".join(f"hw.{block}" for block in result.energy.missing)
    return f"not known: {result.hw} has no {blocks}; give its watts in a profile of yours (docs/energy.md)"


def _energy(result: Result) -> Pairs:
    """Joules of a token with their range, by part of the machine, and what they rest on."""
    found = result.energy
    assert found is not None
    if found.missing or not (found.energy_j or found.joules_per_token is None):
        yield "energy", no_joules(result) or "0 J: every watt that was counted is 0"
        return
    if found.joules_per_token is None or found.provenance is None or found.energy_j is None:
        return
    ends = found.range_joules_per_token
    band = "" if ends is None else f" ({show_joules(ends[0])} to {show_joules(ends[1])}, were all figures off at once)"
    each = f"{_joules(result, found.joules_per_token)}, prefill included{band}"
    yield "energy", f"{each}; {found.mean_w:.0f} W on average"
    largest = sorted(found.lanes_j.items(), key=lambda item: -item[1])
    shares = [(_POWER[lane], show_frac(lane_j / found.energy_j)) for lane, lane_j in largest]
    yield "", ", ".join(f"{name} {share}" for name, share in shares if share != show_frac(0.0))
    without = ", board, fans and losses left out" if found.counted != "gpu" and "rest" not in found.lanes_j else ""
    yield (
        "",
        f"derived: watts x seconds; {shares_of(found.provenance)} watts, by share of joules{without}; the largest:",
    )
    for figure in found.provenance.figures[:TOP_FIGURES]:
        yield "", _ground(figure)


def _joules(result: Result, each_j: float) -> str:
    """A token's, and whose they are."""
    machine = result.energy is not None and result.energy.counted == "machine"
    several = result.replicas is not None or (result.gpus > 1 and not machine)
    whose = f"the {'machine' if machine else 'GPU'}{'s' * several}"
    return f"{show_joules(each_j)} of {whose} per output token"


def _lines(result: Result) -> Pairs:
    """Figures whose row says that they have a line of their own."""
    for row in with_lines():
        if (value := row.read(result)) is not None:
            yield row.label or row.key, show_figure(row.key, value) if row.number else str(value)


_BLOCKS: tuple[tuple[tuple[str, ...], Callable[[Result], Table | Iterable[tuple[str, str]]]], ...] = (
    ((), _facts),
    ((), _times),
    ((), _rates),
    (("load",), _under_load),
    (("load", "scheduling", "slo"), _served),
    (("draft",), _drafts),
    (("host_memory",), _host),
    (("kv",), _kv),
    ((), _hits),
    (("replicas",), _replicas),
    (("by_layer",), by_layer),
    ((), _together),
    ((), _copies),
    (("contention",), _shared),
    ((), _memory),
    ((), _grounds),
    (("energy",), _energy),
    ((), _lines),
)
"""Blocks of an answer in their order, each with the keys of a result, of which a run has to have one to be told of."""


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


def _of_file(name: str, file: PolicyFile | None) -> str:
    return name + (f" of {file.name}, sha256 {file.sha256[:12]}" if file else "")


def _machines(result: Result) -> str:
    """`3 replicas of rtx3090`."""
    one = machine_of(result.hw, result.overrides)
    return f"{len(result.replicas)} replicas of {one}" if result.replicas else one
