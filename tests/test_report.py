"""`moesim report`: the page says what its data says, the data what the run's files say, and names are only text."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from cli_help import mixtral_shaped, moesim, simulated

from sim.base.units import show_seconds
from sim.cli import simulate
from sim.pages.page import show
from sim.studies.rows import pareto

HOSTILE = "<img src=x onerror=document.title='hacked'>"
UNITS = ("s", "bytes", "frac", "n", "x", "")


class Texts(HTMLParser):
    """Text nodes outside scripts and styles, attributes of every element, and the block of data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = "data" if ("id", "data") in attrs else tag

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        elif not self._inside and data.strip():
            self.texts.append(data)


def strings_and_numbers(value: Any) -> tuple[set[str], set[float]]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        found = [strings_and_numbers(child) for child in value]
        return set().union(*(s for s, _ in found)), set().union(*(n for _, n in found))
    if isinstance(value, str):
        return {value}, set()
    return set(), set() if value is None or isinstance(value, bool) else {value}


def unfounded(page: str) -> list[str]:
    """Texts with a digit that the page's data does not hold, as text or as a number."""
    parsed = Texts(page)
    strings, numbers = strings_and_numbers(json.loads(parsed.data))
    shown = {show(number, unit) for number in numbers for unit in UNITS}
    every = "\n".join(strings)
    return [text for text in parsed.texts if re.search(r"\d", text) and text not in shown and text not in every]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of different policies with all their tables, and their trace."""
    folder = tmp_path_factory.mktemp("runs")
    machine = ("--hw", "rtx3090", "--trace", str(mixtral_shaped(folder, outputs=12)), "--cache", "50experts")
    for name, policy in (("a", "fine_moe"), ("b", "lru")):
        with pytest.raises(SystemExit) as stop:
            simulate(["--policy", policy, *machine, "--set", "out.spans=on", "--out", str(folder / name)])
        assert not stop.value.code
    return folder


@pytest.fixture
def kept(runs: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Copies of both, which a test may change."""
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    return tmp_path / "a", tmp_path / "b"


def data_of(capsys: pytest.CaptureFixture[str], *paths: object) -> Any:
    return moesim(capsys, "report", *paths, "--json").json


def section(data: Any, name: str) -> Any:
    return next(one for one in data["sections"] if one["name"] == name)


def plot(data: Any, name: str) -> Any:
    return next(b for s in data["sections"] for b in s["blocks"] if b["kind"] == "plot" and b["name"] == name)


class TestRun:
    def test_the_page_begins_with_the_verdict_of_the_run(self, kept: Any, capsys: pytest.CaptureFixture[str]) -> None:
        said = moesim(capsys, "report", kept[0])
        assert said.code == 0
        page = (kept[0].with_name("a.html")).read_text(encoding="utf-8")
        first = next(text for text in Texts(page.split("<header>")[1]).texts)
        assert said.out.splitlines()[1] == first  # after where it was written
        result = json.loads((kept[0] / "result.json").read_text(encoding="utf-8"))
        assert first.startswith(
            "fine_moe cache=50experts on rtx3090" if "cache=50experts on" in first else "fine_moe on rtx3090"
        )
        assert show_seconds(result["tpot_s"]["mean"]) in first

    def test_every_figure_is_in_its_data(self, kept: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        for paths in ((kept[0],), kept):
            assert moesim(capsys, "report", *paths, "-o", tmp_path / "p.html").code == 0
            page = (tmp_path / "p.html").read_text(encoding="utf-8")
            assert json.loads(Texts(page).data) == data_of(capsys, *paths)
            assert unfounded(page) == []
            assert unfounded(page.replace("</main>", "<p>12.34 ms</p></main>")) == ["12.34 ms"]
            assert len(page.encode()) < 1_500_000

    def test_equal_runs_give_equal_pages(self, kept: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        again = ("--config", kept[0] / "config.yaml", "--set", "out.spans=on", "--out", tmp_path / "again")
        assert simulated(capsys, *again).code == 0
        moesim(capsys, "report", kept[0], "-o", tmp_path / "1.html")
        moesim(capsys, "report", tmp_path / "again", "--out", tmp_path / "2.html")
        assert (tmp_path / "1.html").read_bytes() == (tmp_path / "2.html").read_bytes()

    def test_plots_hold_what_the_tables_hold(self, kept: Any, capsys: pytest.CaptureFixture[str]) -> None:
        data, requests = data_of(capsys, kept[0]), pd.read_parquet(kept[0] / "requests.parquet")
        for name, column in (("ttft", "ttft_s"), ("tpot", "tpot_s")):
            (trace,) = plot(data, name)["traces"]
            assert trace["x"][1:] == sorted(requests[column])
            assert trace["y"] == [i / len(requests) for i in range(len(requests) + 1)]
        result = json.loads((kept[0] / "result.json").read_text(encoding="utf-8"))
        shares = {one["name"]: dict(zip(one["y"], one["x"], strict=True)) for one in plot(data, "time")["traces"]}
        assert shares["waiting for copies"]["decode"] == result["bottleneck"]["decode"]["copy"]
        assert sum(part["prefill"] for part in shares.values()) == pytest.approx(1.0)

    def test_lanes_show_the_window_and_join_copies_to_those_who_waited(
        self, kept: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = moesim(capsys, "report", kept[0], "--from", 3, "--iterations", 2, "--json").json
        steps = pd.read_parquet(kept[0] / "iterations.parquet")
        spans = pd.read_parquet(kept[0] / "spans.parquet")
        left, right = steps["start_s"][3], steps["end_s"][4]
        inside = spans[(spans["start_s"] < right) & (spans["end_s"] > left)]
        traces = plot(found, "lanes")["traces"]
        bars = [trace for trace in traces if trace["type"] == "bar"]
        assert sum(len(trace["x"]) for trace in bars) == len(inside) > 0
        busy_s = (inside["end_s"] - inside["start_s"]).sum()
        assert sum(sum(trace["x"]) for trace in bars) == pytest.approx(busy_s, rel=1e-6)
        copies = inside[inside["lane"] == "h2d"]
        experts = inside[(inside["lane"] == "gpu") & (inside["op"] == "expert")]
        waited = experts.merge(copies, on=["layer", "expert"], suffixes=("", "_copy"))
        waited = waited[waited["start_s"] == waited["end_s_copy"]]
        (joins,) = [trace for trace in traces if trace["type"] == "scatter"]
        assert joins["x"][::3] == pytest.approx(sorted(waited["start_s"] - left), abs=1e-8)
        assert len(waited) > 0
        assert "Iterations 3 to 4 of" in section(found, "lanes")["sentence"]

    def test_curves_are_those_of_caches_and_meet_a_cache_of_that_size(
        self, kept: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The run of `lru` lies on the curve of `lru`: two ways to count the same misses."""
        _, plain, own = plot(data_of(capsys, kept[1]), "misses")["traces"]
        at = plain["x"].index(50 / 256)
        assert own["x"] == [50 / 256]
        assert own["y"][0] == pytest.approx(plain["y"][at])

    def test_memory_over_time_is_a_replay_of_the_same_run(self, kept: Any, capsys: pytest.CaptureFixture[str]) -> None:
        experts, budget = plot(data_of(capsys, kept[0]), "memory-over-time")["traces"]
        result = json.loads((kept[0] / "result.json").read_text(encoding="utf-8"))
        assert experts["x"] == list(pd.read_parquet(kept[0] / "iterations.parquet")["end_s"])
        assert 0 < max(experts["y"]) <= result["cache_peak_bytes"][0] <= budget["y"][0]
        assert all(n_bytes % result["expert_bytes"] == 0 for n_bytes in experts["y"])
        config = kept[0] / "config.yaml"
        config.write_text(config.read_text(encoding="utf-8").replace("seed: 0", "seed: 1"), encoding="utf-8")
        assert "another run by now" in section(data_of(capsys, kept[0]), "memory")["sentence"]

    def test_no_code_of_a_run_folder_is_run(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        mark = tmp_path / "ran"
        policy = tmp_path / "mine.py"
        own = "from sim.policy import Policy, Recency\nclass Mine(Policy):\n    name = 'mine'\n    order = Recency()\n"
        policy.write_text(f"open({str(mark)!r}, 'w').close()\n{own}", encoding="utf-8")
        trace = mixtral_shaped(tmp_path)
        options = ("--hw", "rtx3090", "--trace", trace, "--out", tmp_path / "r")
        assert simulated(capsys, "--policy", policy, *options).code == 0
        mark.unlink()
        command = [sys.executable, "-m", "moesim", "report", tmp_path / "r", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "reports run no code from a file" in section(json.loads(done.stdout), "memory")["sentence"]
        assert not mark.exists()


class TestComparison:
    def test_runs_are_ranked_as_compare_ranks_them(self, kept: Any, capsys: pytest.CaptureFixture[str]) -> None:
        found = data_of(capsys, *kept)
        trace = kept[0].parent / "mix.safetensors"
        asked = ("--hw", "rtx3090", "--trace", trace, "--cache", "50experts", "--policy", "fine_moe", "--policy", "lru")
        said = moesim(capsys, "compare", *asked, "--json")
        assert found["verdict"] == said.json["answer"]
        path = kept[0].parent / "compared.json"
        path.write_text(said.out, encoding="utf-8")
        same = data_of(capsys, path)
        assert same["verdict"] == found["verdict"]
        assert (
            section(same, "ranking")["blocks"][1]["rows"][0][2:]
            == section(found, "ranking")["blocks"][1]["rows"][0][2:]
        )

    def test_the_front_is_what_nothing_beats(self) -> None:
        def row(memory: int, time_s: float) -> Any:
            return SimpleNamespace(ran=SimpleNamespace(peak_vram_bytes=memory), speed_s=time_s, kind="system")

        found = pareto(row(*one) for one in [(3, 1.0), (1, 4.0), (2, 4.0), (2, 2.0), (4, 1.5)])
        assert [(one.ran.peak_vram_bytes, one.speed_s) for one in found] == [(1, 4.0), (2, 2.0), (3, 1.0)]


class TestSweep:
    def test_a_sweep_has_a_selector_for_every_axis(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        trace = mixtral_shaped(tmp_path)
        asked = (
            "--policy",
            "lru",
            "--policy",
            "belady",
            "--hw",
            "rtx3090,a6000",
            "--cache",
            "40experts,60experts,100experts",
        )
        said = moesim(
            capsys,
            "sweep",
            *asked,
            "--trace",
            trace,
            "--workers",
            1,
            "--out",
            tmp_path / "s",
            "--json",
            "--columns",
            "all",
        )
        found = data_of(capsys, tmp_path / "s")
        assert found["verdict"] == said.json["answer"]
        explorer = section(found, "choose")["blocks"][0]
        assert set(explorer["axes"]) == {"label", "hw", "cache"}
        assert explorer["capacities"] == ["cache"]  # one line over all of them
        names = [column["name"] for column in explorer["columns"]]
        rows = [dict(zip(names, row, strict=True)) for row in explorer["rows"]]
        ran = [row for row in said.json["rows"] if row["status"] == "ok"]
        assert len(rows) == len(ran) < len(said.json["rows"])
        for row, told in zip(rows, ran, strict=True):
            assert (row["label"], row["hw"], row["cache"]) == (told["label"], told["hw"], told["cache"])
            assert row["tpot_s.mean"] == pytest.approx(told["tpot_s.mean"], rel=1e-6)
            assert row["kind"] == ("bound" if told["policy"] == "belady" else "system")
        assert section(found, "not-run")["blocks"][0]["rows"][0][1] == "does_not_fit"
        (tmp_path / "s.json").write_text(said.out, encoding="utf-8")
        assert data_of(capsys, tmp_path / "s.json") == found

    def test_hits_of_every_size(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        trace = mixtral_shaped(tmp_path)
        moesim(capsys, "curve", "--policy", "lru", "--trace", trace, "--out", tmp_path / "h")
        (curve,) = plot(data_of(capsys, tmp_path / "h"), "misses")["traces"]
        table = pd.read_parquet(tmp_path / "h" / "curve.parquet")
        assert curve["y"] == pytest.approx(list(1 - table["hit_rate"]))


class TestOthers:
    @pytest.mark.parametrize("name", ["cpu-backend", "emoe"])
    def test_validations_that_are_bundled(self, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = Path(__file__).resolve().parent.parent / "reports" / "validation" / f"{name}.json"
        assert moesim(capsys, "report", path, "-o", tmp_path / "v.html").code == 0
        assert unfounded((tmp_path / "v.html").read_text(encoding="utf-8")) == []

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            (("explain", "--measured", "900ms", "--policy", "lru"), "explanations"),
            (("plan", "--least-memory", "--goal", "tpot_s.mean <= 2s", "--policy", "lru"), "candidates"),
        ],
    )
    def test_other_answers(
        self, options: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        asked = ("--trace", mixtral_shaped(tmp_path), "--hw", "rtx3090", "--json")
        said = moesim(capsys, *options, *asked).out
        (tmp_path / "plan.json").write_text(said, encoding="utf-8")
        found, told = data_of(capsys, tmp_path / "plan.json"), json.loads(said)
        assert found["verdict"] == told["answer"]
        table = section(found, what)["blocks"][-1]
        assert len(table["rows"]) == len(told[what]) > 0


class TestHostile:
    """What comes from files is text."""

    def test_names_stay_text(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        trace = mixtral_shaped(tmp_path)
        hostile = tmp_path / f"{HOSTILE}.safetensors"
        trace.rename(hostile)
        simulated(capsys, "--policy", "lru", "--hw", "rtx3090", "--trace", hostile, "--out", tmp_path / "r")
        path = tmp_path / "r" / "result.json"
        result = json.loads(path.read_text(encoding="utf-8"))
        assert result["trace"] == HOSTILE
        result["caveats"] = ["</script><script>document.title='hacked'</script>", "<!--", "\u2028"]
        path.write_text(json.dumps(result), encoding="utf-8")
        assert moesim(capsys, "report", tmp_path / "r", "-o", tmp_path / "x.html").code == 0
        page = (tmp_path / "x.html").read_text(encoding="utf-8")
        parsed = Texts(page)
        assert all("hacked" not in str(attrs) for _, attrs in parsed.tags)
        assert [tag for tag, _ in parsed.tags].count("script") == 3
        assert any(line.endswith("\u2028.") for line in json.loads(parsed.data)["lines"])
        assert "<img" not in page.split("<script>")[0]

    @pytest.mark.parametrize(
        ("name", "text", "why"),
        [
            ("r.json", "[1]", "not one JSON object"),
            ("r.json", "{", "not JSON"),
            ("r.json", "{}", "of no kind that is known"),
            ("r.json", '{"schema": 3, "run_id": "x"}', "schema"),
            ("r.json", '{"schema": 2, "run_id": "x"}', "not a result"),
            ("r.json", '{"runs": [1], "realism": ""}', "not a list of results"),
            ("r.json", '{"rows": 3, "answer": ""}', "rows"),
            ("r.json", '{"schema": 2, "comparisons": 3}', "not comparisons"),
            ("r.json", '{"goals": [], "candidates": 3}', "not as `moesim plan"),
            ("r.json", '{"ways": 3}', "not as `moesim plan"),
            ("r.json", '{"ways": [], "crossovers": [], "answer": "", "trace": ""}', "nothing was found"),
            ("r.json", "[" * 100_000, "not JSON"),
            ("r.parquet", "PAR1", "not a Parquet file"),
            ("r.yaml", "{", "r.yaml"),
        ],
    )
    def test_one_line_for_what_is_wrong(
        self, name: str, text: str, why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        (tmp_path / name).write_text(text, encoding="utf-8")
        out = tmp_path / "out.html"
        assert why in moesim(capsys, "report", tmp_path / name, "-o", out).error
        assert not out.exists()
        assert [path.name for path in tmp_path.iterdir()] == [name]

    def test_what_is_no_input(self, kept: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert "no such file" in moesim(capsys, "report", tmp_path / "nothing").error
        (tmp_path / "empty").mkdir()
        assert "a folder without" in moesim(capsys, "report", tmp_path / "empty").error
        (kept[0] / "requests.parquet").write_bytes((kept[1] / "requests.parquet").read_bytes())
        assert "of another run" in moesim(capsys, "report", kept[0]).error
        assert "it is of an image" in moesim(capsys, "report", kept[1], "--plot", "time").error
        assert "name one of time" in moesim(capsys, "report", kept[1], "-o", tmp_path / "t.svg").error


class TestLayers:
    def test_layers_and_experts_are_those_of_the_tables(self, kept: Any, capsys: pytest.CaptureFixture[str]) -> None:
        data = data_of(capsys, kept[0])
        layers = pd.read_parquet(kept[0] / "layers.parquet").query("phase == 'decode'")
        shares = {one["name"]: one["y"] for one in plot(data, "layers")["traces"]}
        assert shares["hit"] == pytest.approx(list(layers["hit_n"] / layers["asked_n"]))
        assert [sum(parts) for parts in zip(*shares.values(), strict=True)] == pytest.approx([1.0] * 32)
        reasons = plot(data, "reasons")["traces"]
        assert sum(sum(one["y"]) for one in reasons) == layers["miss_n"].sum() > 0
        waits = sum(sum(one["y"]) for one in plot(data, "waits")["traces"])
        assert waits == pytest.approx(layers.filter(regex="^wait_").sum().sum())
        experts = pd.read_parquet(kept[0] / "experts.parquet").query("phase == 'decode'")
        (asked,) = plot(data, "experts-asked")["traces"]
        assert asked["z"] == experts.pivot(index="layer", columns="expert", values="asked_n").to_numpy().tolist()

    def test_runs_beside_each_other_by_layer(self, kept: Any, capsys: pytest.CaptureFixture[str]) -> None:
        found = {one["name"]: one["y"] for one in plot(data_of(capsys, *kept), "layers")["traces"]}
        rows = pd.read_parquet(kept[1] / "layers.parquet").query("phase == 'decode'")
        assert set(found) == {"fine_moe", "lru"}
        assert found["lru"] == pytest.approx(list(rows["hit_n"] / rows["asked_n"]))


class TestImages:
    """Drawn by kaleido and a browser, where they are installed."""

    def test_equal_plots_are_equal_bytes(
        self, kept: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Plotly draws ids at random; here in place of the browser, in the form that plotly gives them."""

        def drawn(figure: Any, opts: Any) -> bytes:
            uid, own = f"{random.getrandbits(24):06x}", f"{random.getrandbits(24):06x}"
            return (
                f'<svg height="{opts["height"]}"><defs id="defs-{uid}"/><clipPath id="clip{uid}xyplot"/>'
                f'<pattern id="p{uid}-legend-{own}"/><g style="fill: url(#p{uid}-legend-{own})"/>'
                f"{len(figure['data'])} traces</svg>"
            ).encode()

        monkeypatch.setitem(sys.modules, "kaleido", SimpleNamespace(calc_fig_sync=drawn))
        for name in ("1.svg", "2.svg"):
            assert moesim(capsys, "report", *kept, "-o", tmp_path / name, "--plot", "time").code == 0
        assert (tmp_path / "1.svg").read_bytes() == (tmp_path / "2.svg").read_bytes()
        assert b" traces</svg>" in (tmp_path / "1.svg").read_bytes()

    def test_a_browser_draws_them(self, kept: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        pytest.importorskip("kaleido", reason="the extra `images` is not installed")
        said = moesim(capsys, "report", *kept, "-o", tmp_path / "t.svg", "--plot", "time")
        if said.code:
            pytest.skip(said.error)
        assert (tmp_path / "t.svg").read_text(encoding="utf-8").startswith("<svg")
