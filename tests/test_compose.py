"""Composing: same rows at new times, or spliced ones; labels and levels travel, and a run shows the wait."""

import json

import numpy as np
import pytest
from cli_help import mixtral_shaped, moesim, simulated
from tiny_traces import ALL, from_rows, tiny_trace

from sim.base.errors import BadInput
from traces.format.check import check_trace
from traces.format.reader import Trace
from traces.format.writer import Layout
from traces.synth.arrivals import Arrival
from traces.synth.compose import compose, plan

STORE = Layout(
    decode_only=frozenset({"next_scores_1", "next_scores_3", "shared_scores"}),
    sparse={"next_scores_3": 2, "shared_scores": 3},
    codes={"scores": "u8_square", "next_scores_1": "u6_square"},
)


def test_recorded_lengths_keep_every_byte_of_the_rows(tmp_path):
    path = tiny_trace(tmp_path / "a.safetensors", n_layers=4, levels=ALL - {"arrivals"}, store=STORE)
    with Trace(path) as trace:
        plans = plan(trace, [Arrival(0.0), Arrival(0.5), Arrival(2.0), Arrival(2.0)], split="all")
        compose(trace, plans, tmp_path / "b.safetensors", "hand", spliced=False)
        with Trace(tmp_path / "b.safetensors") as made:
            assert check_trace(made) == []
            assert made.requests.arrival_s.tolist() == [0.0, 0.5, 2.0, 2.0]
            assert set(trace.entries) - set(made.entries) == {"iterations"}  # that batch never ran at these times
            for name in set(made.entries) - {"req_arrival_s"}:
                assert np.array_equal(made.stored(name), trace.stored(name)), name
            assert made.header.labels == ("synthetic",)
            assert made.header.extra["arrivals"] == "hand"


def test_the_store_split_comes_before(tmp_path):
    path = tiny_trace(tmp_path / "a.safetensors", levels={"tasks", "token_ids"})  # every second request is `store`
    with Trace(path) as trace:
        compose(trace, plan(trace, [Arrival(0.0), Arrival(3.0)]), tmp_path / "b.safetensors", "hand", False)
        tokens = trace.token_ids.reshape(4, 7)
        with Trace(tmp_path / "b.safetensors") as made:
            assert [(r.split, r.arrival_s, r.task) for r in made.requests] == [
                ("store", 0.0, "chat"),
                ("store", 0.0, "chat"),
                ("test", 0.0, "code"),
                ("test", 3.0, "code"),
            ]
            assert np.array_equal(made.token_ids.reshape(4, 7), tokens[[0, 2, 1, 3]])
        with pytest.raises(BadInput, match="got 3 arrivals: 2 requests"):
            plan(trace, [Arrival(0.0)] * 3)


def test_splicing_by_hand(tmp_path):
    """Two requests of 2 + 2 and 1 + 3 rows; a row's expert says which it is. Prompts are 0 1 4, outputs 2 3 5 6 7."""
    path = from_rows(tmp_path / "a.safetensors", [[[i]] for i in range(8)], 8, [(2, 3), (1, 4)])
    with Trace(path) as trace:
        times = [Arrival(0.0, 4, 3), Arrival(1.0, 1, 7), Arrival(2.0, 2, 1)]
        compose(trace, plan(trace, times, "arrivals"), tmp_path / "b.safetensors", "hand", True)
    with Trace(tmp_path / "b.safetensors") as made:
        rows = [made.experts[r.first_row : r.end_row, 0, 0].tolist() for r in made.requests]
        assert rows == [[0, 1, 4, 0, 2, 3], [4, 5, 6, 7, 2, 3, 5], [0, 1]]
        assert [(r.prompt_len, r.outputs) for r in made.requests] == [(4, 3), (1, 7), (2, 1)]
        assert made.header.labels == ("synthetic", "spliced")


def test_splicing_stays_within_task_and_split(tmp_path):
    path = tiny_trace(
        tmp_path / "a.safetensors", n_requests=8, levels=ALL - {"arrivals", "iterations"}, n_layers=4, store=STORE
    )
    with Trace(path) as trace:
        times = [Arrival(float(i), 9, 20) for i in range(6)]
        plans = plan(trace, times, "arrivals", "all")
        for one in plans:
            owners = {trace.requests.request_of(int(row)) for row in (*one.prompt_rows, *one.decode_rows)}
            assert {trace.requests[i].task for i in owners} == {one.task}
            assert {trace.requests[i].split for i in owners} == {one.split}
        compose(trace, plans, tmp_path / "b.safetensors", "hand", True)
        with Trace(tmp_path / "b.safetensors") as made:
            assert check_trace(made) == []
            wanted = plans[1].decode_rows
            own = made.requests[1]
            for name in ("scores", "embeddings"):
                read = getattr(trace, name)
                expected = np.concatenate([read(int(row), int(row) + 1) for row in wanted])
                assert np.array_equal(getattr(made, name)(own.first_decode_row, own.end_row), expected)
            ahead = np.concatenate([trace.next_scores(3, int(row), int(row) + 1) for row in wanted])
            assert np.array_equal(made.next_scores(3, own.first_decode_row, own.end_row), ahead)


def test_splicing_needs_lengths_and_decode_rows(tmp_path):
    path = from_rows(tmp_path / "a.safetensors", [[[0]], [[1]]], 2, [(2, 1)])
    with Trace(path) as trace:
        with pytest.raises(BadInput, match="without lengths"):
            plan(trace, [Arrival(0.0)], "arrivals")
        with pytest.raises(BadInput, match="no decode rows"):
            plan(trace, [Arrival(0.0, 1, 2)], "arrivals")
        assert plan(trace, [Arrival(0.0, 3, 1)], "arrivals")[0].prompt_rows.tolist() == [0, 1, 0]


class TestFromLogToWait:
    """An Azure log, a composed trace, and a run whose TTFT has the wait in it."""

    LOG = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,6,3\n2023-11-16 18:15:47,4,5\n"

    def ttft(self, capsys, trace, *more):
        return simulated(capsys, "--policy", "lru", "--hw", "rtx3090", "--trace", trace, "--json", *more).json

    def test_wait_is_the_time_the_first_still_runs(self, capsys, tmp_path):
        source, out = mixtral_shaped(tmp_path), tmp_path / "load.safetensors"
        log = tmp_path / "azure.csv"
        log.write_text(self.LOG)
        alone = self.ttft(capsys, source)
        assert alone["arrivals"] == "back to back"
        said = moesim(capsys, "traces", "compose", source, "-o", out, "--arrivals", log)
        assert said.code == 0, said.err
        assert said.out == f"{out}: 2 requests arrive in 1 s, 1 per second; lengths recorded\n"
        loaded = self.ttft(capsys, out)
        assert loaded["arrivals"] == "trace"
        first, second = (self.ttft(capsys, source, "--requests", str(n)) for n in (1, 2))
        # the second request arrives at 1 s and starts when the first is done: its wait is what is missing to that
        wait_s = first["simulated_s"] - 1.0
        assert wait_s > 0
        assert loaded["ttft_s"]["mean"] == pytest.approx(second["ttft_s"]["mean"] + wait_s / 2)
        assert loaded["simulated_s"] == pytest.approx(second["simulated_s"])

    def test_refused(self, capsys, tmp_path):
        source, out = mixtral_shaped(tmp_path), tmp_path / "load.safetensors"
        log = tmp_path / "azure.csv"
        log.write_text(self.LOG.replace(",6,", ",0,"))

        def error(*more):
            return moesim(capsys, "traces", "compose", source, "-o", out, "--arrivals", log, *more).error

        assert "got 2 arrivals: 3 requests need one each" in error("--requests", 3)
        elsewhere = moesim(capsys, "traces", "compose", source, "-o", tmp_path / "x" / "y", "--arrivals", log)
        assert f"there is no folder {tmp_path / 'x'}" in elsewhere.error
        assert not out.exists()
        said = moesim(capsys, "traces", "compose", source, "-o", out, "--arrivals", log, "--lengths", "arrivals")
        assert "note: requests without prompt or output tokens, left out: 1" in said.out
        assert "exists" in error()
        assert (
            "is the trace itself"
            in moesim(capsys, "traces", "compose", source, "-o", source, "--overwrite", "--arrivals", log).error
        )
        assert json.loads(moesim(capsys, "traces", "show", out, "--json").out)["labels"] == ["synthetic", "spliced"]
