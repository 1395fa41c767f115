"""Everything a user can get wrong about a run, once each: one line with file, field and remedy, exit code 2."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from cli_help import simulated
from tiny_traces import ALL, surgery, tiny_header, tiny_trace

from sim.base import yaml_rules
from sim.base.errors import HEAD_CHARS, TAIL_CHARS, BadInput, one_line
from sim.base.files import MAX_YAML_BYTES, bundled, parse_yaml, read_yaml
from sim.cli import main
from traces.format.reader import Trace
from traces.format.writer import TraceWriter

MODEL = {
    "schema": 1,
    "id": "tiny",
    "name": "tiny",
    "source": "tests",
    "gate": {"score": "softmax", "renormalised": True},
    "hidden_size": 64,
    "n_layers": 3,
    "n_experts": 4,
    "top_k": 2,
    "expert_intermediate_size": 64,
    "n_heads": 1,
    "n_kv_heads": 1,
    "head_dim": 64,
    "vocab_size": 100,
}
CARD = bundled("hwprofiles.gpus", ".yaml")["rtx3090"]


class Case(NamedTuple):
    """What to give, and the parts of the one line that come back, in their order."""

    args: tuple[str, ...]
    says: tuple[str, ...]
    trace: Callable[[Path], Any] | None = None  # spoils the sound trace
    files: dict[str, Callable[[], str | bytes]] = {}  # noqa: RUF012 - never written to


def values(tensor: str, index: Any, value: Any) -> Callable[[Path], Any]:
    def spoil(path: Path) -> None:
        surgery(path, lambda pairs, arrays: arrays[tensor].__setitem__(index, value))

    return spoil


def facts(**changes: str) -> Callable[[Path], Any]:
    return lambda path: surgery(path, lambda pairs, arrays: pairs.update(changes))


def without(*tensors: str) -> Callable[[Path], Any]:
    def edit(pairs: dict[str, str], arrays: dict[str, Any]) -> None:
        for name in tensors:
            del arrays[name]
            pairs.pop(f"{name}.code", None)

    return lambda path: surgery(path, edit)


def narrower(tensor: str) -> Callable[[Path], Any]:
    return lambda path: surgery(path, lambda pairs, arrays: arrays.__setitem__(tensor, arrays[tensor][:, :-1].copy()))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def garbled(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(data)


def card(**changes: Any) -> Callable[[], str]:
    """rtx3090.yaml with some top-level fields changed."""
    return lambda: yaml.safe_dump({**read_yaml(CARD), **changes}, sort_keys=False)


def model(**changes: Any) -> Callable[[], str]:
    return lambda: yaml.safe_dump({**MODEL, **changes})


TRACE, HW = "t.safetensors", ("--hw", "rtx3090")
HOBBIT = ("--policy", "hobbit", "--set", "lookahead=1")
BAD_MODEL = ("--model", "FOLDER/bad.yaml")
BAD_HW = ("--hw", "FOLDER/bad.yaml")
CASES: dict[str, Case] = {
    # the trace's container
    "truncated": Case(HW, (TRACE, "not a valid safetensors file", "; copy or record it again"), cut),
    "corrupt header": Case(HW, (TRACE, "header", "; "), garbled),
    "empty": Case(HW, (TRACE, "got 0 bytes: too short", "; copy or record it again"), lambda p: p.write_bytes(b"")),
    "not a trace": Case(HW, (TRACE, "; "), lambda p: p.write_text("token,layer,expert\n0,0,1\n")),
    "a folder": Case(("--trace", "FOLDER", *HW), ("not a regular file", "; give the path of a trace file")),
    "no such file": Case(("--trace", "FOLDER/none", *HW), ("trace, got", "no bundled trace and no file", "; known: ")),
    # its structure
    "wrong shape": Case(HW, (TRACE, "scores, got shape (42, 2, 4)", "axis 1 is L = 3", "; see"), narrower("scores")),
    "missing tensor": Case(HW, (TRACE, "'req_split' is missing", "; see traces/FORMAT.md"), without("req_split")),
    "unknown version": Case(HW, (TRACE, "version, got '9'", "versions 1, 2, 3 and 4", "; upgrade"), facts(version="9")),
    "unknown fact": Case(HW, (TRACE, "metadata gate_scor", "; did you mean 'gate_score'?"), facts(gate_scor="softmax")),
    "requests beyond the rows": Case(
        HW, (TRACE, "req_offsets[6], got 99", "number of rows (42)", "; see"), values("req_offsets", 6, 99)
    ),
    # values that a run reads
    "expert out of range": Case(
        HW, (TRACE, "experts[30, 1, 0], got 9: an expert id is below", "; correct"), values("experts", (30, 1, 0), 9)
    ),
    "one expert twice": Case(
        HW, (TRACE, "experts[30, 1], got 3 3: distinct experts per token", "; "), values("experts", (30, 1), 3)
    ),
    "NaN weight": Case(
        (*HW, *HOBBIT),
        (TRACE, "weights[38, 1, 0], got nan: a finite number", "; correct"),
        values("weights", (38, 1, 0), np.nan),
    ),
    "NaN embedding": Case(
        (*HW, "--policy", "fine_moe"),
        (TRACE, "embeddings[38, 1], got nan", "; correct the recor"),
        values("embeddings", (38, 1), np.nan),
    ),
    "scores as floats": Case(
        (*HW, "--policy", "fine_moe"),
        (TRACE, "scores, got type F32: U16", "; see"),
        lambda path: surgery(path, lambda pairs, arrays: arrays.update(scores=arrays["scores"] * np.float32("nan"))),
    ),
    "scores beyond their code": Case(
        (*HW, "--policy", "fine_moe"),
        (TRACE, "scores[38, 1, 2], got 65535", "; correct"),
        values("scores", (38, 1, 2), 65535),
    ),
    "scores that sum to 2": Case(
        (*HW, "--policy", "importance"),
        (TRACE, "scores[38, 0]", "sum to 1", "; correct"),
        values("scores", (38, 0), 2047),
    ),
    "predicted scores": Case(
        (*HW, "--policy", "mixtral_offloading"),
        (TRACE, "next_scores_1[38, 0, 1], got 4096", "; correct"),
        values("next_scores_1", (38, 0, 1), 4096),
    ),
    "missing level": Case(
        (*HW, "--policy", "fine_moe"), (TRACE, "policy fine_moe needs scores", "; record it with"), without("scores")
    ),
    # trace, model and machine that do not go together
    "shapes disagree": Case(
        (*HW, "--model", "mixtral-8x7b"),
        ("--model mixtral-8x7b is 32x8, k=2", "3x4, k=2", "traces that fit: mixtral-8x7b-small"),
    ),
    "unknown shape": Case(HW, (TRACE, "shape of no model in the catalogue", "; name one with --model FILE")),
    "budget below the policy's minimum": Case(
        (*BAD_MODEL, *HW, "--cache", "1experts", "--policy", "duoserve"),
        ("policy duoserve, got an expert budget of", "it needs at least", "; raise the budget"),
        files={"bad.yaml": model()},
    ),
    "budget below one expert": Case(
        (*BAD_MODEL, *HW, "--cache", "1kB"),
        ("--cache, got 1.00 kB: one expert takes", "; give at least"),
        files={"bad.yaml": model()},
    ),
    "model beyond the host": Case(
        (*BAD_MODEL, *HW, "--set", "hw.cpu.memory_bytes=1000000000", "--cache", "1experts"),
        ("tiny in bf16: its experts need", "host memory", "; take more RAM"),
        files={"bad.yaml": model(expert_intermediate_size=1_000_000)},
    ),
    "model beyond the GPU": Case(
        (*BAD_MODEL, *HW),
        ("tiny in bf16 on rtx3090: dense parts need", "; take a smaller"),
        files={"bad.yaml": model(vocab_size=10**9)},
    ),
    # profiles
    "YAML typo": Case(
        BAD_HW,
        ("bad.yaml", "line 3, column", "; fix the file"),
        files={"bad.yaml": lambda: "schema: 1\nid: [rtx\nname: x\n"},
    ),
    "misspelt field": Case(
        BAD_MODEL + HW,
        ("bad.yaml", "unknown field `top_q`", "; did you mean 'top_k'?"),
        files={"bad.yaml": model(top_q=2)},
    ),
    "missing field": Case(
        BAD_MODEL + HW,
        ("bad.yaml", "missing required field `hidden_size`", "; give it"),
        files={"bad.yaml": lambda: yaml.safe_dump({k: v for k, v in MODEL.items() if k != "hidden_size"})},
    ),
    "wrong type": Case(
        BAD_MODEL + HW,
        ("bad.yaml", "n_experts", "Expected `int`, got `str`", "; correct the field"),
        files={"bad.yaml": model(n_experts="four")},
    ),
    "wrong unit": Case(
        BAD_HW,
        ("bad.yaml", "vram_bytes, got 24", "; did you write GB? the unit is bytes"),
        files={"bad.yaml": card(vram_bytes={"value": 24, "source": "datasheet"})},
    ),
    "number without its origin": Case(
        BAD_HW, ("bad.yaml", "vram_bytes", "; write {value: NUMBER, source:"), files={"bad.yaml": card(vram_bytes=24e9)}
    ),
    "unknown CPU": Case(BAD_HW, ("bad.yaml: cpu, got 'i9'", "; known: core-i9"), files={"bad.yaml": card(cpu="i9")}),
    "citation of nothing": Case(
        BAD_HW,
        ("bad.yaml", "vram_bytes.ref, got 'nowhere'", "; add the citation there"),
        files={"bad.yaml": card(vram_bytes={"value": 24e9, "source": "datasheet", "ref": "nowhere"})},
    ),
    "not finite": Case(
        BAD_HW,
        ("bad.yaml", "vram_bytes.value, got nan", "; correct the number"),
        files={"bad.yaml": card(vram_bytes={"value": float("nan"), "source": "datasheet"})},
    ),
    "key twice": Case(
        BAD_HW,
        ("bad.yaml", "line 2", "key 'schema' appears twice", "; fix the file"),
        files={"bad.yaml": lambda: "schema: 1\nschema: 1\n"},
    ),
    "alias": Case(
        BAD_HW,
        ("bad.yaml", "line 2", "aliases are not accepted", "; fix the file"),
        files={"bad.yaml": lambda: "a: &a [1]\nb: [*a, *a]\n"},
    ),
    "a tag that would run code": Case(
        BAD_HW,
        ("bad.yaml", "could not determine a constructor", "; fix the file"),
        files={"bad.yaml": lambda: "id: !!python/object/apply:os.getcwd []\n"},
    ),
    "not text": Case(
        BAD_HW,
        ("bad.yaml", "not UTF-8 text (byte 0)", "; is it the right file?"),
        files={"bad.yaml": lambda: b"\xff\xfe\x00"},
    ),
    "too large": Case(
        BAD_HW,
        ("bad.yaml", f"at most {MAX_YAML_BYTES} are read", "; is it the right file?"),
        files={"bad.yaml": lambda: "#" * (MAX_YAML_BYTES + 1)},
    ),
    # names and settings
    "unknown policy": Case((*HW, "--policy", "fine_mo"), ("policy, got 'fine_mo'", "; did you mean 'fine_moe'?")),
    "unknown GPU": Case(("--hw", "rtx309"), ("hardware profile, got 'rtx309'", "; did you mean 'rtx3090'?")),
    "unknown model": Case((*HW, "--model", "mixtral-8x7"), ("model, got", "; did you mean 'mixtral-8x7b'?")),
    "unknown stack": Case((*HW, "--engine", "hff"), ("engine, got 'hff'", "; did you mean 'hf'?")),
    "a name too long for a file": Case(("--hw", "x" * 5000), ("hardware profile, got 'xxx", " [...] ", "known: a10")),
    "unknown parameter": Case((*HW, "--set", "scop=layer"), ("parameter lru.scop", "; did you mean 'scope'?")),
    "unknown field": Case(
        (*BAD_MODEL, *HW, "--set", "hw.h2d.latency=1"),
        ("--set hw.h2d.latency,", "; did you mean"),
        files={"bad.yaml": model()},
    ),
    "unknown prefix": Case((*HW, "--set", "gpu.h2d=1"), ("--set gpu.h2d, got prefix 'gpu'", "; known: ")),
    "setting in the wrong unit": Case((*HW, "--set", "hw.h2d.latency_s=10"), ("h2d.latency_s, got 10: from 0", "; ")),
    "setting without a value": Case((*HW, "--set", "scope"), ("--set, got 'scope': not NAME=VALUE", "; write")),
    # a saved configuration
    "unknown field of a configuration": Case(
        ("--config", "FOLDER/bad.yaml"),
        ("bad.yaml, got 'polcy'", "; did you mean 'policy'?"),
        files={"bad.yaml": lambda: "polcy: lru\n"},
    ),
    "wrong type in a configuration": Case(
        ("--config", "FOLDER/bad.yaml"),
        ("bad.yaml: gpus, got 'two'", "; write e.g. "),
        files={"bad.yaml": lambda: "policy: lru\nhw: rtx3090\ngpus: two\n"},
    ),
    "a list for a configuration": Case(
        ("--config", "FOLDER/bad.yaml"),
        ("bad.yaml, got list", "; save one with --out"),
        files={"bad.yaml": lambda: "- policy: lru\n"},
    ),
    "no such configuration": Case(("--config", "FOLDER/none.yaml"), ("none.yaml: No such file", "; check the path")),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / TRACE
    return tiny_trace(path, n_requests=6, levels=ALL - {"arrivals"}).read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, sound: bytes, name: str) -> None:
    case = CASES[name]
    trace = tmp_path / TRACE
    trace.write_bytes(sound)
    if case.trace is not None:
        case.trace(trace)
    for file, text in case.files.items():
        made = text()
        (tmp_path / file).write_bytes(made if isinstance(made, bytes) else made.encode())
    args = [arg.replace("FOLDER", str(tmp_path)) for arg in case.args]
    if "--model" not in args and "shape" not in name:
        (tmp_path / "model.yaml").write_text(model()())
        args += ["--model", str(tmp_path / "model.yaml")]
    args += [] if "--trace" in args else ["--trace", str(trace)]
    args += [] if "--policy" in args else ["--policy", "lru"]
    before = sorted(tmp_path.iterdir())
    said = simulated(capsys, *args, "--out", tmp_path / "out")
    assert said.code == 2, said
    assert said.out == ""
    *table, line = said.err.splitlines()
    assert line.startswith("error: "), said.err
    assert all(row.startswith("  ") for row in table), said.err  # what does not fit comes with its sums
    assert line.isprintable()
    at = 0
    for part in case.says:
        found = line.find(part, at)
        assert found >= 0, f"{part!r} is not in {line!r}, or not in this order"
        at = found + len(part)
    assert sorted(tmp_path.iterdir()) == before


def test_the_same_inputs_unspoilt_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, sound: bytes) -> None:
    """So that each case above is refused for its own reason."""
    (tmp_path / TRACE).write_bytes(sound)
    (tmp_path / "m.yaml").write_text(model()())
    (tmp_path / "hw.yaml").write_text(card()())
    for args in (HOBBIT, *(("--policy", name) for name in ("lru", "fine_moe", "importance", "mixtral_offloading"))):
        said = simulated(
            capsys,
            *args,
            "--hw",
            tmp_path / "hw.yaml",
            "--model",
            tmp_path / "m.yaml",
            "--trace",
            tmp_path / TRACE,
            "--json",
        )
        assert said.json["policy"] == args[1]


class TestLines:
    """What a message may quote is bounded, and cannot forge a second line."""

    def test_control_characters_are_spelt_out(self) -> None:
        assert str(BadInput("a\nb\x1b[31m\u2028\udcff")) == r"a\nb\x1b[31m\u2028\udcff"
        assert str(BadInput("Größe × 2: 5 µs")) == "Größe × 2: 5 µs"

    def test_the_end_of_a_long_message_is_kept(self) -> None:
        said = one_line("x" * 10**6 + "; way out")
        assert said.endswith("; way out")
        assert len(said) == HEAD_CHARS + len(" [...] ") + TAIL_CHARS
        assert one_line("y" * 1000) == "y" * 1000


class TestHostileYaml:
    @pytest.mark.parametrize(
        "text",
        [
            "[" * 100_000,
            "{a: " * 50_000,
            "- " * 100_000,
            "a: &x [1]\n" + "b: [*x, *x]\n" * 1000,
            "\n".join(" " * i + "a:" for i in range(500)),
        ],
        ids=["flow", "maps", "dashes", "aliases", "indents"],
    )
    def test_depth_is_refused_where_it_begins(self, text: str) -> None:
        began_s = time.process_time()
        with pytest.raises(BadInput, match=r"nested deeper than 32 levels|aliases are not accepted"):
            parse_yaml(text, "f.yaml")
        assert time.process_time() - began_s < 2.0  # seconds to minutes, where all of it is read

    def test_numbers_too_long_to_be_meant(self) -> None:
        with pytest.raises(BadInput, match=r"f\.yaml line 1, column 4: a number of 5000 characters: at most 100"):
            parse_yaml("a: " + "9" * 5000, "f.yaml")

    @pytest.mark.parametrize(
        "text",
        [
            "a: *x",
            "a: &x 1\nb: [*x]",
            "[" * 33,
            "a: 1\na: 2",
            "a: !!int foo",
            "[1]: 2",
            "a:\tb\n\tc",
            "\0",
            "- 1\n---\n- 2",
            "a: !!python/object:os.system {}",
            'a: "x',
            "a: [1",
            "a: 1:2:3e5",
            "x: 5e10",
            "x: 017",
            "x: 1:30",
            "x: 'a\n b'",
            "x: .5e3\ny: 1_000\nz: ~\nt: 2026-01-01\nb: yes",
            'a: "\\ud800"',
            "é: ü",
            "",
            "%YAML 1.1\n---\na: 1",
            "<<: {a: 1}",
        ],
    )
    def test_both_scanners_read_the_same(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def told() -> object:
            try:
                return repr(parse_yaml(text, "f.yaml"))
            except BadInput as error:
                return error.args

        quick = told()
        monkeypatch.setattr(yaml, "__with_libyaml__", False)
        assert told() == quick

    @pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML without libyaml")
    def test_bundled_files_read_the_same(self) -> None:
        for package in ("hwprofiles.gpus", "hwprofiles.models", "hwprofiles.stacks"):
            for path in bundled(package, ".yaml").values():
                text = path.read_text(encoding="utf-8")
                slow, quick = (yaml.load(text, Loader=kind) for kind in (yaml_rules._Loader, yaml_rules._QuickLoader))
                assert repr(slow) == repr(quick), path

    def test_depth_that_profiles_have_is_fine(self) -> None:
        assert parse_yaml("{a: {b: {c: [[[1]]]}}}", "f") == {"a": {"b": {"c": [[[1]]]}}}


class TestJudgedWhenRead:
    """Values of a structurally sound trace are held against the rules when somebody first reads them."""

    def test_only_what_is_read_is_judged(self, tmp_path: Path, sound: bytes) -> None:
        path = tmp_path / TRACE
        path.write_bytes(sound)
        values("scores", (38, 1, 2), 65535)(path)
        with Trace(path) as trace:
            assert trace.next_scores(1, 30, 42).shape == (12, 3, 4)
            assert trace.weights(0, 42).shape == (42, 3, 2)
            with pytest.raises(BadInput, match=r"scores\[38, 1, 2\], got 65535"):
                trace.scores(38, 39)
            with pytest.raises(BadInput, match=r"scores\[38, 1, 2\], got 65535"):  # again: it is not forgotten
                trace.scores(38, 39)

    def test_each_block_is_judged_once(self, tmp_path: Path, sound: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        from traces.format import reader

        path = tmp_path / TRACE
        path.write_bytes(sound)
        judged = []
        faults = reader.row_faults
        monkeypatch.setattr(reader, "_JUDGED_VALUES", 120)  # 10 rows of 3 x 4
        monkeypatch.setattr(reader, "row_faults", lambda *args: judged.append(args[1:3]) or faults(*args))
        with Trace(path) as trace:
            for row in (25, 26, 9, 10, 25, 41):
                trace.scores(row, row + 1)
            assert judged == [("scores", 20), ("scores", 0), ("scores", 10), ("scores", 40)]
            trace.scores(0, 42)
            assert judged[4:] == [("scores", 30)]
            assert trace.scores(5, 5).shape == (0, 3, 4)

    @pytest.mark.parametrize(
        ("tensor", "index", "value", "read"),
        [
            ("token_ids", 41, -1, lambda t: t.token_ids),
            ("iterations", 41, 3, lambda t: t.iterations),
            ("weights", (41, 0, 0), np.inf, lambda t: t.weights(41, 42)),
            ("weights", (41, 0), 0.125, lambda t: t.weights(41, 42)),
            ("shared_scores", (41, 0, 0), 9999, lambda t: t.shared_scores(41, 42)),
            ("gate_inputs", (41, 0, 0), np.nan, lambda t: t.gate_inputs(41, 42)),
            ("gate_input_norms", (41, 0), -1.0, lambda t: t.gate_input_norms(41, 42)),
        ],
        ids=lambda part: part if isinstance(part, str) else "",
    )
    def test_every_level(self, tmp_path: Path, sound: bytes, tensor: str, index: Any, value: Any, read: Any) -> None:
        path = tmp_path / TRACE
        path.write_bytes(sound)
        values(tensor, index, value)(path)
        with Trace(path) as trace, pytest.raises(BadInput, match=rf"{TRACE}: {tensor}\[41.*; correct the recorder"):
            read(trace)

    def test_an_embedding_table(self, tmp_path: Path, sound: bytes) -> None:
        path = tmp_path / TRACE
        path.write_bytes(sound)

        def edit(pairs: dict[str, str], arrays: dict[str, Any]) -> None:
            del arrays["embeddings"]
            arrays["embedding_table"] = np.zeros((100, 8), "<f2")
            arrays["embedding_table"][arrays["token_ids"][41], 3] = np.nan

        surgery(path, edit)
        with Trace(path) as trace:
            other = next(row for row in range(41) if trace.token_ids[row] != trace.token_ids[41])
            assert trace.embeddings(other, other + 1).shape == (1, 8)
            with pytest.raises(BadInput, match=r"embedding_table\[48, 3\], got nan: a finite number; "):
                trace.embeddings(41, 42)


def test_scores_that_are_not_numbers_are_never_written(tmp_path: Path) -> None:
    """Files hold scores as integers, so that NaN can only come from a recorder, whom the writer stops."""
    scores = np.full((2, 1, 4), 0.25)
    scores[1, 0, 2] = np.nan
    with (
        pytest.raises(BadInput, match=rf"{TRACE}: scores\[1, 0, 2\], got nan: a score is a number .*; correct"),
        TraceWriter(tmp_path / TRACE, tiny_header(1, 4, 2)) as writer,
    ):
        writer.add_request(1, experts=np.array([[[0, 1]], [[0, 1]]]), scores=scores)
    assert list(tmp_path.iterdir()) == []


def test_other_commands_refuse_in_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (
        ("hw", "rtx309"),
        ("models", "mixtral-8x7"),
        ("policies", "fine_mo"),
        ("traces", "check", "none"),
        ("compare", "--policies", "lru,fif", "--hw", "rtx3090"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(list(args))
        out, err = capsys.readouterr()
        assert (stop.value.code, out) == (2, ""), (args, err)
        assert err.startswith("error: "), err
        assert err.count("\n") == 1, err
