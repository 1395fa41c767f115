"""`simulate`: what it prints, what it refuses, what it saves."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_help import Said, mixtral_shaped, simulated

from sim.base.errors import BadInput
from sim.options import RunSpec
from sim.run import prepare
from sim.setup.config_file import dump_spec, read_spec


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixtral_shaped(tmp_path_factory.mktemp("traces"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], trace: Path) -> Any:
    """Simulate with LRU on an RTX 3090 and the small trace; words given replace those."""

    def call(*args: object, policy: str = "lru", hw: str = "rtx3090") -> Said:
        return simulated(capsys, "--policy", policy, "--hw", hw, "--trace", trace, *args)

    return call


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Equal but for how long the simulation itself took."""
    return {**a, "wall_s": 0} == {**b, "wall_s": 0}


class TestOutput:
    @pytest.mark.parametrize(
        ("policy", "split", "said"),
        [
            ("fiddler", "train", True),
            ("fiddler", "all", True),
            ("fiddler", "test", False),
            ("lru", "train", False),
        ],
    )
    def test_scoring_what_was_learned_is_labelled(self, run: Any, policy: str, split: str, said: bool) -> None:
        labels = run("--json", "--split", split, policy=policy).json["caveats"]
        assert ("scored on requests it may have learned from" in labels) == said

    def test_json_is_one_object_and_nothing_else(self, run: Any) -> None:
        said = run("--json")
        assert said.json["policy"] == "lru"
        assert said.out.count("\n") == 1
        assert said.err == ""

    def test_aliases_resolve_and_are_named(self, run: Any) -> None:
        result = run("--json", policy="accelerate", hw="RTX-3090").json
        assert (result["policy"], result["hw"]) == ("on_demand", "rtx3090")

    def test_bound_in_hypothetical_memory_says_so(self, run: Any) -> None:
        result = run("--json", policy="gpu_only").json
        assert any(label.startswith("does not fit: needs 9") for label in result["caveats"])
        assert result["bottleneck"]["resource"] == "gpu"
        assert "; does not fit: needs 9" in run(policy="gpu_only").out.splitlines()[0]
        assert run(policy="belady").out.splitlines()[0].endswith("; oracle")

    def test_unfinished_statistics_are_null(self, run: Any) -> None:
        tpot = run("--json").json["tpot_s"]
        assert (tpot["n"], tpot["p95"], tpot["p99"]) == (2, None, None)

    def test_a_cap_that_is_not_kept_to_is_mentioned(self, run: Any) -> None:
        label = "--cache 40experts not applied: every expert is kept"
        assert label in run("--json", "--cache", "40experts", policy="gpu_only").json["caveats"]
        assert label in run("--cache", "40experts", policy="gpu_only").out.splitlines()[0]
        assert "not applied" not in run("--vram", "20GB", policy="gpu_only").out
        assert "not applied" not in run("--cache", "40experts").out
        assert "give 1 to 256" in run("--cache", "999experts", policy="gpu_only").error

    @pytest.mark.parametrize("spelt", ["LRU", "Lru", "ACCELERATE", "On-Demand"])
    def test_policies_in_any_spelling(self, run: Any, spelt: str) -> None:
        assert run("--json", policy=spelt).json["policy"] == ("lru" if spelt.lower() == "lru" else "on_demand")

    def test_more_requests_than_there_are(self, run: Any) -> None:
        assert run("--requests", 2).err == ""
        said = run("--requests", 1000, "--json")
        assert said.json["requests"] == 2
        assert said.err == "note: --requests 1000: split test of mix has 2 requests, not more\n"

    def test_memory_is_kept_for_requests_that_run_together(self, run: Any) -> None:
        both, far = run("--json", "--batch", 2), run("--json", "--batch", 100_000)
        assert far.json["memory"] == both.json["memory"]
        assert far.json["memory"]["kv_cache_bytes"] == 2 * run("--json").json["memory"]["kv_cache_bytes"]
        assert (both.err, far.err) == ("", "note: --batch 100000: no more than 2 requests to run together\n")


class TestRefusals:
    @pytest.mark.parametrize(
        ("args", "hint"),
        [
            (("--precision", "bf61"), "did you mean 'bf16'"),
            (("--set", "sim.hit=gat"), "did you mean 'gate'"),
            (("--split", "tset"), "did you mean 'test'"),
            (("--set", "scop=layer"), "did you mean 'scope'"),
            (("--set", "scope=laier"), "did you mean 'layer'"),
            (("--set", "scope"), "not NAME=VALUE"),
            (("--set", "hw.h2d.bandwith_bytes_per_s=5e10"), "did you mean 'bandwidth_bytes_per_s'"),
            (("--vram", "6 apples"), "not a size"),
            (("--vram", "80GB"), "rtx3090 has 25.8 GB"),
            (("--cache", "1MB"), "one expert takes 352 MB"),
            (("--cache", "0experts"), "at least 1"),
            (("--cache", "9experts", "--cache", "50%"), "got it twice"),
            (("--cache", "150%"), "--cache, got"),
            (("--gpus", "0"), "--gpus, got 0: at least 1; raise it"),
            (("--batch", "-3"), "--batch, got -3: at least 1; raise it"),
            (
                ("--policy", "lfu"),
                "--policy, got it twice: one run has one policy; keep one, or rank several with moesim",
            ),
            (("--hw", "a6000", "--hw", "a6000"), "--hw, got it 3 times: one value per option"),
            (("--set", "hw.vram_bytes=8 apples"), "--set hw.vram_bytes, got '8 apples': not a size"),
            (("--set", "hw.h2d.latency_s=nan"), "--set hw.h2d.latency_s, got nan: a figure is finite"),
            (("--set", "hw.h2d.bandwith=1"), "did you mean 'bandwidth_bytes_per_s'?"),
            (("--set", "model.foo=1"), " more"),
            (("--seed", "-1"), "at least 0"),
            (("--gpus", "1000000000"), "at most 256"),
            (("--vram", "1e400GB"), "beyond any memory"),
            (("--cache", "nan"), "--cache, got"),
            (("--requests", "0"), "at least 1"),
            (("--gpus", "two"), "not a whole number"),
            (("--model", "qwen3-30b-a3b"), "routing shapes must agree"),
            (("--timeline", "t.json:iterations=0"), "at least 1"),
        ],
    )
    def test_bad_values(self, run: Any, args: tuple[str, ...], hint: str) -> None:
        assert hint in run(*args).error

    def test_what_does_not_fit_is_shown_as_a_table(self, run: Any) -> None:
        said = run("--precision", "fp32", "--cache", "200experts")
        assert said.code == 2
        assert said.out == ""
        assert re.search(r"dense weights +[\d.]+ GB", said.err)
        assert said.err.splitlines()[-1].startswith("error: ")

    def test_a_shape_without_a_trace_has_a_way_out(self, capsys: pytest.CaptureFixture[str]) -> None:
        own = ("--model", "qwen3-235b-a22b", "--set", "model.n_experts=4096")
        error = simulated(capsys, "--policy", "lru", "--hw", "rtx3090", *own).error
        assert "got 94 layers of 4096 experts" in error
        assert "moesim traces synth qwen3-30b-a3b --model qwen3-235b-a22b -o FILE" in error


class TestConfig:
    def test_round_trip_is_bit_for_bit(self, run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        args = (
            "--set",
            "scope=layer",
            "--set",
            "hw.h2d.latency_s=1e-7",
            "--cache",
            "40experts",
            "--batch",
            2,
            "--set",
            "out.spans=on",
            "--json",
        )
        first = run(*args, "--out", tmp_path / "a").json
        config = tmp_path / "a" / "config.yaml"
        again = simulated(capsys, "--config", config, "--out", tmp_path / "b", "--set", "out.spans=on", "--json")
        assert again.err == ""
        assert same(first, again.json)
        assert config.read_bytes() == (tmp_path / "b" / "config.yaml").read_bytes()
        for table in ("spans", "decisions", "requests", "iterations"):
            a, b = (tmp_path / run / f"{table}.parquet" for run in "ab")
            assert a.read_bytes() == b.read_bytes()

    def test_relative_paths_are_saved_whole(
        self, capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(trace.parent)
        said = simulated(capsys, "--policy", "lru", "--hw", "rtx3090", "--trace", trace.name, "--out", tmp_path / "a")
        assert said.code == 0
        monkeypatch.chdir(tmp_path)
        assert simulated(capsys, "--config", "a/config.yaml").code == 0

    def test_command_line_wins(self, run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        run("--cache", "40experts", "--set", "hw.h2d.latency_s=1e-6", "--seed", 3, "--out", tmp_path / "a")
        config = tmp_path / "a" / "config.yaml"
        changed = simulated(capsys, "--config", config, "--policy", "lfu", "--cache", "20%", "--json").json
        assert (changed["policy"], changed["seed"]) == ("lfu", 3)
        assert changed["cache_capacity_bytes"] == [51 * changed["expert_bytes"]]
        latency = {row["figure"]: row["value"] for row in changed["provenance"]["figures"]}["h2d.latency_s"]
        assert latency == 1e-6

    def test_resolved_block_says_what_names_meant(self, run: Any, tmp_path: Path) -> None:
        result = run("--out", tmp_path / "a", "--json", policy="accelerate").json
        saved = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
        assert saved["policy"] == "accelerate"
        assert saved["resolved"]["policy"] == "on_demand"
        assert saved["resolved"]["params"]["slots"] == 2
        assert saved["resolved"]["trace_sha256"] == result["trace_sha256"]
        assert saved["model"] == "mixtral-8x7b"

    def test_a_changed_trace_is_mentioned(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = mixtral_shaped(tmp_path)
        simulated(capsys, "--policy", "lru", "--hw", "rtx3090", "--trace", path, "--out", tmp_path / "a")
        mixtral_shaped(tmp_path, seed=1)
        said = simulated(capsys, "--config", tmp_path / "a" / "config.yaml", "--json")
        assert said.json
        assert "trace mix has changed" in said.err

    @pytest.mark.parametrize(
        ("text", "hint"),
        [
            ("policy: [lru", "not YAML|expected"),
            ("- lru", "is a mapping"),
            ("polcy: lru", "did you mean 'policy'"),
            ("policy: lru\nhw: rtx3090\ngpus: two", "gpus"),
            ("policy: lru\nhw: rtx3090\nset: {scope: [1]}", "set"),
            ("hw: rtx3090", "--policy"),
        ],
    )
    def test_bad_configurations(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, hint: str) -> None:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        assert re.search(hint, simulated(capsys, "--config", path).error)

    def test_missing_file(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert "No such file" in simulated(capsys, "--config", tmp_path / "none.yaml").error

    @pytest.mark.parametrize("value", [True, None, 3, 1e-7, 5e10, 1e300, "5e10", "true", "null", "1_000", "a's: #", ""])
    def test_values_keep_their_type(self, tmp_path: Path, value: Any) -> None:
        path = tmp_path / "c.yaml"
        path.write_text(dump_spec(RunSpec(policy="p", hw="h", set={"key": value}), {"note": 1}))
        fields, resolved = read_spec(path)
        assert fields["set"] == {"key": value}
        assert type(fields["set"]["key"]) is type(value)
        assert resolved == {"note": 1}


class TestInterruption:
    def test_ctrl_c_leaves_nothing_and_says_one_line(self, tmp_path: Path) -> None:
        trace = mixtral_shaped(tmp_path, n_requests=2, prompt=5, outputs=1500)
        out = tmp_path / "runs" / "a"
        words = [
            "run",
            "--policy",
            "lru",
            "--hw",
            "rtx3090",
            "--trace",
            str(trace),
            "--out",
            str(out),
            "--set",
            "out.spans=on",
            "--timeline",
            str(tmp_path / "runs" / "t.json"),
        ]
        process = subprocess.Popen([sys.executable, "-m", "sim", *words], stdout=-1, stderr=-1)
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob("runs/.a.*.part/spans.parquet")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
        assert process.returncode == 130
        assert stdout == b""
        assert stderr.decode().strip() == "interrupted"
        assert list((tmp_path / "runs").iterdir()) == []


class TestWordsBehindThePolicy:
    def test_they_are_what_options_say(self, run: Any) -> None:
        said = run("--json", policy="lru scope=layer cache=20%").json
        assert said["run_id"] == run("--json", "--set", "scope=layer", "--cache", "20%").json["run_id"]
        assert run("--cache", "60experts", "--json", policy="lru cache=20%").json["overrides"] == {"cache": "20%"}

    @pytest.mark.parametrize("words", ["lru scop=layer", "lru scope", "lru hww=a6000"])
    def test_wrong_ones_are_refused(self, run: Any, words: str) -> None:
        said = run(policy=words)
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith("error: ")

    def test_a_field_of_a_run_takes_a_name_alone(self, trace: Path) -> None:
        with pytest.raises(BadInput, match=r"write 'lru', and --set scope=layer \(from Python set="):
            prepare(RunSpec(policy="lru scope=layer", hw="rtx3090", trace=str(trace)))

    def test_python_takes_them_too(self, trace: Path) -> None:
        import moesim as face

        assert face.simulate("lru scope=layer", "rtx3090", trace=trace).params == {"scope": "layer"}


def test_a_trace_of_fewer_layers_and_another_k_names_what_to_set(capsys: Any, tmp_path: Path) -> None:
    from tiny_traces import tiny_trace

    path = tiny_trace(tmp_path / "t.safetensors", n_layers=30, n_experts=8, top_k=1, levels=())
    words: list[object] = ["--policy", "lru", "--hw", "rtx3090", "--trace", path]
    found = [simulated(capsys, *words, *model).err for model in ((), ("--model", "mixtral-8x7b"))]
    for err in found:
        assert "--set model.n_layers=30 --set model.top_k=1" in err
    assert "--model mixtral-8x7b --set" in found[0]
    changed = ("--model", "mixtral-8x7b", "--set", "model.n_layers=30", "--set", "model.top_k=1")
    assert simulated(capsys, *words, *changed).code == 0
