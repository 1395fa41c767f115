"""DuoServe-MoE: both schedules by hand, its matrices, its predictor from training to replay.

Numbers of `easy_numbers`: copy of an expert 10 s, expert 2 s, attention 1 s, head 1 s; here a prediction takes 3 s.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from easy_numbers import EXPERT_BYTES, execute_easy, run, setup
from tiny_traces import from_rows, tiny_trace

from policies.common.mlp import save
from policies.duoserve import predictor as _duoserve
from policies.duoserve.policy import DuoServe
from policies.duoserve.predictor import (
    States,
    accuracy,
    affinity,
    blocks_of,
    counts_of,
    decode_positions,
    find,
    outputs_for,
    parameters,
    popularity,
    read,
    rows_of,
    width_of,
)
from sim.base.errors import BadInput
from sim.cli import moesim
from sim.options import RunSpec
from sim.profiles.models import load_model
from sim.run import execute, prepare
from sim.workload.learn_split import StoreSplit
from traces.format.bundled import DEFAULT, bundled_traces
from traces.format.reader import Trace

BUNDLED = pytest.mark.skipif(DEFAULT not in bundled_traces(), reason="the default trace is not in this checkout")


# -- preprocessing (section 4) ----------------------------------------------------------------------------------------

# Three tokens, two layers, three experts, k = 2.
IDS = np.array([[[0, 1], [1, 2]], [[0, 2], [1, 0]], [[0, 1], [2, 0]]])


def test_popularity_and_affinity_by_hand():
    """Equations 2 and 3. Expert 1 of layer 0 occurs in tokens 0 and 2; there layer 1 takes 1, 2 and 2, 0."""
    single, joint = counts_of([IDS[:2], IDS[2:]], 3)
    assert single.tolist() == [[3, 2, 1], [2, 2, 2]]
    assert popularity(single).tolist() == [[3 / 6, 2 / 6, 1 / 6], [2 / 6, 2 / 6, 2 / 6]]
    assert joint.tolist() == [[[2, 2, 2], [1, 1, 2], [1, 1, 0]]]
    assert affinity(joint).tolist() == [[[2 / 6, 2 / 6, 2 / 6], [1 / 4, 1 / 4, 2 / 4], [1 / 2, 1 / 2, 0]]]
    # An expert that never occurred has no affinities, not NaN.
    assert affinity(np.zeros((1, 2, 2), dtype=np.int64)).tolist() == [[[0, 0], [0, 0]]]


def test_the_state_vector_by_hand():
    """Equations 4 and 5, in units of 1/4096: ids from 1 in units of 1/E, then p_1, then rows 0 and 1 of A_{0,1}."""
    single, joint = counts_of([IDS], 3)
    states = States(single, joint, 2, rows=True)
    third = round(4096 / 3)
    expected = [third, round(8192 / 3), third, third, third, third, third, third, 1024, 1024, 2048]
    assert states.of(IDS[:1]).tolist() == [[expected]]
    assert width_of(2, 3, 2, True) == len(expected)
    whole = States(single, joint, 2, rows=False).of(IDS[:1])[0, 0]
    assert whole[5:].tolist() == [third, third, third, 1024, 1024, 2048, 2048, 2048, 0]
    assert width_of(2, 3, 2, False) == len(whole)


def test_history_is_padded_and_reads_layers_before_alone():
    rng = np.random.default_rng(0)
    ids = np.array([[rng.permutation(6)[:2] for _ in range(5)] for _ in range(20)])
    states = States(*counts_of([ids], 6), 2, rows=True)
    full = states.of(ids)
    assert (full[:, 0, 2:8] == 0).all()  # layer 1 knows layer 0 alone
    assert (full[:, :, :8] > 0).sum(axis=2).tolist() == [[2, 4, 6, 8]] * 20
    for layer in range(1, 5):
        other = ids.copy()
        other[:, layer:] = (other[:, layer:] + 1) % 6
        assert (states.of(other)[:, :layer] == full[:, :layer]).all()
    assert (states.of(ids[3:4]) == full[3:4]).all()


def test_the_published_network():
    # 7 layers: 86 -> 2048 -> 1024 -> 512 -> 256 -> 128 -> 64 -> 8 for Mixtral-8x7B's shape
    widths = (86, 2048, 1024, 512, 256, 128, 64, 8)
    assert parameters(32, 8, 2) == sum(a * b + b for a, b in pairwise(widths)) + 4 * sum(widths[1:-1])


# -- schedules (section 5) --------------------------------------------------------------------------------------------


class Told:
    """A predictor that says what a test wrote down: one list of experts for every layer but the first, per token."""

    def __init__(self, told):
        self.told, self.at = told, 0

    def named(self, ids):
        self.at += len(ids)
        return np.array(self.told[self.at - len(ids) : self.at])


@pytest.fixture
def told(monkeypatch):
    def make(predictions, **settings):
        monkeypatch.setattr("policies.duoserve.policy.outputs_for", lambda *_: None)
        monkeypatch.setattr("policies.duoserve.policy.read", lambda *_: Told(predictions))
        return DuoServe(**{"predictor": "told", "mlp_s": 3.0, "mlp_bytes": 0} | settings)

    return make


PROMPT = [[[0, 1], [2, 3]]]


def test_prefill_pipelines_all_experts_through_two_slots(told, tmp_path):
    """Section 5.2 and Figure 4(a): the first expert beside attention, a barrier, then the link never rests."""
    seen = run(told([]), tmp_path, PROMPT, room=2, n_experts=4)
    assert seen.lane("h2d") == [
        *((f"{'demand' if e else 'prefetch'} 0.{e}", 10 * e, 10 * e + 10) for e in range(4)),
        *((f"{'demand' if e else 'prefetch'} 1.{e}", 40 + 10 * e, 50 + 10 * e) for e in range(4)),
    ]
    assert seen.lane("gpu") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 10, 12),
        ("expert 0.1", 20, 22),
        ("attention 1", 22, 23),
        ("expert 1.2", 70, 72),
        ("expert 1.3", 80, 82),
        ("head", 82, 83),
    ]
    assert seen.log == [
        ("prefetch", 0, 0),
        ("fetch", 0, 1),
        ("gpu", 0, 0),
        ("evict", 0, 0),
        ("fetch", 0, 2),
        ("gpu", 0, 1),
        ("evict", 0, 1),
        ("fetch", 0, 3),
        ("evict", 0, 2),
        ("prefetch", 1, 0),
        ("evict", 0, 3),
        ("fetch", 1, 1),
        ("evict", 1, 0),
        ("fetch", 1, 2),
        ("evict", 1, 1),
        ("fetch", 1, 3),
        ("gpu", 1, 2),
        ("gpu", 1, 3),
    ]


def test_prefill_to_the_letter_copies_after_the_computation_before(told, tmp_path):
    """ "starts fetching the next expert ... once the first expert ... has completed the computation"."""
    seen = run(
        told([], prefill_fetch_gate="after_prev_compute", prefill_fetch_all=False),
        tmp_path,
        [[[0, 1], [0, 1]]],
        room=2,
        n_experts=4,
    )
    assert seen.lane("h2d") == [
        ("prefetch 0.0", 0, 10),
        ("demand 0.1", 12, 22),
        ("prefetch 1.0", 22, 32),
        ("demand 1.1", 34, 44),
    ]
    assert seen.end_s == 47


# Five steps: a prompt token (83 s, above), then four tokens. Per token: what the gates choose, what layer 1 was told.
STEPS = [*PROMPT, [[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [3, 0]], [[0, 1], [2, 3]]]
PREDICTED = [[[0, 1]], [[1, 3]], [[1, 2]], [[3, 2]]]
PREFILL_END_S = 83.0


def test_five_steps_of_decode(told, tmp_path):
    seen = run(told(PREDICTED), tmp_path, STEPS, room=2, n_experts=4)
    decode = seen.log[18:]
    first_layer = lambda a, b: [("fetch", 0, a), ("fetch", 0, b)]  # noqa: E731
    assert [entry for entry in decode if entry[0] != "evict"] == [
        # One of two right: the wrong one is replaced, then both compute.
        *first_layer(0, 1),
        ("gpu", 0, 0),
        ("prefetch", 1, 0),
        ("gpu", 0, 1),
        ("prefetch", 1, 1),
        ("fetch", 1, 2),
        ("gpu", 1, 0),
        ("gpu", 1, 2),
        # Both right: nothing is fetched.
        *first_layer(0, 1),
        ("gpu", 0, 0),
        ("prefetch", 1, 1),
        ("gpu", 0, 1),
        ("prefetch", 1, 3),
        ("gpu", 1, 1),
        ("gpu", 1, 3),
        # Both wrong.
        *first_layer(2, 3),
        ("gpu", 0, 2),
        ("prefetch", 1, 1),
        ("gpu", 0, 3),
        ("prefetch", 1, 2),
        ("fetch", 1, 3),
        ("fetch", 1, 0),
        ("gpu", 1, 3),
        ("gpu", 1, 0),
        # Both right, in another order: the gate's order decides which is computed first.
        *first_layer(0, 1),
        ("gpu", 0, 0),
        ("prefetch", 1, 3),
        ("gpu", 0, 1),
        ("prefetch", 1, 2),
        ("gpu", 1, 2),
        ("gpu", 1, 3),
    ]
    assert all(entry[0] == "evict" for entry in decode[:1])
    assert list(seen.outcome.report.counts.peak_bytes) == [2 * EXPERT_BYTES]
    # Token 1, from 83: attention 83..84, both copies to 104; predictor 104..107, Expert 1 104..106: the first prefetch
    # starts when both are over (synchronisation point 2), the second behind it. The gate of layer 1 asks at 109; the
    # prefetches end at 127 (synchronisation point 1), the wrong one is replaced 127..137, then both compute.
    copies = [span for span in seen.lane("h2d") if span[1] >= PREFILL_END_S]
    assert copies[:5] == [
        ("demand 0.0", 84, 94),
        ("demand 0.1", 94, 104),
        ("prefetch 1.0", 107, 117),
        ("prefetch 1.1", 117, 127),
        ("demand 1.2", 127, 137),
    ]
    computed = [span for span in seen.lane("gpu") if span[1] >= PREFILL_END_S]
    assert computed[:7] == [
        ("attention 0", 83, 84),
        ("expert 0.0", 104, 106),
        ("expert 0.1", 106, 108),
        ("attention 1", 108, 109),
        ("expert 1.0", 137, 139),
        ("expert 1.2", 139, 141),
        ("head", 141, 142),
    ]
    assert ("predict", 104, 107) in seen.lane("predictor")
    # Token 2 has nothing to replace: ten seconds less. Token 3 replaces two: ten more.
    ends = [end for what, _, end in seen.lane("gpu") if what == "head"]
    assert np.diff(ends).tolist() == [59, 49, 69, 49]
    assert seen.result.policy_stats == {
        "predictions": 4,
        "top_k_frac": 0.5,
        "at_least_one_frac": 0.75,
        "predicted_frac": 0.625,
    }


def test_synchronisation_point_2_waits_for_expert_1_where_the_predictor_is_faster(told, tmp_path):
    seen = run(told(PREDICTED, mlp_s=0.5), tmp_path, STEPS[:2], room=2, n_experts=4)
    copies = [span for span in seen.lane("h2d") if span[1] >= PREFILL_END_S]
    assert copies[2] == ("prefetch 1.0", 106, 116)  # Expert 1 ends at 106, the predictor at 104.5


def test_refetching_beside_the_computation(told, tmp_path):
    seen = run(told(PREDICTED, overlap_refetch=True), tmp_path, STEPS[:2], room=2, n_experts=4)
    computed = [span for span in seen.lane("gpu") if span[1] >= PREFILL_END_S]
    assert computed[4:] == [("expert 1.0", 127, 129), ("expert 1.2", 137, 139), ("head", 139, 140)]


def test_predicting_as_the_gate_has_chosen(told, tmp_path):
    """Beside the copies, 84 to 87, where the other reading begins when they end, at 104; Expert 1 ends at 106."""
    seen = run(told(PREDICTED, predict="gate"), tmp_path, STEPS[:2], room=2, n_experts=4)
    assert [span for span in seen.lane("predictor") if span[1] >= PREFILL_END_S] == [("predict", 84, 87)]
    copies = [span for span in seen.lane("h2d") if span[1] >= PREFILL_END_S]
    assert copies[2:4] == [("prefetch 1.0", 106, 116), ("prefetch 1.1", 116, 126)]


# -- every parameter does something -----------------------------------------------------------------------------------

BASE = {"predictor": "surrogate:0.5", "mlp_bytes": 0, "mlp_s": 3.0}
KNOBS = {
    "predictor": "surrogate:1",
    "slots": 3,
    "mlp_s": 9.0,
    "mlp_bytes": EXPERT_BYTES,
    "prefill_fetch_gate": "after_prev_compute",
    "prefill_fetch_all": False,
    "expert_order": "tokens",
    "decode_order": "gate",
    "overlap_refetch": True,
    "predict": "gate",
    "seed": 1,
}


def seen_with(tmp_path, room=6, **settings):
    path = tmp_path / "t"
    if not path.exists():
        tiny_trace(path, 3, 6, 2, prompt=4, outputs=6, levels=())
    with Trace(path) as trace:
        return execute_easy(setup(DuoServe(**BASE | settings), trace, room))


@pytest.mark.parametrize("knob", KNOBS)
def test_no_knob_is_dead(knob, tmp_path):
    default, other = seen_with(tmp_path), seen_with(tmp_path, **{knob: KNOBS[knob]})
    assert (default.log, default.end_s) != (other.log, other.end_s) or knob == "mlp_bytes"
    assert (default.result.memory != other.result.memory) == (knob in ("mlp_bytes", "slots"))


@pytest.mark.parametrize(
    ("model", "data", "shares"),
    [
        ("mixtral-8x7b", "orca", (0.6685, 0.9545)),
        ("mixtral-8x7b", "squad", (0.6023, 0.9231)),
        ("mixtral-8x22b", "orca", (0.5621, 0.9045)),
        ("mixtral-8x22b", "squad", (0.5416, 0.9031)),
    ],
)
def test_a_stand_in_is_as_right_as_table_3_says_of_the_served_model_and_its_texts(tmp_path, model, data, shares):
    """All four cells of Table 3: not the best of them for every model and data set."""
    with Trace(tiny_trace(tmp_path / "t", 3, 8, 2, outputs=200, n_requests=4, levels=())) as trace:
        made = setup(DuoServe(predictor=f"surrogate:{data}", mlp_bytes=0), trace, 2)
        made.policy.bind(SimpleNamespace(model_name=model, n_gpus=1, top_k=2, n_layers=0, n_experts=0))
        made.policy.learn(StoreSplit(trace, ()))
        ids = trace.experts[:].astype(int)
        named = made.policy._drawn(list(range(len(ids))), ids)
        figures = accuracy([named], [ids], 2)
    for name, share in zip(("top_k_frac", "any_frac"), shares, strict=True):
        assert figures[name] == pytest.approx(share, abs=4 * (share * (1 - share) / figures["n"]) ** 0.5)


@pytest.mark.parametrize(
    "settings", [{}, {"overlap_refetch": True}, {"decode_order": "gate"}, {"slots": 1}, {"slots": 5}]
)
@pytest.mark.parametrize(("gpus", "batch"), [(1, 1), (2, 1), (1, 3), (3, 2)])
def test_slots_suffice(settings, gpus, batch, tmp_path):
    """No more than the slots are ever taken, on several GPUs and with more experts needed than slots."""
    with Trace(tiny_trace(tmp_path / "t", 3, 8, 3, prompt=5, outputs=6, n_requests=8, levels=())) as trace:
        policy = DuoServe(**BASE | {"predictor": "surrogate:0.6"} | settings)
        seen = execute_easy(setup(policy, trace, 8, gpus=gpus, batch=batch))
    assert max(seen.outcome.report.counts.peak_bytes) <= settings.get("slots", 3) * EXPERT_BYTES


# -- memory (Table 2, section 6.3) ------------------------------------------------------------------------------------


@BUNDLED
def test_table_2_by_simulation():
    def peak(policy, **settings):
        spec = RunSpec(policy=policy, hw="a5000", precision="int4_g128", requests=1, set=settings)
        made = prepare(spec)
        try:
            return execute(made, bounds=False).result.peak_vram_bytes
        finally:
            made.close()

    size = load_model("mixtral-8x7b").expert_bytes("int4_g128")
    moesys, acc, duoserve = peak("moesys", layers=1), peak("on_demand"), peak("duoserve")
    assert moesys - acc == 6 * size
    assert moesys - peak("on_demand", slots=1) == 7 * size
    assert duoserve - acc == 300_000_000  # published: 0.28 GB (Table 2), around 300 MB (section 6.4)


# -- the trained predictor --------------------------------------------------------------------------------------------


@BUNDLED
def test_shipped_predictor_says_what_it_measured():
    """Table 3 on the bundled trace: the file's own figures, from the file, on a part of the test split."""
    path = find(DEFAULT)
    with Trace(bundled_traces()[DEFAULT]) as trace:
        predictor = read(path, trace.n_layers, trace.n_experts, trace.top_k)
        spans = rows_of(trace, "test", prefill=False)[:2]
        blocks = list(blocks_of(trace, spans))
        got = accuracy(map(predictor.named, blocks), blocks, trace.top_k)
        rows = decode_positions(trace)[spans[0][0] : spans[0][1]]
        assert (outputs_for(path, trace)[rows] == predictor.named(blocks[0])).all()
        assert predictor.facts["outputs_of"] == trace.sha256
    facts = predictor.facts
    assert (facts["model"], tuple(facts["widths"])) == (DEFAULT, _duoserve.WIDTHS)
    assert facts["test"]["n"] == 2219 * 31
    for key in ("top_k_frac", "any_frac", "share_frac"):
        assert got[key] == pytest.approx(facts["test"][key], abs=0.05)
    made = prepare(RunSpec(policy="duoserve", hw="rtx3090", requests=2))
    seen = execute(made, bounds=False).result
    made.close()
    assert seen.policy_stats["top_k_frac"] == got["top_k_frac"]
    assert seen.policy_stats["at_least_one_frac"] == got["any_frac"]
    assert "surrogate" not in seen.caveats


def test_no_predictor_for_a_trace_is_one_clear_line(tmp_path):
    path = tiny_trace(tmp_path / "mine.safetensors", levels=())
    with Trace(path) as trace, pytest.raises(BadInput, match=r"moesim train duoserve --trace .*mine"):
        execute_easy(setup(DuoServe(mlp_bytes=0), trace, 4))


def test_a_predictor_of_another_shape_is_refused(tmp_path):
    seeded = find("seeded")
    with pytest.raises(BadInput, match="4x6, k=2: the trace is 4x8"):
        read(seeded, 4, 8, 2)
    save(tmp_path / "other", {}, {"format": 99})
    with pytest.raises(BadInput, match="not a predictor of duoserve"):
        read(tmp_path / "other", 4, 6, 2)
    save(tmp_path / "other", {}, {"format": 1, "n_layers": 4, "n_experts": 6, "top_k": 2, "affinity": "rows"})
    with pytest.raises(BadInput, match="counts of another shape"):
        read(tmp_path / "other", 4, 6, 2)


def chain(path, n_requests=6, outputs=20):
    """Each layer's expert follows from the layer before: i, then i + 1, then i + 2; easy to learn."""
    rng = np.random.default_rng(0)
    rows = [[[(i + layer) % 6] for layer in range(3)] for i in rng.integers(0, 6, n_requests * outputs)]
    splits = ["test" if i == n_requests - 1 else "store" for i in range(n_requests)]
    return from_rows(path, rows, 6, [(1, outputs)] * n_requests, splits)


def test_training_on_the_command_line(tmp_path):
    pytest.importorskip("torch")
    trace = chain(tmp_path / "chain.safetensors")
    files = [tmp_path / name for name in ("a.safetensors", "b.safetensors", "c.safetensors")]
    plan = ["--epochs", "30", "--widths", "64,32", "--batch-size", "40", "--learning-rate", "0.02"]
    for seed, out in zip(("0", "0", "1"), files, strict=True):
        done = CliRunner().invoke(
            moesim, ["train", "duoserve", "--trace", str(trace), "--out", str(out), *plan, "--seed", seed]
        )
        assert done.exit_code == 0, done.output
        assert "at least one 100.00%" in done.output
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    with Trace(trace) as opened:
        facts = read(files[0], 3, 6, 1).facts
        assert facts["test"] == {"top_k_frac": 1.0, "any_frac": 1.0, "share_frac": 1.0, "n": 19 * 2}
        seen = execute_easy(setup(DuoServe(predictor=str(files[0]), mlp_bytes=0), opened, 2))
    assert seen.result.policy_stats["predicted_frac"] == 1.0
    assert not list(tmp_path.glob(".*"))


def test_a_file_may_hold_what_was_named_alone(tmp_path):
    """It serves the trace it was made for as the whole one does, and says so where it is asked about another."""
    pytest.importorskip("torch")
    trace, other = chain(tmp_path / "chain.safetensors"), chain(tmp_path / "other.safetensors", outputs=10)
    plan = ["--epochs", "2", "--widths", "64,32", "--batch-size", "40"]
    for name, more in (("whole", []), ("alone", ["--outputs-only"])):
        done = CliRunner().invoke(
            moesim, ["train", "duoserve", "--trace", str(trace), "--out", str(tmp_path / name), *plan, *more]
        )
        assert done.exit_code == 0, done.output
    assert (tmp_path / "alone").stat().st_size < (tmp_path / "whole").stat().st_size / 4
    with Trace(trace) as opened:
        of_file = [outputs_for(tmp_path / name, opened) for name in ("whole", "alone")]
        assert (of_file[0] == of_file[1]).all()
    with Trace(other) as opened, pytest.raises(BadInput, match="alone: it holds what was named for one trace"):
        execute_easy(setup(DuoServe(predictor=str(tmp_path / "alone"), mlp_bytes=0), opened, 2))
    prompts = from_rows(tmp_path / "p.safetensors", [[[0], [1], [2]]] * 4, 6, [(2, 1)] * 2, ["store", "test"])
    done = CliRunner().invoke(
        moesim, ["train", "duoserve", "--trace", str(prompts), "--out", str(tmp_path / "none"), "--outputs-only"]
    )
    assert "got 0 experts to name" in str(done.exception)
    assert not (tmp_path / "none").exists()


def test_one_network_for_each_layer(tmp_path):
    """Section 4.2 does not say: a file may hold one per layer, each trained on that layer alone, and is charged so."""
    pytest.importorskip("torch")
    trace, out, one = chain(tmp_path / "chain.safetensors"), tmp_path / "each", tmp_path / "one"
    plan = ["--epochs", "30", "--widths", "64,32", "--batch-size", "40", "--learning-rate", "0.02"]
    for path, nets in ((out, "per_layer"), (one, "one")):
        done = CliRunner().invoke(
            moesim, ["train", "duoserve", "--trace", str(trace), "--out", str(path), *plan, "--nets", nets]
        )
        assert done.exit_code == 0, done.output
        assert "at least one 100.00%" in done.output
    with Trace(trace) as opened:
        each = read(out, 3, 6, 1)
        assert (len(each.nets), len(read(one, 3, 6, 1).nets)) == (2, 1)
        ids = opened.experts[:].astype(np.int64)
        states = each.states.of(ids)
        for layer, net in enumerate(each.nets):
            assert (each.scores(ids)[:, layer] == net.scores(states[:, layer])).all()
        assert (each.nets[0].scores(states[:, 1]) != each.nets[1].scores(states[:, 1])).any()
    sees = SimpleNamespace(model_name="other", n_layers=3, n_experts=6, top_k=1)
    charged = [DuoServe(predictor=str(path)).predictor_bytes(sees) for path in (one, out)]
    assert charged == [4 * parameters(3, 6, 1), 2 * 4 * parameters(3, 6, 1)]
