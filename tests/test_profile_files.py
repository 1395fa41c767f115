"""Whatever stands in a model, hardware or stack file, the loaders either accept it or refuse it in one line."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from sim.base import index
from sim.base.files import bundled, parse_yaml, read_yaml
from sim.profiles import find
from sim.profiles.find import as_a_start


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
