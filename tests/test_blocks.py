"""Rows read many at a time are the rows read one by one."""

from __future__ import annotations

import numpy as np
from tiny_traces import ALL, tiny_trace

from sim.workload import blocks
from sim.workload.iterations import Arrays, Iteration, Scheduler
from sim.workload.learn_split import requests_of
from traces.format.reader import Trace


def test_blocks_hold_what_single_rows_do(tmp_path, monkeypatch):
    path = tiny_trace(tmp_path / "t.safetensors", 3, 5, 2, n_requests=5, prompt=4, outputs=11, levels=ALL)
    with Trace(path) as trace:
        for values in (1, 3 * 5 * 4, 1 << 16):  # one row, four, all that a request has
            monkeypatch.setattr(blocks, "BLOCK_VALUES", values)
            arrays, scheduler, n_read = Arrays(trace), Scheduler(requests_of(trace, "all"), 2), 0
            counted: list[int] = []

            def counting(a: int, b: int, counted: list[int] = counted) -> np.ndarray:
                counted.append(b - a)
                return Trace.scores(trace, a, b)

            monkeypatch.setattr(trace, "scores", counting)
            while ranges := scheduler.next(0.0):
                arrays.begin(Iteration(0, ranges, trace, None))
                for told, read in ((arrays.scores, Trace.scores), (arrays.embeddings, Trace.embeddings)):
                    exact = np.concatenate([read(trace, r.start_row, r.stop_row) for r in ranges])
                    assert np.array_equal(told(), exact)
                n_read += sum(r.stop_row - r.start_row for r in ranges)
            assert max(counted) <= 10
            assert sum(counted) < 2 * n_read
            assert not arrays._blocks._blocks  # requests that are over leave nothing
