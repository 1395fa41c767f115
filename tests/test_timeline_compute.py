"""Prefill, batches, host, CPU experts, shared experts, dense layers and two GPUs, worked out by hand.

Numbers of `easy_numbers`: copy of an expert 10 s, expert 2 s (CPU: 5 s), a token's hidden state 1 s each way,
attention 1 s, head 1 s; gates and everything the host does take no time unless a test says so.
"""

from __future__ import annotations

import pytest
from easy_numbers import TOKEN_BYTES, run
from test_timeline_copies import Placed

from policies.gpu_only import GpuOnly
from policies.lru import Lru
from policies.on_demand import OnDemand
from sim.figures import Statistic
from sim.policy.api import Policy
from sim.policy.decisions import Fetch, Predict, Prefetch, RunCpu, RunGpu, Serve


def test_prefill_runs_the_union_of_experts_with_their_tokens(tmp_path):
    # Three prompt tokens choose 0 1, 1 2 and 1 0: expert 0 serves 2 tokens, 1 serves 3, 2 serves 1.
    # attention 0..1; copies 1..11, 11..21, 21..31 in ascending order; experts 11..13, 21..23, 31..33; head 33..34.
    seen = run(Lru(), tmp_path, [[[0, 1]], [[1, 2]], [[1, 0]]], room=3, lengths=[(3, 1)])
    assert seen.lane("gpu") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 11, 13),
        ("expert 0.1", 21, 23),
        ("expert 0.2", 31, 33),
        ("head", 33, 34),
    ]
    assert seen.tokens("gpu") == [
        ("attention 0", 3),
        ("gate 0", 3),
        ("expert 0.0", 2),
        ("expert 0.1", 3),
        ("expert 0.2", 1),
        ("head", 3),
    ]
    # Three unique experts missed; the six (token, expert) pairs beside them.
    tally = seen.outcome.report.counts.tally
    assert seen.classes("prefill") == {"miss": 3}
    assert sum(tally.hits["prefill"].tokens) == tally.n_executed == 6


def test_one_output_has_no_time_per_output_token(tmp_path):
    seen = run(Lru(), tmp_path, [[[0, 1]], [[1, 2]], [[1, 0]]], room=3, lengths=[(3, 1)])
    assert seen.result.ttft_s == Statistic(34, None, None, None, 1)
    assert seen.result.tpot_s == Statistic(None, None, None, None, 0)
    assert seen.result.throughput_tokens_per_s == pytest.approx(1 / 34)
    assert seen.result.hit_rate is None  # no decode iteration, so nothing was asked for in decode


def test_more_experts_than_room(tmp_path):
    # Room for 2, the prompt needs 0, 1 and 2. 0: copy 1..11, run 11..13; 1: copy 11..21, run 21..23;
    # 2 takes the room of 0, free since 13: copy 21..31, run 31..33.
    seen = run(Lru(), tmp_path, [[[0, 1]], [[1, 2]], [[1, 0]]], room=2, lengths=[(3, 1)])
    assert seen.lane("h2d") == [("demand 0.0", 1, 11), ("demand 0.1", 11, 21), ("demand 0.2", 21, 31)]
    assert seen.end_s == 34
    # Room for 1: 0: 1..11, 11..13; 1: 13..23, 23..25; 2: 25..35, 35..37; head 38.
    seen = run(Lru(), tmp_path, [[[0, 1]], [[1, 2]], [[1, 0]]], room=1, lengths=[(3, 1)])
    assert seen.lane("h2d") == [("demand 0.0", 1, 11), ("demand 0.1", 13, 23), ("demand 0.2", 25, 35)]
    assert seen.end_s == 38


def test_batch_of_two(tmp_path):
    # Requests A (rows 0, 1) and B (rows 2, 3), one prompt token and two outputs each; all experts on the GPU.
    #   prefill A: attention 0..1, expert 1..3, head 3..4;   prefill B: 4..5, 5..7, 7..8
    #   decode both: attention 8..9, experts 9..11 (0 for A) and 11..13 (1 for B), head 13..14
    rows = [[[0]], [[0]], [[1]], [[1]]]
    seen = run(GpuOnly(), tmp_path, rows, room=2, lengths=[(1, 2), (1, 2)], batch=2)
    assert seen.lane("gpu") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 1, 3),
        ("head", 3, 4),
        ("attention 0", 4, 5),
        ("expert 0.1", 5, 7),
        ("head", 7, 8),
        ("attention 0", 8, 9),
        ("expert 0.0", 9, 11),
        ("expert 0.1", 11, 13),
        ("head", 13, 14),
    ]
    # A: first token at 4, last at 14: TPOT 10. B starts at 4, first token at 8: TTFT 4, TPOT 6.
    assert seen.result.ttft_s.mean == 4
    assert seen.result.tpot_s.mean == 8
    assert seen.result.throughput_tokens_per_s == pytest.approx(4 / 14)


def test_batch_shares_an_expert(tmp_path):
    # Both decode tokens choose expert 1: one computation of two tokens, one unique hit, two token-weighted hits.
    seen = run(GpuOnly(), tmp_path, [[[0]], [[1]], [[0]], [[1]]], room=2, lengths=[(1, 2), (1, 2)], batch=2)
    assert seen.lane("gpu")[6:] == [("attention 0", 8, 9), ("expert 0.1", 9, 11), ("head", 11, 12)]
    assert ("expert 0.1", 2) in seen.tokens("gpu")
    assert seen.outcome.report.counts.tally.hits["decode"].tokens[0] == 2
    assert seen.classes("decode") == {"hit": 1}


def test_host_bound(tmp_path):
    # A launch takes 3 s of host time, a kernel 1 s on the GPU; reading the gate back costs 2 s; gate of one kernel.
    #   attention: launched 0..3, runs 3..4.   gate: launched 3..6, runs 6..7.   host reads it: 7..9
    #   expert of two kernels: launched 9..12 and 12..15; the first runs 12..13, the second 15..16
    #   head: launched 15..18, runs 18..19, read 19..21
    seen = run(GpuOnly(), tmp_path, [[[0]]], room=1, kernels={"gate": 1}, launch_s=3, sync_s=2)
    assert seen.lane("host") == [
        ("launch attention 0", 0, 3),
        ("launch gate 0", 3, 6),
        ("sync", 7, 9),
        ("launch expert 0.0", 9, 15),
        ("launch head", 15, 18),
        ("sync", 19, 21),
    ]
    assert [(what, start) for what, start, _ in seen.lane("gpu")] == [
        ("attention 0", 3),
        ("gate 0", 6),
        ("expert 0.0", 12),
        ("head", 18),
    ]
    assert seen.end_s == 21
    # Kernels ran 1 + 1 + 2 + 1 = 5 s; the other 16 s are the host's.
    assert seen.machine.parts_s() == [5, 0, 16, 0, 0, 0, 0]
    assert seen.result.bottleneck.resource == "host"


def test_a_read_waits_for_the_last_kernel_of_a_host_bound_operation(tmp_path):
    # The gate has two kernels: launched 3..6 and 6..9, the last one runs 9..10; so the host reads it at 10.
    # Expert: launched 10..16; head: launched 16..19, runs 19..20.
    seen = run(GpuOnly(), tmp_path, [[[0]]], room=1, kernels={"gate": 2}, launch_s=3)
    assert seen.lane("host")[2] == ("launch expert 0.0", 10, 16)
    assert seen.end_s == 20


def test_copy_launches_take_host_time(tmp_path):
    # Enqueueing a copy takes 0.5 s of the host: experts 0 and 1 are enqueued at 1.5 and 2.0.
    # copy 0: 1.5..11.5, copy 1: 11.5..21.5; expert 1: 21.5..23.5; head 24.5.
    seen = run(Lru(), tmp_path, [[[0, 1]]], room=2, copy_launch_s=0.5)
    assert seen.lane("host") == [("launch copy 0.0", 1, 1.5), ("launch copy 0.1", 1.5, 2)]
    assert seen.lane("h2d") == [("demand 0.0", 1.5, 11.5), ("demand 0.1", 11.5, 21.5)]
    assert seen.end_s == 24.5


def test_shared_expert_runs_while_the_host_reads_the_gate(tmp_path):
    # attention 0..1, gate at 1, shared expert 1..2; the copy is asked at 1, not at 2: 1..11; expert 11..13; head 14.
    seen = run(Lru(), tmp_path, [[[0]]], room=1, shared=True)
    assert seen.lane("gpu") == [
        ("attention 0", 0, 1),
        ("shared_expert 0", 1, 2),
        ("expert 0.0", 11, 13),
        ("head", 13, 14),
    ]
    assert seen.lane("h2d") == [("demand 0.0", 1, 11)]


def test_dense_layers_before_between_and_after(tmp_path):
    # Layers: dense, MoE 0, dense, MoE 1, dense. A dense layer is attention 1 s + FFN 1 s. All experts on the GPU.
    # dense 0..2, attention 3, expert 5, dense 7, attention 8, expert 10, dense 12, head 13.
    seen = run(GpuOnly(), tmp_path, [[[0], [0]]], room=2, n_experts=1, dense_layers=(0, 2, 4))
    assert seen.lane("gpu") == [
        ("dense_layer 0", 0, 2),
        ("attention 0", 2, 3),
        ("expert 0.0", 3, 5),
        ("dense_layer 1", 5, 7),
        ("attention 1", 7, 8),
        ("expert 1.0", 8, 10),
        ("dense_layer", 10, 12),
        ("head", 12, 13),
    ]


class OnCpu(Placed):
    """Runs expert 1 of layer 0 on the CPU, joined where told; the rest as the engine does."""

    traits = frozenset({"cpu", "timing"})
    join_layer = None

    def gate_done(self, gate, view):
        if gate.layer == 0:
            yield RunCpu(1, self.join_layer)
        yield Serve()


def test_cpu_expert_joins_at_its_own_layer(tmp_path):
    # Gate at 1. Hidden state down 1..2, CPU 2..7, result up 7..8. Expert 0 (there) 1..3.
    # Layer 1's attention needs the result: 8..9; experts 9..11 and 11..13; head 14.
    seen = run(OnCpu([(0, 0), (1, 0), (1, 1)]), tmp_path, [[[0, 1], [0, 1]]], room=4)
    assert seen.lane("d2h") == [("activations 0.1", 1, 2)]
    assert seen.lane("cpu") == [("expert 0.1", 2, 7)]
    assert seen.lane("h2d") == [("activations 0.1", 7, 8)]
    assert seen.lane("gpu") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 1, 3),
        ("attention 1", 8, 9),
        ("expert 1.0", 9, 11),
        ("expert 1.1", 11, 13),
        ("head", 13, 14),
    ]
    assert seen.machine.parts_s() == [9, 0, 0, 5, 0, 0, 0]  # waited 3..8 for the CPU
    assert seen.classes("prefill") == {"hit": 3, "cpu": 1}
    assert seen.result.d2h_bytes == TOKEN_BYTES


def test_cpu_expert_with_a_deferred_join(tmp_path):
    # Joined at layer 1: attention 3..4, experts 4..6 and 6..8 do not wait. The head waits.
    class Deferred(OnCpu):
        join_layer = 1

    seen = run(Deferred([(0, 0), (1, 0), (1, 1)]), tmp_path, [[[0, 1], [0, 1]]], room=4, cpu_s=8)
    # CPU of 8 s: down 1..2, CPU 2..10, up 10..11: the head waits until 11.
    assert seen.lane("gpu") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 1, 3),
        ("attention 1", 3, 4),
        ("expert 1.0", 4, 6),
        ("expert 1.1", 6, 8),
        ("head", 11, 12),
    ]
    assert seen.machine.parts_s() == [9, 0, 0, 3, 0, 0, 0]


def test_cpu_results_share_the_link_with_copies(tmp_path):
    # The token needs 0, 1, 2; 0 is there, 1 on the CPU (result ready at 7), 2 is fetched at 1: 1..11. The result
    # was asked for first but was not ready when the link was free, so it follows: 11..12. Head 12 at the earliest:
    # expert 2 11..13, head 13..14.
    seen = run(OnCpu([(0, 0)]), tmp_path, [[[0, 1, 2]]], room=3)
    assert seen.lane("h2d") == [("demand 0.2", 1, 11), ("activations 0.1", 11, 12)]
    assert seen.lane("gpu") == [("attention 0", 0, 1), ("expert 0.0", 1, 3), ("expert 0.2", 11, 13), ("head", 13, 14)]


def test_predictor_on_the_side_and_in_the_way(tmp_path):
    # A prefetch that waits for a 3 s search starts at 3; a blocking search holds the host: everything 3 s later.
    class Searching(Placed):
        blocking = False

        def request_start(self, request, view):
            ticket = yield Predict(3.0, "side", blocking=self.blocking)
            yield Prefetch(view.piece(1, 0), after=(ticket,))

    class Blocking(Searching):
        blocking = True

    # attention 0..1, expert 1..3, attention 3..4, copy 3..13, expert 13..15, head 16
    seen = run(Searching([(0, 0)]), tmp_path, [[[0], [0]]], room=2)
    assert seen.lane("predictor") == [("predict", 0, 3)]
    assert seen.lane("h2d") == [("prefetch 1.0", 3, 13)]
    assert seen.end_s == 16
    # attention 3..4, expert 4..6, attention 6..7, copy 3..13, expert 13..15, head 16
    seen = run(Blocking([(0, 0)]), tmp_path, [[[0], [0]]], room=2)
    assert seen.lane("gpu") == [
        ("attention 0", 3, 4),
        ("expert 0.0", 4, 6),
        ("attention 1", 6, 7),
        ("expert 1.0", 13, 15),
        ("head", 15, 16),
    ]


def test_two_gpus_compute_side_by_side(tmp_path):
    # Experts are dealt: 0 on GPU 0, 1 on GPU 1; the link between them takes 1 s each way. Both are there.
    # attention 0..1. Expert 0: 1..3 on GPU 0. Hidden state at GPU 1 at 2, expert 1: 2..4, back at 5 (its span holds the
    # way back). Head: waits for both, 5..6.
    # A decode token in the other router order: launched on GPU 1 first, but the streams do not wait for each other:
    # attention 6..7, expert 1: 8..11 on GPU 1, expert 0: 7..9 on GPU 0, head 11..12.
    seen = run(Placed([(0, 0), (0, 1)]), tmp_path, [[[0, 1]], [[1, 0]]], room=1, gpus=2, peer_s=1)
    assert seen.lane("gpu0") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 1, 3),
        ("head", 5, 6),
        ("attention 0", 6, 7),
        ("expert 0.0", 7, 9),
        ("head", 11, 12),
    ]
    assert seen.lane("gpu1") == [("expert 0.1", 2, 5), ("expert 0.1", 8, 11)]
    # Both GPUs' kernels take 2 + 8 + 2 s, the hidden states 4 s on the link between them.
    shares = {figure.figure: figure.share for figure in seen.result.provenance.figures}
    assert shares == {"gpu.kernel_floor_s": 12 / 16, "p2p.latency_s": 4 / 16}


def test_two_gpus_copy_side_by_side(tmp_path):
    # Both missing: two links, 1..11 each. Expert 0: 11..13; expert 1: 11..13 and 1 s back: 14; head 15.
    seen = run(Lru(), tmp_path, [[[0, 1]]], room=1, gpus=2, peer_s=1)
    assert seen.lane("h2d0") == [("demand 0.0", 1, 11)]
    assert seen.lane("h2d1") == [("demand 0.1", 1, 11)]
    assert seen.lane("gpu1") == [("expert 0.1", 11, 14)]
    assert seen.end_s == 15


def test_two_gpus_with_a_late_prefetch_on_the_second(tmp_path):
    # 1.1 lies on GPU 1 (dealt 0 1 | 0 1 ...): prefetched at 0 on link 1: 0..10. Layer 0 hits 0.0: 1..3; attention 3..4.
    # Layer 1 asks at 4 for 1.1: 10..12; layer 2's attention waits for it: 12..13, expert 2.0 (there) 13..15; head 16.
    seen = run(Placed([(0, 0), (2, 0)], ahead=[(1, 1)]), tmp_path, [[[0], [1], [0]]], room=2, gpus=2)
    assert seen.lane("h2d1") == [("prefetch 1.1", 0, 10)]
    assert seen.lane("gpu1") == [("expert 1.1", 10, 12)]
    assert seen.lane("gpu0")[2:] == [
        ("attention 1", 3, 4),
        ("attention 2", 12, 13),
        ("expert 2.0", 13, 15),
        ("head", 15, 16),
    ]


class Patient(Placed):
    """Runs what is on its way without asking for it to be hurried."""

    def gate_done(self, gate, view):
        yield from (RunGpu(expert) for expert in gate.needs)


def test_two_gpus_wait_for_a_queued_prefetch_on_the_second(tmp_path):
    # On link 1, 1.1 waits behind 3.1: 3.1 0..10, 1.1 10..20. Nobody hurries it: expert 1.1 20..22, attention 2: 22..23.
    seen = run(Patient([(0, 0), (2, 0)], ahead=[(3, 1), (1, 1)]), tmp_path, [[[0], [1], [0], [1]]], room=2, gpus=2)
    assert seen.lane("h2d1") == [("prefetch 3.1", 0, 10), ("prefetch 1.1", 10, 20)]
    assert seen.lane("gpu1") == [("expert 1.1", 20, 22), ("expert 3.1", 26, 28)]
    assert seen.lane("gpu0")[2:] == [
        ("attention 1", 3, 4),
        ("attention 2", 22, 23),
        ("expert 2.0", 23, 25),
        ("attention 3", 25, 26),
        ("head", 28, 29),
    ]


def test_a_demand_waits_for_room_that_another_gpus_link_decides(tmp_path):
    class Tight(Placed):
        def victim(self, piece, speculative, view):
            return next((p for p in view.residents() if p.gpu == piece.gpu and view.evictable(p)), None)

    seen = run(Tight([(0, 0)], ahead=[(1, 1)]), tmp_path, [[[0], [1], [0], [1]]], room=1, gpus=2)
    # Link 1: 1.1 0..10. GPU 0: 0.0 1..3, attention 3..4; GPU 1: 1.1 10..12; attention 2 12..13; 2.0 into 0.0's room:
    # copy 13..23, run 23..25; attention 3 25..26; 3.1 into 1.1's room: 26..36, run 36..38; head 38..39.
    assert seen.lane("h2d0") == [("demand 2.0", 13, 23)]
    assert seen.lane("h2d1") == [("prefetch 1.1", 0, 10), ("demand 3.1", 26, 36)]
    assert seen.end_s == 39


def test_arrivals_are_waited_for(tmp_path):
    # One token each: requests arrive at 0 and at 0.5 s (tiny traces); expert 0 on the GPU. A: 0..1, 1..3, 3..4.
    # B arrived at 0.5, starts at 4: TTFT 8 - 0.5. With service of 0.25 s kernels A is done at 1: B waits no more.
    from easy_numbers import execute_easy, setup
    from tiny_traces import tiny_trace

    from traces.format.reader import Trace

    path = tiny_trace(tmp_path / "t", n_layers=1, n_experts=2, top_k=1, n_requests=4, prompt=1, outputs=1)
    with Trace(path) as trace:
        seen = execute_easy(setup(GpuOnly(), trace, 2))  # test split: requests 1 and 3, arrivals 0.5 and 1.5
    # 1: idle until 0.5, attention 1.5, expert 3.5, head 4.5: TTFT 4. 3: from 4.5 to 8.5, arrived 1.5: TTFT 7.
    assert [(t.start_s, t.first_token_s) for t in seen.outcome.report.requests] == [(0.5, 4.5), (1.5, 8.5)]
    assert seen.result.ttft_s.mean == 5.5
    assert seen.machine.parts_s()[-1] == 0.5


class Halves(Policy):
    """Fetches an expert as two halves and computes each as it arrives."""

    name = "halves"

    def gate_done(self, gate, view):
        for expert in gate.needs:
            yield Fetch(view.part(gate.layer, expert, 0.0, 0.5))
            yield Fetch(view.part(gate.layer, expert, 0.5, 1.0))
            yield RunGpu(expert)


def test_halves_of_an_expert_are_computed_as_they_arrive(tmp_path):
    # Copies of 5 s: 1..6, 6..11. A kernel floor does not shrink with the half, so each half takes 2 s: 6..8, 11..13.
    seen = run(Halves(), tmp_path, [[[0]]], room=1)
    assert seen.lane("h2d") == [("demand 0.0", 1, 6), ("demand 0.0", 6, 11)]
    assert seen.lane("gpu") == [("attention 0", 0, 1), ("expert 0.0", 6, 8), ("expert 0.0", 11, 13), ("head", 13, 14)]


def test_on_demand_on_two_gpus(tmp_path):
    # Slots are per GPU; the four experts of the prompt are copied over two links: 1..11 and 11..21 on each.
    rows = [[[0, 1]], [[2, 3]]]
    seen = run(OnDemand(), tmp_path, rows, room=2, lengths=[(2, 1)], gpus=2)
    assert seen.lane("h2d0") == [("demand 0.0", 1, 11), ("demand 0.2", 11, 21)]
    assert seen.lane("h2d1") == [("demand 0.1", 1, 11), ("demand 0.3", 11, 21)]
    assert seen.end_s == 24
