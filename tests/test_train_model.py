"""The training forward is the Hugging Face forward, training learns, checkpoints come back as they were."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch (pip install 'moe-offload-sim[torch]')")
pytest.importorskip("transformers", reason="needs transformers (pip install 'moe-offload-sim[torch]')")
pytest.importorskip("tokenizers", reason="needs tokenizers (comes with transformers)")

from traces.train import model as models  # noqa: E402
from traces.train.fast import FastModel, dense_experts, losses, sorted_experts  # noqa: E402
from traces.train.tokens import save_tokens  # noqa: E402
from traces.train.trainer import Settings, Trainer, learning_rate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def tiny(name: str) -> models.Shape:
    shape = models.SHAPES[name]
    return dataclasses.replace(shape, layers=2 + shape.dense_layers, hidden=32, heads=2, expert_width=8)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen1.5-moe-a2.7b", "phi-3.5-moe", "deepseek-moe-16b"])
@pytest.mark.parametrize("experts", [dense_experts, sorted_experts])
def test_fast_forward_is_the_hugging_face_forward(name, experts):
    shape = tiny(name)
    model = models.build(shape, 64, seed=3).eval()
    ids = torch.randint(0, 64, (3, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=ids, output_router_logits=True)
        hidden, router_logits = FastModel(model, experts).hidden(ids)
        assert torch.allclose(model.lm_head(hidden), expected.logits, atol=2e-5)
    assert len(router_logits) == shape.moe_layers
    for own, theirs in zip(router_logits, expected.router_logits, strict=True):
        assert torch.allclose(own, theirs, atol=2e-5)


@pytest.mark.parametrize("experts", [dense_experts, sorted_experts])
def test_gradients_agree_with_hugging_face(experts):
    model = models.build(tiny("mixtral-8x7b"), 64, seed=3)
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids, output_router_logits=False).loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    FastModel(model, experts)(ids[:, :-1], ids[:, 1:])[0].backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            assert torch.allclose(parameter.grad, expected[name], atol=2e-5), name


def test_balance_loss_is_one_when_balanced_and_grows_with_imbalance():
    hidden, head, labels = torch.zeros(1, 4, 8), torch.zeros(16, 8), torch.zeros(1, 4, dtype=torch.long)
    even = torch.tensor([[5.0, 5, 0, 0], [0, 0, 5, 5], [5, 5, 0, 0], [0, 0, 5, 5]])[None]
    skewed = torch.tensor([[5.0, 5, 0, 0]] * 4)[None]
    _, balanced, load = losses(head, None, hidden, labels, even, 2)
    _, unbalanced, _ = losses(head, None, hidden, labels, skewed, 2)
    assert float(balanced) == pytest.approx(1.0)
    assert torch.allclose(load, torch.full((1, 4), 0.25))
    assert float(unbalanced) > 1.9


def test_learning_rate_warms_up_and_ends_low():
    assert learning_rate(0.0, 1.0) < 0.02 < learning_rate(0.01, 1.0) < learning_rate(0.02, 1.0) == 1.0
    assert learning_rate(1.0, 1.0) == pytest.approx(0.05)


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
    settings = Settings("toy", minutes=5, batch_tokens=512, length=16, max_steps=12, peak_lr=1e-2)
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

    again = Trainer(run_settings(max_steps=14), data, out)
    assert again.restore()
    assert again.step == 12
    for old, new in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(old, new)
        assert torch.equal(trainer.optimizer.state[old]["exp_avg"], again.optimizer.state[new]["exp_avg"])
    again.run()
    assert again.step == 14

    loaded = models.load(out)
    for (name, kept), (_, own) in zip(loaded.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(kept, own.detach().to(torch.bfloat16).float()), name


def test_checkpoint_splits_into_shards_and_names_what_is_missing(tmp_path, monkeypatch):
    from sim.base.errors import BadInput

    monkeypatch.setattr(models, "SHARD_BYTES", 20_000)
    model = models.build(models.SHAPES["toy"], 64, seed=1).eval()
    models.save(model, tmp_path / "run")
    shards = sorted((tmp_path / "run").glob("*.safetensors"))
    assert len(shards) > 1
    ids = torch.arange(10)[None]
    bf16 = {k: v.to(torch.bfloat16).float() for k, v in model.state_dict().items()}
    model.load_state_dict(bf16)
    with torch.no_grad():
        assert torch.equal(models.load(tmp_path / "run")(ids).logits, model(ids).logits)
    shards[0].unlink()
    with pytest.raises(BadInput, match="do not match"):
        models.load(tmp_path / "run")
    with pytest.raises(BadInput, match="did you mean 'mixtral-8x7b'"):
        models.get_shape("mixtral-8x7")
