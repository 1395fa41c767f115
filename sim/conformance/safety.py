"""Rules about what the engine is asked for: every expert runs, capacities hold, bytes add up."""

from __future__ import annotations

from sim.base.errors import DoesNotFit
from sim.conformance.world import ALL, HALF, QUARTER, Computed, Seen, Skip, World, require
from sim.engine.counts import DROPPED, SUBSTITUTED
from sim.policy.registry import find

PART = 3
"""Tokens of an iteration: fewer than most prompts have, and as many as requests run together."""
PAGES = 12
"""Tokens of a KV cache that holds every request, and no two to their ends."""

DRAFT = "k=3,acceptance=0.6,draft_s=1e-5,rejected=elsewhere"


def runs(world: World) -> list[Seen]:
    """The settings most rules look at: three budgets, a batch, two GPUs; prompts in parts, alone and beside decode
    tokens, and several prompts at once; a request that makes room and is prefilled anew; and drafts, some of which are
    taken, with time to draft in."""
    return [
        world.run(world.room(QUARTER)),
        world.run(world.room(HALF)),
        world.run(ALL),
        world.run(world.room(HALF), batch=2),
        world.run(world.room(HALF, gpus=2), gpus=2),
        world.run(world.room(HALF), prefill_chunk=PART),
        world.run(world.room(HALF), batch=3, prefill_chunk=PART),
        world.run(world.room(HALF), batch=3, static=True),
        world.run(world.room(HALF), batch=2, kv_pages=PAGES),
        world.run(world.room(HALF), batch=2, draft=DRAFT),
    ]


def up_again(seen: Seen) -> int:
    """Bytes of CPU experts' results: as many as went down to them."""
    return seen.machine.d2h_bytes - seen.machine.written_back_bytes


def check_executes_each_needed_expert_once(world: World) -> None:
    """Every expert a gate asks for is executed exactly once in its layer, for all its tokens, on GPU or CPU."""
    kind = world.kind
    if "lossy" in kind.traits:
        raise Skip("lossy: it may change what is asked for")
    for seen in runs(world):
        executed = sorted((e.iteration, e.at_layer, e.expert) for e in seen.events if e.kind in ("gpu", "cpu"))
        needed = sorted((i, layer, x) for i, layers in enumerate(seen.needs) for layer in layers for x in layers[layer])
        require(executed == needed, f"executed {len(executed)} (iteration, layer, expert), needed {len(needed)}")
        tokens = sum(n for layers in seen.needs for experts in layers.values() for n in experts.values())
        require(seen.engine.tally.n_executed == tokens, f"{seen.engine.tally.n_executed} of {tokens} tokens executed")


def check_computes_each_column_once(world: World) -> None:
    """What runs on a GPU runs whole: its parts make the expert up, none of it twice, each for all its tokens."""
    for seen in runs(world):
        parts: dict[tuple[int, int, int], list[Computed]] = {}
        for part in seen.computed:
            parts.setdefault(part[:3], []).append(part)
        said = {(e.iteration, e.at_layer, e.expert) for e in seen.events if e.kind == "gpu"}
        require(parts.keys() == said, f"{len(parts)} experts computed, {len(said)} said to be")
        for (i, layer, expert), found in parts.items():
            where = f"iteration {i}, expert {layer}.{expert}"
            bounds = sorted((part.start_frac, part.stop_frac) for part in found)
            edges = [0.0, *(stop for _, stop in bounds)]
            whole = [start for start, _ in bounds] == edges[:-1] and edges[-1] == 1.0
            require(whole, f"{where}: computed in {bounds}")
            counts = {part.n_tokens for part in found}
            require(len(counts) == 1, f"{where}: parts for {sorted(counts)} tokens")
            asked = seen.needs[i].get(layer, {}).get(expert)
            lossy = "lossy" in world.kind.traits
            require(lossy or counts == {asked}, f"{where}: computed for {counts} tokens, asked for {asked}")


def check_executes_what_it_assigned(world: World) -> None:
    """A lossy policy says what it changed: substituted, dropped and kept add up to what the gates asked for."""
    if "lossy" not in world.kind.traits:
        raise Skip("lossless")
    for seen in runs(world):
        asked = sum(n for layers in seen.needs for experts in layers.values() for n in experts.values())
        loss = seen.engine.tally.loss
        require(loss.activations == asked, f"{loss.activations} activations accounted for, {asked} asked for")
        require(seen.engine.tally.n_executed == asked - loss.dropped, "executed and dropped tokens are not those asked")
        lost = any(hits.experts[SUBSTITUTED] + hits.experts[DROPPED] for hits in seen.engine.tally.hits.values())
        require(not lost or loss.changed + loss.dropped > 0, "experts were lost without any activation changed")


def check_never_exceeds_its_budget(world: World) -> None:
    """At every decision, the pieces on each GPU take no more than its expert budget."""
    for seen in runs(world):
        budgets = seen.budgets
        for event in seen.events:
            require(
                all(used <= budget for used, budget in zip(event.used_bytes, budgets, strict=True)),
                f"{event.kind} of {event.layer}.{event.expert}: {event.used_bytes} bytes taken of {budgets}",
            )
        residents = seen.engine.residency.resident_pieces()
        taken = [sum(p.n_bytes for p in residents if p.gpu == gpu) for gpu in range(len(budgets))]
        booked, peaks = list(seen.engine.residency.used_bytes), list(seen.engine.residency.peak_bytes)
        require(taken == booked, f"pieces of {taken} bytes, {booked} booked")
        require(all(peak <= b for peak, b in zip(peaks, budgets, strict=True)), f"peak {peaks} of {budgets}")


def check_never_evicts_what_the_layer_needs(world: World) -> None:
    """No expert leaves the GPU while the layer being served still has to run it."""
    for seen in runs(world):
        for event in seen.events:
            leaves = event.kind in ("evict", "cancel") and event.layer == event.at_layer
            require(
                not (leaves and event.expert in event.pending),
                f"{event.kind} of {event.layer}.{event.expert} while layer {event.at_layer} waits for {event.pending}",
            )


def check_works_at_its_smallest_budget(world: World) -> None:
    """The smallest budget it declares is enough, on one GPU and on two; one expert less is refused with DoesNotFit."""
    kind = world.kind
    if kind.keeps_all:
        raise Skip("keeps every expert, whatever the budget")
    for gpus in (1, 2):
        smallest = world.smallest(gpus)
        require(smallest <= ALL, f"needs {smallest} of {ALL} experts on {gpus} GPUs with default settings")
        world.run(smallest, gpus=gpus)
        if smallest <= 1:
            continue  # a budget of no expert is refused before the policy is asked
        try:
            world.run(smallest - 1, gpus=gpus)
        except DoesNotFit as error:
            require(kind.name in str(error), f"the refusal does not name the policy: {error}")
        else:
            require(False, f"ran with {smallest - 1} experts, {smallest} is its minimum")


def check_copies_nothing_twice_when_everything_fits(world: World) -> None:
    """With room for every expert each is copied at most once, so that nothing is fetched after warm-up."""
    kind = world.kind
    if kind.keeps_all:
        raise Skip("keeps every expert, nothing is ever copied")
    if "evicts_eagerly" in kind.traits:
        raise Skip("streams: it forgets experts on purpose")
    room = max(ALL, world.smallest())
    if room > ALL:
        raise Skip("its predictor leaves no room for every expert")
    seen = world.run(ALL)
    size = seen.engine.view.expert_bytes
    copied = seen.result.h2d_bytes - up_again(seen)
    wanted = len({(e.layer, e.expert) for e in seen.events if e.kind in ("fetch", "prefetch")})
    require(copied <= wanted * size, f"copied {copied} bytes for {wanted} distinct experts of {size} bytes")


def check_bytes_add_up(world: World) -> None:
    """Once the queue has run dry, bytes asked for = bytes copied + bytes cancelled."""
    for seen in runs(world):
        tally = seen.engine.tally
        asked = tally.demand_bytes + tally.prefetch.issued_bytes + up_again(seen)
        copied, cancelled = sum(up.copied_bytes for up in seen.machine.h2d), tally.prefetch.cancelled_bytes
        require(asked == copied + cancelled, f"asked for {asked}, copied {copied}, cancelled {cancelled}")
        require(copied == seen.result.h2d_bytes, "the result reports other bytes than the links carried")
        require(not any(up.n_queued for up in seen.machine.h2d), "copies are left in a queue")


def check_prefetches_add_up(world: World) -> None:
    """Useful, late and wasted prefetches (and their bytes) are those issued and not cancelled; harmful are some."""
    for seen in runs(world):
        p = seen.engine.tally.prefetch
        require(
            p.n["useful"] + p.n["late"] + p.n["wasted"] == p.n_issued - p.n_cancelled,
            f"{p.n}, {p.n_issued} issued, {p.n_cancelled} cancelled",
        )
        spent = p.n_bytes["useful"] + p.n_bytes["late"] + p.n_bytes["wasted"]
        require(spent == p.issued_bytes - p.cancelled_bytes, f"{p.n_bytes}, {p.issued_bytes} issued")
        require(p.n["harmful"] <= p.n_issued, f"{p.n['harmful']} harmful of {p.n_issued}")


def check_hit_classes_add_up(world: World) -> None:
    """The classes of each phase add up to the unique experts (and tokens) the gates asked for; their shares to 1."""
    for seen in runs(world):
        require(sum(seen.engine.tally.n_iterations.values()) == len(seen.needs), "iterations are missing")
        hits = seen.engine.tally.hits
        asked = [experts for layers in seen.needs for experts in layers.values()]
        require(sum(map(len, asked)) == sum(sum(h.experts) for h in hits.values()), "unique experts do not add up")
        tokens = sum(sum(experts.values()) for experts in asked)
        require(tokens == sum(sum(h.tokens) for h in hits.values()), "tokens do not add up")
        ran = [hits[phase] for phase, n in seen.engine.tally.n_iterations.items() if n]
        for shares in (*(one.rates() for one in ran), *(one.rates(tokens=True) for one in ran)):
            total = sum(share for share in shares.values() if share is not None)
            require(abs(total - 1) < 1e-12, f"shares of {shares} add up to {total}")


def check_copies_no_less_than_belady(world: World) -> None:
    """No lossless policy of whole experts on the GPU copies fewer of them than belady in the same room."""
    kind = world.kind
    if kind.traits & {"lossy", "cpu"} or kind.keeps_all:
        raise Skip("lossy, on the CPU, or with all experts in place")
    for experts in (world.smallest(), world.room(QUARTER), world.room(HALF), ALL):
        mine = world.run(experts)
        if mine.engine.pieces.n_parts:
            raise Skip("copies parts of experts")
        with World(find("belady")) as other:
            least = other.run(mine.engine.view.capacity)
        tally = mine.engine.tally
        copied = tally.n_demand + tally.prefetch.n_issued - tally.prefetch.n_cancelled
        require(
            copied + len(mine.initial) >= least.engine.tally.n_demand,
            f"{copied} copies with room for {experts}, belady makes {least.engine.tally.n_demand}",
        )


CHECKS = (
    check_executes_each_needed_expert_once,
    check_computes_each_column_once,
    check_executes_what_it_assigned,
    check_never_exceeds_its_budget,
    check_never_evicts_what_the_layer_needs,
    check_works_at_its_smallest_budget,
    check_copies_nothing_twice_when_everything_fits,
    check_bytes_add_up,
    check_prefetches_add_up,
    check_hit_classes_add_up,
    check_copies_no_less_than_belady,
)
