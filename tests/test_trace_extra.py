"""Public traces that may not be redistributed: written with our writer, measured, compared with an independent table.

Runs where MOESIM_EXTRA_TRACES names a folder with `normalized/*.npz`.
"""

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from traces.format.check import check_trace
from traces.format.header import GateRule, Header
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import write_trace
from traces.stats.figures import next_token_overlap

FOLDER = os.environ.get("MOESIM_EXTRA_TRACES", "")
pytestmark = pytest.mark.skipif(
    not (Path(FOLDER) / "normalized").is_dir() or not FOLDER,
    reason="MOESIM_EXTRA_TRACES does not name a folder with normalized/*.npz",
)
# Share of a token's experts that the token before used, over decode rows where the file has any, else over all.
SHARES = {
    "esft_dsv2lite_intent": 0.262,
    "esft_dsv2lite_law": 0.290,
    "bigmoe_qwen": 0.383,
    "bigmoe_gemma": 0.357,
    "ocs_qwen15moe_cooking_1": 0.188,
    "ocs_qwen15moe_history_1": 0.166,
    "warp_olmoe_299": 0.435,
}


@pytest.mark.parametrize("name", SHARES)
def test_overlap_of_a_public_trace(tmp_path, name):
    source = np.load(Path(FOLDER) / "normalized" / f"{name}.npz")
    facts, experts, seq = json.loads(str(source["meta"])), source["experts"], source["seq"]
    starts = [0, *(np.flatnonzero(np.diff(seq)) + 1).tolist(), len(seq)]
    requests = [
        Request(i, a, max(1, int((source["phase"][a:b] == 0).sum())), b - a)
        for i, (a, b) in enumerate(pairwise(starts))
    ]
    header = Header(
        facts["model"],
        facts["source"],
        experts.shape[1],
        facts["num_experts"],
        experts.shape[2],
        gate=GateRule(renormalised=False),
        weights_kind="raw",
        labels=("converted",),
        created_by="tests",
        expert_order="router" if "weights" in source else "unranked",
    )
    rows = {"weights": source["weights"]} if "weights" in source else {}
    path = write_trace(tmp_path / f"{name}.safetensors", header, requests, experts=experts, **rows)
    with Trace(path) as trace:
        assert check_trace(trace) == []
        assert np.array_equal(trace.experts, experts)
        share, n_pairs = next_token_overlap(trace, decode=trace.requests.n_decode_rows > 0)
    assert n_pairs > 100
    assert float(share.mean()) == pytest.approx(SHARES[name], abs=0.0006)
