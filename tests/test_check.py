"""`moesim check`: runs held to a baseline file."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_help import mixtral_shaped

import moesim as face
from sim.base.errors import BadInput
from sim.base.files import MAX_YAML_BYTES, parse_yaml
from sim.cli.verbs import guarded, moesim
from sim.figures import SCHEMA, numbers
from sim.options import RunSpec
from sim.results.compared import BETTER, CHANGED, NEW, SAME, WORSE, Tolerance, verdict_of
from sim.results.figure import better, unit_of
from sim.run import prepare
from sim.studies.check.baseline import read_baseline
from sim.studies.check.update import updated

ROOT = Path(__file__).resolve().parents[1]


class Said:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]):
    def run(*args: object) -> Said:
        with pytest.raises(SystemExit) as left:
            guarded(moesim, ["check", *map(str, args)], "moesim")
        said = capsys.readouterr()
        return Said(int(left.value.code or 0), said.out, said.err)

    return run


@pytest.fixture
def baseline(tmp_path: Path):
    trace = mixtral_shaped(tmp_path)

    def write(runs: str, head: str = "") -> Path:
        path = tmp_path / "baseline.yaml"
        path.write_text(f"# ours\nschema: 2\nrun: {{hw: rtx3090, trace: {trace}}}\n{head}runs:\n{runs}", "utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("key", "unit", "way"),
    [
        ("hit_rate", "share", 1),
        ("prefill_hit_rates.hit", "share", 1),
        ("token_hit_rates.miss", "share", -1),
        ("tpot_s.mean", "s", -1),
        ("tpot_s.n", "", 0),
        ("h2d_bytes", "bytes", -1),
        ("prefetch.issued.bytes", "bytes", 0),
        ("prefetch.wasted.n", "", -1),
        ("throughput_tokens_per_s", "per_s", 1),
        ("lower_bound.tpot_s", "s", 0),
        ("lane_utilisation.gpu", "share", 0),
        ("memory.cache_capacity_bytes", "bytes", 0),
    ],
)
def test_units_and_ways_of_figures(key: str, unit: str, way: int) -> None:
    assert (unit_of(key), better(key)) == (unit, way)


@pytest.mark.parametrize(
    ("key", "expected", "value", "tolerance", "verdict"),
    [
        ("hit_rate", 0.5, 0.5, Tolerance(0.0, False, "0"), SAME),
        ("hit_rate", 0.5, 0.375, Tolerance(0.25, True, "25%"), SAME),  # a quarter of 0.5: exactly the distance
        ("hit_rate", 0.5, 0.4899, Tolerance(0.02, True, "2%"), WORSE),
        ("hit_rate", 0.5, 0.5101, Tolerance(0.02, True, "2%"), BETTER),
        ("tpot_s.mean", 1.0, 1.1, Tolerance(0.05, False, "50ms"), WORSE),
        ("tpot_s.mean", 1.0, 0.9, Tolerance(0.05, False, "50ms"), BETTER),
        ("prefetch.issued.n", 10, 11, Tolerance(0.0, False, "0"), CHANGED),
        ("tpot_s.mean", 1.0, None, Tolerance(9.0, False, "9"), CHANGED),
        ("tpot_s.mean", None, 1.0, Tolerance(9.0, False, "9"), NEW),
        ("tpot_s.p95", None, None, Tolerance(0.0, False, "0"), SAME),
    ],
)
def test_verdicts(key: str, expected: float | None, value: float | None, tolerance: Tolerance, verdict: str) -> None:
    assert verdict_of(key, expected, value, tolerance) == verdict


def test_a_lower_bound_can_be_held(check, baseline) -> None:
    """It is worked out for the sake of a file that names it."""
    path = baseline("- {policy: lru, requests: 1, figures: {lower_bound.tpot_s: 1ms}}\n")
    (figure,) = json.loads(check(path, "--json").out)["runs"][0]["figures"]
    assert figure["value"] > 0.001
    assert figure["verdict"] == CHANGED


def test_from_new_to_recorded_to_worse(check, baseline) -> None:
    path = baseline(
        "- policy: lru      # plain\n- {policy: lfu, cache: 50experts}\n- policy: fifo\n  figures:\n    hit_rate:\n"
    )
    first = check(path)
    assert first.code == 1
    assert first.out.startswith("not as expected: 7 not recorded yet")
    told = check(path, "--update")
    assert told.code == 0
    assert told.out.replace("\n  ", " ").startswith(f"recorded: 7 figures changed in {path}\n")
    text = path.read_text("utf-8")
    assert text.startswith("# ours\n")
    assert "- policy: lru      # plain\n  figures: {hit_rate: " in text
    data = yaml.safe_load(text)
    assert list(data["runs"][0]["figures"]) == ["hit_rate", "tpot_s.mean", "h2d_bytes"]
    assert set(data["inputs"]) >= {"hw rtx3090", "engine bare", "model mixtral-8x7b"}
    again = check(path, "--strict")
    assert (again.code, again.out) == (0, "as expected: 7 figures of 3 runs\n")
    assert check(path, "--update").out.splitlines()[0].startswith("recorded: 0 figures")
    assert path.read_text("utf-8") == text, "nothing changed, nothing is written"

    hits = data["runs"][1]["figures"]["hit_rate"]
    path.write_text(text.replace(f"hit_rate: {hits!r}", f"hit_rate: {hits + 0.1!r}"), "utf-8")
    worse = check(path)
    assert worse.code == 1
    assert worse.out.startswith(
        "not as expected: 1 worse; 7 figures of 3 runs were checked; the first: lfu, cache 50experts,"
    )
    path.write_text(text.replace(f"hit_rate: {hits!r}", f"hit_rate: {hits - 0.1!r}"), "utf-8")
    assert check(path).code == 0
    assert "1 figure better (--update records that)" in check(path).out.replace("\n  ", " ")
    assert check(path, "--strict").code == 1


def test_the_figures_are_those_of_simulate(check, baseline, capsys: pytest.CaptureFixture[str]) -> None:
    path = baseline("- policy: lcp rho=0.25\n  batch: 2\n")
    check(path, "--update")
    data = yaml.safe_load(path.read_text("utf-8"))
    args = ["--policy", "lcp", "--set", "rho=0.25", "--batch", "2", "--hw", "rtx3090", "--trace", data["run"]["trace"]]
    with pytest.raises(SystemExit):
        guarded(moesim, ["run", *args, "--json"], "moesim")
    result = json.loads(capsys.readouterr().out)
    found = data["runs"][0]["figures"]
    assert found == {
        "hit_rate": result["hit_rate"],
        "tpot_s.mean": result["tpot_s"]["mean"],
        "h2d_bytes": result["h2d_bytes"],
    }


def test_what_the_names_meant(check, baseline) -> None:
    path = baseline("- {policy: lru, figures: {requests: 2}}\n")
    check(path, "--update")
    text = path.read_text("utf-8")
    path.write_text(text.replace(yaml.safe_load(text)["inputs"]["hw rtx3090"], "0" * 12), "utf-8")
    done = check(path)
    assert (done.code, done.out.splitlines()[1]) == (0, "inputs that changed since it was recorded: hw rtx3090")
    assert json.loads(check(path, "--json").out)["changed_inputs"] == ["hw rtx3090"]


LRU = "{policy: lru, hw: rtx3090}"
LAYOUTS = {
    "json": '{"schema": 1, "runs": [{"policy": "lru", "hw": "rtx3090"}], "inputs": {"hw rtx3090": "x"}}\n',
    "json, no newline": '{"schema":1,"runs":[{"policy":"lru","hw":"rtx3090"},{"policy":"lfu","hw":"x"}]}',
    "json, indented": '{\n  "schema": 1,\n  "runs": [\n    {\n      "policy": "lru",\n      "hw": "x"\n    }\n  ]\n}\n',
    "json, null figures": '{"runs": [{"figures": null, "policy": "lru", "hw": "x"}], "schema": 1, "inputs": {}}',
    "json, figures": '{"runs": [{"figures": {"hit_rate": 1e-3, "h2d_bytes":null}, "policy": "lru"}], "schema": 1}',
    "json, byte order mark": '\ufeff{"schema": 1, "runs": [{"policy": "lru", "hw": "rtx3090"}]}\n',
    "flow": f"{{schema: 2, runs: [{LRU}, {LRU}], inputs: {{hw rtx3090: x}}}}\n",
    "flow, comments": "# a\n{schema: 2, # b\n runs: [ # c\n  {policy: lru, # d\n   hw: rtx3090, }, # e\n  ]}\n# f\n",
    "flow inputs": f"schema: 2\nruns: [{LRU}]\ninputs: {{hw rtx3090: x, # a\n  hw gone: y}} # b\n",
    "flow inputs, kept": f"schema: 2\nruns: [{LRU}]\ninputs: {{hw rtx3090: x}} # b\n",
    "no value": "schema: 2\nruns: [{policy: lru, name: , figures: }]\n",
    "block": "schema: 2\nruns:\n  - policy: lru # a\n    hw: rtx3090 # b\n  # - policy: off\n# c",
    "indented root": "  schema: 2\n  runs:\n    -   policy: lru\n        hw: rtx3090\n",
    "inputs with comments": (
        f"inputs: # a\n  hw rtx3090: x # b\n  # c\n  model kept: 'z'\n  hw gone: y\n  # e\nschema: 2\nruns: [{LRU}]\n"
    ),
    "inputs last, gone last": f"schema: 2\nruns: [{LRU}]\ninputs:\n  hw rtx3090: x # b\n  hw gone: y",
    "documents' ends": f"%YAML 1.1\n--- # a\nschema: 2\nruns: [{LRU}]\n... # b\n",
    "a block of text last": "schema: 2\nruns:\n- policy: lru\n  name: |\n    two\n    lines\n# a\n- policy: lfu\n",
    "a folded text kept last": "schema: 2\nruns:\n- policy: lru\n  name: >+\n    two\n\n\n- policy: lfu\n",
    "a figure in a block of text": "schema: 2\nruns:\n- policy: lru\n  figures:\n    hit_rate: |\n      1\n  name: a\n",
    "anchors and tags": f"schema: !!int 1\nruns: &all\n- &one {LRU}\n- !!map {{figures: &f {{hit_rate: &h 1}}}}\n",
    "odd keys": "'schema': 1\n? runs\n: - \"policy\" : lru\n    'figures' : {\"hit_rate\" : 1 , 'h2d_bytes': 2,}\n",
    "tabs": "schema: 2\t# a\nruns: [{policy: lru,\thw: rtx3090\t}]\t# b\n",
    "a block of text without an end": "schema: 2\nruns:\n- policy: lru\n  name: |\n    two",
}


@pytest.mark.parametrize("breaks", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_is_kept_or_refused(tmp_path: Path, name: str, breaks: str) -> None:
    """What is written means what was meant, every other line and comment is still there, and JSON is still JSON."""
    path, text = tmp_path / "b.yaml", LAYOUTS[name].replace("\n", breaks)
    before = parse_yaml(text, "")
    inputs = {"hw rtx3090": "new", "model kept": "z", "trace ./a: b.safetensors": "1e5"}
    found = [dict.fromkeys(run.get("figures") or ("hit_rate", "h2d_bytes"), 5e-7) for run in before["runs"]]
    try:
        written = updated(path, text, found, inputs)
    except BadInput as refused:
        assert name == "a block of text without an end", refused
        assert "\n" not in str(refused) and "left as it was" in str(refused)
        return
    after = parse_yaml(written, "")
    for run, recorded in zip(before["runs"], found, strict=True):
        run["figures"] = recorded
    assert after == {**before, "inputs": inputs}
    comments = set(re.findall(r"# [a-z]\b", text)) - ({"# a"} if name == "flow inputs" else set())  # of what is gone
    assert comments <= set(re.findall(r"# [a-z]\b", written))
    assert written.startswith("\ufeff") == text.startswith("\ufeff")
    assert ("\r\n" in text and written.count("\n") == written.count("\r\n")) == (breaks == "\r\n" and "\n" in text)
    if name.startswith("json"):
        assert json.loads(written.removeprefix("\ufeff")) == after
    assert updated(path, written, [{}] * len(found), inputs) == written


@pytest.mark.skipif(os.name != "posix", reason="symbolic links and modes")
def test_a_baseline_is_replaced_in_its_place_or_refused_before_the_runs(check, baseline, monkeypatch) -> None:
    path = baseline("- {policy: lru}\n")
    path.chmod(0o640)
    link = path.with_name("link.yaml")
    link.symlink_to(path.name)
    assert check(link, "--update").code == 0
    assert link.is_symlink()
    assert "figures: {" in path.read_text("utf-8")
    assert path.stat().st_mode & 0o777 == 0o640

    monkeypatch.setattr("sim.studies.check.check.check", None)
    path.chmod(0o440)
    text = path.read_bytes()
    done = check(link, "--update")
    assert (done.code, path.read_bytes()) == (2, text)
    assert "it is read-only" in done.err and done.err.count("\n") == 1
    path.chmod(0o640)
    path.write_text("\n" * (MAX_YAML_BYTES - 60) + "{schema: 2, runs: [{policy: lru, hw: rtx3090}]}")
    done = check(path, "--update")
    assert (done.code, done.err.count("\n")) == (2, 1)


def test_a_baseline_that_is_edited_while_its_runs_are_replayed_stays(check, baseline, monkeypatch) -> None:
    from sim.studies.check import check as module

    path, run = baseline("- {policy: lru}\n"), module.check

    def edited(*args: Any) -> Any:
        path.write_text("# mine\n" + path.read_text("utf-8"), "utf-8")
        return run(*args)

    monkeypatch.setattr(module, "check", edited)
    done = check(path, "--update")
    assert done.code == 2 and "it was changed while its runs were replayed" in done.err
    assert path.read_text("utf-8").startswith("# mine\n# ours\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "a baseline is a mapping"),
        ("schema: 2\nruns: []", "there are none"),
        ("schema: 1\nruns: [{policy: lru, hw: rtx3090}]", "schema, got 1: 2 is read; write schema: 2"),
        ("schema: 2\nruns: [{hw: rtx3090}]", "no policy"),
        ("schema: 2\nruns: [{policy: lru}]", "no hardware"),
        ("schema: 2\nruns: [{policy: lru, hw: [rtx3090, a6000]}]", "got 2 runs: each field has one value"),
        ("schema: 2\nruns: [{policy: all, hw: rtx3090}]", "each field has one value"),
        ("schema: 2\nruns: [{policy: lru, hw: rtx3090}, {policy: lru, hw: rtx3090}]", "give it a name of its own"),
        (
            "schema: 2\nruns: [{policy: lru, hw: rtx3090, figures: {hit_rate: 5ms}}]",
            "runs[0].figures.hit_rate, got '5ms'",
        ),
        (
            "schema: 2\nruns: [{policy: lru, hw: rtx3090, figures: {hit_rate: 31}}]",
            "a share, 1 at most; write e.g. 0.31",
        ),
        ("schema: 2\nruns: [{policy: lru, hw: rtx3090, figures: {hitrate: 3%}}]", "if it is called so"),
        ("schema: 2\nruns: [{policy: lru, hw: rtx3090, figures: {}}]", "name at least one"),
        ("schema: 2\nruns: [{policy: lru, hw: rtx3090, tolerance: {hits: 1}}]", "tolerance, got 'hits'"),
        ("schema: 2\ntolerance: {hit_rat: 1%}\nruns: [{policy: lru, hw: rtx3090}]", "did you mean 'hit_rate'"),
        ("schema: 2\ntolerance: {hit_rate: -1%}\nruns: [{policy: lru, hw: rtx3090}]", "a tolerance is not negative"),
        ("schema: 2\nruns: [{polciy: lru, hw: rtx3090}]", "did you mean 'policy'"),
    ],
)
def test_what_is_no_baseline(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "b.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(BadInput) as refused:
        read_baseline(path)
    assert says in str(refused.value)
    assert str(path) in str(refused.value)


def test_mistakes_are_exit_2_and_nothing_is_written(check, baseline) -> None:
    path = baseline("- {policy: lru, figures: {hitrate: 0.5}}\n")
    before = path.read_bytes()
    done = check(path, "--update")
    assert (done.code, done.out) == (2, "")
    assert "hitrate" in done.err and "did you mean 'hit_rate'" in done.err
    assert path.read_bytes() == before
    assert check(path.with_name("none.yaml")).code == 2
    assert check(baseline("- {policy: lruu}\n")).code == 2
    assert check(baseline("- {policy: lru}\n"), "--junit", path / "j.xml").code == 2


FAILS = """
from sim.policy import Policy

class Fails(Policy):
    name = "fails"

    def {hook}(self, *_, **__):
        return self.deeper()

    def deeper(self):
        import json
        json.loads("{{")  # line 12
"""


@pytest.mark.parametrize("hook", ["gate_done", "bind", "__init__"])
def test_a_policys_mistake_is_told_with_file_and_line(check, baseline, tmp_path: Path, hook: str) -> None:
    """Of its own last line, wherever what it called gave up."""
    (tmp_path / "fails.py").write_text(FAILS.format(hook=hook), "utf-8")
    done = check(
        baseline(f"- policy: {tmp_path / 'fails.py'}\n- {{policy: lru, figures: {{requests: 2}}}}\n"), "--json"
    )
    assert done.code == 1
    first, second = json.loads(done.out)["runs"]
    assert first["status"] == "failed"
    assert re.fullmatch(r".*fails\.py:12: JSONDecodeError: .*", first["reason"])
    assert second["met"]


def test_both_a_run_that_stops_and_a_misspelt_figure_are_told(check, baseline) -> None:
    """Whichever was found first hid the other."""
    stops = "- {policy: lru, name: stops, vram: 4GB, figures: {hit_rat: 0.5}}\n"
    path = baseline(f"{stops}- {{policy: lru, figures: {{requests: 2, tpot_s.men: 1}}}}\n")
    before = path.read_bytes()
    done = check(path, "--update", "--json")
    assert done.code == 2
    assert "nothing is recorded" in done.err
    runs = json.loads(done.out)["runs"]
    assert (runs[0]["status"], runs[1]["status"]) == ("does_not_fit", "ok")
    told = {one["key"]: (one["verdict"], one.get("why")) for run in runs for one in run["figures"]}
    assert told["hit_rat"] == ("no such figure", "no figure of a result, see docs/output.md; did you mean 'hit_rate'?")
    assert told["tpot_s.men"] == (
        "no such figure",
        "no figure of a result, see docs/output.md; did you mean 'tpot_s.mean'?",
    )
    assert told["requests"] == ("same", None)
    assert path.read_bytes() == before
    alone = check(baseline(stops))  # where no run is left, both stand in the line
    assert (alone.code, alone.out) == (2, "")
    assert "take a smaller model" in alone.err and "and stops: figures, got 'hit_rat'" in alone.err


def test_every_figure_of_a_result_has_a_known_name(baseline) -> None:
    """A name is judged without a result, too: none that a result has may be called misspelt."""
    from sim.results.expectations import misspelt

    trace = yaml.safe_load(baseline("").read_text("utf-8"))["run"]["trace"]
    plain = face.simulate(policy="lru", hw="rtx3090", trace=trace)
    loaded = face.simulate(
        policy="fiddler", hw="rtx3090", trace=trace, arrivals="poisson:1", slo="ttft_s <= 1s", replicas=2
    )
    for result in (plain, loaded, face.simulate(policy="lru", hw="rtx3090", trace=trace, sim_energy="machine")):
        assert [key for key, _ in numbers(result.to_dict()) if misspelt(key)] == []


def test_every_policy_is_in_our_own_baseline() -> None:
    from sim.policy.registry import policies

    held = read_baseline(ROOT / "tests" / "baselines" / "policies.yaml")
    assert [run.point.spec.policy for run in held.runs] == list(policies())
    assert all(value is not None for run in held.runs for value in run.figures.values())


@pytest.mark.skipif(shutil.which("bash") is None or sys.platform == "win32", reason="the action runs in bash")
def test_the_action_runs_what_it_says(baseline, tmp_path: Path) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    step = action["runs"]["steps"][-1]
    assert set(step["env"].values()) == {"${{ inputs.baseline }}", "${{ inputs.args }}"}
    path = baseline("- {policy: lru, figures: {requests: 3}}\n- {policy: fifo, figures: {requests: 2}}\n")
    places = {name: str(tmp_path / name) for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "moesim").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m moesim "$@"\n', "utf-8")
    (tools / "moesim").chmod(0o755)
    env = {**os.environ, **places, "RUNNER_TEMP": str(tmp_path), "BASELINE": str(path), "ARGS": "--strict"}
    env["PATH"] = f"{tools}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step["run"]], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    outputs = dict(line.split("=", 1) for line in Path(places["GITHUB_OUTPUT"]).read_text().splitlines())
    assert Path(outputs["junit"]).is_file()
    assert "requests" in Path(places["GITHUB_STEP_SUMMARY"]).read_text("utf-8")


# -- an engine's own log -----------------------------------------------------------------------------------------------

RUN = {"hw": "a6000", "requests": 2, "cache": "128experts"}
WORDS = "lru scope=global " + " ".join(f"{key}={value}" for key, value in RUN.items())


def lru_of_its_own(trace: Any, requests: list[Any], capacity: int) -> list[tuple[int, int, int, int, str]]:
    """An LRU as an engine would write it: (request, token, layer, expert, event). Nothing of the simulator is used."""
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    told = []
    for request, asked in enumerate(requests):
        decodes = asked.first_row + asked.prompt_len
        passes = [(asked.first_row, decodes)] + [(row, row + 1) for row in range(decodes, decodes + asked.outputs - 1)]
        for token, (start, stop) in enumerate(passes):
            rows = trace.experts[start:stop].astype(int)
            for layer in range(trace.n_layers):
                ids = rows[0, layer].tolist() if stop - start == 1 else sorted(set(rows[:, layer].ravel().tolist()))
                missing = [expert for expert in ids if (layer, expert) not in held]
                for expert in ids:
                    if (layer, expert) in held:
                        held.move_to_end((layer, expert))
                        told.append((request, token, layer, expert, "hit"))
                for expert in missing:
                    told.append((request, token, layer, expert, "miss"))
                    if len(held) == capacity:
                        victim = next(key for key in held if key[0] != layer or key[1] not in ids)
                        del held[victim]
                        told.append((request, token, *victim, "evict"))
                    held[layer, expert] = None
    return told


@pytest.fixture(scope="module")
def engine_rows() -> list[tuple[int, int, int, int, str]]:
    setup = prepare(RunSpec(policy="lru", set={"scope": "global"}, **RUN))
    with setup.trace:
        return lru_of_its_own(setup.trace, setup.requests, int(RUN["cache"].removesuffix("experts")))


def written(path: Path, rows: Iterable[tuple[Any, ...]], head: str = "request,token,layer,expert,event") -> Path:
    path.write_text("\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def test_a_log_of_an_independent_lru_equals_the_simulator(check, engine_rows, tmp_path: Path) -> None:
    said = check(WORDS, "--log", written(tmp_path / "engine.csv", engine_rows), "--json")
    told = json.loads(said.out)
    assert (said.code, told["schema"], told["equal"], told["first_difference"]) == (0, SCHEMA, True, None)
    counts = {event: sum(row[4] == event for row in engine_rows) for event in ("hit", "miss", "evict")}
    assert told["engine"] == told["simulator"] == counts
    assert min(counts.values()) > 1000


@pytest.mark.parametrize(
    ("event", "becomes", "engine", "simulator"),
    [
        ("evict", lambda row: (*row[:3], (row[3] + 1) % 8, "evict"), "evicted expert {1} of", "evicted expert {0} of"),
        ("evict", lambda row: None, "no eviction", "evicted expert {0} of"),
        ("hit", lambda row: (*row[:4], "miss"), "miss", "hit"),
        ("miss", lambda row: None, "no lookup", "miss"),
    ],
)
def test_a_log_with_one_row_changed_parts_there(
    check, engine_rows, tmp_path: Path, event: str, becomes: Any, engine: str, simulator: str
) -> None:
    """Whatever row it is, the first difference is that row's pass and layer, and says what either side did."""
    for at in random.Random(event).sample([n for n, row in enumerate(engine_rows) if row[4] == event], 3):
        row = engine_rows[at]
        changed = [*engine_rows[:at], *filter(None, [becomes(row)]), *engine_rows[at + 1 :]]
        said = check(WORDS, "--log", written(tmp_path / "engine.csv", changed), "--json")
        first = json.loads(said.out)["first_difference"]
        at_layer = next(one[2] for one in reversed(engine_rows[: at + 1]) if one[4] != "evict")
        assert said.code == 1
        assert (first["request"], first["token"], first["at_layer"], first["layer"]) == (*row[:2], at_layer, row[2])
        ids = row[3], (row[3] + 1) % 8
        assert first["engine"].startswith(engine.format(*ids))
        assert first["simulator"].startswith(simulator.format(*ids))
    assert "not equal: first in request" in check(WORDS, "--log", tmp_path / "engine.csv").out


def test_logs_may_be_json_lines_by_step_and_lack_events(check, engine_rows, tmp_path: Path) -> None:
    n_passes: dict[tuple[int, int], int] = {}
    path = tmp_path / "engine.jsonl"
    with path.open("w") as file:
        for request, token, layer, expert, event in engine_rows:
            step = n_passes.setdefault((request, token), len(n_passes))
            if event != "evict":
                row = {"step": step, "layer": layer, "expert": expert, "event": event, "at_s": 0.5}
                print(json.dumps(row), file=file)
    assert check(WORDS, "--log", path, "--log-events", "hit,miss").code == 0
    said = check(WORDS, "--log", path)
    assert (said.code, "--log-events hit,miss" in " ".join(said.out.split())) == (1, True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no rows"),
        ("request,token,layer,expert,event\n", "no rows"),
        (
            "request,token,layer,event\n0,0,0,hit\n",
            "line 1, got columns request, token, layer, event: expert is missing",
        ),
        ("layer,expert,event\n0,0,hit\n", "line 2, got layer, expert, event: no request and token, nor step"),
        ("request,token,layer,expert,event\n0,0,0,hit\n", "line 2, got 4 cells under 5 columns"),
        ("request,token,layer,expert,event\n0,0,32,0,hit\n", "line 2: layer, got '32': a whole number from 0 to 31"),
        ("request,token,layer,expert,event\n0,0,0,-1,hit\n", "line 2: expert, got '-1': a whole number from 0 to 7"),
        ("request,token,layer,expert,event\n0,0.5,0,1,hit\n", "line 2: token, got '0.5'"),
        ("request,token,layer,expert,event\n0,0,0,1,hits\n", "line 2: event, got 'hits': did you mean 'hit'?"),
        ("request,token,layer,expert,event\n0,0,0,1,evict\n", "line 2: event, got an evict before any hit or miss"),
        ("request,token,layer,layer,expert,event\n", "line 1, got column 'layer' twice"),
        ('{"step": 0, "layer": 0, "expert": 1}\n', "line 1: event is missing"),
        ('{"step": true, "layer": 0, "expert": 1, "event": "hit"}\n', "line 1: step, got 'True'"),
        ('{"step": 0, "layer": 0, "expert": 1, "event": ["hit"]}\n', "line 1: event, got"),
        ('{"step": 0\n', "line 1: no JSON"),
        ('{"step": 0, "layer": 0, "expert": 1, "event": "hit"}\n[1]\n', "line 2, got list: an object a line"),
        ("\xff\xfe", "UTF-8"),
        ("x" * 5000, "line 1: longer than 4096 characters"),
    ],
)
def test_what_is_no_log(check, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes(text.encode("latin-1"))
    said = check(WORDS, "--log", path)
    assert said.code == 2
    assert says in said.err
    assert str(path) in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "more", "says"),
    [
        ("hobbit hw=a6000 requests=1", (), "changes what gates ask for"),
        ("moepic hw=a6000 requests=1", (), "copies parts of experts"),
        (WORDS, ("--update",), "--update, got it with --log"),
        (WORDS, ("--log-events", "hit,mis"), "did you mean 'miss'?"),
        (WORDS, ("--log-events", "hit,miss"), "--log-events says that the log has none"),
        ("lru", (), "on which GPU"),
    ],
)
def test_what_no_log_is_held_against(check, engine_rows, tmp_path: Path, words: str, more: Any, says: str) -> None:
    said = check(words, "--log", written(tmp_path / "engine.csv", engine_rows), *more)
    assert (said.code, says in said.err) == (2, True), said.err
