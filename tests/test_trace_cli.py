"""`moesim traces`: what people and scripts see."""

import json

import pytest
from tiny_traces import surgery, tiny_trace

from sim.cli import main


@pytest.fixture
def tiny(tmp_path):
    return tiny_trace(tmp_path / "tiny.safetensors", notes="see [bold]this[/bold] and [/that]", text_source="none")


def moesim(capsys, *args):
    with pytest.raises(SystemExit) as stopped:
        main(["traces", *map(str, args)])
    out, err = capsys.readouterr()
    return stopped.value.code, out, err


def test_show_for_people(capsys, monkeypatch, tiny):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = moesim(capsys, "show", tiny)
    assert (code, err) == (0, "")
    assert "3 layers x 4 experts, k = 2; softmax gate, renormalised" in out
    assert "28 tokens, 16 of them decode" in out
    assert "4 (2 store, 2 test)" in out
    assert "see [bold]this[/bold] and [/that]" in out
    assert "nan" not in out


def test_show_for_programs(capsys, tiny):
    code, out, err = moesim(capsys, "show", tiny, "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert (facts["n_tokens"], facts["n_requests"], facts["n_decode_rows"]) == (28, 4, 16)
    assert facts["next_token_overlap"]["by_lag"]["8"] == {"share": None, "n": 0}
    assert set(facts["prediction_accuracy"]) == {"1", "2"}
    assert facts["labels"] == ["synthetic"]
    assert len(facts["sha256"]) == 64


def test_check(capsys, monkeypatch, tiny):
    monkeypatch.setenv("COLUMNS", "400")
    code, out, _ = moesim(capsys, "check", tiny)
    assert (code, out) == (0, f"{tiny}: sound; 3x4, k=2, 4 requests, 28 tokens\n")

    def spoil(metadata, arrays):
        arrays["experts"][4, 1] = 3
        arrays["experts"][9, 2] = 3

    surgery(tiny, spoil)
    code, out, err = moesim(capsys, "check", tiny)
    assert (code, out) == (2, "")
    fault = "experts[4, 1], got 3 3: distinct experts per token and layer"
    assert err == f"error: {tiny}: {fault}; correct the recorder and write the trace again\n"
    code, out, err = moesim(capsys, "check", tiny, "--all")
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert lines[0] == fault
    assert lines[1] == "experts[9, 2], got 3 3: distinct experts per token and layer"
    assert lines[-1].startswith(f"error: {tiny}: got {len(lines) - 1} faults: a trace has none")


@pytest.mark.parametrize("verb", ["show", "check"])
def test_errors_are_one_line_and_exit_2(capsys, tmp_path, verb):
    (tmp_path / "x").write_bytes(b"not a trace at all")
    for name, message in ((tmp_path / "x", "not a safetensors file"), ("nowhere", "no bundled trace and no file")):
        code, out, err = moesim(capsys, verb, name)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert message in err
        assert err.count("\n") == 1
