"""Simulation and reality side by side: what is compared, what is refused, and a wrong profile that is found out."""

from __future__ import annotations

import json

import msgspec
import pytest

torch = pytest.importorskip("torch")

from cli_help import moesim, simulated  # noqa: E402
from real_world import lanes_and_weights, tiny_setup  # noqa: E402

from calibrate import duplex, in_situ, profile  # noqa: E402
from calibrate.derive import Table  # noqa: E402
from sim.hardware import load_hardware  # noqa: E402
from sim.real.validate import compare, judge, rank_correlation, summary  # noqa: E402

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
"""  # an expert of 6.3 MB: copies dominate, whatever else runs on the machine


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, its trace, and a profile measured on this machine's lanes just now."""
    folder = tmp_path_factory.mktemp("validate")
    setup = tiny_setup(folder, "lru", 4)
    setup.close()
    (folder / "wide.yaml").write_text(WIDE)
    samples = in_situ.run("cpu", str(folder / "wide.yaml"), "fp32", folder, rounds=1, prompts=(1, 4, 16),
                          cases=(("lru", 1.0), ("lru", 0.25), ("llama_cpp", 0.5), (in_situ.SWAPS, 0.25)))  # fmt: skip
    in_situ.save(samples, folder / "me.lanes.json.gz")
    facts = {"id": "me", "name": "CPU backend", "kind": "cpu", "dtype": "float32", "cpu_dtype": "float32",
             "threads": [1], "vram_bytes": 1 << 34, "n_sms": 1, "l2_bytes": 1 << 20, "bus": (4, 16), "command": "test",
             "machine": samples.environment["machine"]}  # fmt: skip
    data = in_situ.apply(profile.build(Table([]), facts), in_situ.load(folder / "me.lanes.json.gz"), "me")
    profile.write(folder / "me.yaml", data)
    for name, factor in (("half", 2), ("sixth", 6)):  # deliberately wrong ones
        wrong = msgspec.to_builtins(load_hardware(folder / "me.yaml"))
        wrong["h2d"]["bandwidth_bytes_per_s"]["value"] /= factor
        profile.write(folder / f"{name}.yaml", wrong)
    return folder


def compared(world, hw="me.yaml", policy="lru", experts=2, **fields):
    setup = tiny_setup(world, policy, experts, hw=str(world / hw))
    setup.close()
    spec = msgspec.structs.replace(setup.spec, model=str(world / "wide.yaml"), **fields)
    from sim.run import prepare

    setup = prepare(spec)
    with lanes_and_weights(setup) as (lanes, weights):
        found = compare(spec, lanes, weights)
    setup.close()
    return found


def test_a_comparison_has_everything(world):
    found = compared(world)
    assert found["decisions"]["identical"], found["decisions"]
    assert found["decisions"]["n"] > 100
    assert found["bytes"]["h2d_bytes"]["error_frac"] == found["bytes"]["asked_bytes"]["error_frac"] == 0
    assert found["classes"]["miss_rate"]["error_frac"] == 0
    assert {"gpu", "h2d", "host"} <= set(found["lanes"])
    assert {"gpu: expert", "gpu: attention", "gpu: gate", "gpu: head", "h2d: demand", "host: launch expert",
            "host: sync", "host: policy code"} <= set(found["operations"])  # fmt: skip
    for row in found["operations"].values():
        assert row["off_s"] == pytest.approx(row["predicted_s"] - row["measured_s"])
    assert found["plus_minus_frac"] > 0
    assert found["policy_code_s"]["predicted"] > 0
    json.dumps(found)


def test_what_both_ways_cost_each_other_is_measured_in_swaps(world):
    samples = in_situ.load(world / "me.lanes.json.gz")
    assert len(samples.swaps["up"]) >= len(samples.swaps["down"]) > 100
    assert all(0 <= beside <= took for pairs in samples.swaps.values() for took, beside in pairs)
    assert any(beside > 0 for _, beside in samples.swaps["down"])
    terms = load_hardware(world / "me.yaml").contention
    for term in (terms.h2d_slowdown_by_d2h, terms.d2h_slowdown_by_h2d):
        assert (term.source, term.ref) == ("measured", "lanes")
    assert load_hardware(world / "me.yaml").d2h.bandwidth_bytes_per_s.source == "measured"
    found = compared(world, policy="mixtral_offloading", experts=8)
    assert found["decisions"]["identical"]
    assert found["bytes"]["d2h_bytes"]["error_frac"] == 0
    assert "d2h: write_back" in found["operations"]


def test_slow_downs_are_worked_out_from_overlap():
    # Alone 10 s, a term of 0.5. Beside the other way all along: 15 s. For 6 s, which do 4 s of work: 6 + 6 s.
    assert duplex.slowdown([(15.0, 15.0)] * 40, 10.0)["value"] == pytest.approx(0.5)
    assert duplex.slowdown([(12.0, 6.0), (15.0, 15.0), (10.0, 0.0)] * 20, 10.0)["value"] == pytest.approx(0.5)
    assert duplex.slowdown([(9.0, 9.0)] * 40, 10.0)["value"] == 0.0
    assert duplex.slowdown([(300.0, 280.0)] * 40, 10.0)["value"] == 10.0
    assert duplex.slowdown([(15.0, 15.0)] * 10, 10.0) is None
    assert duplex.slowdown([(10.0, 0.5)] * 40, 10.0) is None, "hardly ever beside"
    assert duplex.ratio_down({"up": [1.0] * 5, "down": [2.0] * 5}) == 2.0
    assert duplex.rate_down({"up": [1.0] * 5, "down": [2.0] * 5}, {"value": 8e9})["value"] == 4e9
    assert duplex.rate_down({"up": [1.0]}, {"value": 8e9}) is None


def test_half_the_bandwidth_is_found_out_and_the_copy_lane_named(world):
    """The prediction alone is compared with itself at half the bandwidth, so that a busy machine cannot blur it."""
    right, wrong = compared(world), compared(world, "half.yaml")
    for found in (right, wrong):  # the same reality for both: what the right profile's run measured
        for key in ("tpot_s", "ttft_s"):
            pair = found[key]
            pair["measured"] = right[key]["predicted"]
            pair["error_frac"] = pair["predicted"] / pair["measured"] - 1
        for part in ("operations", "lanes"):
            for name, row in found[part].items():
                row["measured_s"] = right[part][name]["predicted_s"]
                row["off_s"] = row["predicted_s"] - row["measured_s"]
        found["worst_lane"] = max(found["lanes"], key=lambda lane: abs(found["lanes"][lane]["off_s"]))
        found["worst_operation"] = max(found["operations"], key=lambda op: abs(found["operations"][op]["off_s"]))
    assert [line for line in judge(right, 0.25) if "off by" in line] == []
    said = judge(wrong, 0.25)
    assert any("TPOT is off by" in line and "on lane h2d" in line for line in said), said


def test_a_grossly_wrong_profile_fails_on_the_command_line(world, capsys):
    (world / "v.json").unlink(missing_ok=True)
    args = ("validate", "--policy", "lru", "--experts", 2, "--model", world / "wide.yaml", "--trace",
            world / "tiny.safetensors", "--precision", "fp32", "--device", "cpu", "--hw")  # fmt: skip
    said = moesim(capsys, *args, world / "sixth.yaml", "--out", world / "v.json")
    assert said.code == 1
    assert "TPOT is off by +" in said.out
    assert "most of the difference is on lane h2d" in said.out
    kept = json.loads((world / "v.json").read_text())
    assert kept["comparisons"][0]["worst_lane"] == "h2d"
    assert kept["wrong"]
    table = moesim(capsys, "validate", "--table", world / "v.json").out
    assert "| lru | tiny-wide | 2 |" in table
    assert "identical" in table
    lenient = moesim(capsys, *args, world / "me.yaml", "--tolerance", 100, "--json")
    assert lenient.json["wrong"] == []
    assert lenient.json["comparisons"][0]["decisions"]["identical"] is True


def test_decisions_that_part_and_bytes_that_differ_are_wrong():
    pair = {"predicted": 1.0, "measured": 1.0, "error_frac": 0.0}
    parted = {"identical": False, "part_at": 7, "predicted": [("fetch", 0, 1)], "measured": []}
    found = {"tpot_s": pair, "ttft_s": pair, "traits": ["streams"], "bytes": {"asked_bytes": pair}, "decisions": parted}
    assert "decisions part at entry 7" in judge(found, 0.1)[0]
    found["traits"] = ["timing"]
    assert judge(found, 0.1) == []
    found |= {"traits": [], "decisions": {"identical": True}, "bytes": {"asked_bytes": {"predicted": 5, "measured": 4}}}
    assert judge(found, 0.1) == ["bytes asked for: 5 predicted, 4 measured"]


def test_ranks_and_medians():
    def case(budget, predicted, measured):
        pair = {"predicted": predicted, "measured": measured, "error_frac": predicted / measured - 1}
        return {"expert_budget_bytes": budget, "tpot_s": pair, "ttft_s": pair}

    cases = [case(1, 1.0, 1.0), case(1, 2.0, 4.0), case(1, 3.0, 3.0), case(2, 1.0, 2.0)]
    assert rank_correlation(cases) == {"1": pytest.approx(0.5), "2": None}
    assert summary(cases)["tpot_s_worst_error_frac"] == 0.5
    assert summary(cases)["tpot_s_median_error_frac"] == pytest.approx(0.25)


def test_leaving_the_measured_range_is_flagged(world):
    hw = load_hardware(world / "me.yaml")
    assert hw.curves is not None
    expert = hw.curves.operations["expert"]
    assert expert.at[0] == 1.0
    assert not expert.covers(expert.at[-1] + 1)
    assert expert.value(2 * expert.at[-1]) >= expert.seconds[-1]
    found = compared(world, requests=1)
    beyond = [label for label in found["labels"] if "beyond the calibrated range: attention_decode at " in label]
    assert bool(beyond) == (not hw.curves.operations["attention_decode"].covers(11))


def test_report_draws_it(world, capsys):
    said = moesim(capsys, "report", world / "me.yaml", "--out", world / "me.html")
    assert said.code == 0, said.err
    page = (world / "me.html").read_text()
    assert "On the real machine" in page
    assert "Plotly.newPlot" in page
    assert 'src="http' not in page, "self-contained"
    assert "nothing to draw" in moesim(capsys, "report", world / "half.yaml").error


def test_what_is_missing_is_named(world, capsys):
    assert "--hw, got none" in moesim(capsys, "validate", "--policy", "lru").error
    assert "--policy, got none" in moesim(capsys, "validate", "--hw", "rtx3090").error
    said = moesim(capsys, "validate", "--table", world / "me.yaml").error
    assert "not comparisons of `moesim validate --out`" in said


def test_simulate_real_as_it_is_written(tmp_path, capsys, world):
    args = ("--policy", "lru", "--hw", "rtx3090", "--real", "--model", world / "wide.yaml", "--trace",
            world / "tiny.safetensors", "--precision", "fp32", "--device", "cpu", "--experts", 4)  # fmt: skip
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
    assert "add --real" in simulated(capsys, "--policy", "lru", "--hw", "rtx3090", "--device", "cpu").error
    refused = simulated(capsys, "--policy", "lru", "--hw", "h200-sxm", "--real", "--model", "mixtral-8x7b",
                        "--device", "cpu", "--expert-cache", "100GB", "--requests", 1)  # fmt: skip
    assert refused.code == 2
    assert "--model cpu-small" in refused.err


def test_a_case_that_is_cut_short_keeps_what_it_measured(tmp_path):
    """The lanes are used again by the next case: nothing of the one cut short may still be queued."""
    samples = in_situ.run("cpu", "cpu-small", "fp32", tmp_path, rounds=1, prompts=(2, 8), budget_s=1.0,
                          cases=(("perfect_prefetch", 0.25), ("lru", 0.25)))  # fmt: skip
    cases = {case for found in samples.operations.values() for case in found}
    assert cases == {"perfect_prefetch@0.25", "lru@0.25"}
    whole = (8 + 2 * in_situ.OUTPUTS) * 32
    n = sum(len(found["lru@0.25"]) for (op, _), found in samples.operations.items()
            if op.startswith("attention") and "lru@0.25" in found)  # fmt: skip
    assert 0 < n < whole
