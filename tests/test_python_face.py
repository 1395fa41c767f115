"""`import moesim`: what a run gives in Python is what the command line prints and writes."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pandas as pd
import pytest
from cli_help import mixtral_shaped, simulated
from tiny_traces import ALL

import moesim
from sim.base.errors import BadInput, CheckFailed, DoesNotFit
from sim.options import RunSpec
from sim.policy.decisions import Decision
from sim.results.record import Result
from sim.results.run_folder import TABLES
from sim.results.tables import columns_of

ROOT = Path(__file__).parents[1]
HEAVY = {"numpy", "pandas", "plotly", "torch", "pyarrow", "rich", "scipy", "simpy", "msgspec", "safetensors", "yaml"}
MINE = """
from moesim import Policy


class Mine(Policy):
    name = "mine"

    def bind(self, view):
        self._order = {}

    def accessed(self, piece, hit, view):
        self._order.pop(piece, None)
        self._order[piece] = True

    def evicted(self, piece, view):
        del self._order[piece]

    def victim(self, piece, speculative, view):
        return view.first_evictable(self._order)
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return mixtral_shaped(tmp_path, levels=ALL - {"arrivals"})


@pytest.fixture
def world(trace: Path) -> dict[str, Any]:
    return {"hw": "rtx3090", "trace": trace, "cache": "60experts"}


def words(world: dict[str, Any]) -> list[object]:
    """The same for the command line."""
    return [word for name, value in world.items() for word in (f"--{name}", value)]


def timeless(facts: dict[str, Any]) -> dict[str, Any]:
    return {**facts, "wall_s": None}


def imported(code: str, name: str, path: Path) -> Any:
    """A class of a module that lies in a file, as `import` gives it."""
    path.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


class TestAsTheCommandLine:
    @pytest.mark.parametrize("policy", ["lfu", "fine_moe", "fiddler"])
    def test_result_is_the_json_of_the_command(self, capsys: Any, world: dict[str, Any], policy: str) -> None:
        result = moesim.simulate(policy=policy, seed=3, **world)
        told = simulated(capsys, "--policy", policy, *words(world), "--seed", 3, "--json")
        assert timeless(result.to_dict()) == timeless(json.loads(told.out))
        assert timeless(json.loads(result.to_json())) == timeless(json.loads(told.out))

    def test_every_key_is_an_attribute_with_its_value(self, world: dict[str, Any]) -> None:
        result = moesim.simulate(policy="fine_moe", **world)
        fields = {one.encode_name: one.name for one in msgspec.structs.fields(Result) if not one.name.startswith("_")}
        plain = {key: msgspec.to_builtins(getattr(result, name)) for key, name in fields.items()}
        facts = result.to_dict()
        assert {key for key, value in plain.items() if value is None and key not in facts} == set(plain) - set(facts)
        assert set(facts) <= set(plain)
        for key, value in facts.items():
            assert covers(plain[key], value), (key, plain[key], value)
        assert result.tpot_s.mean == facts["tpot_s"]["mean"] > 0
        assert result.n_requests == facts["requests"] == len(result.requests)

    def test_options_are_those_of_a_configuration(self) -> None:
        fields = {field.name for field in msgspec.structs.fields(RunSpec)}
        assert {*moesim.Options.__annotations__, "policy", "hw"} == fields

    def test_set_sizes_paths_and_numbers_of_numpy(self, trace: Path, tmp_path: Path) -> None:
        config = {"policy": "lru", "hw": "rtx3090", "trace": str(trace), "cache": f"{12 * 10**9}B"}
        plain = moesim.simulate(**config, set={"scope": "layer"})
        for size in ("12GB", 12e9, np.int64(12 * 10**9)):
            options: Any = {"trace": trace, "cache": size, "requests": np.int64(2)}
            other = moesim.simulate("lru", "rtx3090", **options, set={"scope": "layer"})
            assert other.tpot_s == plain.tpot_s
        assert plain.params["scope"] == "layer"

    def test_text_is_what_the_command_prints(
        self, capsys: Any, world: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "100")
        result = moesim.simulate(policy="lru", **world)
        told = simulated(capsys, "--policy", "lru", *words(world))
        assert str(result) == told.out
        assert result.run_id in repr(result)


def covers(record: Any, facts: Any) -> bool:
    """Whether a record holds every value of plain data; what it has beyond that is None."""
    if isinstance(facts, dict):
        more = set(record) - set(facts)
        return all(key in record and covers(record[key], value) for key, value in facts.items()) and all(
            record[key] is None for key in more
        )
    if isinstance(facts, list):
        return len(record) == len(facts) and all(covers(a, b) for a, b in zip(record, facts, strict=True))
    return bool(record == facts)


class TestTables:
    def test_they_are_those_of_out(self, capsys: Any, world: dict[str, Any], tmp_path: Path) -> None:
        result = moesim.simulate(policy="fine_moe", **world)
        simulated(capsys, "--policy", "fine_moe", *words(world), "--out", tmp_path / "run", "--set", "out.spans=on")
        for name in set(TABLES) - {"runs"}:
            frame = getattr(result, name)
            pd.testing.assert_frame_equal(frame, pd.read_parquet(tmp_path / "run" / f"{name}.parquet"))
            assert list(frame.columns) == list(columns_of(name))

    def test_no_answer_is_changed_by_what_is_done_to_it(self, world: dict[str, Any]) -> None:
        result = moesim.simulate(policy="lru", **world)
        frame = result.requests
        frame["ttft_s"] = 0.0
        assert (result.requests["ttft_s"] > 0).all()

    def test_inputs_that_changed_are_another_runs(self, world: dict[str, Any], tmp_path: Path) -> None:
        kind = imported(MINE, "Mine", tmp_path / "changing.py")
        result = moesim.simulate(policy=f"{tmp_path / 'changing.py'}", **world)
        assert moesim.simulate(policy=kind, **world).run_id == result.run_id
        (tmp_path / "changing.py").write_text(MINE + "\n# another\n", encoding="utf-8")
        with pytest.raises(BadInput, match=r"spans, got inputs that have changed since the run .*; simulate again"):
            _ = result.spans
        assert len(result.requests) == 2

    def test_a_policy_that_draws_by_chance_has_no_second_replay(self, world: dict[str, Any]) -> None:
        class Odd(moesim.Policy):
            name = "odd"
            runs = 0

            def bind(self, view: moesim.View) -> None:
                Odd.runs += 1

            def victim(self, piece: moesim.Piece, speculative: bool, view: moesim.View) -> moesim.Piece | None:
                free = [p for p in view.residents() if view.evictable(p)]
                return free[0 if Odd.runs == 1 else -1] if free else None

        result = moesim.simulate(policy=Odd, **world)
        with pytest.raises(CheckFailed, match="decisions, got another result from a second replay"):
            _ = result.decisions


class TestPoliciesOfOnesOwn:
    def test_class_file_and_installed_policy_agree(self, world: dict[str, Any], tmp_path: Path) -> None:
        path = tmp_path / "own_lru.py"
        kind = imported(MINE, "Mine", path)
        by_class, by_file = moesim.simulate(policy=kind, **world), moesim.simulate(policy=path, **world)
        installed = moesim.simulate(policy="lru", set={"scope": "global"}, **world)
        assert timeless(by_class.to_dict()) == timeless(by_file.to_dict())
        assert by_class.policy_file is not None
        assert by_class.policy_file.name == "own_lru.py"
        assert by_class.caveats == installed.caveats
        assert (installed.tpot_s, installed.hit_rate) == (by_class.tpot_s, by_class.hit_rate)

    def test_a_class_without_a_text_is_labelled(self, world: dict[str, Any]) -> None:
        typed: dict[str, Any] = {"__name__": "__main__"}
        exec(MINE, typed)
        result = moesim.simulate(policy=typed["Mine"], **world)
        assert "policy given as a class whose text is in no file: run_id does not hold it" in result.caveats
        assert result.policy_file is None

    def test_a_file_that_changed_since_is_no_text_of_the_class(self, world: dict[str, Any], tmp_path: Path) -> None:
        kind = imported(MINE, "Mine", tmp_path / "edited.py")
        edited = MINE.replace("(self._order)", "(reversed(self._order))")
        assert edited != MINE
        (tmp_path / "edited.py").write_text(edited, encoding="utf-8")
        assert moesim.simulate(policy=kind, **world).policy_file is None

    def test_what_a_policy_needs_is_here(self) -> None:
        assert {kind.__name__ for kind in get_args(Decision)} <= set(moesim.__all__)
        for name in moesim.__all__:
            assert getattr(moesim, name) is not None
        assert sorted(moesim.__all__) == dir(moesim)

    def test_editors_see_what_is_imported(self) -> None:
        """What stands below `if TYPE_CHECKING` is what `__getattr__` finds."""
        tree = ast.parse(Path(moesim.__file__ or "").read_text(encoding="utf-8"))
        (block,) = [node for node in tree.body if isinstance(node, ast.If)]
        imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
        stated = {alias.name: node.module for node in imports for alias in node.names}
        assert set(stated) == set(moesim.__all__)
        for name, module in stated.items():
            assert getattr(sys.modules[str(module)], name) is getattr(moesim, name)


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "kind", "says"),
        [
            ({"request": 4}, BadInput, r"got 'request': no such option of a run; did you mean 'requests'\?"),
            ({"requests": "four"}, BadInput, r"requests, got 'four': not a whole number"),
            ({"requests": 0}, BadInput, "--requests, got 0: at least 1; raise it"),
            ({"policy": "lfo"}, BadInput, r"policy, got 'lfo': no such policy; did you mean 'lfu'\?"),
            ({"policy": "lro scope=layer"}, BadInput, r"got 'lro': no such policy"),
            ({"policy": object}, BadInput, r"policy, got <class 'object'>: a policy is a class derived from"),
            ({"policy": 7}, BadInput, r"policy, got 7: a policy is a class derived from"),
            ({"set": {"scop": "layer"}}, BadInput, r"parameter lru.scop: no such parameter; did you mean 'scope'\?"),
            ({"trace": "nowhere"}, BadInput, r"trace, got 'nowhere': no bundled trace and no file of that name"),
            ({"cache": "6 furlongs"}, BadInput, r"cache, got '6 furlongs': not a size"),
            ({"vram": "3GB"}, DoesNotFit, r"dense parts need .* of 3.00 GB"),
        ],
    )
    def test_one_line_and_no_exit(
        self, trace: Path, options: Any, kind: type[Exception], says: str, capsys: Any
    ) -> None:
        given: Any = {"policy": "lru", "hw": "rtx3090", "trace": trace} | options
        with pytest.raises(kind, match=says) as stop:
            moesim.simulate(**given)
        assert "\n" not in str(stop.value)
        assert capsys.readouterr() == ("", "")

    def test_fewer_requests_than_asked_for_are_a_warning(self, world: dict[str, Any]) -> None:
        with pytest.warns(UserWarning, match=r"--requests 9: split test of mix has 2 requests, not more"):
            assert moesim.simulate(policy="lru", requests=9, **world).n_requests == 2


def test_importing_it_imports_nothing_heavy() -> None:
    code = "import sys, moesim; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & (HEAVY | {"sim", "click"})


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_three_lines_are_enough(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    block = re.search(r"```python\n(import moesim\n.*?)```", text, re.DOTALL)
    assert block is not None
    lines = list(filter(None, block[1].splitlines()))
    assert len(lines) == 3
    done = subprocess.run([sys.executable, "-c", block[1]], capture_output=True, text=True, check=True)
    result = moesim.simulate(policy="lfu", hw="rtx3090", requests=4)
    assert done.stdout == f"{result.tpot_s.mean} {result.hit_rate}\n"
    assert isinstance(result, Result)
