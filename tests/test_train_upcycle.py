"""A model of another shape begins where one of few large experts stopped: exactly, where nothing must be left out."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch", reason="needs torch (pip install 'moe-offload-sim[torch]')")
pytest.importorskip("transformers", reason="needs transformers (pip install 'moe-offload-sim[torch]')")

from sim.base.errors import BadInput  # noqa: E402
from tools.train import begin as beginning  # noqa: E402
from tools.train import model as models  # noqa: E402
from tools.train.begin import begin, fits, grown, upcycle  # noqa: E402

FEW = models.Shape("mixtral", layers=3, experts=4, top_k=2, hidden=32, expert_width=16, heads=2)
MANY = models.Shape("qwen2_moe", layers=2, experts=12, top_k=3, hidden=32, expert_width=6, heads=2, shared_width=16)


def built(shape: models.Shape, seed: int):
    return models.build(shape, 64, seed).eval()


def logits(model):
    ids = torch.randint(0, 64, (3, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


@pytest.fixture
def gates_as_they_were(monkeypatch):
    monkeypatch.setattr(beginning, "NOISE", 0.0)
    monkeypatch.setattr(beginning, "SHARPER", 1.0)


def test_halves_of_experts_that_all_run_are_the_experts(gates_as_they_were):
    old = built(dataclasses.replace(FEW, top_k=4), 3)
    new = built(dataclasses.replace(FEW, experts=8, top_k=8, expert_width=8), 4)
    upcycle(old, new, seed=5)
    assert torch.allclose(logits(new), logits(old), atol=2e-5)


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_what_runs_for_every_token_stands_for_all_columns(gates_as_they_were, dense_layers):
    old = built(FEW, 3)
    with torch.no_grad():
        for layer in old.model.layers:  # experts that are one: whichever columns are taken of each, they add up
            for matrices in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                matrices.copy_(matrices[:1].expand_as(matrices).clone())
    new = built(dataclasses.replace(MANY, layers=3, experts=4, top_k=4, expert_width=16, dense_layers=dense_layers), 4)
    new.config.rms_norm_eps = old.config.rms_norm_eps
    for norm in (module for module in new.modules() if hasattr(module, "variance_epsilon")):
        norm.variance_epsilon = old.config.rms_norm_eps
    upcycle(old, new, seed=5)
    assert torch.allclose(logits(new), logits(old), atol=2e-5)


def test_a_model_twice_as_wide_of_another_shape_begins_from_the_grown_one():
    old, shape = built(FEW, 3), dataclasses.replace(MANY, hidden=64, heads=4)
    wide = grown(old, seed=5).eval()
    assert torch.allclose(logits(wide), logits(old), atol=2e-5)
    expected, got, same = built(shape, 4), built(shape, 6), built(MANY, 4)
    upcycle(wide, expected, seed=5)
    begin(old, got, seed=5)
    for (name, own), theirs in zip(got.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(own, theirs), name
    begin(old, same, seed=5)
    assert not fits(same, built(MANY, 6))
    with pytest.raises(BadInput, match="hidden size, from 32 to 96"):
        begin(old, built(dataclasses.replace(MANY, hidden=96, heads=6), 4), seed=5)


def test_layers_are_taken_evenly_and_slices_of_one_expert_part():
    old, new = built(FEW, 3), built(MANY, 4)
    upcycle(old, new, seed=5)
    for index, source in enumerate((0, 1)):  # of three, floor(i * 3 / 2)
        layer, before = new.model.layers[index], old.model.layers[source]
        assert torch.equal(layer.self_attn.o_proj.weight, before.self_attn.o_proj.weight)
        assert not layer.self_attn.q_proj.bias.any()  # the old model has none
        gate = layer.mlp.experts.gate_up_proj
        assert torch.equal(gate[5, :6], before.mlp.experts.gate_up_proj[1, 6:12])  # the second slice of expert 1
        rows, parents = layer.mlp.gate.weight, before.mlp.gate.weight
        assert not torch.allclose(rows[1], rows[5], atol=1e-3)
        near = torch.nn.functional.cosine_similarity(rows[:, None], parents[None], dim=-1).argmax(dim=1)
        assert near.tolist() == [0, 1, 2, 3] * 3


def test_what_begins_from_what():
    old = built(FEW, 3)
    assert fits(old, built(MANY, 4))
    assert not fits(old, built(dataclasses.replace(FEW, hidden=64, heads=4), 4))  # twice as wide: grow
    assert not fits(built(MANY, 3), built(MANY, 4))
    with pytest.raises(BadInput, match="hidden size, from 32 to 64"):
        upcycle(old, built(dataclasses.replace(MANY, hidden=64, heads=4), 4), seed=5)
    with pytest.raises(BadInput, match="at least as many layers"):
        upcycle(old, built(dataclasses.replace(MANY, layers=4), 4), seed=5)
    with pytest.raises(BadInput, match="none of them shared"):
        upcycle(built(MANY, 3), built(FEW, 4), seed=5)
