"""FineMoE's ablations (arXiv 2502.05370, Figure 14a): what the searcher tracks instead of maps."""

from __future__ import annotations

import numpy as np
import pytest
from easy_numbers import execute_easy, run, setup
from tiny_traces import ALL, tiny_header, tiny_trace

from policies.fine_moe.policy import FineMoe
from policies.fine_moe.tracks import CountTrack, GateTrack, MapTrack
from sim.base.errors import BadInput
from sim.options import RunSpec
from sim.run import execute, prepare
from sim.workload.gate import Arrays
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import Layout, write_trace

NOT_OF_PROMPTS = Layout(decode_only=frozenset({"next_scores_1"}))


class Shape:
    n_layers, n_experts, top_k = 3, 4, 1


class Told:
    """An outlook that writes down what it is to choose by."""

    to_last = False

    def __init__(self):
        self.calls = []

    def choose(self, first, rows, similarities, least, threshold, joins=False):
        self.calls.append((first, rows.tolist(), similarities.tolist(), least, threshold, joins))


class Step:
    """A gate of one decode token, as a track sees it."""

    phase = "decode"

    def __init__(self, layer, ids, iteration):
        self.layer, self.ids, self.iteration = layer, np.array([ids]), iteration


class Asked:
    index = 7


class Pass:
    """An iteration of one decode token."""

    phase = "decode"

    class ranges:  # noqa: N801
        request, start_row, stop_row, context = Asked, 0, 1, 4

    ranges = [ranges]  # noqa: RUF012


def test_hit_counts_follow_the_request_most_alike():
    told = Told()
    track = CountTrack(Shape, 1, told)
    one, other = np.zeros((3, 4)), np.zeros((3, 4))
    one[:, 0], other[:, 3] = 5, 2  # one past request asked for expert 0 five times in each layer, another for 3 twice
    track._keep(one)
    track._keep(other)
    assert track.n_stored == 2

    # Nothing counted so far: both are equally alike, the first is taken. After expert 3 in layer 0 the other one is:
    # its counts are (2, 2, 2) against (1, 0, 0), a cosine of 1 / sqrt(3).
    assert track.start(Pass, Shape) == 1
    assert told.calls == [(0, [[5, 0, 0, 0]], [0], 1, False, False)]
    assert track.step(Step(0, [3], Pass), 1)
    assert told.calls[1] == (1, [[0, 0, 0, 2]], [pytest.approx(3**-0.5)], 1, False, False)
    assert not track.step(Step(2, [3], Pass), 3)  # behind the last layer
    assert len(told.calls) == 2

    # The request's own counts join when it ends: expert 3 once in layers 0 and 2.
    track.request_end(Asked)
    assert track._stored[2].reshape(3, 4)[:, 3].tolist() == [1, 0, 1]


def test_speculation_asks_the_gate_ahead_while_generating(monkeypatch):
    told = Told()
    track = GateTrack(Shape, 2, told)
    gate = Step(0, [1], Pass)
    gate.next_scores = lambda distance: np.array([[10.0, 20.0, distance, 0.0]])
    assert track.step(gate, 2)
    assert told.calls == [(2, [[10, 20, 2, 0]], [1], 1, False, False)]
    assert not track.step(gate, 3)
    gate.phase = "prefill"
    assert not track.step(gate, 2)
    assert len(told.calls) == 1


@pytest.mark.parametrize("recorded", [True, False])
def test_speculation_predicts_for_prompts_where_their_gates_are_recorded(recorded, tmp_path):
    experts = np.array([[[0], [1]], [[2], [1]], [[0], [1]]])
    layout = None if recorded else NOT_OF_PROMPTS
    scores = np.zeros((3, 2, 4))
    scores[:, 0, 1] = 1.0
    request = Request(0, 0, 2, 2, "", None, "test")
    path = write_trace(tmp_path / "t", tiny_header(2, 4, 1), [request], layout, experts=experts, next_scores_1=scores)
    with Trace(path) as trace:
        seen = execute_easy(setup(FineMoe(track="speculate", distance=1, search_overhead_s=0.0), trace, room=6))
    assert [entry[1:] for entry in seen.log if entry[0] == "prefetch"] == ([(1, 1)] if recorded else [])


@pytest.mark.parametrize(
    ("track", "needs", "kind"),
    [
        ("speculate", {"experts", "next_scores_3"}, GateTrack),
        ("hit_count", {"experts"}, CountTrack),
        ("map_t", {"experts", "scores", "embeddings"}, MapTrack),
    ],
)
def test_each_track_needs_no_more_than_it_reads(track, needs, kind):
    policy = FineMoe(track=track)
    assert policy.needs == needs
    setup = prepare(RunSpec(policy="fine_moe", hw="rtx3090", requests=2, set={"track": track}))
    outcome = execute(setup, bounds=False)
    assert isinstance(setup.policy._track, kind)
    assert outcome.result.policy_stats["predicted_frac"] > 0.25  # two of eight at random would be 0.25


def test_hit_counts_run_on_a_trace_of_experts_alone(tmp_path):
    rows = [[[0], [1]], [[0], [1]], [[1], [0]], [[1], [0]]]
    seen = run(FineMoe(track="hit_count", mode="online"), tmp_path, rows, room=2, lengths=[(1, 2), (1, 2)])
    assert seen.result.policy_stats["maps"] == 2


def test_gates_farther_ahead_than_recorded_are_refused():
    with pytest.raises(BadInput, match="gates of 3 layers ahead at most; lower it"):
        FineMoe(track="speculate", distance=4)


class OneByOne(Arrays):
    """Nothing is known of a layer before its gate has spoken."""

    def at_once(self, *_):
        return None


@pytest.mark.parametrize("world", [{"batch": 1}, {"batch": 3}, {"gpus": 2}])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"horizon": "distance", "prefill": "union"},
        {"variant": "code"},
        {"track": "map_t"},
        {"mode": "online", "capacity": 7},
        {"asynchronous": False, "horizon": "all", "prefill": "union"},
    ],
)
def test_gates_that_speak_one_by_one_change_nothing(settings, world, tmp_path, monkeypatch):
    """Live runs know no layer before its gate has spoken; recorded ones are searched for all layers at once."""
    trace = tiny_trace(tmp_path / "t.safetensors", 24, 60, 4, n_requests=4, prompt=3, outputs=5, levels=ALL)
    spec = RunSpec(policy="fine_moe", hw="a6000", trace=str(trace), model="qwen1.5-moe-a2.7b", set=settings, **world)
    seen = []
    for recorded in (True, False):
        if not recorded:
            monkeypatch.setattr("sim.run.Arrays", OneByOne)
        log: list[tuple[str, int, int]] = []
        result = execute(prepare(spec), log=lambda *entry, log=log: log.append(entry), bounds=False).result
        seen.append((log, {**result.to_dict(), "wall_s": None}))
    assert seen[0] == seen[1]
    assert seen[0][1]["policy_stats"]["searches"] > 0


# Five tokens of two layers; a gate gives all of its mass to one expert, an embedding has one component. Online: the
# store is empty at first. Room for three experts; prefetching one layer ahead; searches take no time.
FIVE = [[[0], [1]], [[0], [1]], [[2], [3]], [[2], [3]], [[0], [3]]]
MEANING = [0, 0, 1, 1, 0]


def test_five_steps_by_hand(tmp_path):
    experts = np.array(FIVE)
    scores = np.eye(4)[experts[:, :, 0]]
    request = Request(0, 0, 1, 5, "", None, "test")
    path = write_trace(
        tmp_path / "t",
        tiny_header(2, 4, 1),
        [request],
        None,
        experts=experts,
        scores=scores,
        embeddings=np.eye(4)[MEANING],
    )
    policy = FineMoe(mode="online", distance=1, search_overhead_s=0.0, capacity=8)
    with Trace(path) as trace:
        seen = execute_easy(setup(policy, trace, room=3))
    assert seen.log == [
        # The prompt's token: nothing stored, both fetched on demand. Its map joins the store.
        ("fetch", 0, 0),
        ("gpu", 0, 0),
        ("fetch", 1, 1),
        ("gpu", 1, 1),
        # Alike in meaning and in trajectory: 0 and 1 are predicted, and there.
        ("gpu", 0, 0),
        ("gpu", 1, 1),
        # Another meaning: no map is alike (similarity 0, delta 1), the first one says 0 and 1, wrongly. Expert 2 takes
        # the free room. For 3 somebody goes: 1 is predicted for this very layer, 0 has p x freq = 1 x 2, and 2, which
        # the map found gives nothing, 0 x 1.
        ("fetch", 0, 2),
        ("gpu", 0, 2),
        ("evict", 0, 2),
        ("fetch", 1, 3),
        ("gpu", 1, 3),
        # The meaning just stored: 2 is prefetched before layer 0. Of 0 and 3 of layer 1, both at p x freq = 0 now, the
        # lower one goes. Asked while it is on its way. Layer 1: the trajectory says 3, which is there.
        ("evict", 0, 0),
        ("prefetch", 0, 2),
        ("gpu", 0, 2),
        ("gpu", 1, 3),
        # The first meaning: 0 is prefetched; 1 (0 x 2) goes before 2 (0 x 2), having the lower id. Layer 0 went as with
        # the first map, so layer 1 is told 1, wrongly: 2 (0) goes before 3 (0). Its copy is under way at the end.
        ("evict", 1, 1),
        ("prefetch", 0, 0),
        ("gpu", 0, 0),
        ("evict", 0, 2),
        ("prefetch", 1, 1),
        ("gpu", 1, 3),
    ]
    # Misses take 10 + 2 s a layer, hits 2, attention and head 1 each: 27, 7 and 27 s. Then two prefetches that start
    # with the iteration: asked a second later, 9 s are left: 16 s each.
    assert seen.lane("h2d") == [
        ("demand 0.0", 1, 11),
        ("demand 1.1", 14, 24),
        ("demand 0.2", 35, 45),
        ("demand 1.3", 48, 58),
        ("prefetch 0.2", 61, 71),
        ("prefetch 0.0", 77, 87),
        ("prefetch 1.1", 87, 97),
    ]
    assert seen.end_s == 27 + 7 + 27 + 16 + 16
    assert seen.prefetched() == {"issued": 3, "late": 2, "wasted": 1}
    stats = seen.result.policy_stats
    assert (stats["predicted_frac"], stats["right_frac"], stats["maps"]) == (5 / 8, 5 / 8, 5)


def test_what_others_do_waits_for_prediction_and_prefetching(tmp_path):
    """Section 4.3, by hand: one expert of four in each of three layers; the gate a layer ahead is right, then wrong.

    The prompt's token misses three times: 3 x (1 + 10 + 2) + 1 = 40 s. The next one finds 0.0. Beside the forward pass:
    1.1 is copied from 41 to 51 s while 0.0 runs, 2.2 behind it until 61 s, so that the missing 2.1 comes at 71 s, runs
    until 73 s, and the head ends at 74 s. Synchronously: 0.0 runs only when 1.1 is there, from 51 s; 1.1 only when 2.2
    is, from 64 s; 2.1 is copied from 67 s, runs from 77 s, and the head ends at 80 s.
    """
    experts = np.array([[[0], [0], [0]], [[0], [1], [1]]])
    scores = np.zeros((2, 3, 4))
    scores[:, :, 0] = 1.0
    scores[1, 0], scores[1, 1] = [0, 1, 0, 0], [0, 0, 1, 0]
    path = write_trace(
        tmp_path / "t",
        tiny_header(3, 4, 1),
        [Request(0, 0, 1, 2, "", None, "test")],
        NOT_OF_PROMPTS,
        experts=experts,
        next_scores_1=scores,
    )
    seen = {}
    for asynchronous in (True, False):
        policy = FineMoe(track="speculate", distance=1, search_overhead_s=0.0, asynchronous=asynchronous)
        with Trace(path) as trace:
            seen[asynchronous] = execute_easy(setup(policy, trace, room=6))
    beside, waiting = seen[True], seen[False]
    assert [span for span in beside.lane("h2d") if span[1] >= 40] == [
        ("prefetch 1.1", 41, 51),
        ("prefetch 2.2", 51, 61),
        ("demand 2.1", 61, 71),
    ]
    assert beside.end_s == 74
    assert [span for span in waiting.lane("h2d") if span[1] >= 40] == [
        ("prefetch 1.1", 41, 51),
        ("prefetch 2.2", 54, 64),
        ("demand 2.1", 67, 77),
    ]
    assert [span for span in waiting.lane("gpu") if span[0].startswith("expert") and span[1] >= 40] == [
        ("expert 0.0", 51, 53),
        ("expert 1.1", 64, 66),
        ("expert 2.1", 77, 79),
    ]
    assert waiting.end_s == 80
    assert beside.classes("decode") == {"hit": 1, "late": 1, "miss": 1}
    assert waiting.classes("decode") == {"hit": 2, "miss": 1}  # no copy is late that is waited for


def test_a_wrong_prefetch_goes_first_once_its_layer_has_passed(tmp_path):
    """Section 4.5, by hand: highest 1 / (p x freq) leaves first, so an expert never visited does, however probable.

    One expert of four in each of three layers, the gate a layer ahead predicts, room for four. The prompt brings 0.0,
    1.0 and 2.0. The second token's gate of layer 0 names 1.3 (p = .75; 1.0 has .25), which takes the free room and is
    not asked for. The third asks for 0.1: 0.0 has 1/4 x 2, 1.0 has .25 x 2, 2.0 has 1 x 2 and 1.3 has .75 x 0.
    In release 2 a demand may take any of them, so that the same one goes.
    """
    experts = np.array([[[0], [0], [0]], [[0], [0], [0]], [[1], [0], [0]]])
    scores = np.zeros((3, 3, 4))
    scores[:, :, 0] = 1.0
    scores[1, 0] = [0.25, 0, 0, 0.75]
    path = write_trace(
        tmp_path / "t",
        tiny_header(3, 4, 1),
        [Request(0, 0, 1, 3, "", None, "test")],
        NOT_OF_PROMPTS,
        experts=experts,
        next_scores_1=scores,
    )
    for variant in ("paper", "code"):
        policy = FineMoe(track="speculate", distance=1, search_overhead_s=0.0, variant=variant)
        with Trace(path) as trace:
            seen = execute_easy(setup(policy, trace, room=4))
        moved = [entry for entry in seen.log if entry[0] in ("prefetch", "evict")]
        assert moved == [("prefetch", 1, 3), ("evict", 1, 3)]
        # Held at the end of the second of three iterations only.
        assert policy.stats()["unasked_experts"] == pytest.approx(1 / 3)


def same_prompts(path, ways):
    """The prompt twice, the first in the store: `ways[token][layer]` is the one expert of four that the token takes."""
    n, n_layers = len(ways), len(ways[0])
    experts = np.array([ways, ways]).reshape(2 * n, n_layers, 1)
    requests = [Request(0, 0, n, n, "", None, "store"), Request(1, n, n, n, "", None, "test")]
    return write_trace(
        path,
        tiny_header(n_layers, 4, 1),
        requests,
        None,
        experts=experts,
        scores=np.eye(4)[experts[:, :, 0]],
        embeddings=np.eye(4)[[*range(n), *range(n)]],
    )


@pytest.mark.parametrize(
    ("prefill", "prefetched", "classes", "maps"),
    [
        # The mean gives experts 0 and 2 of layer 0 the same, 1 and 3 of layer 1 too: the lower one is named.
        ("mean", [(0, 0), (1, 1)], {"late": 2, "miss": 2}, 2),
        ("union", [(0, 0), (0, 2), (1, 1), (1, 3)], {"late": 4}, 4),
        # Both by meaning; after the gate the second one alone, whose way led to 1.3.
        ("release1", [(0, 0), (0, 2), (1, 3)], {"late": 3, "miss": 1}, 4),
        ("none", [], {"miss": 4}, 2),
    ],
)
def test_what_is_predicted_for_a_prompt(prefill, prefetched, classes, maps, tmp_path):
    """Two prompts of the same two tokens, the first in the store: one goes through 0.0 and 1.1, the other 0.2 and 1.3.

    Prefetching one layer ahead: the first layer's experts by meaning as the pass begins, the second's after a gate.
    """
    with Trace(same_prompts(tmp_path / "t", [[0, 1], [2, 3]])) as trace:
        seen = execute_easy(setup(FineMoe(distance=1, search_overhead_s=0.0, prefill=prefill), trace, room=4))
    assert [entry[1:] for entry in seen.log if entry[0] == "prefetch"] == prefetched
    assert seen.classes("prefill") == classes
    assert seen.result.policy_stats["maps"] == maps


def test_what_the_text_leaves_open_is_taken_from_release_1_and_the_code_is_release_2(tmp_path):
    with Trace(tiny_trace(tmp_path / "t", 3, 4, 1, levels=ALL)) as trace:
        for settings, prefill, horizon in (
            ({}, "release1", "all"),
            ({"variant": "code"}, "none", "distance"),
            ({"asynchronous": False}, "release1", "distance"),
            ({"track": "speculate"}, None, "distance"),
        ):
            policy = FineMoe(**settings)
            execute_easy(setup(policy, trace, room=6))
            assert (policy.settings["prefill"], policy.settings["horizon"]) == (prefill, horizon)
    with pytest.raises(BadInput, match="a gate is asked about one layer; leave it out"):
        FineMoe(track="speculate", horizon="all")


def test_how_far_ahead_is_prefetched(tmp_path):
    """Sections 4.3 and 4.5, by hand: four layers of one expert each, the store has the way that the token goes.

    Copies take half a second, attention one, an expert two. 0.1 is named by meaning as the pass begins. The gate of
    layer 0, a second later, names 1.1, 2.1 and 3.1, of which two are handed over; or each gate names the next one.
    """
    path = same_prompts(tmp_path / "t", [[1] * 4])
    starts = {}
    for horizon in ("all", "distance"):
        policy = FineMoe(distance=1, search_overhead_s=0.0, horizon=horizon)
        with Trace(path) as trace:
            seen = execute_easy(setup(policy, trace, room=8, copy_s=0.5))
        assert [entry[1:] for entry in seen.log if entry[0] == "prefetch"] == [(layer, 1) for layer in range(4)]
        starts[horizon] = [start for _, start, _ in seen.lane("h2d")]
    assert starts == {"all": [0, 1, 1.5, 4], "distance": [0, 1, 4, 7]}


@pytest.mark.parametrize(
    ("asked", "evicted"),
    [
        # 2 takes the room of 0 (1 use against 2), 0 that of 2 (1), 2 that of 0 (2 and 2, or less). Then 2 was asked for
        # as often as 1, but loaded anew, and never found.
        ([0, 1, 1, 2, 0, 2, 0], {"visits": [0, 2, 0, 1], "hits": [0, 2, 0, 2], "since_loaded": [0, 2, 0, 2]}),
        # In the end 0 was asked for 5 times and found 3 times, 1 was 3 and 2; since 0 came back both were 3 times.
        ([0, 0, 1, 1, 1, 2, 0, 0, 0, 2], {"visits": [0, 2, 1], "hits": [0, 2, 1], "since_loaded": [0, 2, 0]}),
    ],
)
@pytest.mark.parametrize("evict", ["fine_moe", "lfu"])
def test_what_frequency_counts(evict, asked, evicted, tmp_path):
    """Section 4.5, by hand: room for two experts of one layer of which no map says anything, so that p is the same."""
    rows = [[[expert]] for expert in asked]
    for freq, leaving in evicted.items():
        policy = FineMoe(track="hit_count", mode="online", freq=freq, evict=evict, search_overhead_s=0.0)
        seen = run(policy, tmp_path, rows, room=2, lengths=[(1, len(rows))])
        assert [entry[2] for entry in seen.log if entry[0] == "evict"] == leaving


def test_a_stand_in_for_the_gates_is_right_as_often_as_told(tmp_path):
    """So FineMoE and what speculates can be compared at equal accuracy; results carry the label."""
    path = tiny_trace(tmp_path / "t", 6, 8, 2, n_requests=3, prompt=2, outputs=30, levels=())
    with Trace(path) as trace:
        for share, told in ((1.0, 1.0), (0.75, pytest.approx(0.75, abs=0.05))):
            policy = FineMoe(track="speculate", distance=2, predictor=f"surrogate:{share}")
            seen = execute_easy(setup(policy, trace, room=16))
            assert seen.result.policy_stats["predicted_frac"] == told
            assert "surrogate" in seen.result.caveats
    with pytest.raises(BadInput, match="with track=speculate; take one"):
        FineMoe(predictor="surrogate:0.85")
    with pytest.raises(BadInput, match="gate_reuse"):
        FineMoe(track="speculate", predictor="oracle")
