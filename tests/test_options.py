"""The table of options: a row is found everywhere, and what went is refused by the name of today."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from cli_help import moesim, simulated
from click.testing import CliRunner

from sim.base.errors import BadInput
from sim.base.kinds import WHOLE
from sim.base.renamed import FLAGS
from sim.base.renamed import OPTIONS as OLD_NAMES
from sim.cli.run import command as simulate_command
from sim.cli.spec_options import run_options
from sim.cli.unique_options import UniqueOptions
from sim.options import LOAD, OPTIONS, OUTPUTS, RunSpec, Table, option, spec_of
from sim.run import prepare
from sim.studies.keywords import signature_of
from sim.studies.python_api import compare
from sim.studies.simulate import simulate
from sim.studies.sweep.grid_file import gathered
from sim.studies.sweep.table import asked_columns
from tools.generate_options import PAGE, TOP, TYPES, page_text, types_text


class More(RunSpec, frozen=True, kw_only=True):
    """The options of a run, and one more."""

    batch_patience: int = option(
        3,
        LOAD,
        "Iterations that a request waits",
        dotted=True,
        flags=("--patience", "--wait"),
        metavar="N",
        kind=WHOLE,
        least=1,
    )


def test_a_new_row_is_an_option_a_setting_a_key_an_axis_a_keyword_and_a_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Table(More)

    @click.command(cls=UniqueOptions)
    @run_options(table=table)
    def command(**given: Any) -> None:
        click.echo(given["batch_patience"])

    assert "--patience, --wait N" in (told := CliRunner().invoke(command, ["--help"]).output)
    assert "Iterations that a request waits; default: 3." in " ".join(told.split())
    assert CliRunner().invoke(command, ["--wait", "7"]).output == "7\n"
    asked = {"policy": "lru", "hw": "rtx3090"}
    assert table.spec({**asked, "set": {"batch.patience": 5}}).batch_patience == 5  # --set, and a configuration's `set`
    assert table.spec({**asked, "batch.patience": "5"}).batch_patience == 5  # a grid's and a configuration's key
    assert table.spec({**asked, "batch_patience": 5}).batch_patience == 5  # a keyword
    assert "batch.patience" in [row.name for row in table.axes]
    assert "batch_patience" in signature_of(simulate, table).parameters
    assert "batch_patience" in [row.columned for row in asked_columns(table)]
    assert "| `batch.patience` | `--patience`, `--wait` | N | 3 |" in page_text((table,))
    assert "    batch_patience: int\n" in types_text(table)
    with pytest.raises(BadInput, match="--patience, got 0: at least 1; raise it, or leave it out for 3"):
        table.by_field["batch_patience"].check(0)
    monkeypatch.setattr("sim.studies.sweep.grid_file.OPTIONS", table)
    assert gathered({"policy": "lru", "batch.patience": "1:4"}, "g.yaml")["axes"] == {"batch.patience": "1:4"}


def test_what_is_generated_is_as_the_table_is() -> None:
    assert (TOP / TYPES).read_text(encoding="utf-8") == types_text(), "run python -m tools.generate_options"
    assert (TOP / PAGE).read_text(encoding="utf-8") == page_text(), "run python -m tools.generate_options"


def test_names_are_told_apart_and_forty_have_an_option_at_most() -> None:
    rows = (*OPTIONS.rows, *OUTPUTS.rows)
    names, fields = [row.name for row in rows], [row.field for row in rows]
    assert len(set(names)) == len(names)
    assert all(row.field == row.key.replace(".", "_") for row in rows)
    assert len(set(fields)) == len(fields)
    shown = [param for param in simulate_command.params if isinstance(param, click.Option) and param.name != "version"]
    assert len(shown) <= 40
    assert sum(row.top for row in rows) == 10


def test_python_shows_every_keyword() -> None:
    import moesim as face

    assert set(inspect.signature(face.simulate).parameters) == {"policy", "hw", *OPTIONS.by_field}
    assert OPTIONS.by_field.keys() - {"policy", "hw"} < inspect.signature(face.sweep).parameters.keys()


@pytest.mark.parametrize("old", OLD_NAMES)
def test_names_that_went_are_refused_with_those_of_today(old: str, capsys: Any) -> None:
    flag = f"--{old.replace('_', '-')}"
    now = OLD_NAMES[old].partition("=")[0]
    row = OPTIONS.by_name[now]
    if not row.flags or flag not in row.flags:
        said = simulated(capsys, "--policy", "lru", "--hw", "rtx3090", flag, "1").error
        if flag not in [name for one in OPTIONS.rows for name in one.flags]:
            assert f"{flag}: no such option any more; write {row.said}" in said
    if old not in OPTIONS.by_field:
        with pytest.raises(BadInput, match=f"no such name any more; write {now}"):
            spec_of({"policy": "lru", "hw": "rtx3090", old: 1}, "grid.yaml")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--engine", "simpy"), "--engine, got 'simpy': a serving engine is meant here; the event-by-event simulator"),
        (("--engine", "core"), "--engine, got 'core': a serving engine is meant here"),
        (("--engine", "arithmetic"), "--engine, got 'arithmetic': a serving engine is meant here"),
        (("--split", "store"), "--split, got 'store': it is called train now"),
        (("--set", "sim.hit=room"), "write --set sim.hit=slot"),
        (("--set", "gpus.host_bandwidth=apart"), "write --set gpus.host_bandwidth=per-link"),
        (("--set", "stack.pinned=false"), "'stack.pinned': no such name any more; write engine.pinned"),
        (("--set", "sim.contension=off"), "did you mean 'sim.contention'?"),
        (("--batch", "2", "--set", "run.batch=3"), "one value each; keep one of them"),
        (("--drive", "gen4x4:depth=8", "--set", "drive.depth=4"), "one value each; keep one of them"),
        (("--drive", "gen4x4:dept=8"), "--drive, got 'dept': no such term; did you mean 'depth'?"),
        (("--cache", "40"), "--cache, got '40': of what? write 40% of all experts, 60experts, or bytes"),
        (("--timeline-from", "3"), "--timeline-from: no such option any more; write --timeline FILE:from=2.5s"),
        (("--force",), "--force: no such option any more; write --overwrite"),
        (("--unstable",), "--unstable: no such option any more; percentiles are always shown; leave it out"),
        (("--set", "run.batch=x"), "write e.g. --set run.batch=4"),
        (("--set", "sim.contention=maybe"), "write --set sim.contention=on"),
        (("--batch", "x"), "write e.g. --batch 4"),
        (("--set", "batch=2"), "write --batch 2 or --set run.batch=2"),
        (("--set", "contention=off"), "write --set sim.contention=off"),
        (("--set", "hit_definition=slot"), "write --set sim.hit=slot"),
        (("--set", "static=on"), "write --set batch.static=on"),
        (("--set", "scop=layer"), "did you mean 'scope'?"),
    ],
)
def test_values_and_terms_that_are_wrong_say_what_to_write(words: tuple[str, ...], says: str, capsys: Any) -> None:
    assert says in simulated(capsys, "--policy", "lru", "--hw", "rtx3090", *words).error


@pytest.mark.parametrize("verb", ["compare", "sweep"])
def test_an_option_without_its_group_is_told_beside_several_policies(verb: str, capsys: Any) -> None:
    said = moesim(capsys, verb, "--policy", "lru", "--policy", "lfu", "--hw", "rtx3090", "--set", "batch=2").error
    assert "of all, write --batch " in said
    with pytest.raises(BadInput, match=r"of all, write --set sim\.contention=off"):
        compare(["lru", "lfu"], hw="rtx3090", set={"contention": False})


@pytest.mark.parametrize("engine", ["simpy", "core", "arithmetic"])
def test_a_simulator_is_no_serving_engine_from_python_either(engine: str) -> None:
    for ask in (simulate, lambda **fields: prepare(RunSpec(**fields))):
        with pytest.raises(BadInput, match=f"--engine, got '{engine}': a serving engine is meant here"):
            ask(policy="lru", hw="rtx3090", engine=engine)


def test_flags_of_verbs_that_went_name_one_that_is_there() -> None:
    assert all(now.split()[0].startswith(("--", "moesim")) for now in FLAGS.values() if now)


def test_a_colon_is_a_terms_only_before_a_known_word() -> None:
    spec = spec_of({"policy": "lru", "hw": "x", "arrivals": r"C:\log.csv:scale=2", "drive": "gen4x4:evict=./m.py:Mine"})
    assert (spec.arrivals, spec.arrivals_scale) == (r"C:\log.csv", 2.0)
    assert (spec.drive, spec.drive_evict) == ("gen4x4", "./m.py:Mine")
    assert RunSpec(policy="lru", hw="x", drive="gen4x4:depth=8").drive_depth == 8


@pytest.mark.parametrize(
    ("said", "kept"),
    [("40%", "40%"), (0.4, "40%"), ("0.125", "12.5%"), ("60 experts", "60experts"), ("12000MB", "12GB")],
)
def test_room_for_experts_has_one_form(said: Any, kept: str) -> None:
    assert spec_of({"policy": "lru", "hw": "x", "cache": said}).cache == kept


def test_two_spellings_are_one_option(capsys: Any) -> None:
    words = ("--policy", "lru", "--requests", 1, "--cache", "20%", "--json")
    one = simulated(capsys, *words, "--hw", "rtx3090", "--precision", "int4_g128", "--batch", 2).json
    other = simulated(capsys, *words, "--gpu", "rtx3090", "--quant", "int4_g128", "--users", 2).json
    assert one["run_id"] == other["run_id"]
    assert "twice" in simulated(capsys, *words, "--hw", "rtx3090", "--gpu", "a6000").error


def test_a_configuration_has_the_names_of_the_table(capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("--policy", "lru", "--hw", "rtx3090", "--requests", 1, "--cache", "20%", "--set", "sim.contention=off")
    first = simulated(capsys, *words, "--out", out, "--json").json
    text = (out / "config.yaml").read_text(encoding="utf-8")
    assert "sim.contention: false\n" in text
    assert "cache: 20%\n" in text
    again = simulated(capsys, "--config", out / "config.yaml", "--json").json
    assert again["run_id"] == first["run_id"]


def test_an_identity_leaves_out_what_is_usual() -> None:
    """So that an option more renames no run."""
    from sim.run import prepare

    def id_of(**fields: Any) -> str:
        setup = prepare(RunSpec(policy="lru", hw="rtx3090", requests=1, **fields))
        try:
            return setup.run_id
        finally:
            setup.close()

    assert id_of() == id_of(kv_page=16, sim_contention=True, scheduler="fcfs")
    differing = [{"cache": "20%"}, {"sim_hit": "slot"}, {"sim_contention": False}, {"batch": 2}, {"drive": "gen4x4"}]
    assert len({id_of(), *(id_of(**fields) for fields in differing)}) == 1 + len(differing)


def test_settings_are_axes(capsys: Any) -> None:
    words = (
        "sweep",
        "--policy",
        "lru",
        "--hw",
        "rtx3090",
        "--requests",
        1,
        "--cache",
        "20%",
        "--columns",
        "all",
        "--json",
    )
    rows = moesim(capsys, *words, "--set", "sim.contention=on,off").json["rows"]
    assert [row["sim_contention"] for row in rows] == [True, False]
    assert {row["cache"] for row in rows} == {"20%"}
    assert all(abs(row["cache_frac"] - 0.2) < 0.01 for row in rows)
    assert msgspec.structs.fields(RunSpec)
