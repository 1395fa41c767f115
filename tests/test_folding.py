"""Text folds to where it is read: sentences and tables by hand, then what commands print at 80 and 100 columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_help import mixtral_shaped, moesim, simulated

from sim.base.tables import plain, render


def fits(text: str, width: int) -> None:
    """No line is wider, but for one that holds a single word: a path or an address is not broken."""
    for line in text.splitlines():
        assert len(line) <= width or len(line.split()) == 1, f"{len(line)}: {line}"


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
