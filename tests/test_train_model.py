"""The training forward is the Hugging Face forward, training learns, checkpoints come back as they were."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch (pip install 'moe-offload-sim[torch]')")
pytest.importorskip("transformers", reason="needs transformers (pip install 'moe-offload-sim[torch]')")
pytest.importorskip("tokenizers", reason="needs tokenizers (comes with transformers)")

from safetensors import safe_open  # noqa: E402

from sim.base.errors import BadInput  # noqa: E402
from tools.train import log  # noqa: E402
from tools.train import model as models  # noqa: E402
from tools.train.begin import grow  # noqa: E402
from tools.train.evaluate import evaluate  # noqa: E402
from tools.train.fast import FastModel, losses, route, turning_loss  # noqa: E402
from tools.train.muon import orthogonal  # noqa: E402
from tools.train.schedule import SelectionBias, rate_of_step  # noqa: E402
from tools.train.tokens import save_tokens  # noqa: E402
from tools.train.trainer import Settings, Trainer  # noqa: E402
from traces.format.header import REPEATING  # noqa: E402
from traces.record.checkpoint import load  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def tiny(name: str) -> models.Shape:
    shape = models.SHAPES[name]
    return dataclasses.replace(shape, layers=2 + shape.dense_layers, hidden=32, heads=2, expert_width=8)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen1.5-moe-a2.7b", "phi-3.5-moe", "deepseek-moe-16b"])
def test_fast_forward_is_the_hugging_face_forward(name):
    shape = tiny(name)
    model = models.build(shape, 64, seed=3).eval()
    ids = torch.randint(0, 64, (3, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=ids, output_router_logits=True)
        hidden, router_logits = FastModel(model).hidden(ids)
        assert torch.allclose(model.lm_head(hidden), expected.logits, atol=2e-5)
    assert len(router_logits) == shape.moe_layers
    for own, theirs in zip(router_logits, expected.router_logits, strict=True):
        assert torch.allclose(own, theirs, atol=2e-5)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen1.5-moe-a2.7b"])
def test_gradients_agree_with_hugging_face(name):
    model = models.build(tiny(name), 64, seed=3)
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids, output_router_logits=False).loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    FastModel(model)(ids[:, :-1], ids[:, 1:])[0].backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            assert torch.allclose(parameter.grad, expected[name], atol=2e-5), name


def test_balance_loss_is_one_when_balanced_and_grows_with_imbalance():
    hidden, labels = torch.zeros(1, 4, 8), torch.zeros(1, 4, dtype=torch.long)
    head = torch.nn.Linear(8, 16)
    even = torch.tensor([[5.0, 5, 0, 0], [0, 0, 5, 5], [5, 5, 0, 0], [0, 0, 5, 5]])[None]
    skewed = torch.tensor([[5.0, 5, 0, 0]] * 4)[None]
    balanced, unbalanced = (losses(head, hidden, labels, logits, 2) for logits in (even, skewed))
    assert float(balanced.balance) == pytest.approx(1.0)
    assert torch.allclose(balanced.load, torch.full((1, 4), 0.25))
    assert float(unbalanced.balance) > 1.9


def test_turning_loss_by_hand(monkeypatch):
    """Two experts, one each, neighbours against two apart: A A B B agrees two times of three, and never."""
    monkeypatch.setattr("tools.train.fast.FAR", 2)
    a, b, even = [50.0, 0.0], [0.0, 50.0], [1.0, 1.0]
    layer = torch.tensor([a, a, b, b, b, b, b, b]).softmax(-1)
    of_both = math.log((0 + 2) / 4) / 2 - math.log((2 + 3) / 6)  # no pair spans two sequences: A A B B, then B B B B
    assert float(turning_loss(layer[None], 2, 4)) == pytest.approx(of_both)
    assert float(turning_loss(layer[None, 4:], 1, 4)) == pytest.approx(0), "who never turns gains nothing"
    both = torch.stack([layer, torch.tensor([even] * 8).softmax(-1)])
    assert float(turning_loss(both, 2, 4)) == pytest.approx((of_both + math.log(2) / 2) / 2), "a mean over layers"


def test_a_loss_on_turning_keeps_tokens_with_the_experts_of_the_one_before(data, tmp_path):
    """The same short run with and without: neighbours are routed more alike than tokens further apart."""
    found = {}
    for coef in (0.0, 3.0):
        trainer = Trainer(run_settings(steps=25, length=32, turning_coef=coef), data, tmp_path / f"run{coef}")
        trainer.run()
        ids, labels = trainer.sampler.draw(512, 32)
        with torch.no_grad():
            found[coef] = float(trainer.fast(ids, labels, turning=True).turning)
        assert ("turning" in trainer.entries[0]) == (coef > 0)
    assert found[3.0] < found[0.0] - 0.1


def test_what_is_begun_from_a_model_that_was_taught_has_been_taught(data, tmp_path):
    """Also where the second run itself has no such loss, and is resumed."""
    for coef, labels in ((0.0, ()), (0.1, (REPEATING,))):
        first, second = tmp_path / f"first{coef}", tmp_path / f"second{coef}"
        Trainer(run_settings(steps=1, turning_coef=coef), data, first).run()
        assert log.labels_at(first) == labels
        for steps in (1, 2):
            trainer = Trainer(run_settings(steps=steps, begin_from=str(first)), data, second)
            assert trainer.restore() == (steps == 2)
            trainer.run()
            assert log.labels_at(second) == labels
    assert log.labels_at(tmp_path) == ()


@pytest.mark.parametrize("shape", [(6, 12, 30), (3, 30, 12), (16, 16)])
def test_an_orthogonal_step_keeps_directions_and_evens_out_sizes(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    u, _, vt = torch.linalg.svd(matrices, full_matrices=False)
    sizes = u.mT @ orthogonal(matrices) @ vt.mT  # diagonal: the same singular vectors
    diagonal = sizes.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(sizes, torch.diag_embed(diagonal), atol=1e-4)
    assert diagonal.max() < 1.3
    assert (diagonal > 0.6).float().mean() > 0.9  # the smallest of many may lag behind


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two tasks of a language that is easy to learn: id + 1 follows id, with the task's own start."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for task, low in (("low", 1), ("high", 32)):
        for split, length in (("train", 6000), ("heldout", 700)):
            runs = [np.arange(s, s + 8) % 30 + low for s in rng.integers(0, 30, length // 8)]
            ids = np.concatenate(runs).astype(np.uint16)
            ids[::100] = 0
            save_tokens(folder / f"{task}.{split}.u16.xz", ids)
    (folder / "tokens.json").write_text(json.dumps({"vocab": 64}), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


def run_settings(**changes: object) -> Settings:
    settings = Settings("toy", steps=12, batch_tokens=512, length=16, lr=1e-2)
    return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]


def test_training_learns_and_resumes_and_the_checkpoint_is_the_model(data, tmp_path):
    out = tmp_path / "run"
    trainer = Trainer(run_settings(), data, out)
    before = trainer.evaluate()
    trainer.run()
    after = trainer.entries[-1]["heldout"]
    assert all(after[task] < before[task] - 0.5 for task in ("low", "high"))
    log = json.loads((out / "training_log.json").read_text(encoding="utf-8"))
    assert (log["steps"], log["tokens_seen"]) == (12, 12 * 512)

    again = Trainer(run_settings(steps=14), data, out)
    assert again.restore()
    assert again.step == 12
    for old, new in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(old, new)
        assert torch.equal(trainer.optimizers[0].state[old]["exp_avg"], again.optimizers[0].state[new]["exp_avg"])
    again.run()
    assert again.step == 14

    loaded = load(out)
    for (name, kept), (_, own) in zip(loaded.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(kept, own.detach().to(torch.bfloat16).float()), name


def test_checkpoint_splits_into_shards_and_names_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "SHARD_BYTES", 20_000)
    model = models.build(models.SHAPES["toy"], 64, seed=1).eval()
    models.save(model, tmp_path / "run")
    shards = sorted((tmp_path / "run").glob("*.safetensors"))
    assert len(shards) > 1
    ids = torch.arange(10)[None]
    bf16 = {k: v.to(torch.bfloat16).float() for k, v in model.state_dict().items()}
    model.load_state_dict(bf16)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "run")(ids).logits, model(ids).logits)
    shards[0].unlink()
    with pytest.raises(BadInput, match="do not match"):
        load(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(BadInput, match="model_type, got 'llama': give a checkpoint of mixtral or phimoe"):
        load(tmp_path / "run")
    with pytest.raises(BadInput, match="did you mean 'mixtral-8x7b'"):
        models.get_shape("mixtral-8x7")


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen1.5-moe-a2.7b", "phi-3.5-moe", "deepseek-moe-16b"])
def test_a_grown_model_is_twice_as_wide_and_computes_the_same(name):
    shape = tiny(name)
    small = models.build(shape, 64, seed=3).eval()
    wide = models.build(dataclasses.replace(shape, hidden=64, heads=4), 64, seed=4).eval()
    with torch.no_grad():
        small.model.norm.weight.mul_(1.5)
        grow(small, wide, seed=5)
        ids = torch.randint(0, 64, (3, 11), generator=torch.Generator().manual_seed(1))
        expected, got = small(ids, output_router_logits=True), wide(ids, output_router_logits=True)
    assert torch.allclose(got.logits, expected.logits, atol=2e-5)
    for own, theirs in zip(got.router_logits, expected.router_logits, strict=True):
        assert torch.allclose(own, theirs, atol=2e-5)
    read = wide.model.layers[-1].self_attn.q_proj.weight
    assert not torch.allclose(read[:, :32], read[:, 32:], atol=1e-3)  # halves that were alike would stay alike


class Killed(Exception):
    """Stands for a signal that leaves no time to save."""


# in the constant part and in the decay, between two saves
@pytest.mark.parametrize(
    ("died_in", "optimizer"),
    [
        (6, "adamw"),
        pytest.param(12, "adamw", marks=pytest.mark.thorough),
        pytest.param(6, "muon", marks=pytest.mark.thorough),
    ],
)
def test_a_killed_run_goes_on_to_the_bits_of_one_that_was_not(data, tmp_path, monkeypatch, died_in, optimizer):
    settings = run_settings(
        steps=14,
        decay_steps=6,
        long_length=64,
        balance="bias",
        bias_step=0.01,
        aux_coef=0.02,
        optimizer=optimizer,
        save_every_s=-1,
    )
    whole = Trainer(settings, data, tmp_path / "whole")
    whole.run()
    with safe_open(tmp_path / "whole" / "resume" / "before_decay.bin", framework="pt") as stored:
        moved = (whole.bias.values - stored.get_tensor("bias")).abs().max()
    assert 0 < moved <= 3 * 0.01 / 4 + 1e-6  # 3 of 6 steps lie before the share of the decay at which it stands still
    assert whole.bias.values.abs().max() >= 2e-3

    out = tmp_path / "killed"
    first = Trainer(settings, data, out)
    step = first.train_step

    def train_step():
        if first.step == died_in:
            raise Killed
        first.settings.save_every_s = -1 if first.step % 3 == 0 else 1e9
        return step()

    monkeypatch.setattr(first, "train_step", train_step)
    with pytest.raises(Killed):
        first.run()
    torch.manual_seed(99)  # a new process begins elsewhere
    again = Trainer(dataclasses.replace(settings, save_every_s=-1), data, out)
    assert again.restore()
    assert 0 < again.step < died_in
    again.run()
    assert again.step == whole.step == 14
    for (name, old), new in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(old, new), name
    assert torch.equal(whole.bias.values, again.bias.values)
    curves = [[{k: v for k, v in entry.items() if k != "seconds"} for entry in t.entries] for t in (whole, again)]
    assert curves[0] == curves[1]


def test_a_run_that_goes_on_with_other_batches_says_so_and_counts_their_tokens(data, tmp_path):
    Trainer(run_settings(steps=4), data, tmp_path).run()
    again = Trainer(run_settings(steps=7, batch_tokens=256), data, tmp_path)
    assert again.restore()
    again.run()
    log = json.loads((tmp_path / "training_log.json").read_text(encoding="utf-8"))
    assert log["tokens_seen"] == 4 * 512 + 3 * 256
    assert [(phase["from_step"], phase["batch_tokens"]) for phase in log["phases"]] == [(0, 512), (4, 256)]
    with pytest.raises(BadInput, match="optimizer, got 'sgd': adamw or muon"):
        Trainer(run_settings(optimizer="sgd"), data, tmp_path)


def test_a_run_goes_on_from_before_its_decay_as_if_it_had_been_longer(data, tmp_path):
    short = run_settings(steps=10, decay_steps=4, balance="bias")
    longer = dataclasses.replace(short, steps=13)
    Trainer(short, data, tmp_path / "short").run()
    resume = tmp_path / "short" / "resume"
    (resume / "before_decay.bin").replace(resume / "state.bin")
    again = Trainer(longer, data, tmp_path / "short")
    assert again.restore()
    assert again.step == 6
    whole = Trainer(longer, data, tmp_path / "whole")
    for trainer in (again, whole):
        trainer.run()
    for old, new in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_bias_lifts_what_is_chosen_too_rarely_and_leaves_weights_to_the_scores():
    layer = models.moe_layers(models.build(tiny("mixtral-8x7b"), 64, seed=3))[0]
    rows = torch.randn(40, 32, generator=torch.Generator().manual_seed(2))
    logits, weights, ids = route(layer, rows, None)
    shares = logits.softmax(-1)
    for got, expected in zip(route(layer, rows, torch.zeros(8)), (logits, weights, ids), strict=True):
        assert torch.allclose(got, expected)
    bias = torch.zeros(8)
    bias[5] = 2.0  # above any share
    _, weights, ids = route(layer, rows, bias)
    assert (ids[:, 0] == 5).all()
    both = shares.gather(1, ids)
    assert torch.allclose(weights, both / both.sum(-1, keepdim=True))

    balance = SelectionBias(1, 4, 0.01)
    balance.update(torch.tensor([[0.7, 0.1, 0.2, 0.0]]))
    balance.update(torch.tensor([[0.2, 0.4, 0.2, 0.2]]))
    assert torch.allclose(balance.values, torch.tensor([[0.0, 0.0, 0.02, 0.02]]), atol=1e-7)
    assert torch.equal(balance.applied(0.4), balance.values)
    assert torch.allclose(balance.applied(0.55), balance.values / 2)
    assert not balance.applied(0.7).any()


def test_the_rate_of_a_step_depends_on_no_clock():
    rates = [rate_of_step(step, 1000, 200, 1.0) for step in range(1000)]
    assert rates[0] == 0.02
    assert rates[49] == rates[800] == 1.0
    assert rates[900] == pytest.approx(0.525)
    assert rates[999] == pytest.approx(0.05, abs=0.005)
    longer = [rate_of_step(step, 3000, 200, 1.0) for step in range(800)]
    assert longer == rates[:800]  # a longer run is the same run until the shorter one settles


def test_every_window_is_balanced_by_itself_where_asked():
    """Two windows of three tokens, two experts, top 1: each window wants the other expert; together they are even."""
    logits = torch.tensor([[5.0, 0.0]] * 3 + [[0.0, 5.0]] * 3)[None].requires_grad_()
    labels = torch.zeros(2, 3, dtype=torch.long)
    found = {
        by_window: losses(lambda hidden: hidden, torch.zeros(2, 3, 4), labels, logits, 1, by_window=by_window)
        for by_window in (False, True)
    }
    assert float(found[False].balance.detach()) == pytest.approx(1)
    sure = 1 / (1 + math.exp(-5))
    assert float(found[True].balance.detach()) == pytest.approx(2 * sure)
    assert found[True].load.tolist() == found[False].load.tolist() == [[0.5, 0.5]]
    (gradient,) = torch.autograd.grad(found[True].balance, logits)
    assert (gradient[0, :3, 0] > 0).all()
    assert (gradient[0, 3:, 0] < 0).all(), "each window is pushed towards the expert that it leaves idle"


def test_evaluation_counts_every_choice_and_knows_reuse_from_popularity():
    """Reuse is the next router on this layer's gate input, worked out here from the modules themselves."""
    model = models.build(tiny("qwen1.5-moe-a2.7b"), 64, seed=5).eval()
    stream = np.random.default_rng(1).integers(1, 64, 1100).astype(np.uint16)
    result = evaluate(model, {"a": stream, "b": stream[::-1].copy()}, 512)
    routing = result["routing"]
    assert routing["rows"] == 4 * 256
    assert result["predicted_tokens"] == {"a": 512, "b": 512}
    assert routing["chance_accuracy"] == round(4 / 60, 4)
    assert 4 / 60 <= routing["popularity_accuracy"] <= 1
    layers, seen = models.moe_layers(model), [[], []]
    for layer, rows in zip(layers, seen, strict=True):
        layer.mlp.register_forward_hook(lambda _m, args, _o, rows=rows: rows.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for ids in (stream, stream[::-1].copy()):
            windows = torch.from_numpy(np.stack([ids[at : at + 256] for at in (0, 256)]).astype(np.int64))
            model(input_ids=windows, use_cache=False)
        inputs, routers = [torch.cat(rows) for rows in seen], [models.router_of(layer).weight for layer in layers]
        chosen, guessed = ((inputs[at] @ routers[1].T).topk(4).indices for at in (1, 0))
    right = (chosen[:, :, None] == guessed[:, None, :]).any(-1).float().mean()
    assert routing["gate_reuse_accuracy"] == pytest.approx(float(right), abs=1e-3)
    counts = torch.bincount(chosen.flatten(), minlength=60)
    assert routing["most_load_by_layer"][1] == pytest.approx(float(counts.max() / counts.sum() * 60), abs=2e-3)
