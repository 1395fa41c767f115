"""`moesim record` from the command line: what it writes, cut off and continued, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch (pip install 'moe-offload-sim[torch]')")
pytest.importorskip("transformers", reason="needs transformers (pip install 'moe-offload-sim[torch]')")

from cli_help import moesim, simulated  # noqa: E402
from tiny_moe import saved_moe  # noqa: E402

import traces  # noqa: E402
from traces.format.parts import Parts  # noqa: E402
from traces.format.reader import Trace  # noqa: E402
from traces.format.writer import TraceWriter  # noqa: E402
from traces.record import recorder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
OWN = Path(traces.__file__).parent / "models" / "mixtral-8x7b-small"
RANDOM = ("--prompt-tokens", "3-6", "--output-tokens", "2-5", "--requests", 5, "--batch", 2)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Products this small wait for each other's threads longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_moe("mixtral", tmp_path_factory.mktemp("checkpoint") / "tiny-mixtral")


def recorded(capsys, model, out, *args):
    return moesim(capsys, "record", model, "--out", out, "--device", "cpu", *args)


def test_own_checkpoint_from_text_to_simulation(tmp_path, capsys):
    """The project's own model with its tokenizer, JSON lines with tasks, two at a time."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": text, "task": task}
        for text, task in (
            ("The package manager installs", "admin"),
            ("A module is loaded when the kernel", "kernel"),
            ("To configure a printer, first", "admin"),
            ("The scheduler decides", "kernel"),
        )
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "mine.safetensors"
    said = recorded(
        capsys, OWN, out, "--prompts", prompts, "--max-new-tokens", 6, "--batch", 2, "--text-licence", "CC0-1.0"
    )
    assert said.code == 0, said.err
    assert said.err == ""
    config = tmp_path / "mine.config.json"
    assert said.out.startswith(f"{out}: 32x8, k=2, 4 requests (2 to score), ")
    assert said.out.endswith(f"its model: {config}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.config.json", "mine.safetensors", "prompts.jsonl"]
    assert moesim(capsys, "traces", "check", out).out == f"{out}: sound; 32x8, k=2, 4 requests, {rows_in(out)} tokens\n"
    facts = moesim(capsys, "traces", "show", out, "--json").json
    assert facts["model"] == "mixtral-8x7b-small"
    assert facts["text_licence"] == "CC0-1.0"
    assert "prompts.jsonl (sha256 " in facts["text_source"]
    assert facts["splits"] == {"store": 2, "test": 2}
    assert facts["labels"] == []
    accuracy = facts["prediction_accuracy"]["1"]["recorded"]
    assert np.mean(accuracy) > 0.6  # a trained model: its gates do foresee the next ones
    with Trace(out) as trace:
        assert [request.task for request in trace.requests] == ["admin", "kernel", "admin", "kernel"]
        import tokenizers

        first = trace.requests[0]
        ids = trace.token_ids[first.first_row : first.first_decode_row].tolist()
        assert tokenizers.Tokenizer.from_file(str(OWN / "tokenizer.json")).decode(ids) == lines[0]["prompt"]
    result = simulated(capsys, "--policy", "lru", "--hw", "rtx3090", "--trace", out, "--model", config, "--json").json
    assert (result["model"], result["requests"]) == ("mixtral-8x7b-small", 2)


def rows_in(path):
    with Trace(path) as trace:
        return trace.n_tokens


def test_the_same_command_gives_the_same_bytes_and_another_seed_others(model, tmp_path, capsys):
    outs = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for out, seed in zip(outs, (1, 1, 2), strict=True):
        assert recorded(capsys, model, out, *RANDOM, "--seed", seed).code == 0
    first, second, third = (out.read_bytes() for out in outs)
    assert first == second != third


class Killed(BaseException):
    """As sudden as a power cut: nothing tidies up."""


@pytest.mark.parametrize("at", [1, 4, 9, 12])
def test_killed_while_recording_and_continued(at, model, tmp_path, capsys, monkeypatch):
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    assert recorded(capsys, model, whole, *RANDOM, "--name", "m").code == 0
    real, calls = recorder.BatchWriter.add, [0]

    def add(self, slot, rows):
        calls[0] += 1
        if calls[0] == at:
            raise Killed
        real(self, slot, rows)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(recorder.BatchWriter, "add", add)
        patch.setattr(TraceWriter, "abort", lambda self: None)
        moesim(capsys, "record", model, "--out", cut, "--device", "cpu", *RANDOM, "--name", "m")
    assert not cut.exists()
    folder = tmp_path / "cut.safetensors.recording"
    done = sorted(folder.glob("request-*.safetensors"))
    for part in done:
        assert moesim(capsys, "traces", "check", part).code == 0
    error = recorded(capsys, model, cut, *RANDOM, "--name", "m").error
    assert "a recording was begun and not finished; give --resume" in error
    before = [part.stat().st_mtime_ns for part in done]
    with monkeypatch.context() as patch:
        patch.setattr(recorder.Session, "_clear", lambda _: None)  # keep the parts, to see which were made again
        assert recorded(capsys, model, cut, *RANDOM, "--name", "m", "--resume").code == 0
    n_whole = len(done) // 2 * 2  # batches of two
    assert [part.stat().st_mtime_ns for part in done][:n_whole] == before[:n_whole]
    assert cut.read_bytes() == whole.read_bytes()
    assert recorded(capsys, model, cut, *RANDOM, "--name", "m", "--resume").out == f"{cut}: already complete\n"
    assert not folder.exists()


def test_killed_while_joining_and_continued(model, tmp_path, capsys, monkeypatch):
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    assert recorded(capsys, model, whole, *RANDOM).code == 0
    real = TraceWriter.close

    def close(self):
        if self.path.name == "whole.safetensors":
            raise Killed
        return real(self)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(TraceWriter, "close", close)
        recorded(capsys, model, cut, *RANDOM)
    assert not cut.exists()
    assert recorded(capsys, model, cut, *RANDOM, "--resume").code == 0
    assert cut.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "cut.safetensors.recording").exists()


def test_what_exists_is_not_overwritten_unasked(model, tmp_path, capsys):
    out = tmp_path / "t.safetensors"
    assert recorded(capsys, model, out, *RANDOM).code == 0
    before = out.read_bytes()
    assert "t.safetensors: it exists; give --overwrite" in recorded(capsys, model, out, *RANDOM).error
    assert (
        "holds another recording; give --overwrite"
        in recorded(capsys, model, out, *RANDOM, "--seed", 3, "--resume").error
    )
    assert out.read_bytes() == before
    assert recorded(capsys, model, out, *RANDOM, "--seed", 3, "--overwrite").code == 0
    assert out.read_bytes() != before
    assert "got both" in recorded(capsys, model, out, *RANDOM, "--resume", "--overwrite").error


def test_resuming_something_else_is_refused(model, tmp_path, capsys, monkeypatch):
    out = tmp_path / "t.safetensors"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(recorder.BatchWriter, "add", lambda *_: (_ for _ in ()).throw(Killed()))
        recorded(capsys, model, out, *RANDOM)
    error = recorded(capsys, model, out, *RANDOM, "--seed", 9, "--resume").error
    assert "--resume, got" in error
    assert "the recording was begun with" in error


def test_memory_stays_constant(model, tmp_path, capsys, monkeypatch):
    """Rows leave memory when the buffer is full, in the middle of a batch; the bytes stay the same."""
    calls = []
    real = TraceWriter.append
    monkeypatch.setattr(
        TraceWriter, "append", lambda self, **rows: (calls.append(len(rows["experts"])), real(self, **rows))
    )
    outs = [tmp_path / f"{name}.safetensors" for name in "ab"]
    args = ("--prompt-tokens", "40", "--output-tokens", "20", "--requests", 2, "--batch", 2)
    assert recorded(capsys, model, outs[0], *args).code == 0
    in_one = len(calls)
    monkeypatch.setattr("traces.record.session.BUFFER_BYTES", 1)
    assert recorded(capsys, model, outs[1], *args).code == 0
    assert len(calls) - in_one > 4 * in_one
    assert outs[0].read_bytes() == outs[1].read_bytes()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "got both or neither of --prompts FILE and --prompt-tokens"),
        (("--prompt-tokens", "4", "--dtype", "float12"), "'float12' is not one of 'auto', 'bfloat16', 'float16'"),
        (("--prompt-tokens", "4", "--device", "toaster"), "--device, got 'toaster': not usable here"),
        (("--prompt-tokens", "4", "--embeddings", "some"), "--embeddings, got 'some': full, none, or a number"),
        (("--prompt-tokens", "four"), "lengths, got 'four'"),
        (("--prompt-tokens", "250", "--output-tokens", "8"), "the model has 256 positions; lower"),
        (("--prompts", "EMPTY"), "empty.txt: no prompt in it"),
        (("--prompts", "TEXT"), "the model has no tokenizer"),
        (("--prompts", "IDS"), "got token id 64: the model's vocabulary has 64"),
        (("--prompts", "FEW", "--requests", 2), "--requests, got 2: few.jsonl has 1 prompts"),
    ],
)
def test_refusals(args, message, model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = {
        "EMPTY": ("empty.txt", "\n"),
        "TEXT": ("text.txt", "hello"),
        "IDS": ("ids.jsonl", '{"token_ids": [64]}'),
        "FEW": ("few.jsonl", '{"token_ids": [6]}'),
    }
    for name, text in texts.values():
        (tmp_path / name).write_text(text)
    said = moesim(capsys, "record", model, "--out", "t.safetensors", *(texts.get(arg, (arg,))[0] for arg in args))
    assert message in said.error
    assert not list(tmp_path.glob("t.safetensors*"))


def test_models_that_cannot_be_used(model, tmp_path, capsys):
    def error(name):
        return recorded(capsys, name, tmp_path / "t.safetensors", *RANDOM).error

    assert "no such folder" in error(tmp_path / "nowhere")
    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**facts, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    assert "no router is known in it; supported are Mixtral (mixtral), " in error(folder)
    (folder / "config.json").write_text(json.dumps({**facts, "model_type": "ours", "auto_map": {"AutoConfig": "x.Y"}}))
    assert "--trust-remote-code allows that" in error(folder)
    (folder / "config.json").write_text("{")
    assert "cannot be loaded" in error(folder)
    (folder / "config.json").write_text(json.dumps(facts))
    weights = next(folder.glob("*.safetensors"))
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")
    weights.unlink()
    assert "no safetensors weights in it; pickled weights are not loaded" in error(folder)


def test_a_full_disk_is_one_line(model, tmp_path, capsys, monkeypatch):
    def spool(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Parts, "add", spool)
    error = recorded(capsys, model, tmp_path / "t.safetensors", *RANDOM).error
    assert "No space left on device; mend that and continue with --resume" in error
