"""Simulation and reality side by side: what is compared, what is refused, and a wrong profile that is found out."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest

pytest.importorskip("torch")

from cli_help import moesim, simulated
from real_world import lanes_and_weights, tiny_setup

from calibrate import in_situ, in_situ_file, in_situ_fit, profile
from calibrate.derive import Table
from sim.profiles.hardware import load_hardware
from sim.real import validate as worlds
from sim.real.validate import Case, HostPays

WIDE = """
schema: 1
id: tiny-wide
name: Tiny with large experts
source: tests/test_validate.py
hidden_size: 256
n_layers: 4
n_experts: 4
top_k: 2
expert_intermediate_size: 2048
n_heads: 4
n_kv_heads: 2
head_dim: 16
vocab_size: 128
native_precision: fp32
gate: {score: softmax, renormalised: true}
"""
EXPERT_BYTES = 3 * 256 * 2048 * 4


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, its trace, and a profile measured on this machine's lanes just now."""
    folder = tmp_path_factory.mktemp("validate")
    setup = tiny_setup(folder, "lru", 4)
    setup.close()
    (folder / "wide.yaml").write_text(WIDE)
    samples = in_situ.run(
        "cpu",
        str(folder / "wide.yaml"),
        "fp32",
        folder,
        rounds=1,
        prompts=(1, 4, 16),
        cases=(("lru", 1.0), ("lru", 0.25), ("llama_cpp", 0.5), (in_situ.SWAPS, 0.25)),
    )
    in_situ_file.save(samples, folder / "me.lanes.json.gz")
    facts = {
        "id": "me",
        "name": "CPU backend",
        "kind": "cpu",
        "dtype": "float32",
        "cpu_dtype": "float32",
        "threads": [1],
        "vram_bytes": 1 << 34,
        "n_sms": 1,
        "l2_bytes": 1 << 20,
        "bus": (4, 16),
        "command": "test",
        "machine": samples.environment["machine"],
    }
    data = in_situ_fit.apply(profile.build(Table([]), facts), in_situ_file.load(folder / "me.lanes.json.gz"), "me")
    profile.write(folder / "me.yaml", data)
    mine = load_hardware(folder / "me.yaml")
    rate, rest_s = mine.h2d.bandwidth_bytes_per_s.value, sum(c.seconds[0] for c in mine.curves.operations.values())
    plain = min(rate, EXPERT_BYTES / (4 * rest_s))  # copies dominate, however busy the machine was just now
    hundredth = max(plain / 100, 1.01e6)  # no slower than a profile may say
    for name, value in (("plain", plain), ("half", plain / 2), ("hundredth", hundredth)):  # wrong ones
        wrong = msgspec.to_builtins(mine)
        wrong["h2d"]["bandwidth_bytes_per_s"] |= {"value": value, "low": None, "high": None}
        profile.write(folder / f"{name}.yaml", wrong)
    return folder


def validate(world, *policies):
    """The words of a command about the model with large experts."""
    policy = [word for name in policies or ("lru",) for word in ("--policy", name)]
    run = ("--model", world / "wide.yaml", "--trace", world / "tiny.safetensors", "--precision", "fp32", "--real=cpu")
    return ("validate", *policy, "--cache", "4experts", *run)


def compared(world, hw="me.yaml", policy="lru", experts=4, **fields):
    setup = tiny_setup(world, policy, experts, hw=str(world / hw))
    setup.close()
    spec = msgspec.structs.replace(setup.spec, model=str(world / "wide.yaml"), **fields)
    from sim.run import prepare

    setup = prepare(spec)
    with lanes_and_weights(setup) as (lanes, weights):
        case = Case(spec)
        case.predict()
        case.carry_out(lanes, weights)
        found = worlds.compared(case)
    setup.close()
    return found


def test_a_comparison_has_everything(world):
    found = compared(world, policy="belady")
    assert found["decisions"]["identical"], found["decisions"]
    assert found["decisions"]["n"] > 100
    assert found["bytes"]["h2d_bytes"]["error_frac"] == found["bytes"]["asked_bytes"]["error_frac"] == 0
    assert found["classes"]["miss_rate"]["error_frac"] == 0
    assert {"gpu", "h2d", "host"} <= set(found["lanes"])
    assert {
        "gpu: expert",
        "gpu: attention",
        "gpu: gate",
        "gpu: head",
        "h2d: demand",
        "host: launch expert",
        "host: sync",
        "host: policy code",
    } <= set(found["operations"])
    for row in found["operations"].values():
        assert row["off_s"] == pytest.approx(row["predicted_s"] - row["measured_s"])
    assert found["plus_minus_frac"] > 0
    assert found["policy_code_s"]["predicted"] > 0
    json.dumps(found)


def test_what_both_ways_cost_each_other_is_measured_in_swaps(world):
    samples = in_situ_file.load(world / "me.lanes.json.gz")
    assert len(samples.swaps["up"]) >= len(samples.swaps["down"]) > 100
    assert all(0 <= beside <= took for pairs in samples.swaps.values() for took, beside in pairs)
    assert any(beside > 0 for _, beside in samples.swaps["down"])
    samples.swaps = dict.fromkeys(("up", "down", "expert"), [(1.0, 0.9)] * 40)  # whatever this machine had to spare
    data = in_situ_fit.apply(msgspec.to_builtins(load_hardware(world / "me.yaml")), samples, "me")
    profile.write(world / "swaps.yaml", data)
    terms = load_hardware(world / "swaps.yaml").contention
    unpack = load_hardware(world / "me.yaml").curves.operations["unpack"]
    assert unpack.at == (2.0, 4.0, 8.0)
    for term in (terms.h2d_slowdown_by_d2h, terms.d2h_slowdown_by_h2d, terms.gpu_slowdown_by_d2h):
        assert (term.source, term.ref, term.n) == ("measured", "lanes", 39)
    assert load_hardware(world / "me.yaml").d2h.bandwidth_bytes_per_s.source == "measured"
    found = compared(world, policy="mixtral_offloading", experts=8)
    assert found["decisions"]["identical"]
    assert found["bytes"]["d2h_bytes"]["error_frac"] == 0
    assert "d2h: write_back" in found["operations"]


def test_policy_code_costs_what_it_costs_beside_the_lanes(world):
    samples = in_situ_file.load(world / "me.lanes.json.gz")
    assert len(samples.policy) == 4, "one pair for each whole run"
    assert all((run_s > 0) == (alone_s > 0) for run_s, alone_s in samples.policy), "a plain cache runs no code"
    assert any(alone_s > 0 for _, alone_s in samples.policy)
    made = in_situ_file.Samples(policy=[(3.0, 1.0), (5.0, 1.0)])
    assert in_situ_fit.policy_slowdown(made)["value"] == 3.0, "8 s for 2"
    assert in_situ_fit.policy_slowdown(in_situ_file.Samples()) is None

    class Machine:
        now_s = 10.0

    spent: dict = {}
    payer = HostPays(Machine, spent, 3.0)
    payer.policy("victim", 0, 1.0, 1.5)
    assert (Machine.now_s, payer.total_s, spent) == (12.0, 2.0, {("host", "policy code"): 2.0})
    curves = load_hardware(world / "me.yaml").curves
    assert curves.policy_slowdown.source == "measured"


@pytest.fixture
def simulated_truth(world, monkeypatch):
    """Stands for the machine: the simulation with the right profile, so that no noise blurs what a wrong one does."""
    from sim.run import prepare

    def truth(setup, lanes, weights):
        mine = prepare(msgspec.structs.replace(setup.spec, hw=str(world / "plain.yaml")))
        mine = dataclasses.replace(mine, requests=setup.requests)
        try:
            found = worlds.simulated(mine)
        finally:
            mine.close()
        return dataclasses.replace(found, result=msgspec.structs.replace(found.result, device="stand-in"))

    monkeypatch.setattr(worlds, "carried_out", truth)


def test_half_the_bandwidth_fails_on_the_command_line_and_names_the_copy_lane(world, capsys, simulated_truth):
    args = (*validate(world), "--repeat", 2, "--hw")
    right = moesim(capsys, *args, world / "plain.yaml", "--tolerance", 0.2)
    assert right.code == 0, right.out
    wrong = moesim(capsys, *args, world / "half.yaml", "--tolerance", 0.2)
    assert wrong.code == 1
    assert "wrong: lru, cache 4experts: TPOT is off by +" in wrong.out
    assert "most of the difference is on lane h2d (h2d: demand: " in wrong.out


@pytest.mark.thorough
def test_repeats_outputs_and_an_interrupt(world, capsys, monkeypatch):
    more = ("--tolerance", 100, "--outputs", 3, "--hw", world / "me.yaml")
    args = (*validate(world, "lru", "lfu", "on_demand"), *more)
    data = moesim(capsys, *args, "--repeat", 3, "--json").json
    assert [len(c["repeats"]["tpot_s"]) for c in data["comparisons"]] == [3, 3, 3]
    assert data["comparisons"][0]["decode_tokens"] == 2
    for c in data["comparisons"]:
        assert c["tpot_s"]["measured"] == sorted(c["repeats"]["tpot_s"])[1]
        assert c["decisions"]["identical"]
    assert set(data["order"]) == {"tiny-wide at 25 MB"}
    real, n = worlds.carried_out, [0]

    def stopped(*args):
        n[0] += 1
        if n[0] == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(worlds, "carried_out", stopped)
    said = moesim(capsys, *args, "--out", world / "cut.json")
    assert said.code == 130
    assert "interrupted; what was compared until then is above" in said.err
    assert [c["policy"] for c in json.loads((world / "cut.json").read_text())["comparisons"]] == ["lru", "lfu"]


def test_leaving_the_measured_range_is_flagged(world):
    hw = load_hardware(world / "me.yaml")
    assert hw.curves is not None
    expert = hw.curves.operations["expert"]
    assert expert.at[0] == 1.0
    assert not expert.covers(expert.at[-1] + 1)
    assert expert.value(2 * expert.at[-1]) >= expert.seconds[-1]
    found = compared(world, requests=1)
    beyond = [label for label in found["caveats"] if "beyond the calibrated range: attention_decode at " in label]
    assert bool(beyond) == (not hw.curves.operations["attention_decode"].covers(11))


def test_simulate_real_as_it_is_written(tmp_path, capsys, world):
    args = (*validate(world)[1:], "--hw", "rtx3090")
    result = simulated(capsys, *args, "--json").json
    assert result["real"] is True
    assert result["device"] == "CPU backend"
    assert result["prediction"]["hw"] == "rtx3090"
    assert "describes another device" in result["prediction"]["label"]
    assert result["h2d_bytes"] == result["prediction"]["h2d_bytes"]
    assert result["provenance"]["measured"] == 1.0
    said = simulated(capsys, *args, "--requests", 1)
    assert said.code == 0, said.err
    assert said.out.startswith("real run on the CPU backend")
    assert "predicted for rtx3090" in said.out
    assert "rests on" not in said.out  # but on the clock
    assert "write --real=DEVICE" in simulated(capsys, "--policy", "lru", "--hw", "rtx3090", "--device", "cpu").error
    words = "--policy lru --hw h200-sxm --real=cpu --model mixtral-8x7b --cache 100GB --requests 1"
    refused = simulated(capsys, *words.split())
    assert refused.code == 2
    assert "--model cpu-small" in refused.err


@pytest.mark.thorough
def test_a_validation_that_was_cut_off_goes_on(world, capsys, monkeypatch):
    """Each run is on disk before the next begins; --resume measures what is missing, and no more."""

    (world / "r.json").unlink(missing_ok=True)
    more = ("--tolerance", 1000, "--outputs", 2, "--hw", world / "me.yaml", "--out", world / "r.json")
    args = (*validate(world, "lru", "lfu"), *more)
    carry_out, ran = Case.carry_out, []

    def cut_off(self, *given):
        if ran == ["lru"]:
            raise RuntimeError("killed")
        ran.append(self.spec.policy)
        carry_out(self, *given)

    monkeypatch.setattr(Case, "carry_out", cut_off)
    with pytest.raises(RuntimeError, match="killed"):
        moesim(capsys, *args)
    (first,) = json.loads((world / "r.json").read_text())["comparisons"]
    assert first["policy"] == "lru" and first["outputs"] == 2
    ran[:] = []
    monkeypatch.setattr(Case, "carry_out", lambda self, *given: (ran.append(self.spec.policy), carry_out(self, *given)))
    assert moesim(capsys, *args, "--resume").code == 0
    assert ran == ["lfu"]
    kept = json.loads((world / "r.json").read_text())
    assert [c["policy"] for c in kept["comparisons"]] == ["lru", "lfu"]
    assert kept["comparisons"][0] == first and not kept["interrupted"]
    assert moesim(capsys, *args, "--resume", "--repeat", 2).code == 0
    assert ran == ["lfu", "lru", "lfu", "lru", "lfu"], "as often as asked for, or again"
    said = moesim(capsys, "validate", "--policy", "lru", "--hw", world / "me.yaml", "--resume")
    assert said.code == 2 and "--resume, got no --out" in said.err


@pytest.mark.thorough
def test_no_arena_outlives_its_run(world, monkeypatch, tmp_path):
    """On a GPU one arena may take most of the memory: the one before it has to be gone when the next is asked for."""
    import weakref

    from sim.real import run as real_run
    from sim.real.machine.machine import RealMachine

    made, alive = [], []

    class Counted(RealMachine):
        def __init__(self, *args, **kwargs):
            alive.append(sum(ref() is not None for ref in made))
            made.append(weakref.ref(self))
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(real_run, "RealMachine", Counted)
    in_situ.run(
        "cpu", str(world / "wide.yaml"), "fp32", tmp_path, rounds=2, prompts=(1, 4), cases=(("lru", 1.0), ("lru", 0.25))
    )
    assert alive == [0, 0, 0, 0]
    made.clear()
    alive.clear()
    compared(world)
    compared(world, policy="lfu")
    assert alive == [0, 0]
