"""Text folds to where it is read: sentences and tables by hand, then what commands print at 80 and 100 columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_help import mixtral_shaped, moesim, simulated

from sim.base.tables import IN_A_PIPE, NARROWEST, columns, fold, lines, listed, plain, prose, render, table, tabled
from sim.base.units import show_change


def fits(text: str, width: int) -> None:
    """No line is wider, but for one that holds a single word: a path or an address is not broken."""
    for line in text.splitlines():
        assert len(line) <= width or len(line.split()) == 1, f"{len(line)}: {line}"


@pytest.mark.parametrize(("said", "is_"), [("72", 72), ("1", NARROWEST), ("0", IN_A_PIPE), ("wide", IN_A_PIPE)])
def test_a_pipe_has_100_columns_unless_told(monkeypatch: pytest.MonkeyPatch, said: str, is_: int) -> None:
    monkeypatch.setattr("sys.__stdout__", None)
    monkeypatch.setenv("COLUMNS", said)
    assert columns() == is_
    monkeypatch.delenv("COLUMNS")
    assert columns() == 100


def test_a_sentence_goes_on_under_its_own_text() -> None:
    assert fold("a short line\nand another", 12) == "a short line\nand another"
    assert fold("one two three four", 12) == "one two\n  three four"
    assert fold("text    one two three", 14) == "text    one\n        two\n        three"
    assert fold("  model   a b c d e f", 16) == "  model   a b c\n          d e f"
    assert fold("written: /a/very/long/path/in/one/piece", 12) == "written:\n  /a/very/long/path/in/one/piece"
    assert fold("", 12) == ""


def test_words_fold_before_numbers() -> None:
    rows = table("policy", "TPOT", "note")
    prose(rows, -1)
    rows.add_row("lru", "1,234 ms", "does not fit: needs 94.5 GB")
    assert render(rows, 40) == (
        "policy      TPOT  note\n"
        "────────────────────────────────────────\n"
        "lru     1,234 ms  does not fit: needs\n"
        "                  94.5 GB\n"
    )


def test_numbers_that_are_too_wide_go_on_below() -> None:
    rows = plain("policy", "first", "second", "third")
    rows.add_row("lru", "1,000,000 ms", "2,000,000 ms", "3,000,000 ms")
    rows.add_row("lfu", "1,000,000 ms", "2,000,000 ms", "")
    assert render(rows, 40) == (
        "policy         first        second\n"
        "lru     1,000,000 ms  2,000,000 ms\n"
        "lfu     1,000,000 ms  2,000,000 ms\n"
        "\n"
        "policy         third\n"
        "lru     3,000,000 ms\n"
    )


def test_rows_stay_together_where_columns_may_go() -> None:
    rows = table("policy", "first", "second", "third", "note")
    prose(rows, -1)
    rows.add_row("lru", "1,000,000 ms", "2,000,000 ms", "3,000,000 ms", "oracle")
    rows.add_row("lfu", "4,000,000 ms", "", "6,000,000 ms", "")
    assert render(rows, 44, ("third", "second")) == (
        "policy         first        second  note\n"
        "──────────────────────────────────────────\n"
        "lru     1,000,000 ms  2,000,000 ms  oracle\n"
        "lfu     4,000,000 ms\n"
        "left out to fit: third; COLUMNS=56, or\n"
        "  --json, shows them\n"
    )
    assert "left out to fit: second, third; " in render(rows, 40, ("third", "second")).replace("\n ", "")
    assert render(rows, 56, ("third", "second")) == render(rows, 100)
    assert render(rows, 100, ("third", "second")) == render(rows, 100)
    # Where no column may go, or not enough of them, each row is a block.
    assert render(rows, 40, ()) == (
        "policy  lru\nfirst   1,000,000 ms\nsecond  2,000,000 ms\nthird   3,000,000 ms\nnote    oracle\n\n"
        "policy  lfu\nfirst   4,000,000 ms\nsecond\nthird   6,000,000 ms\nnote\n"
    )


def test_a_long_word_is_broken_rather_than_lost() -> None:
    rows = table("file", "", numbers=False)
    rows.add_row("name", "x" * 100)
    shown = render(rows, 40)
    fits(shown, 40)
    assert shown.count("x") == 100


def test_what_would_move_a_cursor_is_shown_and_wide_characters_take_two() -> None:
    """Names come from files of anybody's."""
    rows = plain("name", "n")
    rows.add_row("日本語", "1")
    rows.add_row("\x1b[31mred", "12")
    assert render(rows, 40) == "name          n\n日本語        1\n\\x1b[31mred  12\n"


COMMANDS = [
    "policies",
    "policies --api",
    "policies fine_moe",
    "policies moe_infinity",
    "hw",
    "hw rtx3090",
    "hw --links",
    "hw --cpus",
    "models",
    "models mixtral-8x7b",
    "traces",
    "traces list",
    "traces show mixtral-8x7b-small",
    "traces stats --public all",
    "traces synth mixtral-8x7b-small --targets list",
    "validate --table cpu-backend",
    "validate --table emoe",
    "reproduce --last",
    "reproduce --last --misses",
    "conformance lru",
]


@pytest.mark.parametrize("width", [80, pytest.param(100, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=[pytest.mark.thorough] if words == "traces list" else []) for words in COMMANDS],
)
def test_commands_fold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    said = moesim(capsys, *words.split())
    assert said.code == 0
    fits(said.out, width)


@pytest.mark.parametrize("width", [80, 100])
def test_runs_and_comparisons_fold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int
) -> None:
    trace = mixtral_shaped(tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))
    of_all_widths = ("gpu_only", "belady", "mixtral_offloading", "lru scope=layer", "hobbit", "fine_moe variant=code")
    named = [word for name in of_all_widths for word in ("--policy", name)]
    for said in (
        simulated(capsys, "--policy", "fine_moe", "--hw", "rtx3090", "--trace", trace),
        moesim(capsys, "compare", *named, "--hw", "rtx3090", "--trace", trace, "--workers", 1),
    ):
        assert said.code == 0, said.err
        fits(said.out, width)


@pytest.mark.parametrize("width", [44, 70, 100])
def test_rows_of_sweeps_and_comparisons_stay_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int
) -> None:
    """A row that went on below, after all others, could not be read across; what is missing instead is named."""
    common = ("--policy", "lru", "--policy", "fiddler", "--trace", mixtral_shaped(tmp_path), "--workers", 1)
    for words, title in (
        (("compare", "--hw", "rtx3090", "--against", "lru", "--slo", "ttft_s <= 9s"), "policy"),
        (("sweep", "--hw", "rtx3090,a6000", "--pcie", "gen3x16,gen4x16", "--cache", "20experts"), "hw"),
        (("sweep", "--hw", "rtx3090", "--cache", "20experts", "--seed", 1), "point"),
    ):
        seen = []
        for columns_ in (400, width):
            monkeypatch.setenv("COLUMNS", str(columns_))
            said = moesim(capsys, *words, *common)
            assert said.code == 0, said.err
            fits(said.out, columns_)
            (at,) = [
                i for i, block in enumerate(said.out.split("\n\n")) if re.search("─{30}", block) and title in block
            ]
            seen.append(said.out.split("\n\n")[at])
        wide, narrow = (block.split("────\n") for block in seen)
        for line in wide[1].splitlines():
            assert len(re.findall(rf"^{line.split()[0]}\b", narrow[1], re.MULTILINE)) == len(
                re.findall(rf"^{line.split()[0]}\b", wide[1], re.MULTILINE)
            )
        left_out = re.sub(r"\s+", " ", narrow[1].partition("left out to fit: ")[2])
        for word in re.split(r"  +", wide[0].splitlines()[0].strip()):
            assert word in left_out or all(part in narrow[0] for part in word.split())


def test_what_is_folded_is_all_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every word that a wide terminal shows, a narrow one shows as well."""
    for words in ("hw --links", "reproduce --last", "traces stats --public all"):
        seen = []
        for width in (300, 80):
            monkeypatch.setenv("COLUMNS", str(width))
            seen.append(set(re.findall(r"\d[\d.,]*", moesim(capsys, *words.split()).out)))
        assert seen[0] == seen[1] != set()


VERBS = [
    "bench",
    "calibrate",
    "compare",
    "conformance",
    "hw",
    "models",
    "policies",
    "record",
    "report",
    "reproduce",
    "run",
    "sweep",
    "traces",
    "traces stats",
    "traces synth",
    "traces convert",
    "traces compose",
    "traces squeeze",
    "traces unsqueeze",
    "train",
    "validate",
    "",
]


@pytest.mark.parametrize("width", [80, 100])
def test_usage_folds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for verb in VERBS:
        said = moesim(capsys, *verb.split(), "--help")
        assert said.code == 0
        fits(said.out, width)


@pytest.mark.parametrize(
    ("before", "after", "unit", "said"),
    [
        (0.646, 0.768, "s", "+122 ms"),
        (1.0, 1.0 + 4e-10, "s", "0"),  # less than a nanosecond
        (0.1 + 0.2, 0.3, "", "0"),  # the order of a sum
        (0.5, 0.12, "frac", "-38.0 points"),
        (0.0003, 0.0, "share", "-0.03 points"),
        (10_004, 4_530, "", "-5,474"),
        (2.0, 1.5, "per_s", "-0.5"),
        (0, 3.47e9, "bytes", "+3.47 GB"),
        (None, 1.0, "s", ""),
    ],
)
def test_a_change_is_told_in_its_unit(before: float | None, after: float | None, unit: str, said: str) -> None:
    assert show_change(before, after, unit) == said
    assert show_change(after, before, unit) == said.translate(str.maketrans("+-", "-+"))


def test_lists_and_tables_of_the_kit() -> None:
    assert [listed(parts) for parts in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]
    assert listed(["a", "b", "c", "d"], most=2) == "a, b and 2 more"
    said = tabled(("what", "A", "why"), [("x", "1", "a word"), ("y", "10", "more")], words=(2,), width=60)
    assert [line.split() for line in said.splitlines()[2:]] == [["x", "1", "a", "word"], ["y", "10", "more"]]
    assert said.splitlines()[2].index("1") == said.splitlines()[3].index("0")  # numbers stand on the right
    assert lines([("A", "one\x1b[31m"), ("", "two")]) == "A  one\\x1b[31m\n   two\n"
