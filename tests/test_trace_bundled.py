"""The bundled traces are what FORMAT.md's table and their headers say they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from grids import few_each_time
from tiny_traces import tiny_trace

from sim.base.errors import BadInput
from sim.profiles.models import load_model, model_names
from sim.setup.pairing import default_model, shape_of
from traces.format.bundled import DEFAULT, bundled_traces, traces_that_fit
from traces.format.check import check_trace
from traces.format.layout import DISTANCES
from traces.format.reader import Trace
from traces.stats import figures as stats

FORMAT = Path(__file__).resolve().parent.parent / "traces" / "FORMAT.md"
TABLE = re.search(r"<!-- bundled: begin -->\n(.*?)<!-- bundled: end -->", FORMAT.read_text("utf-8"), re.S)
assert TABLE is not None
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE[1].splitlines()[2:]]
ROWS = {cells[0]: cells for cells in CELLS}


# Files that nobody has touched are read from end to end by the thorough tests.
READ_WHOLE = pytest.mark.parametrize("trace", few_each_time(sorted(bundled_traces()), [DEFAULT]), indirect=True)


@pytest.fixture(params=sorted(bundled_traces()))
def trace(request):
    with Trace(bundled_traces()[request.param]) as opened:
        yield opened


def test_a_row_says_what_the_file_holds(trace):
    _, _, shape, requests, tokens, _, sha256 = ROWS[trace.name]
    assert shape == trace.header.shape
    assert int(requests) == trace.n_requests
    assert int(tokens.replace(",", "")) == trace.n_tokens
    assert sha256.strip("`") == trace.sha256


@READ_WHOLE
def test_it_keeps_every_rule_of_the_format(trace):
    """Squeezed, and still the trace of the table's digest: the last rule unpacks everything and compares."""
    assert trace.squeezed
    assert check_trace(trace) == []


@READ_WHOLE
def test_the_model_learned_and_its_routing_is_alive(trace):
    """Held-out loss below an interpolated bigram model's, no dead expert, gates predict better than popularity does."""
    loss = json.loads(trace.header.extra["heldout_nats_per_token"])
    assert loss["model"] < loss["bigram"]
    assert json.loads(trace.header.extra["dead_experts"]) == 0
    assert stats.dead_experts(stats.popularity(trace)) == []
    for distance in DISTANCES:
        found = stats.prediction_accuracy(trace, distance)
        assert np.nanmean(found.recorded) > 2 * np.nanmean(found.popular)


@pytest.mark.parametrize(
    "model, names",
    [
        ("mixtral-8x7b", ["mixtral-8x7b-small", "mixtral-8x7b-chat"]),
        ("qwen1.5-moe-a2.7b", ["qwen1.5-moe-chat"]),
        ("phi-3.5-moe", ["phi-3.5-moe-small"]),
        ("deepseek-moe-16b", ["deepseek-moe-16b-chat"]),
    ],
)
def test_a_model_runs_on_the_traces_of_its_shape_and_back(model, names):
    """The default is the first of its shape."""
    shape = shape_of(load_model(model))
    assert traces_that_fit(*shape) == names
    for name in names:
        with Trace(bundled_traces()[name]) as trace:
            assert trace.header.stands_for == default_model(trace) == model


def test_a_bundled_trace_names_its_model_and_no_catalogue_is_searched(trace, monkeypatch):
    monkeypatch.setattr("sim.base.index.facts", lambda file: pytest.fail(f"looked {file} up"))
    assert default_model(trace) in model_names()


@pytest.mark.parametrize(
    "facts, model",
    [
        ({"model": "tiny"}, "gpt-oss-20b"),  # the first of its shape
        ({"model": "Qwen/Qwen3-Coder-480B-A35B-Instruct"}, "qwen3-coder-480b-a35b"),
        ({"model": "qwen3.5-122b-a10b"}, "qwen3.5-122b-a10b"),
        ({"model": "qwen3-30b-a3b", "stands_for": "phi-3.5-moe"}, "phi-3.5-moe"),
    ],
)
def test_a_model_is_found_by_the_headers_names_and_then_by_shape(tmp_path, facts, model):
    with Trace(tiny_trace(tmp_path / "t.safetensors", 24, 32, 4, levels=(), **facts)) as trace:
        assert default_model(trace) == model


def test_a_header_that_names_an_unknown_model_is_refused(tmp_path):
    path = tiny_trace(tmp_path / "t.safetensors", 24, 32, 4, levels=(), stands_for="gpt-oss-20")
    wanted = r"metadata stands_for, got 'gpt-oss-20': .*--model NAME; did you mean 'gpt-oss-20b'"
    with Trace(path) as trace, pytest.raises(BadInput, match=wanted):
        default_model(trace)
