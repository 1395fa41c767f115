"""Whatever stands in a model, hardware or stack file, the loaders either accept it or refuse it in one line."""

from __future__ import annotations

import copy
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.base import index
from sim.base.errors import BadInput
from sim.base.files import bundled, parse_yaml, read_yaml
from sim.profiles import find
from sim.profiles.find import as_a_start
from sim.profiles.hardware import load_hardware
from sim.profiles.models import load_model
from sim.profiles.stack import load_stack

LOADERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "model": (load_model, "deepseek-v2-lite"),
    "hardware": (load_hardware, "rtx3090"),
    "stack": (load_stack, "hf"),
}
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-2, 99), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.just({"from": "xeon-8358p"}),
    st.just({"from": None}),
    st.just({"value": 1.0}),
)


def _paths(node: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path] if path else []
    if isinstance(node, dict):
        for key, child in node.items():
            found += _paths(child, (*path, key))
    return found


@pytest.mark.parametrize("kind", LOADERS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.integers(0, 10**6), junk=JUNK, remove=st.booleans())
def test_one_spoilt_field(tmp_path: Path, kind: str, choice: int, junk: Any, remove: bool) -> None:
    load, name = LOADERS[kind]
    data = copy.deepcopy(msgspec.to_builtins(load(name)))
    paths = _paths(data)
    *parents, last = paths[choice % len(paths)]
    node = data
    for key in parents:
        node = node[key]
    if remove:
        del node[last]
    else:
        node[last] = junk
    path = tmp_path / "spoilt.yaml"
    path.write_text(json.dumps(data), encoding="utf-8")
    try:
        load(str(path))
    except BadInput as error:
        assert str(error), "a refusal says something"
        assert "\n" not in str(error)


@pytest.mark.parametrize("verb", ["hw", "models"])
def test_a_start_for_a_file_of_ones_own(verb: str) -> None:
    """All of the bundled file but what is of the original alone, so that a copy answers to no name of the original's
    and tells nothing about another machine."""
    package = {"hw": "hwprofiles.gpus", "models": "hwprofiles.models"}[verb]
    for name, path in bundled(package, ".yaml").items():
        data = read_yaml(path)
        start = parse_yaml(as_a_start(package, verb, name, alone=True), name)
        assert start == {key: value for key, value in data.items() if key not in ("aliases", "note")}
        assert start["id"] == name


class TestIndex:
    """What a run asks of every file of a folder is in an index, so that it reads those alone that it names."""

    def test_it_says_what_the_files_say(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(Path(__file__).parents[1])
        tool = runpy.run_path("tools/index.py")
        for package in tool["PACKAGES"]:
            is_there = tool["path_of"](package).read_text(encoding="utf-8")
            assert is_there == tool["text_of"](package), f"{package}: run python tools/index.py"

    def test_what_is_new_or_was_changed_is_read(self, tmp_path: Path) -> None:
        known, other = tmp_path / "known.yaml", tmp_path / "other.yaml"
        known.write_bytes(b"aliases: [mine]\n")
        other.write_bytes(b"aliases: [yours]\n")
        assert index.facts(known) is None, "no index"
        entry = {"sha256": index.digest(known), "names": ["mine"]}
        (tmp_path / index.NAME).write_text(index.written({"known": entry}))
        assert index.facts(known) == entry
        assert index.facts(other) is None
        known.write_bytes(b"aliases: [mine]\r\n")
        assert index.facts(known) == entry, "the same file, as Windows has it"
        known.write_bytes(b"aliases: [ours]\n")
        assert index.facts(known) is None
        (tmp_path / index.NAME).write_text("{")
        os.utime(tmp_path / index.NAME, ns=(0, 1))
        assert index.facts(known) is None

    def test_a_run_on_bundled_profiles_parses_no_yaml(self) -> None:
        code = (
            "import sys\n"
            "from sim.profiles.models import load_model\n"
            "from sim.setup.prepare import prepare\n"
            "from sim.options import RunSpec\n"
            "prepare(RunSpec(policy='lru', hw='4090', engine='llama_cpp')).close()\n"
            "load_model('glm-4.6')\n"
            "print('yaml' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"

    def test_a_profile_is_what_its_file_says(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An edited file is read, whatever the index remembers of it."""
        monkeypatch.setattr("sim.profiles.find.PACKAGE", tmp_path)
        path = tmp_path / "known.yaml"
        path.write_bytes(b"id: one\n")
        known = {"sha256": index.digest(path), "data": {"id": "one"}}
        (tmp_path / index.NAME).write_text(index.written({"known": known}))
        find.read(path, "model")["id"] = "changed by its reader"
        assert find.read(path, "model") == {"id": "one"}
        path.write_bytes(b"id: two\n")
        assert find.read(path, "model") == {"id": "two"}
