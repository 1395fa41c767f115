"""Calling commands inside the test process: exit code, standard output, standard error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from tiny_traces import ALL, tiny_trace

from sim.cli import main, simulate


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))

    @property
    def error(self) -> str:
        """The one line of an error that is the user's to mend."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.out == "", self.out
        assert self.err.startswith("error: "), self.err
        assert self.err.count("\n") == 1, self.err
        return self.err


def called(capsys: pytest.CaptureFixture[str], entry: Callable[..., None], *args: object) -> Said:
    capsys.readouterr()
    # So wide that sentences can be looked for in one piece, unless a test says how wide.
    wide = mock.patch.dict(os.environ, {"COLUMNS": os.environ.get("COLUMNS", "400")})
    with wide, pytest.raises(SystemExit) as stop:
        entry([str(arg) for arg in args])
    out, err = capsys.readouterr()
    code = stop.value.code
    return Said(code if isinstance(code, int) else 0, out, err)


def moesim(capsys: pytest.CaptureFixture[str], *args: object) -> Said:
    return called(capsys, main, *args)


def simulated(capsys: pytest.CaptureFixture[str], *args: object) -> Said:
    return called(capsys, simulate, *args)


def mixtral_shaped(folder: Path, **changes: Any) -> Path:
    """A small trace of Mixtral-8x7B's routing shape: four requests, two of them scored."""
    facts: dict[str, Any] = {"n_requests": 4, "prompt": 5, "outputs": 9, "levels": ALL - {"arrivals"}} | changes
    return tiny_trace(folder / "mix.safetensors", n_layers=32, n_experts=8, top_k=2, **facts)
