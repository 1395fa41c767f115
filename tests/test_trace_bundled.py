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
from sim.cli import main
from sim.profiles.models import load_model, model_names
from sim.setup.pairing import default_model, shape_of
from traces.format.bundled import DEFAULT, bundled_traces, traces_that_fit
from traces.format.check import check_trace
from traces.format.layout import DISTANCES
from traces.format.reader import Trace
from traces.stats import figures as stats

CHATS = ("mixtral-8x7b-chat", "qwen1.5-moe-chat")
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


def test_the_table_lists_every_bundled_trace():
    assert set(ROWS) == set(bundled_traces())
    assert DEFAULT in ROWS


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


def test_the_default_trace_is_fine_moes_workload():
    """FineMoE section 6.2: prompts of 37 and generations of 127 tokens on average, 64 requests, a 70/30 split."""
    with Trace(bundled_traces()[DEFAULT]) as trace:
        assert (trace.n_layers, trace.n_experts, trace.top_k) == (32, 8, 2)
        requests = list(trace.requests)
        assert len(requests) >= 64
        assert np.mean([r.prompt_len for r in requests]) == pytest.approx(37, abs=3)
        assert np.mean([r.outputs for r in requests]) == pytest.approx(127, abs=6)
        assert 0.6 <= len(trace.requests.in_split("store")) / len(requests) <= 0.75
        assert len(trace.requests.tasks) >= 4
        assert trace.path.stat().st_size <= 15_000_000
        wanted = {"experts", "weights", "scores", "shared_scores", "embeddings", "token_ids", "tasks"}
        assert wanted | {f"next_scores_{d}" for d in DISTANCES} <= trace.levels


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_trace_has_the_lengths_of_chats(name):
    """200 requests to score, hundreds of tokens long, with arrivals, predicted in prefill; loss below a trigram."""
    with Trace(bundled_traces()[name]) as trace:
        tests = trace.requests.in_split("test")
        prompts = [request.prompt_len for request in tests]
        assert len(tests) >= 200
        assert np.mean(prompts) > 180 and max(prompts) > 1000
        assert all(request.arrival_s is not None for request in tests)
        assert {"experts", "scores", "next_scores_1"} <= trace.levels_prefill
        loss = json.loads(trace.header.extra["heldout_nats_per_token"])
        assert loss["model"] < loss["trigram"]
        assert "Fewer bits: scores: mean error" in trace.header.notes
        assert "CC-BY-4.0" in trace.header.notes, "whose lengths they are"


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


def test_it_has_what_policies_need(trace):
    """Every level, several tasks in both splits, enough decoding to score."""
    wanted = {"experts", "weights", "scores", "shared_scores", "embeddings", "token_ids", "tasks"}
    assert wanted | {f"next_scores_{d}" for d in DISTANCES} <= trace.levels
    assert {"experts", "weights", "scores"} <= trace.levels_prefill
    assert trace.requests.n_decode_rows >= 5_000
    assert len(trace.requests.tasks) >= 4
    for split in ("store", "test"):
        assert {request.task for request in trace.requests.in_split(split)} == set(trace.requests.tasks)
    assert trace.header.labels == (("trained-to-repeat",) if trace.name == "deepseek-moe-16b-chat" else ())


def test_sizes():
    """120 MB with models and all; what is left out of far predictions is no more than half of what a policy could want
    of them."""
    files = [path for path in FORMAT.parent.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 120_000_000
    for path in bundled_traces().values():
        with Trace(path) as trace:
            for name in ("next_scores_2", "next_scores_3", "shared_scores"):
                if f"{name}.ids" in trace.entries:
                    assert trace.entries[f"{name}.ids"].shape[-1] == 2 * trace.top_k


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


def test_the_list_shows_them_all(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(stats, "recorded_distances", lambda trace: [])  # docs/traces.md holds what is said of them
    with pytest.raises(SystemExit) as stopped:
        main(["traces", "list"])
    out, _ = capsys.readouterr()
    assert stopped.value.code == 0
    for path in bundled_traces().values():
        with Trace(path) as trace:
            loss = json.loads(trace.header.extra["heldout_nats_per_token"])
            for text in (trace.sha256, trace.header.model_source, f"{loss['trigram']:.2f} nats per token"):
                assert text in out


def test_what_the_page_says_of_predictions_of_the_next_token(capsys):
    page = (FORMAT.parent.parent / "docs" / "traces.md").read_text("utf-8")
    found = re.search(r"shape (\S+) % there and (\S+) % from layer to layer make the (\S+) %", " ".join(page.split()))
    assert found is not None
    with Trace(bundled_traces()[DEFAULT]) as trace:
        by_layer = stats.prediction_accuracy(trace, 1).recorded
    shares = (by_layer[-1], by_layer[:-1].mean(), by_layer.mean())
    assert found.groups() == tuple(f"{100 * share:.1f}" for share in shares)
    with pytest.raises(SystemExit, match="0"):
        main(["traces", "show", DEFAULT])
    assert "predicts the next token's first" in " ".join(capsys.readouterr().out.split())
