"""Counts of routed tokens out of a file, for policies that place experts by a profile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.base.errors import BadInput


def routed_counts(file: str | Path, n_layers: int, n_experts: int) -> NDArray[np.int64]:
    """Tokens routed to each expert, [layers, experts], out of whatever of these a file is.

    A trace (every token of it), llama-imatrix's GGUF, `llama-moe-trace` CSV (thecodacus' llama.cpp), or the YAML that
    `moesim traces convert` makes of an importance matrix.

    Raises:
        BadInput: none of these, one that is broken, or counts of another shape.
    """
    from traces.convert import imatrix, llama_csv
    from traces.convert.text import head_of
    from traces.format.reader import Trace
    from traces.stats import counts

    path = Path(file)
    head = head_of(path, 512)
    if counts.is_one(path):
        found = counts.load(path)
    elif imatrix.sniff(head):
        found = imatrix.read(path)
    elif llama_csv.SOURCE.sniff(path, head):
        found = llama_csv.counts(path, n_experts)
    elif path.suffix == ".safetensors":
        with Trace(path) as trace:
            _must_fit(path, trace.n_layers, trace.n_experts, n_layers, n_experts)
            ids = np.asarray(trace.experts[:], dtype=np.int64)
        return np.stack([np.bincount(ids[:, layer].ravel(), minlength=n_experts) for layer in range(n_layers)])
    else:
        raise BadInput(
            f"{path}: no profile of routed experts; give llama-moe-trace CSV, a llama-imatrix GGUF, counts that "
            "`moesim traces convert` wrote, or a trace"
        )
    _must_fit(path, len(found.counts), len(found.counts[0]), n_layers, n_experts)
    return np.array(found.counts, dtype=np.int64)


def _must_fit(path: Path, layers: int, experts: int, n_layers: int, n_experts: int) -> None:
    if (layers, experts) != (n_layers, n_experts):
        raise BadInput(
            f"{path}, got counts of {layers} layers of {experts} experts: the model has {n_layers} of {n_experts}; "
            "take a profile of that model"
        )
