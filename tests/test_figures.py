"""The table of figures: a row more is in JSON, columns, `--expect`, goals, checks, text and the reference at once."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pytest
from cli_help import mixtral_shaped, simulated

import moesim as face
from sim import figures
from sim.figures import Figure, Figures, numbers, row_of, rows_of
from sim.results import expectations
from sim.results.compared import BETTER, Tolerance, verdict_of
from sim.results.figure import better, label_of, show_figure, unit_of
from sim.results.record import Result
from sim.results.tables import columns_of, run_row
from sim.results.text import render
from sim.studies.plan.goal import goals_of, readings
from sim.studies.sweep.grid import Block, PolicyAxis
from sim.studies.sweep.sweep import Asked, sweep
from tools import figures_page


class Grown(Result, kw_only=True, eq=False):
    """A result with a row more."""

    fan_j: Annotated[float, Figure("what the fans drew", -1, label="fans", shown="first", line=True)]


def grown(result: Result) -> Grown:
    own = {name: getattr(result, name) for name in result.__struct_fields__ if not name.startswith("_")}
    return Grown(**own, fan_j=2.5)


@pytest.fixture
def one_row_more(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(figures, "RECORD", Grown)
    yield


@pytest.mark.usefixtures("one_row_more")
def test_a_row_more_is_a_figure_everywhere(tmp_path: Path) -> None:
    trace = mixtral_shaped(tmp_path)
    result = grown(face.simulate(policy="lru", hw="rtx3090", trace=trace))
    told = result.to_dict()
    assert told["fan_j"] == 2.5
    assert (unit_of("fan_j"), better("fan_j"), show_figure("fan_j", 2.5)) == ("j", -1, "2.50 J")
    assert columns_of("runs")["fan_j"] == "float"
    assert dict(zip(columns_of("runs"), run_row(result), strict=True))["fan_j"] == 2.5
    expected = expectations.parsed(("fan_j <= 3",))
    assert [one.held for one in expectations.judged(expected, told)] == [True]
    assert verdict_of("fan_j", 3.0, 2.5, Tolerance(0.0, False, "0")) == BETTER
    assert [one.met for one in readings(goals_of(["fan_j <= 3"]), result)] == [True]
    assert "fans           2.50 J" in render(result).splitlines()
    assert "| `fan_j` ● | J | less | what the fans drew |\n" in figures_page.page()

    asked = Asked(Block([PolicyAxis("lru")], {"hw": ["rtx3090"], "trace": [str(trace)]}, {}, {}))
    swept = sweep(asked, lambda _: None, lambda *_: None)
    rows = [replace(row, result=grown(row.result)) for row in swept.rows]
    swept = replace(swept, rows=rows)
    assert swept.shown().column("fan_j").to_pylist() == [2.5]
    assert "fan_j" in swept.whole.column_names


def test_every_row_says_what_it_is() -> None:
    rows = rows_of(Figures)
    assert len(rows) > 400
    assert [key for key, row in rows.items() if not row.figure.about] == []
    assert [key for key, row in rows.items() if row.shown == "first" and row.part] == [
        "slo.attained_frac",
        "slo.goodput_requests_per_s",
        "lower_bound.tpot_s",
        "lower_bound.above_frac",
        "energy.joules_per_token",
    ]


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("slo.tasks.chat.v2.attained_frac", "slo.tasks.*.attained_frac"),
        ("lane_utilisation.h2d0", "lane_utilisation.*"),
        ("policy_stats.n.of.mine", "policy_stats.*"),
        ("host_memory.by_phase.decode.read_bytes", "host_memory.by_phase.*.read_bytes"),
        ("hit_rates", None),
        ("tpot_s", None),
    ],
)
def test_keys_of_names_that_a_run_gives_itself(key: str, row: str | None) -> None:
    found = row_of(key)
    assert (None if found is None else found.key) == row


def test_what_a_key_has_from_the_record_that_it_lies_in() -> None:
    assert (unit_of("tpot_s.p95"), unit_of("tpot_s.n"), unit_of("queue_s.sampling.blocks")) == ("s", "", "")
    assert (unit_of("prefill_hit_rates.miss"), unit_of("energy.provenance.assumed")) == ("share", "share")
    assert (better("prefetch.wasted.n"), better("prefetch.issued.n"), better("demand_copies.bytes")) == (-1, 0, -1)
    assert (label_of("tpot_s.mean"), label_of("tpot_s.p95"), label_of("seed")) == ("TPOT", "TPOT, p95", "seed")


def test_nulls_are_figures_where_a_number_may_stand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = simulated(capsys, "--policy", "lru", "--hw", "rtx3090", "--trace", mixtral_shaped(tmp_path), "--json").json
    found = dict(numbers(told))
    assert found["tpot_s.p99"] is None
    assert {"slo", "load", "policy_file", "bottleneck.resource", "caveats"}.isdisjoint(found)
    assert [key for key in found if row_of(key) is None] == []
