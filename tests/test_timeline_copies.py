"""Copies against computation, worked out by hand. Numbers of `easy_numbers`: copy 10 s, expert 2 s, attention 1 s."""

from __future__ import annotations

import pytest
from easy_numbers import EXPERT_BYTES, run

from policies.lru import Lru
from policies.on_demand import OnDemand
from sim.policy.api import Policy
from sim.policy.decisions import Cancel, DropQueue, Evict, Fetch, Predict, Prefetch, Requeue, RunGpu, Serve


class Placed(Policy):
    """Serves as the engine does by default; `there` are resident from the start, `ahead` prefetched at once."""

    name = "placed"
    traits = frozenset({"timing"})

    def __init__(self, there=(), ahead=()):
        super().__init__()
        self.there, self.ahead = there, ahead

    def initial(self, view):
        return [view.piece(*at) for at in self.there]

    def request_start(self, request, view):
        return [Prefetch(view.piece(*at)) for at in self.ahead]


def test_on_demand_with_two_slots(tmp_path):
    # One layer; the token needs experts 1 and 0. The module loop goes in ascending order.
    #   attention 0..1, its gate is read at 1
    #   copy 0: 1..11, expert 0: 11..13
    #   copy 1: has the second slot, so it follows at once: 11..21, expert 1: 21..23
    #   head 23..24
    seen = run(OnDemand(), tmp_path, [[[1, 0]]], room=2)
    assert seen.lane("h2d") == [("demand 0.0", 1, 11), ("demand 0.1", 11, 21)]
    assert seen.lane("gpu") == [("attention 0", 0, 1), ("expert 0.0", 11, 13), ("expert 0.1", 21, 23), ("head", 23, 24)]
    assert seen.end_s == 24
    assert seen.classes("prefill") == {"miss": 2}
    assert seen.log == [
        ("fetch", 0, 0),
        ("gpu", 0, 0),
        ("fetch", 0, 1),
        ("gpu", 0, 1),
        ("evict", 0, 0),
        ("evict", 0, 1),
    ]


def test_a_copy_nobody_waits_for_goes_on_after_the_last_token(tmp_path):
    # Copies 0..10 and 10..20, expert 10..12, head 12..13: the link is busy for all of its own 20 s.
    seen = run(Placed(ahead=[(0, 0), (0, 1)]), tmp_path, [[[0]]], room=2, n_experts=2)
    assert seen.end_s == 13
    assert seen.result.prefetch.wasted.n == 1
    busy = seen.result.lane_utilisation
    assert (busy["h2d"], busy["gpu"]) == (1, 4 / 13)


def test_on_demand_with_one_slot(tmp_path):
    # The second copy must wait until expert 0 has been computed: 13..23, expert 1: 23..25, head 25..26.
    seen = run(OnDemand(slots=1), tmp_path, [[[1, 0]]], room=1)
    assert seen.lane("h2d") == [("demand 0.0", 1, 11), ("demand 0.1", 13, 23)]
    assert seen.lane("gpu") == [("attention 0", 0, 1), ("expert 0.0", 11, 13), ("expert 0.1", 23, 25), ("head", 25, 26)]


def test_two_layers_on_demand(tmp_path):
    # Layer 0: attention 0..1, copy 1..11, expert 11..13.
    # Layer 1: attention 13..14, copy 14..24, expert 24..26. Head 27.
    # The compute stream was busy 1 + 2 + 1 + 2 + 1 = 7 s and waited 20 s for copies.
    seen = run(OnDemand(), tmp_path, [[[0], [1]]], room=2, n_experts=2)
    assert seen.lane("h2d") == [("demand 0.0", 1, 11), ("demand 1.1", 14, 24)]
    assert seen.lane("gpu") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 11, 13),
        ("attention 1", 13, 14),
        ("expert 1.1", 24, 26),
        ("head", 26, 27),
    ]
    assert seen.machine.parts_s() == [7, 20, 0, 0, 0, 0, 0]
    assert seen.result.bottleneck.resource == "copy link"


def test_a_copy_runs_beside_the_computation_of_a_hit(tmp_path):
    # Expert 0 is there. The gate asks for both at 1: copy of 1: 1..11, beside expert 0: 1..3.
    # Expert 1: 11..13, head 14.
    seen = run(Placed([(0, 0)]), tmp_path, [[[0, 1]]], room=2)
    assert seen.lane("h2d") == [("demand 0.1", 1, 11)]
    assert seen.lane("gpu") == [("attention 0", 0, 1), ("expert 0.0", 1, 3), ("expert 0.1", 11, 13), ("head", 13, 14)]
    assert seen.classes("prefill") == {"hit": 1, "miss": 1}


def test_late_hit(tmp_path):
    # Expert 0 of layer 1 is prefetched at 0: copy 0..10. Layer 0 hits: attention 0..1, expert 1..3.
    # Layer 1: attention 3..4; its gate asks at 4, 6 s too early: late. Expert 10..12, head 12..13.
    seen = run(Placed([(0, 0)], ahead=[(1, 0)]), tmp_path, [[[0], [0]]], room=2)
    assert seen.lane("h2d") == [("prefetch 1.0", 0, 10)]
    assert seen.lane("gpu") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 1, 3),
        ("attention 1", 3, 4),
        ("expert 1.0", 10, 12),
        ("head", 12, 13),
    ]
    assert seen.classes("prefill") == {"hit": 1, "late": 1}
    assert seen.prefetched() == {"issued": 1, "late": 1}


def test_useful_prefetch(tmp_path):
    # Attention of 10 s: the copy 0..10 has ended when layer 0's gate is read at 10, long before layer 1's.
    # Layer 0: attention 0..10, expert 10..12. Layer 1: attention 12..22, expert 22..24, head 25.
    seen = run(Placed([(0, 0)], ahead=[(1, 0)]), tmp_path, [[[0], [0]]], room=2, kernels={"attention": 10})
    assert seen.end_s == 25
    assert seen.classes("prefill") == {"hit": 2}
    assert seen.prefetched() == {"issued": 1, "useful": 1}


def test_demand_overtakes_what_is_queued_but_not_what_is_in_flight(tmp_path):
    # At 0 two prefetches for layer 1: the first is in flight 0..10. At 1 layer 0 demands its expert 0:
    # it waits for the link until 10, copies 10..20, ahead of the second prefetch, which copies 20..30.
    # Expert 0.0: 20..22; attention 22..23; 1.0 arrived at 10: 23..25; head 25..26.
    # The second prefetch is never used, and ends after the last token.
    seen = run(Placed(ahead=[(1, 0), (1, 1)]), tmp_path, [[[0], [0]]], room=3, n_experts=2)
    assert seen.lane("h2d") == [("prefetch 1.0", 0, 10), ("demand 0.0", 10, 20), ("prefetch 1.1", 20, 30)]
    assert seen.lane("gpu") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 20, 22),
        ("attention 1", 22, 23),
        ("expert 1.0", 23, 25),
        ("head", 25, 26),
    ]
    assert seen.prefetched() == {"issued": 2, "useful": 1, "wasted": 1}


def test_a_prefetch_that_would_start_as_the_demand_is_asked_is_overtaken(tmp_path):
    # Attention takes 10 s, so the demand is asked at 10, exactly when the second prefetch would start.
    seen = run(Placed(ahead=[(1, 0), (1, 1)]), tmp_path, [[[0], [0]]], room=3, n_experts=2, kernels={"attention": 10})
    assert seen.lane("h2d") == [("prefetch 1.0", 0, 10), ("demand 0.0", 10, 20), ("prefetch 1.1", 20, 30)]


def test_a_prefetch_that_started_just_before_is_not_overtaken(tmp_path):
    # Attention takes 11 s: the second prefetch has been in flight since 10, so the demand copies 20..30.
    seen = run(Placed(ahead=[(1, 0), (1, 1)]), tmp_path, [[[0], [0]]], room=3, n_experts=2, kernels={"attention": 11})
    assert seen.lane("h2d") == [("prefetch 1.0", 0, 10), ("prefetch 1.1", 10, 20), ("demand 0.0", 20, 30)]


def test_a_queued_prefetch_the_gate_asks_for_is_promoted(tmp_path):
    # Three prefetches for layer 1 at 0: 1.0 in flight 0..10. Layer 0 hits: 0..1, 1..3. Layer 1: attention 3..4.
    # Its gate asks at 4 for 1.2, third in the queue: it goes first, 10..20, then 1.1: 20..30.
    # Expert 1.2: 20..22, head 22..23.
    seen = run(Placed([(0, 0)], ahead=[(1, 0), (1, 1), (1, 2)]), tmp_path, [[[0], [2]]], room=4)
    assert seen.lane("h2d") == [("prefetch 1.0", 0, 10), ("prefetch 1.2", 10, 20), ("prefetch 1.1", 20, 30)]
    assert seen.end_s == 23
    assert seen.prefetched() == {"issued": 3, "late": 1, "wasted": 2}


class Fetcher(Placed):
    """Fetches what is on its way again, which moves it to the front, then runs it."""

    def gate_done(self, gate, view):
        for expert in gate.needs:
            yield Fetch(view.piece(gate.layer, expert))
            yield RunGpu(expert)


def test_fetch_of_a_queued_prefetch_promotes_it(tmp_path):
    seen = run(Fetcher([(0, 0)], ahead=[(1, 0), (1, 1), (1, 2)]), tmp_path, [[[0], [2]]], room=4)
    assert seen.lane("h2d") == [("prefetch 1.0", 0, 10), ("prefetch 1.2", 10, 20), ("prefetch 1.1", 20, 30)]
    assert ("fetch", 1, 2) not in seen.log  # one copy, not two
    assert seen.result.demand_copies.n == 0


class Canceller(Placed):
    """Withdraws its prefetches as soon as the first gate has spoken."""

    def gate_done(self, gate, view):
        if gate.layer == 0:
            yield Cancel(view.piece(1, 1))
            yield Cancel(view.piece(1, 0))
        yield Serve()


def test_cancel_withdraws_what_is_queued_and_lets_finish_what_is_in_flight(tmp_path):
    # 1.0 in flight 0..10, 1.1 queued. At 1 both are cancelled: 1.1 goes, 1.0 finishes and stays.
    # Layer 0 hits 1..3; attention 3..4; layer 1 asks at 4 for 1.1, gone: demanded at 4, copied 10..20, run 20..22.
    seen = run(Canceller([(0, 0)], ahead=[(1, 0), (1, 1)]), tmp_path, [[[0], [1]]], room=3)
    assert seen.lane("h2d") == [("prefetch 1.0", 0, 10), ("demand 1.1", 10, 20)]
    assert seen.end_s == 23
    assert seen.prefetched() == {"issued": 2, "cancelled": 1, "wasted": 1}
    assert seen.classes("prefill") == {"hit": 1, "miss": 1}
    # Requested = copied + cancelled: 2 prefetches + 1 demand = 2 copies + 1 withdrawn.
    assert seen.result.h2d_bytes == 2 * EXPERT_BYTES
    assert seen.outcome.report.counts.tally.prefetch.cancelled_bytes == EXPERT_BYTES


class Dropper(Placed):
    """Drops the queue up to layer 1 at the first gate."""

    def gate_done(self, gate, view):
        if gate.layer == 0:
            yield DropQueue(up_to_layer=1)
        yield Serve()


def test_drop_queue_spares_later_layers(tmp_path):
    # Queue at 1: 1.0 in flight, 1.1 and 2.0 waiting. Dropped up to layer 1: 1.1 goes; 2.0 follows at 10..20.
    # Layer 0 hits 1..3, attention 3..4, 1.0 late 10..12, attention 12..13, 2.0 late 20..22, head 23.
    seen = run(Dropper([(0, 0)], ahead=[(1, 0), (1, 1), (2, 0)]), tmp_path, [[[0], [0], [0]]], room=4, n_experts=2)
    assert seen.lane("h2d") == [("prefetch 1.0", 0, 10), ("prefetch 2.0", 10, 20)]
    assert seen.end_s == 23
    assert seen.prefetched() == {"issued": 3, "cancelled": 1, "late": 2}


class Again(Placed):
    """One copy handed over at a time; fetches it anew a second later, then asks for another."""

    prefetch_depth = 1

    def request_start(self, request, view):
        yield Prefetch(view.piece(1, 0))
        if self.started:
            yield Predict(1.0, "host", blocking=False, basis="assumed")  # time goes by, and nobody looks at the link
        yield Fetch(view.piece(1, 0))
        yield Prefetch(view.piece(1, 1))
        self.queued = view.queued()


@pytest.mark.parametrize("started", [True, False])
def test_a_prefetch_that_has_started_stays_one_of_those_handed_over(tmp_path, started):
    # In flight since 0 it fills the depth of 1 when it is fetched at 1. Fetched at 0 it has not started: it becomes
    # a demand copy, and the next prefetch may be handed over.
    policy = Again([(0, 0)])
    policy.started = started
    run(policy, tmp_path, [[[0], [0]]], room=3, n_experts=2)
    assert [(piece.layer, piece.expert) for piece in policy.queued] == [(1, 1)] * started


class Requeuer(Placed):
    """Two copies handed over at once; at the first gate it wants something else, and layer 1 no more."""

    prefetch_depth = 2

    def gate_done(self, gate, view):
        if gate.layer == 0:
            yield Requeue([(view.piece(2, 1), 1.0, ()), Prefetch(view.piece(2, 2), 0.5)], up_to_layer=1)
        yield Serve()


def test_requeue_replaces_the_queue_and_withdraws_copies_for_layers_passed(tmp_path):
    # 1.0 in flight 0..10, 1.1 handed over behind it, 2.0 waits. At 1 1.1 goes, 2.0 is wanted no more; 2.1 is handed
    # over and copies 10..20, then 2.2. Layer 0 hits 1..3, attention 3..4, 1.0 late 10..12, attention 13, 2.1 20..22.
    seen = run(Requeuer([(0, 0)], ahead=[(1, 0), (1, 1), (2, 0)]), tmp_path, [[[0], [0], [1]]], room=5, n_experts=3)
    assert seen.lane("h2d") == [("prefetch 1.0", 0, 10), ("prefetch 2.1", 10, 20), ("prefetch 2.2", 20, 30)]
    assert seen.prefetched() == {"issued": 4, "cancelled": 1, "late": 2, "wasted": 1}
    assert seen.end_s == 23


def test_a_copy_waits_for_the_last_computation_of_its_victim(tmp_path):
    # Room for one expert, 0 is in it. Gate at 1: expert 0 runs 1..3, then 1 takes its room: copy 3..13, run 13..15.
    class OneRoom(Placed):
        def victim(self, piece, speculative, view):
            return next((p for p in view.residents() if view.evictable(p)), None)

    seen = run(OneRoom([(0, 0)]), tmp_path, [[[0, 1]]], room=1)
    assert seen.lane("h2d") == [("demand 0.1", 3, 13)]
    assert seen.lane("gpu") == [("attention 0", 0, 1), ("expert 0.0", 1, 3), ("expert 0.1", 13, 15), ("head", 15, 16)]
    assert seen.log == [("gpu", 0, 0), ("evict", 0, 0), ("fetch", 0, 1), ("gpu", 0, 1)]


class Swapper(Placed):
    """Layer 0: run the resident expert, prefetch 1.0 into its room, think better of it and fetch 1.1 instead."""

    def gate_done(self, gate, view):
        yield RunGpu(gate.layer and 1)
        if gate.layer == 0:
            yield Evict(view.piece(0, 0))
            yield Prefetch(view.piece(1, 0))
            yield Cancel(view.piece(1, 0))
            yield Fetch(view.piece(1, 1))


def test_a_cancelled_copy_gives_its_room_back_with_what_the_room_still_waits_for(tmp_path):
    # Expert 0.0 (20 s here) runs 1..21 in the only room. The prefetch into it waits for 21 and is cancelled at 1;
    # the demand that takes the room instead must wait for 21 as well: copy 21..31, attention 21..22, expert 31..51.
    seen = run(Swapper([(0, 0)]), tmp_path, [[[0], [1]]], room=1, kernels={"expert": 20})
    assert seen.lane("h2d") == [("demand 1.1", 21, 31)]
    assert seen.lane("gpu") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 1, 21),
        ("attention 1", 21, 22),
        ("expert 1.1", 31, 51),
        ("head", 51, 52),
    ]


class EvictInFlight(Placed):
    """Evicts a prefetch in flight; whoever takes the room waits for the copy that cannot be aborted."""

    def gate_done(self, gate, view):
        if gate.layer == 0:
            yield Evict(view.piece(1, 0))
        yield Serve()


def test_room_of_a_prefetch_evicted_in_flight_is_free_when_its_copy_ends(tmp_path):
    # 1.0 in flight 0..10, evicted at 1. Room for one: the demand of 0.0 copies 10..20 anyhow (one link). Run 20..22.
    # Layer 1 asks at 23 for 1.0: its room was taken by 0.0 (used until 22): copy 23..33, run 33..35, head 36.
    class Only(EvictInFlight):
        def victim(self, piece, speculative, view):
            return next(iter(view.residents()))

    seen = run(Only(ahead=[(1, 0)]), tmp_path, [[[0], [0]]], room=1)
    assert seen.lane("h2d") == [("prefetch 1.0", 0, 10), ("demand 0.0", 10, 20), ("demand 1.0", 23, 33)]
    assert seen.end_s == 36
    assert seen.prefetched() == {"issued": 1, "wasted": 1}


def test_eviction_of_a_queued_prefetch_withdraws_it(tmp_path):
    # 1.1 in flight 0..10, 1.0 queued and evicted at 1: it never copies. 0.0 demanded at 1: 10..20.
    seen = run(EvictInFlight(ahead=[(1, 1), (1, 0)]), tmp_path, [[[0], [1]]], room=3)
    assert seen.lane("h2d") == [("prefetch 1.1", 0, 10), ("demand 0.0", 10, 20)]
    assert seen.prefetched() == {"issued": 2, "cancelled": 1, "useful": 1}


def test_harmful_prefetch(tmp_path):
    # Room for one expert, 0.0 is in it. At 0 the prefetch of 1.0 throws it out; layer 0 asks for 0.0 at 1: harm.
    class Greedy(Placed):
        def victim(self, piece, speculative, view):
            return next((p for p in view.residents() if view.evictable(p)), None)

    seen = run(Greedy([(0, 0)], ahead=[(1, 0)]), tmp_path, [[[0], [0]]], room=1)
    # 1.0: 0..10 in flight when 0.0 is demanded at 1, evicted at once; 0.0: 10..20, run 20..22; then 1.0 again 23..33.
    assert seen.lane("h2d") == [("prefetch 1.0", 0, 10), ("demand 0.0", 10, 20), ("demand 1.0", 23, 33)]
    assert seen.prefetched() == {"issued": 1, "wasted": 1, "harmful": 1}


class Queued(Placed):
    """Holds prefetches in its own queue and hands over one at a time."""

    prefetch_depth = 1

    def request_start(self, request, view):
        return [Prefetch(view.piece(*at), priority) for priority, at in enumerate(self.ahead)]

    def gate_done(self, gate, view):
        if gate.layer == 0:
            yield Cancel(view.piece(*self.ahead[0]))
        yield Serve()


def test_depth_one_hands_over_the_next_best_when_the_one_before_has_ended(tmp_path):
    # Asked 1.0, 1.1, 1.2 with priorities 0, 1, 2. 1.0 is handed over at once (nothing else was asked yet): 0..10.
    # It has started when it is cancelled at 1. Polling points: layer 0 is left at 1 (host), layer 1's gate is read at
    # 4, both before 10; layer 1 asks for 1.0, late: 10..12. Then the head: 12..13; polled at 13: 1.2 (best) 13..23.
    seen = run(Queued([(0, 0)], ahead=[(1, 0), (1, 1), (1, 2)]), tmp_path, [[[0], [0]]], room=4, n_experts=3)
    assert seen.lane("h2d") == [("prefetch 1.0", 0, 10), ("prefetch 1.2", 13, 23)]
    assert seen.prefetched() == {"issued": 2, "late": 1, "wasted": 1}


class QueuedBusy(Queued):
    """The same, with the link busy: the handed-over prefetch is still queued when it is cancelled."""

    def gate_done(self, gate, view):
        if gate.layer == 0:
            yield Fetch(view.piece(0, 0))
            yield RunGpu(0)
            yield Cancel(view.piece(1, 0))
        else:
            yield Serve()

    def request_start(self, request, view):
        return [Fetch(view.piece(0, 0)), *super().request_start(request, view)]


def test_a_cancelled_copy_makes_way_for_the_next_in_the_queue(tmp_path):
    # 0.0 demanded at 0: 0..10. 1.0 handed over behind it, cancelled at 1 before it starts; the next polling point hands
    # over 1.2, which copies 10..20. Expert 0.0 10..12, attention 12..13, layer 1 asks at 13 for 1.2: late, 20..22.
    seen = run(QueuedBusy(ahead=[(1, 0), (1, 1), (1, 2)]), tmp_path, [[[0], [2]]], room=4, n_experts=3)
    assert seen.lane("h2d")[:2] == [("demand 0.0", 0, 10), ("prefetch 1.2", 10, 20)]
    assert seen.prefetched()["cancelled"] == 1
    assert seen.end_s == 23


def test_dropping_the_queue_spares_what_has_been_demanded_since(tmp_path):
    # 1.0 in flight 0..10; 1.1 queued, demanded at 4 by Fetch (so: 10..20), then the queue is dropped. It must stay.
    class DropAfterFetch(Placed):
        def gate_done(self, gate, view):
            if gate.layer == 1:
                yield Fetch(view.piece(1, 1))
                yield DropQueue()
            yield Serve()

    seen = run(DropAfterFetch([(0, 0)], ahead=[(1, 0), (1, 1)]), tmp_path, [[[0], [1]]], room=3)
    assert seen.lane("h2d") == [("prefetch 1.0", 0, 10), ("prefetch 1.1", 10, 20)]
    assert seen.prefetched() == {"issued": 2, "late": 1, "wasted": 1}


def test_lru_over_two_tokens(tmp_path):
    # Room for 2, one layer of 3 experts, k = 1; tokens ask 0, 1, 0, 2, 1: misses 0, 1; hit 0; 2 replaces 1; 1 then 0.
    #   token 1: attention 0..1, copy 1..11, expert 11..13, head 14
    #   token 2: attention 14..15, copy 15..25, expert 27, head 28;  token 3 (hit): 29, 31, head 32
    #   token 4: attention 33, copy 33..43, expert 45, head 46;      token 5: 47, copy 47..57, 59, head 60
    seen = run(Lru(), tmp_path, [[[0]], [[1]], [[0]], [[2]], [[1]]], room=2)
    assert seen.lane("h2d") == [
        ("demand 0.0", 1, 11),
        ("demand 0.1", 15, 25),
        ("demand 0.2", 33, 43),
        ("demand 0.1", 47, 57),
    ]
    assert [entry for entry in seen.log if entry[0] == "evict"] == [("evict", 0, 1), ("evict", 0, 0)]
    assert seen.end_s == 60
    # First token at 14, four more by 60.
    assert seen.result.ttft_s.mean == 14
    assert seen.result.tpot_s.mean == pytest.approx(46 / 4)
    assert seen.classes("decode") == {"hit": 1, "miss": 3}


def test_dropping_the_queue_spares_a_demanded_copy_that_still_waits_for_room(tmp_path):
    # One room. 0.0 (20 s) runs 1..21 in it; 1.0 is prefetched into it (not before 21), demanded, and the queue dropped.
    class Hasty(Placed):
        def gate_done(self, gate, view):
            yield Serve()
            if gate.layer == 0:
                yield Evict(view.piece(0, 0))
                yield Prefetch(view.piece(1, 0))
                yield Fetch(view.piece(1, 0))
                yield DropQueue()

    seen = run(Hasty([(0, 0)]), tmp_path, [[[0], [0]]], room=1, kernels={"expert": 20})
    assert seen.lane("h2d") == [("prefetch 1.0", 21, 31)]
    assert seen.prefetched() == {"issued": 1, "late": 1}
