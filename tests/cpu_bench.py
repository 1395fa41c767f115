"""Traces with a store split and hand-written scores, for policies that place experts beforehand or read a gate.

Numbers are those of `easy_numbers`: copy of an expert 10 s, expert 2 s (CPU: 5 s), a token's hidden state 1 s each way,
attention 1 s, head 1 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from easy_numbers import Run, execute_easy, setup
from tiny_traces import tiny_header, tiny_trace

from sim.conformance.suite import FAIL, conform
from sim.policy.api import ParamValue, Policy
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import write_trace

Rows = Sequence[Sequence[Sequence[int]]]


def written(path: Path, requests: Sequence[tuple[int, int, str]], rows: Rows, n_experts: int, **levels: Any) -> Path:
    """Write `rows[token][layer]` = ids, heaviest first.

    Args:
        requests: (prompt, outputs, split). levels: more tensors, scores as shares that sum to 1.
    """
    experts, made, first = np.array(rows), [], 0
    for index, (prompt, outputs, split) in enumerate(requests):
        made.append(Request(index, first, prompt, prompt + outputs - 1, "", None, split))
        first += prompt + outputs - 1
    assert first == len(experts), f"requests cover {first} rows, there are {len(experts)}"
    header = tiny_header(experts.shape[1], n_experts, experts.shape[2])
    arrays = {name: np.array(level) for name, level in levels.items()}
    return write_trace(path, header, made, None, experts=experts, **arrays)


def taught(tmp_path: Path, store: Rows, rows: Rows, n_experts: int, prompt: int = 1) -> Path:
    """One request of the store split (a prompt of one token), then one to be scored with a prompt of `prompt`."""
    requests = [(1, len(store), "store"), (prompt, len(rows) - prompt + 1, "test")]
    return written(tmp_path / "taught.safetensors", requests, [*store, *rows], n_experts)


def replay(policy: Policy, path: Path, room: int | Sequence[int], **world: Any) -> Run:
    """Replay a trace's test split with easy numbers."""
    with Trace(path) as trace:
        return execute_easy(setup(policy, trace, room, **world))


def resident(seen: Run) -> list[tuple[int, int]]:
    """(layer, expert) on the GPU at the end."""
    return sorted((piece.layer, piece.expert) for piece in seen.engine.residency.resident_pieces())


def decided(seen: Run) -> tuple[Any, ...]:
    """Everything a parameter could change: decisions, and when what happened."""
    return seen.log, seen.spans


def check_knobs(
    kind: type[Policy], path: Path, room: int, knobs: dict[str, tuple[dict[str, ParamValue], ParamValue]], **world: Any
) -> None:
    """Every parameter of `kind` has an entry (settings beside it, its other value), and the value changes the run."""
    assert set(knobs) == {param.name for param in kind.params}
    for name, (beside, other) in knobs.items():
        before, after = (replay(kind(**settings), path, room, **world) for settings in (beside, beside | {name: other}))
        assert decided(before) != decided(after), f"{name}={other} changes nothing"


@contextmanager
def seeded(tmp_path: Path, **facts: Any) -> Iterator[Trace]:
    """A seeded trace with every level but arrivals: 4 requests, 2 of them to be scored."""
    levels = {"weights", "scores", "next_scores_1", "next_scores_2", "next_scores_3"}
    with Trace(tiny_trace(tmp_path / "seeded.safetensors", **({"levels": levels} | facts))) as trace:
        yield trace


def failures(kind: type[Policy]) -> list[tuple[str, str]]:
    """Rules of the conformance suite it breaks, and why."""
    return [(verdict.check, verdict.reason) for verdict in conform(kind) if verdict.verdict == FAIL]
