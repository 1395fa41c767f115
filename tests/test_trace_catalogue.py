"""Names, paths and the traces that come with the package; and the helper that writes explicit rows."""

import pytest
from tiny_traces import from_rows, tiny_trace

from sim.base.errors import BadInput
from traces import open_trace
from traces.format import bundled, catalogue
from traces.format.reader import Trace


def test_explicit_rows(tmp_path):
    path = from_rows(
        tmp_path / "t.safetensors", [[[0, 1]], [[1, 2]], [[2, 0]]], lengths=[(1, 2), (1, 1)], splits=["store", "test"]
    )
    with Trace(path) as trace:
        assert trace.experts.tolist() == [[[0, 1]], [[1, 2]], [[2, 0]]]
        assert [(r.prompt_len, r.outputs, r.split) for r in trace.requests] == [(1, 2, "store"), (1, 1, "test")]


def test_names_and_paths(tmp_path, monkeypatch):
    full = tiny_trace(tmp_path / "full.safetensors", n_layers=5, n_experts=6)
    assert open_trace(str(full)).name == "full"
    for module in (bundled, catalogue):
        monkeypatch.setattr(module, "bundled_traces", lambda: {"mixtral-8x7b-small": full})
    assert open_trace("mixtral-8x7b-small").n_tokens == 28
    assert bundled.traces_that_fit(5, 6, 2) == ["mixtral-8x7b-small"]
    assert bundled.traces_that_fit(5, 6, 3) == []
    with pytest.raises(BadInput, match="did you mean 'mixtral-8x7b-small'"):
        open_trace("mixtral-8x7b-smal")
    monkeypatch.setattr(catalogue, "bundled_traces", dict)
    with pytest.raises(BadInput, match="no bundled trace and no file of that name"):
        open_trace("x")
    with pytest.raises(BadInput, match="not a regular file"):
        open_trace(tmp_path)


def test_a_name_that_was_bundled_once_says_what_took_its_place():
    for old, new in catalogue.SUCCEEDED.items():
        with pytest.raises(BadInput, match=f"{old}.*{new} has taken its place") as stopped:
            catalogue.resolve(old)
        assert new in bundled.bundled_traces()
        assert "\n" not in str(stopped.value)
