"""The trained small model, routing itself, through the real machine: what lossless means, and what lossy costs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cli_help import moesim, simulated  # noqa: E402

from sim.base.errors import BadInput  # noqa: E402
from sim.options import RunSpec  # noqa: E402
from sim.real.devices import environment  # noqa: E402
from sim.real.devices.open import open_lanes  # noqa: E402
from sim.real.generate import open_checkpoint, speak, talk  # noqa: E402
from sim.real.run import execute_real  # noqa: E402
from sim.run import prepare  # noqa: E402
from traces.format.bundled import DEFAULT, bundled_traces  # noqa: E402
from traces.format.catalogue import open_trace  # noqa: E402
from traces.record.load import named  # noqa: E402

pytestmark = pytest.mark.skipif(DEFAULT not in bundled_traces(), reason="the default trace is not in this checkout")
FOLDER = Path(named("mixtral-8x7b-small"))
N = 6


def spec(policy, experts=96):
    return RunSpec(
        policy=policy,
        hw="rtx3090",
        model=str(FOLDER),
        trace=DEFAULT,
        precision="fp32",
        requests=1,
        cache=f"{experts}experts",
    )


def test_it_says_what_transformers_says():
    from traces.record.checkpoint import load

    lanes, weights = open_checkpoint(spec("lru"), FOLDER, "cpu")
    try:
        spoken = speak(spec("lru"), lanes, weights, N, free=True)
        forced = speak(spec("lru"), lanes, weights, N, free=False)
    finally:
        lanes.close()
    (tokens,) = spoken.tokens.values()
    with open_trace(DEFAULT) as trace:  # its prompt
        (number,) = spoken.tokens
        request = trace.requests[number]
        text = np.array(trace.token_ids[request.first_row : request.first_row + request.prompt_len + N - 1])
    net = load(FOLDER)
    prompt = torch.from_numpy(text[: request.prompt_len].astype(np.int64))[None]
    with torch.inference_mode():
        said = net.generate(prompt, max_new_tokens=N, do_sample=False, eos_token_id=-1)[0, request.prompt_len :]
        logits = net(torch.from_numpy(text.astype(np.int64))[None]).logits[0]
    assert tokens == said.tolist()
    target = torch.from_numpy(text[request.prompt_len :].astype(np.int64))
    expected = torch.nn.functional.cross_entropy(logits[request.prompt_len - 1 : -1].double(), target)
    assert np.mean(forced.nll) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.thorough
def test_lossless_policies_say_the_same_and_lossy_ones_have_a_price():
    rows = {
        row["policy"]: row for row in talk([spec(p) for p in ("fine_moe", "on_demand", "importance")], FOLDER, "cpu", N)
    }
    for name in ("fine_moe", "on_demand"):
        assert rows[name]["tokens_identical"]
        assert rows[name]["perplexity_change_frac"] == 0
    lossy = rows["importance"]
    assert lossy["lossy"]
    assert lossy["closed_loop_activations_changed_frac"] > 0
    assert lossy["open_loop_gate_mass_kept"] < 1
    assert lossy["perplexity"] != lossy["perplexity_resident"]


@pytest.mark.thorough
def test_emoe_with_all_experts_changes_nothing_and_with_fewer_it_does():
    """Rerouting itself is sound: what it costs is due to what is missing."""
    from msgspec.structs import replace

    kept = [replace(spec("emoe", 256), set={"experts_per_layer": n, "memory_bytes": 0}) for n in (8, 5)]
    whole, five = talk(kept, FOLDER, "cpu", N)
    assert whole["tokens_identical"]
    assert whole["perplexity_change_frac"] == 0
    assert whole["closed_loop_activations_changed_frac"] == 0
    assert five["closed_loop_activations_changed_frac"] > 0.1
    assert five["perplexity"] > five["perplexity_resident"]


@pytest.mark.thorough
def test_the_command_line_tells(capsys, tmp_path):
    words = "validate --checkpoint mixtral-8x7b-small --real=cpu --policy"
    said = moesim(capsys, *f"{words} lru --cache 64experts --hw rtx3090 --outputs 3 --out".split(), tmp_path / "t.json")
    assert said.code == 0, said.err
    assert "generates under 1 policies" in said.out
    assert (tmp_path / "t.json").is_file()
    missing = moesim(capsys, "validate", "--checkpoint", tmp_path, "--policy", "lru", "--hw", "l4").error
    assert "no config.json" in missing
    oracle = moesim(capsys, *f"{words} belady --hw l4 --outputs 2 --cache 96experts --json".split())
    (row,) = oracle.json["policies"]
    assert row["tokens_identical"]
    assert row["perplexity_change_frac"] == 0
    lanes, weights = open_checkpoint(spec("belady"), FOLDER, "cpu")
    try:
        with pytest.raises(BadInput, match="policy belady: it reads the future of a trace, a live model has none"):
            speak(spec("belady"), lanes, weights, 2, free=True)
        drawn = msgspec.structs.replace(spec("moepic"), predictor="surrogate:0.9")
        with pytest.raises(BadInput, match=r"--predictor, got surrogate:0\.9: a live model's own gates predict"):
            speak(drawn, lanes, weights, 2, free=True)
    finally:
        lanes.close()


def carried_out_with(checkpoint, policy="lru", experts=96):
    setup = prepare(spec(policy, experts))
    setup = setup.asking(3)
    try:
        return execute_real(setup, "cpu", checkpoint=checkpoint).result.measured
    finally:
        setup.close()


@pytest.mark.thorough
def test_a_run_may_compute_with_a_checkpoint():
    mine, other, drawn = carried_out_with(FOLDER), carried_out_with(FOLDER, "lfu", 64), carried_out_with(None)
    assert (mine.weights, drawn.weights) == ("mixtral-8x7b-small", "random")
    assert mine.output_digest == other.output_digest != drawn.output_digest


def test_a_checkpoint_is_the_model_of_a_real_run(capsys, tmp_path):
    run = ("--policy", "lru", "--hw", "rtx3090")
    assert "weights are what --real computes with" in simulated(capsys, *run, "--checkpoint", FOLDER).error
    real = (*run, "--real=cpu", "--checkpoint")
    assert "a checkpoint is its own model" in simulated(capsys, *real, FOLDER, "--model", "mixtral-8x7b").error
    assert "no config.json in it" in simulated(capsys, *real, tmp_path).error
    assert "routing shapes must agree" in simulated(capsys, *real, FOLDER, "--trace", "qwen1.5-moe-chat").error


def test_a_cpu_that_announces_too_much_is_found_out(monkeypatch):
    asked = []
    monkeypatch.setattr(environment, "bf16_on_cpu", lambda: asked.append(1))
    for flags, precision in ((["amx_bf16"], "fp32"), ([], "bf16"), (["amx_bf16"], "bf16")):
        monkeypatch.setattr(environment, "machine", lambda flags=flags: {"cpu_flags": flags})
        assert asked == []
        open_lanes("cpu", precision=precision).close()
    assert asked == [1]
