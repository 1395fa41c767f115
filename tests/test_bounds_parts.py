"""The lower bound where experts come, stay and run in parts."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from easy_numbers import EXPERT_BYTES, cost_of, execute_easy, figure, setup
from tiny_traces import from_rows

from policies.lru import Lru
from sim.bounds.path import Clocks
from sim.bounds.time_bound import lower_bound
from sim.policy.api import Policy
from sim.policy.decisions import Evict, Fetch, Prefetch, RunGpu
from traces.format.reader import Trace


class ByMatrix(Policy):
    """One expert fits. Its matrices leave one by one as they have been computed, and the next expert's follow them."""

    name = "by_matrix"
    traits = frozenset({"oracle"})

    def cut(self, view, layer):
        return view.matrices(layer % view.n_layers, 0, 4)

    def initial(self, view):
        return self.cut(view, 0)

    def gate_done(self, gate, view):
        yield RunGpu(0)
        for old, new in zip(self.cut(view, gate.layer), self.cut(view, gate.layer + 1), strict=True):
            yield Evict(old)
            yield Prefetch(new)


def test_only_part_of_an_expert_follows_the_last_copy(tmp_path):
    with Trace(from_rows(tmp_path / "t", [[[0], [0], [0]]] * 2, 1)) as trace:
        made = setup(ByMatrix(), trace, 1, copy_s=8.0, kernels={"expert": 4, "attention": 0, "head": 0})
        seen = execute_easy(made)
        # Copies of 8 s in quarters, an expert of 4 s in quarters, nothing else takes time. Prefill: 0.0 runs 0..4 and
        # leaves at 1, 2, 3, 4. 1.0 comes 1..9, its quarters run 4..6, 7..8 and 9..10. 2.0 comes 9..17, ends at 18.
        # Then a copy of 8 s per layer: 26, 34, 42.
        (times,) = seen.outcome.report.requests
        assert (times.first_token_s, times.last_token_s) == (18, 42)
        assert lower_bound(made).ttft_s == pytest.approx(2 * 8 + 1)


class HalfKept(Policy):
    """Experts 0 and 1 in turn, room for one and a half: the other half of each is kept."""

    name = "half_kept"
    traits = frozenset({"oracle"})

    def halves(self, view, expert):
        return [view.part(0, expert, 0.0, 0.5), view.part(0, expert, 0.5, 1.0)]

    def initial(self, view):
        return [*self.halves(view, 0), self.halves(view, 1)[0]]

    def gate_done(self, gate, view):
        (expert,) = gate.needs
        yield Fetch(self.halves(view, expert)[1])
        yield RunGpu(expert)
        yield Evict(self.halves(view, expert)[1])
        yield Prefetch(self.halves(view, 1 - expert)[1])


def test_room_for_half_an_expert_counts(tmp_path):
    with Trace(from_rows(tmp_path / "t", [[[i % 2]] for i in range(9)], 2)) as trace:
        made = setup(HalfKept(), trace, 1)
        made = replace(
            made, memory=msgspec.structs.replace(made.memory, expert_bytes=(EXPERT_BYTES + EXPERT_BYTES // 2,))
        )
        result = execute_easy(made).result
        # Half a copy of 5 s for each token, once the expert before has left, then 2 s; head and attention meanwhile.
        assert result.tpot_s.mean == 7
        assert lower_bound(made).tpot_s <= 7  # two whole ones fit, in favour of whoever holds parts
        made = replace(made, memory=msgspec.structs.replace(made.memory, expert_bytes=(EXPERT_BYTES,)))
        assert lower_bound(made).tpot_s > 7  # with room for one, 7 copies of 10 s in 8 tokens


def chained(cost, launches):
    """(host, stream) after these (launch, duration) from zero."""
    clocks = Clocks(0.0, 0.0)
    for launch, duration_s in launches:
        clocks.launch(launch, duration_s)
    return clocks.host_s, clocks.free_s


@pytest.mark.parametrize("kernels", [0, 1, 2, 3, 4, 5, 11])
@pytest.mark.parametrize("extra_s", [0.0, 0.5, 7.0])
@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_launching_an_expert_in_parts_is_never_quicker(kernels, extra_s, n, tmp_path):
    with Trace(from_rows(tmp_path / "t", [[[0, 1]]], 2)) as trace:
        for launch_s in (0.0, 0.25, 1.0, 5.0):
            made = setup(Lru(), trace, 2, launch_s=launch_s, kernels={"expert": kernels})
            made = replace(made, stack=msgspec.structs.replace(made.stack, per_expert_s=figure(extra_s)))
            cost = cost_of(made)
            whole_s = chained(cost, [(cost.launches.expert, cost.expert(1, "bf16").duration_s)])
            for matrices in (True, False):
                frac = 1 / n if matrices else 1.0
                part_s = cost.expert(1, "bf16", 1 / n, frac).duration_s
                launches = [cost.launches.part(frac, i == 0) if matrices else cost.launches.expert for i in range(n)]
                parts = [(launch, part_s) for launch in launches]
                parts_s = chained(cost, parts)
                assert parts_s[0] >= whole_s[0] - 1e-9
                assert parts_s[1] >= whole_s[1] - 1e-9
