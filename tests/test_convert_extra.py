"""Public routing traces that may not be redistributed: our conversion equals an independent one, token for token.

Runs where MOESIM_EXTRA_TRACES names a folder with the public files and `normalized/*.npz`.
"""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from traces.convert import Options, convert, detect
from traces.format.check import check_trace
from traces.format.reader import Trace
from traces.synth.arrivals import arrivals

FOLDER = os.environ.get("MOESIM_EXTRA_TRACES", "")
pytestmark = pytest.mark.skipif(
    not (Path(FOLDER) / "normalized").is_dir() or not FOLDER,
    reason="MOESIM_EXTRA_TRACES does not name a folder with normalized/*.npz",
)
# independent conversion -> file, format, what the file does not tell, and what is recognised of it
FILES = {
    "bigmoe_qwen": ("bigmoe/qwen.route.csv", "bigmoe", Options()),
    "bigmoe_gemma": ("bigmoe/gemma.route.csv", "bigmoe", Options()),
    "esft_dsv2lite_law": ("esft/law", "esft", Options(n_experts=64, top_k=6, model="ESFT-vanilla-lite")),
    "esft_dsv2lite_intent": ("esft/intent", "esft", Options(n_experts=64, top_k=6, model="ESFT-vanilla-lite")),
    "ocs_qwen15moe_cooking_1": ("moe_ocs/qwen15moe_cooking_1.json", "moe_ocs", Options()),
    "ocs_qwen15moe_history_1": ("moe_ocs/qwen15moe_history_1.json", "moe_ocs", Options()),
    "warp_olmoe_299": ("warp/trace_olmoe_299.jsonl", "warp", Options(n_experts=64, model="OLMoE-1B-7B")),
}


@pytest.mark.parametrize("name", FILES)
def test_equals_the_independent_conversion(tmp_path, name):
    path, source, options = FILES[name]
    assert detect(Path(FOLDER) / path) == source
    convert([Path(FOLDER) / path], tmp_path / "t.safetensors", options=options)
    other = np.load(Path(FOLDER) / "normalized" / f"{name}.npz")
    with Trace(tmp_path / "t.safetensors") as trace:
        assert check_trace(trace) == []
        assert np.array_equal(trace.experts, other["experts"])
        if "weights" in other:
            assert np.array_equal(trace.stored("weights"), other["weights"].astype(np.float16))
        if "token" in other:
            assert np.array_equal(trace.token_ids, other["token"])
        starts = np.flatnonzero(np.diff(other["seq"], prepend=-1))
        assert trace.requests.first_row.tolist() == starts.tolist()
        phases = np.concatenate([np.arange(r.n_rows) >= r.prompt_len for r in trace.requests])
        first_of_decode_only = (other["phase"][starts] == 1).sum()  # stands for the prompt
        assert (phases != other["phase"].astype(bool)).sum() == first_of_decode_only
        layers = [int(n) for n in trace.header.extra.get("source_layers", "").split(", ") if n]
        assert (layers or list(range(trace.n_layers))) == other["layers"].tolist()


def test_azure_2023():
    times = arrivals(str(Path(FOLDER) / "azure" / "AzureLLMInferenceTrace_conv.csv"), 100_000)
    assert len(times) == 19_366
    assert (times[0].at_s, times[0].prompt_len, times[0].outputs) == (0.0, 374, 44)
    assert (times[1].at_s, times[1].prompt_len, times[1].outputs) == (4.314579, 396, 109)
    assert all(a.at_s <= b.at_s for a, b in pairwise(times))
