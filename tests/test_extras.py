"""A plain install, without the libraries of any extra: every verb works, or says the one command that brings what it
lacks."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import moesim
from sim.base.errors import BadInput
from sim.base.extras import EXTRAS
from sim.cli import simulate
from sim.cli.verbs import VERBS

ROOT = Path(__file__).parents[1]
WITHOUT = (*EXTRAS, "plotly", "dask", "pynvml")
"""None: a library that is not installed."""

# One process for all: what cannot be imported stays so, and the others are imported once.
CHILD = """
import contextlib, io, json, sys, traceback
sys.modules |= dict.fromkeys(sys.argv[1].split(","))
from sim.cli import calibrating, main, simulate
said = []
for entry, *args in json.loads(sys.stdin.read()):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            {"moesim": main, "simulate": simulate, "calibrate": calibrating}[entry](args)
        except SystemExit as stop:
            code = stop.code or 0
        except Exception:
            code = traceback.format_exc()
    said.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(said))
"""

RUN = "--policy lru --hw rtx3090 --requests 1"
WORKS = {
    "run": [f"simulate {RUN}", f"moesim run {RUN} --json", f"simulate {RUN} --timeline t.json"],
    "report": ["moesim report result.json -o page.html"],
    "compare": [f"moesim compare --policy lfu {RUN} --out compared"],
    "sweep": [f"moesim sweep --policy lfu {RUN} --workers 1"],
    "plan": [f"moesim plan --goal 'tpot_s.mean <= 900ms' {RUN} --workers 1"],
    "curve": ["moesim curve --policy lru --requests 1", "moesim curve --policy lru --requests 1 --json"],
    "explain": [f"moesim explain --measured 900ms {RUN} --workers 1"],
    "timeline": ["moesim timeline config.yaml -o lanes.json"],
    "saturate": ["moesim saturate --policy lru --hw rtx3090 --requests 3 --workers 1"],
    "check": ["moesim check baseline.yaml --update", "moesim check baseline.yaml"],
    "policies": ["moesim policies lru"],
    "schedulers": ["moesim schedulers"],
    "routers": ["moesim routers"],
    "models": ["moesim models mixtral-8x7b"],
    "hw": ["moesim hw rtx3090"],
    "traces": [
        "moesim traces list",
        "moesim traces synth qwen1.5-moe-a2.7b --requests 8 --levels experts -o drawn.safetensors",
    ],
    "reproduce": ["moesim reproduce --last", "moesim reproduce --rows geometry"],
    "bench": ["moesim bench --only imports --repeat 1"],
    "conformance": ["moesim conformance lru"],
}
"""Verb -> commands that a plain install carries out."""
LACKS = {
    "run": [(f"simulate {RUN} --out run", "tables"), (f"simulate {RUN} --real", "torch")],
    "calibrate": [("calibrate --device cpu --minutes 1", "fit")],
    "validate": [("moesim validate --policy lru --hw rtx3090 --cache 64experts", "torch")],
    "report": [
        ("moesim report kept -o kept.html", "tables"),
        ("moesim report result.json -o x.svg --plot time", "images"),
    ],
    "sweep": [
        (f"moesim sweep {RUN} --out swept", "tables"),
        (f"moesim sweep {RUN} --json", "tables"),
        (f"moesim sweep {RUN} --cluster tcp://nowhere:1", "cluster"),
    ],
    "curve": [("moesim curve --policy lru --requests 1 --out curves", "tables")],
    "diff": [("moesim diff 'lru hw=rtx3090 requests=1' 'lfu hw=rtx3090 requests=1'", "tables")],
    "traces": [("moesim traces fit mixtral-8x7b-small -o fit.yaml", "fit")],
    "train": [
        ("moesim train duoserve --trace mixtral-8x7b-small --out p.safetensors", "torch"),
        ("moesim train emoe --trace mixtral-8x7b-small --out p.safetensors", "torch"),
    ],
    "record": [("moesim record mixtral-8x7b-small --requests 1 --out r.safetensors", "torch")],
}
"""Verb -> commands that need an extra, and which."""


def child(folder: Path, commands: list[str]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each; an error that was not foreseen is a traceback in place of the code."""
    words = json.dumps([shlex.split(command) for command in commands])
    told = [sys.executable, "-c", CHILD, ",".join(WITHOUT)]
    done = subprocess.run(told, input=words, capture_output=True, text=True, cwd=folder, timeout=600, check=True)
    found: list[tuple[int, str, str]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """By command, what it said where no extra is installed."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.raises(SystemExit):
        simulate([*RUN.split(), "--out", str(folder / "kept"), "--set", "out.spans=on"])
    for name in ("config.yaml", "result.json"):
        shutil.copy(folder / "kept" / name, folder / name)
    text = "schema: 2\nrun: {hw: rtx3090, requests: 1}\nruns:\n- {policy: lfu}\n"
    (folder / "baseline.yaml").write_text(text, encoding="utf-8")
    commands = [one for many in WORKS.values() for one in many]
    commands += [one for many in LACKS.values() for one, _ in many]
    return dict(zip(commands, child(folder, commands), strict=True))


def test_every_verb_is_tried() -> None:
    assert {*WORKS, *LACKS} == set(VERBS)


@pytest.mark.parametrize("command", [one for many in WORKS.values() for one in many])
def test_works_without_extras(command: str, said: dict[str, tuple[int, str, str]]) -> None:
    code, out, err = said[command]
    assert code == 0, f"{code}\n{err}"
    assert out


@pytest.mark.parametrize(("command", "extra"), [one for many in LACKS.values() for one in many])
def test_says_the_command_that_brings_it(command: str, extra: str, said: dict[str, tuple[int, str, str]]) -> None:
    code, out, err = said[command]
    assert (code, out) == (2, ""), f"{code}\n{err}"
    assert err.splitlines()[-1].endswith(f"pip install 'moe-offload-sim[{extra}]'")


FRAMES = (
    "simulate(policy='lru', hw='rtx3090', requests=1).requests",
    "compare('lru', 'rtx3090')",
    "sweep('lru', 'rtx3090')",
    "plan('tpot_s.mean <= 1s', policy='lru', hw='rtx3090')",
)


@pytest.mark.parametrize("call", FRAMES)
def test_python_says_the_same(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pandas", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BadInput, match=r"; pip install 'moe-offload-sim\[tables\]'$"):
        eval(f"moesim.{call}", {"moesim": moesim})


def test_extras_of_the_project() -> None:
    """Each library comes with the extra that is named for it, and `all` is what README installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for library, extra in EXTRAS.items():
        assert any(one.startswith(library) for one in extras[extra]), (library, extra)
        assert not any(one.startswith(library) for one in project["dependencies"]), library
    assert extras["all"] == ["moe-offload-sim[tables,report,fit,cluster]"]
