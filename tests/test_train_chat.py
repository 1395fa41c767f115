"""Requests as long as a chat log's: drawn, recorded with a tiny model, packed in fewer bits, and read again."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch (pip install 'moe-offload-sim[torch]')")
pytest.importorskip("transformers", reason="needs transformers (pip install 'moe-offload-sim[torch]')")
pytest.importorskip("tokenizers", reason="needs tokenizers (comes with transformers)")

from sim.base.errors import BadInput  # noqa: E402
from tools.train import model as models  # noqa: E402
from tools.train.chat import Cut, draw_lengths, draw_requests  # noqa: E402
from tools.train.pack import Cost, Gates, coded, pack  # noqa: E402
from traces.format.check import check_trace  # noqa: E402
from traces.format.layout import U4_SQUARE  # noqa: E402
from traces.format.reader import Trace  # noqa: E402
from traces.record.load import Settings, Source  # noqa: E402
from traces.record.recorder import record  # noqa: E402
from traces.synth.chat_lengths import load_lengths  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
WHOLE = Cut(1, 1, 1 << 20, 1 << 21)


def test_lengths_have_the_quantiles_of_the_log_and_keep_the_limits():
    log = load_lengths()
    assert log.prompt_tokens == sorted(log.prompt_tokens)
    assert log.shares == sorted(log.shares)
    drawn = np.array(draw_lengths(log, WHOLE, 20_000, np.random.default_rng(0)))
    for column, quantiles in ((0, log.prompt_tokens), (1, log.output_tokens)):
        for share in (0.25, 0.75, 0.9):
            assert np.quantile(drawn[:, column], share) == pytest.approx(quantiles[log.shares.index(share)], rel=0.05)
    halves = np.array(draw_lengths(log, Cut(4, 2, 300, 400), 20_000, np.random.default_rng(0)))
    assert (halves[:, 0] == np.minimum(np.maximum(1, np.round(drawn[:, 0] / 4)), 300))[drawn[:, 0] > 8].mean() > 0.9
    assert halves[:, 0].max() == 300
    assert halves.sum(axis=1).max() == 400


def held_out() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: np.append(rng.integers(1, 64, 3000), 0).astype(np.uint16) for name in ("a", "b", "c")}


def test_requests_have_tasks_splits_arrivals_and_held_out_prompts():
    heldout = held_out()
    found = draw_requests(heldout, load_lengths(), Cut(20, 20, 200, 250), 6, 30, 0.5, seed=3)
    assert [request["split"] for request in found] == ["store"] * 6 + ["test"] * 30
    for split, each in (("store", 2), ("test", 10)):
        tasks = [request["task"] for request in found if request["split"] == split]
        assert {task: tasks.count(task) for task in tasks} == dict.fromkeys("abc", each)
    tasks = [request["task"] for request in found]
    assert tasks != sorted(tasks)
    at_s = [request["arrival_s"] for request in found]
    assert at_s == sorted(at_s)
    assert at_s[0] == 0
    assert np.diff(at_s).mean() == pytest.approx(2, rel=0.5)
    for request in found:
        text = " ".join(map(str, heldout[request["task"]].tolist()))
        assert " ".join(map(str, request["token_ids"])) in text
    with pytest.raises(BadInput, match="lower --max-prompt"):
        draw_requests({"a": np.array([5, 0], np.uint16)}, load_lengths(), WHOLE, 1, 1, 0.5, seed=3)


@pytest.mark.parametrize(
    ("name", "gates"),
    [
        ("mixtral-8x7b", Gates.ALL),
        ("phi-3.5-moe", Gates.ALL),
        ("deepseek-moe-16b", Gates.ALL),
        ("deepseek-moe-16b", Gates.HIGHEST),
        ("deepseek-moe-16b", Gates.HIGHEST_IN_FOUR_BITS),
    ],
)
def test_a_packed_recording_says_what_the_full_one_says_within_its_bits(tmp_path, name, gates):
    bits = gates.bits
    shape = models.SHAPES[name]
    shape = replace(shape, layers=5 + shape.dense_layers, hidden=32, heads=2, expert_width=8)
    model = models.build(shape, 64, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    run = tmp_path / "run"
    models.save(model, run)
    facts = {
        "settings": {"shape": name, "hidden": 32, "seed": 1, "begin_from": "x/old"},
        "parameters": 9,
        "seconds": 1.0,
    }
    phases = [{"from_step": 0}, {"from_step": 3, "turning_coef": 0.1 if bits == 4 else 0.0}]
    log = {**facts, "tokens_seen": 7, "hardware": "none", "torch": "2", "phases": phases}
    (run / "training_log.json").write_text(json.dumps(log), encoding="utf-8")
    routing = {"dead_experts": 0, "gate_reuse_accuracy": 0.5, "popularity_accuracy": 0.5}
    routing["gate_reuse_accuracy_by_distance"] = {"1": 0.5}
    judged = {"loss": {"model": {"all": 1.0}}, "predicted_tokens": {"a": 1}, "routing": routing}
    (run / "evaluation.json").write_text(json.dumps(judged), encoding="utf-8")
    chat = draw_requests(held_out(), load_lengths(), Cut(100, 40, 20, 40), 1, 3, 0.5, seed=2)
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(r) + "\n" for r in chat), encoding="utf-8")
    full, out = tmp_path / "full.safetensors", tmp_path / "packed.safetensors"
    record(Settings(Source(str(run)), full, prompts=tmp_path / "chat.jsonl", batch=3, device="cpu", dtype="float32"))
    costs = pack(full, run, out, "Lengths of nobody.", gates)
    if name == "mixtral-8x7b":
        with pytest.raises(BadInput, match="--gate-bits 4, got a recording of 8 experts: it is for more than 16"):
            pack(full, run, out, "", Gates.HIGHEST_IN_FOUR_BITS)
        with pytest.raises(BadInput, match="--highest, got a recording of 8 experts"):
            pack(full, run, out, "", Gates.HIGHEST)

    with Trace(full) as whole, Trace(out) as packed:
        assert check_trace(packed) == []
        assert packed.header.model_source.startswith("small model with the routing shape of " + name)
        assert ", begun from old (" in packed.header.model_source
        assert packed.header.labels == (("trained-to-repeat",) if bits == 4 else ())
        assert ("trained to repeat themselves" in packed.header.kind) == (bits == 4)
        assert packed.header.tokenizer.startswith("byte-level BPE of 64 tokens")
        assert "Lengths of nobody. Fewer bits: scores: mean error" in packed.header.notes
        assert [r.arrival_s for r in packed.requests] == [r["arrival_s"] for r in chat]
        assert [r.outputs for r in packed.requests] == [r["output_tokens"] for r in chat]
        assert [r.split for r in packed.requests] == ["store", "test", "test", "test"]
        n, scale = whole.n_tokens, (whole.score_scale, packed.score_scale)
        assert (whole.experts == packed.experts).all()
        assert packed.levels_prefill >= {"weights", "scores", "next_scores_1", "embeddings"}
        np.testing.assert_allclose(whole.embeddings(0, n), packed.embeddings(0, n), rtol=2e-3, atol=1e-4)
        for level, top in (("scores", {6: 63, 4: 15}[bits]), ("next_scores_1", 15)):
            read = [
                (t.scores if level == "scores" else lambda a, b, t=t: t.next_scores(1, a, b))(0, n)
                for t in (whole, packed)
            ]
            error = np.abs(read[0] / scale[0] - read[1] / scale[1])
            assert error.max() <= 1.5 * 2 / top + 0.25 / top**2  # half a step, and one for a tie
            assert error.max() == pytest.approx(costs[level].largest)
        off = {"rtol": 2**-7, "atol": 2**-24} if gates.highest or name == "phi-3.5-moe" else {"atol": 0.06}
        np.testing.assert_allclose(packed.weights(0, n), whole.weights(0, n), **off)
        n_near = (packed.next_scores(1, 0, n)[:, :-1] > 0).sum(axis=-1).max()
        assert n_near <= (2 * packed.top_k if gates.highest else packed.n_experts)
        row = packed.requests[1].first_decode_row
        far = [t.next_scores(3, row, row + 1)[0, 0] / s for t, s in zip((whole, packed), scale, strict=True)]
        best = int(np.argmax(far[0]))
        assert far[1][best] == pytest.approx(far[0][best], abs=0.07)
        with pytest.raises(BadInput, match="decode rows"):
            packed.shared_scores(0, 1)


def test_a_cost_is_counted_by_hand():
    cost = Cost("next_scores_1", 1)
    cost.add(np.array([[[0.36, 0.30, 0.34]], [[0.25, 0.50, 0.25]]]))
    # 15 * sqrt(p) is 9, 8.2, 8.7 and 7.5 (8, half to even), 10.6, 7.5: codes 9 8 9 and 8 11 8
    errors = [0, 0.30 - 64 / 225, 81 / 225 - 0.34, 64 / 225 - 0.25, 121 / 225 - 0.5, 64 / 225 - 0.25]
    assert cost.total == pytest.approx(sum(errors))
    assert cost.largest == pytest.approx(max(errors))
    assert (cost.named, cost.others) == (2, 0)
    cost.add(np.array([[[0.0001, 0.0002, 0.0]]]))  # three codes of 0: the lowest id is taken
    assert (cost.named, cost.others) == (3, 1)


def test_codes_are_lowered_where_a_tie_would_name_another_expert():
    # codes 9 9 8 of 0.34, 0.36, 0.30 would name expert 0
    assert coded(np.array([[[0.34, 0.36, 0.30]]]), U4_SQUARE, 1).tolist() == [[[8, 9, 8]]]
    assert coded(np.array([[[0.36, 0.34, 0.30]]]), U4_SQUARE, 1).tolist() == [[[9, 9, 8]]]
    rng = np.random.default_rng(0)
    for top_k in (1, 2, 4):
        scores = rng.dirichlet(np.full(8, 2.0), (400, 3))
        codes = coded(scores, U4_SQUARE, top_k)
        best = [np.argsort(-v.astype(float), axis=-1, kind="stable")[..., :top_k] for v in (scores, codes)]
        assert (best[0] == best[1]).all()
        assert (np.abs(codes - 15 * np.sqrt(scores)) <= 0.5 + top_k).all()
