"""A trace of expert ids alone, for machines that are timed rather than models that are studied."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from traces.format.header import GateRule, Header
from traces.format.requests import Request
from traces.format.writer import write_trace


def bare_trace(
    path: Path,
    model: str,
    n_experts: int,
    experts: Any,
    prompts: Iterable[int],
    outputs: int,
    source: str,
    made_by: str,
) -> Path:
    """Write one request of the test split per prompt length, with `outputs` tokens each, and return the path.

    Args:
        experts: ids of shape (rows, layers, chosen); a request has a row for each token but the last.
        source, made_by: what the header says of where the ids are from, and of who wrote it.
    """
    requests, first = [], 0
    for index, prompt in enumerate(prompts):
        requests.append(Request(index, first, prompt, prompt + outputs - 1, "", None, "test"))
        first += prompt + outputs - 1
    header = Header(
        n_layers=experts.shape[1],
        n_experts=n_experts,
        top_k=experts.shape[2],
        model=model,
        model_source=source,
        gate=GateRule(),
        labels=("synthetic",),
        created_by=made_by,
        text_licence="none",
    )
    return write_trace(path, header, requests, None, experts=experts)
