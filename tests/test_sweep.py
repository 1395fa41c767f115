"""A sweep's rows are what single runs give; what cannot run is a row too; a kill loses nothing and repeats nothing."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from cli_help import mixtral_shaped, moesim, simulated

import moesim as face
from sim.base.errors import BadInput, CheckFailed
from sim.results.sampling import Sample
from sim.results.tables import columns_of
from sim.studies.rows import Row
from sim.studies.runner import runner
from sim.studies.runner.work import carried_out

BROKEN = """
from sim.policy import Policy, RunGpu


class Broken(Policy):
    name = "broken"

    def gate_done(self, gate, view):
        yield RunGpu(next(iter(gate.needs)))
"""
FAILING = BROKEN.replace("broken", "failing").replace("yield RunGpu(next(iter(gate.needs)))", "raise KeyError('mine')")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return mixtral_shaped(tmp_path)


def table(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "sweep.parquet")


def test_every_row_is_what_simulate_says(capsys: Any, trace: Path, tmp_path: Path) -> None:
    """Brute force: each point once more as a command of its own, figure by figure, its bound included."""
    grid = {"hw": ("rtx3090", "a6000"), "cache": ("32experts", "48experts"), "batch": (1, 2)}
    link = "hw.h2d.bandwidth_bytes_per_s"
    words: list[object] = ["sweep", "--trace", trace, "--policy", "lru", "--policy", "lcp rho=0.5,0.9"]
    words += ["--policy", "fiddler", "--set", f"{link}=1.2e10,2.4e10"]
    words += [word for name, values in grid.items() for word in (f"--{name}", ",".join(map(str, values)))]
    assert moesim(capsys, *words, "--out", tmp_path / "out").code == 0
    rows = table(tmp_path / "out")
    assert len(rows) == 4 * 2 * 2 * 2 * 2
    assert rows["run_id"].is_unique
    for row in rows.sample(10, random_state=3).to_dict("records"):
        name, *own = row["label"].split()
        words = [
            "--policy",
            name,
            "--trace",
            trace,
            "--hw",
            row["hw"],
            "--cache",
            row["cache"],
            "--batch",
            row["batch"],
        ]
        words += [word for pair in (*own, f"{link}={row[link]}") for word in ("--set", pair)]
        alone = simulated(capsys, *words, "--json").json
        for column in ("run_id", "hit_rate", "h2d_bytes", "trace_sha256", "version", "simulated_s", "peak_vram_bytes"):
            assert row[column] == alone[column], column
        assert row["tpot_s.mean"] == alone["tpot_s"]["mean"]
        assert row["ttft_s.mean"] == alone["ttft_s"]["mean"]
        assert row["lower_bound.tpot_s"] == alone["lower_bound"]["tpot_s"]
        assert row["lower_bound.above_frac"] == alone["lower_bound"]["above_frac"]
        ends = alone["uncertainty"]["sampling"]["tpot_s"]
        assert (None if row["uncertainty.sampling.tpot_s"] is None else [*row["uncertainty.sampling.tpot_s"]]) == ends
        for key, value in alone["params"].items():
            assert row[f"params.{key}"] == value


def test_everything_varied_or_resolved_has_a_column(capsys: Any, trace: Path, tmp_path: Path) -> None:
    words = (
        "--policy",
        "lru",
        "--policy",
        "lfu scope=global",
        "--hw",
        "rtx3090",
        "--seed",
        "1:2",
        "--cache",
        "15%",
    )
    words = (*words, "--vram", "20GB,22GB", "--set", "engine.per_layer_s=5e-6", "--pcie", "gen4x16,gen5x16")
    assert moesim(capsys, "sweep", "--trace", trace, *words, "--out", tmp_path / "out").code == 0
    rows = table(tmp_path / "out")
    assert set(columns_of("runs")) - set(rows) == {"wall_s", "params", "overrides"}
    assert set(rows["seed"]) == {1, 2}
    assert set(rows["vram_bytes"]) == {20 * 10**9, 22 * 10**9}
    assert set(rows["pcie"]) == {"gen4x16", "gen5x16"}
    assert set(rows["cache"]) == {"15%"}
    assert set(rows["engine.per_layer_s"]) == {5e-6}
    assert set(rows["params.scope"]) == {"layer", "global"}
    for column in ("hw_sha256", "model_sha256", "engine_sha256", "trace_sha256"):
        assert rows[column].str.fullmatch("[0-9a-f]{64}").all()
    assert rows["hw_sha256"].nunique() == 2  # the link is part of what the hardware was resolved to


def test_one_bound_is_beside_all_points_of_a_workload(capsys: Any, trace: Path, tmp_path: Path) -> None:
    words = ("sweep", "--policy", "lru", "--policy", "fiddler", "--trace", trace, "--cache", "32experts,48experts")
    said = moesim(capsys, *words, "--hw", "rtx3090,a6000", "--out", tmp_path / "one")
    rows = table(tmp_path / "one")
    least_s = rows["lower_bound.tpot_s"].min()
    assert rows["lower_bound.tpot_s"].nunique() == 8
    assert (rows["above_common_bound_frac"] == rows["tpot_s.mean"] / least_s - 1).all()
    best = rows.loc[rows.groupby(["hw", "cache"])["tpot_s.mean"].idxmin()]
    shown = re.findall(r"fiddler +[\d.]+ m?s +(\d+) %", said.out)
    assert sorted(map(int, shown)) == sorted(round(100 * frac) for frac in best["above_common_bound_frac"])
    where = rows.loc[rows["lower_bound.tpot_s"].idxmin()]
    words_of = f"(with experts on the CPU too, hw {where['hw']}, cache {where['cache']})"
    assert words_of in " ".join(said.out.split())
    said = moesim(capsys, *words, "--hw", "rtx3090", "--batch", "1,2", "--out", tmp_path / "two")
    assert table(tmp_path / "two")["above_common_bound_frac"].isna().all()  # of other requests at once: no one bound
    assert "above bound" not in said.out


def test_what_cannot_run_is_a_row(capsys: Any, trace: Path, tmp_path: Path) -> None:
    """Before the run and in it: a budget beyond the card, and one below what a policy needs."""
    words = (
        "--policy",
        "lru scope=global",
        "--policy",
        "lfu",
        "--hw",
        "rtx3090",
        "--cache",
        "16experts,40experts,200experts",
    )
    said = moesim(capsys, "sweep", "--trace", trace, *words, "--out", tmp_path / "out")
    assert said.code == 0
    rows = table(tmp_path / "out")
    assert rows["status"].tolist() == ["ok", "does_not_fit", "ok", "ok", "does_not_fit", "does_not_fit"]
    assert rows["reason"].isna().tolist() == [True, False, True, True, False, False]
    assert rows["cache"].tolist() == [f"{n}experts" for n in (16, 16, 40, 40, 200, 200)]
    assert set(rows["model"]) == {"mixtral-8x7b"}
    assert "needs at least 32 whole experts" in said.out
    assert "lower it, or take a larger GPU" in said.out
    with pytest.raises(BadInput, match="lower it, or take a larger GPU"):
        face.sweep(
            "lru scope=global", "rtx3090", trace=trace, cache=["200experts", "201experts"]
        )  # nothing is left to run
    said = moesim(
        capsys, "sweep", "--trace", trace, *words[2:6], "--cache", "15experts,16experts"
    )  # known as it runs alone
    assert (said.code, said.out.splitlines()[0]) == (2, "nothing ran")


def test_a_named_policy_that_cannot_run_is_a_row_and_a_mistake_in_its_words_is_none(
    capsys: Any, tmp_path: Path
) -> None:
    from tiny_traces import tiny_trace

    path = tiny_trace(tmp_path / "ids.safetensors", 32, 8, 2, n_requests=2, prompt=2, outputs=3, levels=())
    words: list[object] = ["sweep", "--trace", path, "--hw", "rtx3090,a6000", "--policy", "lru"]
    said = moesim(capsys, *words, "--policy", "fine_moe track=map_t,map_ts", "--policy", "moepic", "--json")
    found = {row["label"]: (row["status"], row["reason"]) for row in json.loads(said.out)["rows"]}
    assert (said.code, found["lru"]) == (0, ("ok", None))
    assert len(found) == 4
    assert all(status == "refused" and "needs" in reason for name, (status, reason) in found.items() if name != "lru")
    for wrong in ("moepicc", "fine_moe track=map_u", "fine_moe trak=map_t"):
        said = moesim(capsys, *words, "--policy", wrong)
        assert (said.code, said.out) == (2, "")


@pytest.mark.parametrize(("code", "status"), [(BROKEN, "broke_a_rule"), (FAILING, "failed")])
def test_a_policy_that_breaks_a_rule_is_a_row_and_exit_1(
    capsys: Any, trace: Path, tmp_path: Path, code: str, status: str
) -> None:
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    words = ("--policy", tmp_path / "mine.py", "--policy", "lru", "--hw", "rtx3090", "--out", tmp_path / "out")
    assert moesim(capsys, "sweep", "--trace", trace, *words).code == 1
    rows = table(tmp_path / "out")
    assert rows["status"].tolist() == [status, "ok"]
    kept = {path.stem for path in (tmp_path / "out" / "points").iterdir()}
    assert len(kept) == (1 if status == "failed" else 2)  # nobody can say that a crash would come again


def test_the_number_of_workers_changes_no_byte(capsys: Any, trace: Path, tmp_path: Path) -> None:
    words = ("--policy", "lru", "--policy", "random", "--hw", "rtx3090,a6000", "--seed", "0:3", "--cache", "40experts")
    for n in (1, 2):
        assert moesim(capsys, "sweep", "--trace", trace, *words, "--workers", n, "--out", tmp_path / f"{n}").code == 0
    assert (tmp_path / "1" / "sweep.parquet").read_bytes() == (tmp_path / "2" / "sweep.parquet").read_bytes()


class TestTheFolder:
    WORDS = ("sweep", "--policy", "lru", "--policy", "lfu", "--hw", "rtx3090", "--cache", "40experts")

    def test_resuming_runs_what_is_missing_and_nothing_else(
        self, capsys: Any, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        words = (*self.WORDS, "--trace", trace, "--out", tmp_path / "out")
        assert moesim(capsys, *words).code == 0
        before = (tmp_path / "out" / "sweep.parquet").read_bytes()
        gone, torn, *_ = sorted((tmp_path / "out" / "points").iterdir())
        gone.unlink()
        torn.write_text(torn.read_text(encoding="utf-8")[:-40], encoding="utf-8")
        (tmp_path / "out" / "sweep.parquet").unlink()
        asked = []

        def counted(spec: Any, id_: str, *others: Any) -> Any:
            asked.append(id_)
            return carried_out(spec, id_, *others)

        monkeypatch.setattr(runner, "carried_out", counted)
        assert moesim(capsys, *words, "--resume", "--workers", 1).code == 0
        assert sorted(asked) == [gone.stem, torn.stem]
        assert (tmp_path / "out" / "sweep.parquet").read_bytes() == before

    def test_it_holds_one_sweep(self, capsys: Any, trace: Path, tmp_path: Path) -> None:
        out = ("--trace", trace, "--out", tmp_path / "out")
        assert moesim(capsys, *self.WORDS, *out).code == 0
        assert "2 of 2 points done; add --resume to go on" in moesim(capsys, *self.WORDS, *out).error
        for changed in (("--seed", "1"), ("--set", "hw.h2d.latency_s=1e-5"), ("--policy", "fifo")):
            assert "it holds another sweep" in moesim(capsys, *self.WORDS, *changed, *out, "--resume").error
        mixtral_shaped(tmp_path, seed=5)  # the same name, other routing
        assert "files that have changed" in moesim(capsys, *self.WORDS, *out, "--resume").error
        manifest = tmp_path / "out" / "sweep.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": "0.0.1"}))
        assert "it holds runs of version 0.0.1" in moesim(capsys, *self.WORDS, *out, "--resume").error

    def test_nobody_elses_files_are_touched(self, capsys: Any, trace: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("mine", encoding="utf-8")
        said = moesim(capsys, *self.WORDS, "--trace", trace, "--out", tmp_path / "out", "--resume").error
        assert "it holds 'thesis.txt', which is no part of a sweep" in said
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]

    def test_an_input_that_changes_under_way_is_found_out(self, trace: Path) -> None:
        from sim.options import RunSpec

        with pytest.raises(CheckFailed, match="what it is made of has changed since the sweep began"):
            carried_out(RunSpec(policy="lru", hw="rtx3090", trace=str(trace)), "000000000000")


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
class TestKills:
    def words(self, trace: Path, out: Path) -> list[str]:
        words = ["sweep", "--policy", "lru", "--policy", "random", "--policy", "lfu scope=global,layer"]
        words += ["--hw", "rtx3090,a6000", "--cache", "16experts:48experts:16experts", "--seed", "0:1"]
        return [*words, "--trace", str(trace), "--out", str(out), "--workers", "2", "--resume"]

    def killed_and_resumed(self, capsys: Any, trace: Path, tmp_path: Path, times: int, seed: int) -> None:
        """SIGKILL at random moments after the first record, then to the end: the table of an undisturbed sweep, and
        no record that was there is written anew."""
        assert moesim(capsys, *self.words(trace, tmp_path / "whole")).code == 0
        moments, out = random.Random(seed), tmp_path / "out"
        written: dict[str, int] = {}
        n_killed = 0
        for _ in range(times):
            # Own group: its workers end with it, whoever is killed.
            process = subprocess.Popen(
                [sys.executable, "-m", "sim", *self.words(trace, out)], stdout=-3, stderr=-3, start_new_session=True
            )
            seen, deadline_s = len(written), time.monotonic() + 180
            while process.poll() is None and len(list(out.glob("points/*.json"))) <= seen:
                assert time.monotonic() < deadline_s
                time.sleep(0.002)
            time.sleep(moments.random() * 0.05)
            n_killed += process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)
            now = {path.name: path.stat().st_mtime_ns for path in out.glob("points/*.json")}
            assert {name: now.get(name) for name in written} == written
            for path in out.glob("points/*.json"):
                json.loads(path.read_bytes())
            written = now
        assert n_killed
        assert moesim(capsys, *self.words(trace, out)).code == 0
        now = {path.name: path.stat().st_mtime_ns for path in out.glob("points/*.json")}
        assert {name: now[name] for name in written} == written
        assert (out / "sweep.parquet").read_bytes() == (tmp_path / "whole" / "sweep.parquet").read_bytes()
        assert sorted(path.name for path in out.iterdir()) == ["bounds", "points", "sweep.json", "sweep.parquet"]

    @pytest.mark.thorough
    def test_a_few(self, capsys: Any, trace: Path, tmp_path: Path) -> None:
        self.killed_and_resumed(capsys, trace, tmp_path, times=3, seed=1)


class TestPython:
    def test_the_frame_is_the_table(self, capsys: Any, trace: Path, tmp_path: Path) -> None:
        words = (
            "sweep",
            "--policy",
            "lru",
            "--policy",
            "lcp rho=0.5:0.9:0.2",
            "--hw",
            "rtx3090",
            "--cache",
            "20experts,40experts",
        )
        said = moesim(capsys, *words, "--trace", trace, "--out", tmp_path / "out")
        frame = face.sweep(
            ["lru", "lcp rho=0.5:0.9:0.2"], "rtx3090", trace=trace, cache=["20experts", "40experts"], columns="all"
        )
        pd.testing.assert_frame_equal(frame, table(tmp_path / "out"))
        assert frame.attrs["answer"] == said.out.splitlines()[0]

    def test_a_class_in_a_file_and_ranges_and_one_policys_parameters(self, trace: Path, tmp_path: Path) -> None:
        frame = face.sweep(
            "lcp", "rtx3090", trace=trace, cache="20experts:40experts:20experts", set={"rho": [0.5, 0.9]}
        )
        assert frame[["cache", "params.rho"]].to_numpy().tolist() == [
            [f"{n}experts", rho] for n in (20, 40) for rho in (0.5, 0.9)
        ]

    def test_a_script_without_a_guard_is_run_once(self, trace: Path, tmp_path: Path) -> None:
        call = f"moesim.sweep(['lru', 'lfu'], 'rtx3090', trace={str(trace)!r}, workers=2)"
        code = f"print('once')\nimport moesim\nprint(len({call}))"
        (tmp_path / "script.py").write_text(code, encoding="utf-8")
        done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("once\n2\n", "")


class TestSummary:
    """By hand: groups, ties and fronts of made-up times."""

    def row(
        self, label: str, hw: str, tpot: tuple[float, ...], vram: int, *labels: str, link: str | None = None
    ) -> Any:
        from types import SimpleNamespace

        from sim.figures import Statistic
        from sim.options import RunSpec
        from sim.studies.runner.work import Resolved

        mean = Statistic(sum(tpot) / len(tpot), None, None, None, len(tpot))
        said: Any = SimpleNamespace(
            draft=None,
            tpot_s=mean,
            caveats=list(labels),
            model="m",
            hw=hw,
            overrides={},
            peak_vram_bytes=vram,
            n_requests=len(tpot),
            load=None,
            slo=None,
            energy=None,
        )
        said.time_s = lambda _: mean
        spec = RunSpec(policy=label, hw=hw, pcie=link)
        sample = Sample(dict(enumerate(tpot)))
        return Row(label, said, sample, spec=spec, asked=Resolved(f"{label}@{hw}", spec))

    def rows(self) -> list[Any]:
        return [
            self.row("a", "x", (1.0, 1.1), 10),
            self.row("b", "x", (2.0, 2.1), 8),
            self.row("o", "x", (0.1, 0.1), 1, "oracle"),
            self.row("a", "y", (3.0, 1.0), 20),
            self.row("b", "y", (1.0, 2.5), 9),
            self.row("l", "y", (0.5, 0.5), 5, "lossy"),
        ]

    def test_best_of_each_group_and_whom_it_is_not_told_apart_from(self) -> None:
        from sim.studies.sweep.summary import summarise

        rows = self.rows()
        found = summarise(rows)
        x, y = found.groups
        assert (x.by, y.by) == ({"hw": "x"}, {"hw": "y"})
        assert (x.best, y.best) == (rows[0], rows[4])
        assert ([*x.tied(rows[0])], [*y.tied(rows[4])]) == ([], [rows[3], rows[5]][::-1]) or y.tied(rows[4])[
            -1
        ] is rows[3]
        assert x.bounds == [rows[2]]
        assert rows[0] in found.ranks
        assert rows[2] not in found.ranks

    def test_the_front_is_of_lossless_systems(self) -> None:
        from sim.studies.sweep.summary import summarise

        rows = self.rows()
        found = summarise(rows)
        # By memory: b@x (8, 2.05), b@y (9, 1.75), a@x (10, 1.05); a@y takes more of both.
        assert found.fronts == [[rows[1], rows[4], rows[0]]]

    def test_one_policy_competes_by_its_settings(self) -> None:
        from sim.studies.sweep.summary import summarise
        from sim.studies.sweep.text import SweepText

        def answer(rows, found):
            return SweepText(rows, found).answer()

        rows = [self.rows()[0], self.row("a", "y", (0.5, 0.6), 20)]
        assert answer(rows, summarise(rows)) == "a, hw y: 550 ms per token over 2 requests, 1.91x faster than a, hw x"
        assert len(summarise(rows, ["hw"]).groups) == 2
        seconds = {("x", "slow"): 2.0, ("x", "fast"): 1.6, ("y", "slow"): 1.0, ("y", "fast"): 0.9}
        grid = [self.row("a", hw, (s, s), 9, link=link) for (hw, link), s in seconds.items()]
        said = answer(grid, summarise(grid))
        assert said.startswith("2.00x as fast with hw y, 1.25x with pcie fast, each alone against hw x, pcie slow; a, ")
