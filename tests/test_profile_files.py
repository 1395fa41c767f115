"""Whatever stands in a model, hardware or stack file, the loaders either accept it or refuse it in one line."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.base.errors import BadInput
from sim.base.files import bundled, parse_yaml, read_yaml
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
