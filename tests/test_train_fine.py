"""The command that trains the model of fine experts on docs/importance.md leaves what `validate --checkpoint` reads."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch (pip install 'moe-offload-sim[torch]')")
pytest.importorskip("transformers", reason="needs transformers (pip install 'moe-offload-sim[torch]')")
pytest.importorskip("tokenizers", reason="needs tokenizers (comes with transformers)")

from cli_help import moesim

from tools.train import fine
from traces.format.catalogue import open_trace

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.thorough
def test_one_command_makes_a_checkpoint_and_a_trace_that_validate_reads(tmp_path, monkeypatch, capsys):
    text = inspect.getsource(inspect) + inspect.getsource(json)
    (tmp_path / "corpus").mkdir()
    for task in ("code", "prose"):
        for split in ("train", "heldout"):
            documents = [json.dumps({"text": text[start : start + 9000]}) for start in range(0, 90_000, 9000)]
            (tmp_path / "corpus" / f"{task}.{split}.jsonl").write_text("\n".join(documents) + "\n", encoding="utf-8")
    (tmp_path / "corpus" / "corpus_built.json").write_text("{}", encoding="utf-8")
    fine.main([f"--out={tmp_path}", "--steps=2", "--requests=4"], standalone_mode=False)
    run, trace = tmp_path / fine.NAME, tmp_path / f"{fine.NAME}.safetensors"
    log = json.loads((run / "training_log.json").read_text(encoding="utf-8"))
    assert (log["steps"], Path(log["settings"]["begin_from"]).name) == (2, "mixtral-8x7b-small")
    with open_trace(str(trace)) as opened:
        assert (opened.n_layers, opened.n_experts, opened.top_k) == (16, 32, 8)
        assert opened.header.stands_for == ""  # no model of the catalogue has that shape
    capsys.readouterr()
    asked = ("--hw", "rtx3090", "--cache", "256experts", "--outputs", 4, "--policy", "importance alpha=1", "--json")
    said = moesim(capsys, "validate", "--checkpoint", run, "--trace", trace, *asked)
    assert said.code == 0, said.err
    (row,) = json.loads(said.out)["policies"]
    assert row["closed_loop_activations_changed_frac"] > 0
