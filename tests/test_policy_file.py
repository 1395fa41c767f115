"""Policies in files of one's own, and files that cannot be imported: each takes away its own policy and no other."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from cli_help import mixtral_shaped, moesim, simulated
from easy_numbers import run

from policies.lru import Lru
from sim.base.errors import BadInput, IllegalDecision
from sim.cli.policy_api import helpers, reference
from sim.conformance.suite import FAIL, PASS, SKIP, conform
from sim.options import RunSpec
from sim.policy import policy_file
from sim.policy.api import Policy
from sim.policy.decisions import Decision
from sim.policy.registry import find
from sim.policy.view import Prices, View
from sim.run import execute, prepare
from sim.workload.gate import Gate
from sim.workload.iterations import Iteration

ROOT = Path(__file__).resolve().parent.parent
MINE = '''"""A cache of mine."""

from collections import OrderedDict

from policies.common.cache import scope_param
from policies.lru import Lru
from sim.policy import param


class Mine(Lru):
    """LRU that spares some of the oldest."""

    name = "mine"
    title = "Mine"
    source = "tests/test_policy_file.py"
    scope: str = scope_param("global")
    rank: int = param(0, "how many older ones to spare", within=(0, 9))

    def bind(self, view):
        super().bind(view)
        self.order = None  # `victim` answers instead
        self.used = OrderedDict()

    def accessed(self, piece, hit, view):
        self.used[piece] = None
        self.used.move_to_end(piece)

    def evicted(self, piece, view):
        del self.used[piece]

    def victim(self, piece, speculative, view):
        free = [p for p in self.used if view.evictable(p)]
        return free[min(self.rank, len(free) - 1)] if free else None


class Other(Mine):
    """Another one."""

    name = "other"
'''.replace(
    "    exchange = None  # the long way, as `victim` is asked there\n",
    """\
    def exchange(self, wanted, room, view):
        return None  # the long way, where `victim` is asked
""",
)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "my policy.py"
    path.write_text(MINE)
    return path


def result(capsys: pytest.CaptureFixture[Any], *words: object) -> dict[str, Any]:
    told = simulated(capsys, *words, "--json")
    assert told.code == 0, told.err
    found: dict[str, Any] = json.loads(told.out)
    return found


def test_a_file_is_a_policy_like_any_other(capsys, tmp_path, mine):
    trace = mixtral_shaped(tmp_path)
    world = ("--hw", "rtx3090", "--trace", trace, "--requests", 1, "--cache", "60experts")
    own = result(capsys, "--policy", f"{mine}:Mine", *world)
    installed = result(capsys, "--policy", "lru", "--set", "scope=global", *world)
    assert own["policy"] == "mine"
    assert own["policy_file"]["name"] == "my policy.py"
    assert installed["policy_file"] is None
    assert own["name"].startswith("mine of my policy.py on rtx3090")
    assert (own["simulated_s"], own["hit_rate"]) == (installed["simulated_s"], installed["hit_rate"])
    other = result(capsys, "--policy", f"{mine}:Mine", *world, "--set", "rank=5")
    assert other["params"]["rank"] == 5
    assert other["hit_rate"] != own["hit_rate"]
    assert "how many older ones to spare" in moesim(capsys, "policies", f"{mine}:Mine").out
    shown = simulated(capsys, "--policy", f"{mine}:Mine", *world).out
    assert f"mine of my policy.py, sha256 {own['policy_file']['sha256'][:12]}" in shown
    assert "mine keeps every rule that applies" in moesim(capsys, "conformance", f"{mine}:Mine").out


def test_equal_ids_mean_equal_code(capsys, tmp_path, mine):
    trace = mixtral_shaped(tmp_path)
    world = ("--hw", "rtx3090", "--trace", trace, "--requests", 1, "--cache", "60experts")
    first = result(capsys, "--policy", f"{mine}:Mine", *world)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copy = shutil.copy(mine, elsewhere / "renamed.py")
    assert result(capsys, "--policy", f"{copy}:Mine", *world)["run_id"] == first["run_id"]
    mine.write_text(MINE.replace("len(free) - 1)]", "len(free) - 1)]  # other text"))
    assert result(capsys, "--policy", f"{mine}:Mine", *world)["run_id"] != first["run_id"]


def test_a_saved_configuration_finds_it_from_anywhere(capsys, tmp_path, monkeypatch, mine):
    trace = mixtral_shaped(tmp_path)
    monkeypatch.chdir(tmp_path)
    simulated(
        capsys,
        "--policy",
        "./my policy.py:Mine",
        "--hw",
        "rtx3090",
        "--trace",
        trace,
        "--requests",
        1,
        "--cache",
        "60experts",
        "--set",
        "rank=2",
        "--out",
        "run",
    )
    monkeypatch.chdir("/")
    config = tmp_path / "run" / "config.yaml"
    again = simulated(capsys, "--config", config, "--json")
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    found = json.loads(again.out)
    assert (found["run_id"], found["simulated_s"]) == (saved["run_id"], saved["simulated_s"])
    assert "has changed" not in again.err
    mine.write_text(MINE + "\n# changed\n")
    assert "policy mine has changed since this was saved" in simulated(capsys, "--config", config, "--json").err


def test_compare_takes_files_in_processes_of_its_own(capsys, tmp_path, mine):
    trace = mixtral_shaped(tmp_path)
    told = moesim(
        capsys,
        "compare",
        "--policy",
        f"{mine}:Mine rank=2",
        "--policy",
        "lru",
        "--hw",
        "rtx3090",
        "--trace",
        trace,
        "--requests",
        1,
        "--cache",
        "60experts",
        "--workers",
        2,
        "--json",
    )
    assert told.code == 0, told.err
    runs = {run["policy"]: run for run in json.loads(told.out)["runs"]}
    assert set(runs) == {"mine", "lru"}
    assert runs["mine"]["params"]["rank"] == 2
    assert runs["mine"]["policy_file"]["sha256"] == policy_file.file_of(find(f"{mine}:Mine")).sha256


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("no_such.py", None, r"policy, got '.*no_such\.py': No such file or directory; check the path \(--policy "),
        ("wrong.py", "\ndef f(:\n", r"wrong\.py:2: SyntaxError: invalid syntax; correct the file"),
        ("wrong.py", "import json\n\njson.loads('x')\n", r": JSONDecodeError: Expecting value.*; correct the file"),
        ("wrong.py", "\n\nraise SystemExit(3)\n", r"wrong\.py:3: SystemExit: 3; correct the file"),
        ("wrong.py", "x = 1\n", r"a policy is a class derived from sim\.policy\.Policy with a `name`"),
        ("wrong.py", MINE, r"it holds 2 policies; name one, .*wrong\.py:Mine"),
        ("wrong.py:Mina", MINE, r"no policy of that class in the file; did you mean 'Mine'"),
        (
            "wrong.py:Mine",
            MINE.replace("def accessed", "def acessed"),
            r"a method 'acessed': .*did you mean 'accessed'",
        ),
    ],
)
@pytest.mark.parametrize("verb", ["simulate", "policies", "conformance", "compare"])
def test_what_is_wrong_with_a_file_is_one_line(capsys, tmp_path, verb, name, text, why):
    if text is not None:
        (tmp_path / name.split(":")[0]).write_text(text)
    words = {"simulate": ("run", "--hw", "rtx3090", "--policy"), "compare": ("compare", "--hw", "rtx3090", "--policy")}
    told = moesim(capsys, *words.get(verb, (verb,)), tmp_path / name)
    assert told.code == 2
    assert re.search(why, told.err)
    assert told.err.count("\n") == 1


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the policies, one of them cut in the middle of a line."""
    folder = tmp_path_factory.mktemp("broken")
    shutil.copytree(ROOT / "policies", folder / "policies", ignore=shutil.ignore_patterns("__pycache__", "data"))
    (folder / "policies" / "data").mkdir()
    path = folder / "policies" / "fifo.py"
    path.write_text(path.read_text() + "\ndef half(:\n")
    return folder


def beside(broken: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{broken}{os.pathsep}{ROOT}"}
    code = f"import sys; sys.path.insert(0, {str(broken)!r}); from sim.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words], env=env, cwd=broken, capture_output=True, text=True, check=False
    )


def test_a_broken_file_takes_its_own_policy_away(broken):
    listed = beside(broken, "policies")
    assert listed.returncode == 0
    line = len((broken / "policies" / "fifo.py").read_text().splitlines())
    assert re.search(rf"left out: policy 'fifo', got .*fifo\.py:{line}: SyntaxError: invalid syntax", listed.stderr)
    assert "lru" in listed.stdout
    assert "fifo" not in listed.stdout
    asked = beside(broken, "run", "--policy", "FIFO", "--hw", "rtx3090")
    assert asked.returncode == 2
    assert re.fullmatch(rf"error: policy 'fifo', got .*fifo\.py:{line}: SyntaxError.*\n", asked.stderr)
    other = beside(broken, "run", "--policy", "lru", "--hw", "rtx3090", "--requests", "1")
    assert (other.returncode, other.stderr) == (0, "")


def test_conformance_says_where_and_when(tmp_path):
    """Scenario, hook, file and line: `IndexError in the policy` told none of them."""
    path = tmp_path / "faulty.py"
    path.write_text(
        MINE.split("\n    def victim")[0]
        + """

    def victim(self, piece, speculative, view):
        return self.pick([p for p in view.residents() if view.evictable(p)])

    def pick(self, free):
        return free[99]
"""
    )
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "free[99]" in text)
    failed = [verdict for verdict in conform(find(str(path))) if verdict.verdict == FAIL]
    assert failed
    for verdict in failed:
        told = rf"IndexError: .* \(victim, faulty\.py:{line}; room for \d+ experts of 24, .*batch [12].*\)"
        assert re.fullmatch(told, verdict.reason), verdict.reason


class PerLayer(Policy):
    """The oldest of the layer's own; without a word about budgets."""

    name = "per_layer"

    def bind(self, view):
        self._order = {}

    def accessed(self, piece, hit, view):
        self._order.setdefault(piece)

    def evicted(self, piece, view):
        del self._order[piece]

    def victim(self, piece, speculative, view):
        return next((p for p in self._order if p.layer == piece.layer and view.evictable(p)), None)


class Divided(PerLayer):
    """The same, which says so."""

    def layer_budgets(self, view):
        each = view.capacity // view.n_layers * view.expert_bytes
        return [[each] * view.n_layers]


ROWS = [[[0], [1], [2]], [[3], [3], [3]], [[0], [1], [0]]]


def test_a_cache_per_layer_is_told_what_it_lacks(tmp_path):
    with pytest.raises(IllegalDecision, match="a cache per layer says so by `layer_budgets`"):
        run(PerLayer(), tmp_path, [[[0, 1], [1, 2], [2, 3]]], room=4)
    seen = run(Divided(), tmp_path, ROWS, room=3, n_experts=4)
    assert list(seen.outcome.report.counts.peak_bytes) == [3 * 160]


def test_the_reference_is_whole_and_current():
    """Everything public has a docstring; the page holds what the command prints, in less than 25 kB."""
    page = (ROOT / "docs" / "policy_api.md").read_text(encoding="utf-8")
    assert f"```text\n{reference().rstrip()}\n```" in page
    assert f"```text\n{helpers().rstrip()}\n```" in (ROOT / "docs" / "policy_helpers.md").read_text(encoding="utf-8")
    assert len(page.encode()) < 25_000
    for kind in (Policy, View, Prices, Gate, Iteration):
        for name, value in vars(kind).items():
            if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{kind.__name__}.{name} has no docstring"
                assert re.search(rf"^{name}\b", page, re.MULTILINE), f"{kind.__name__}.{name} is not in the page"
    for decision in get_args(Decision):
        assert re.search(rf"^{decision.__name__}\({', '.join(decision._fields)[:9]}", page, re.MULTILINE)


def test_an_inherited_order_does_not_silence_a_victim(tmp_path):
    class Stubborn(Lru):
        name = "stubborn"

        def victim(self, piece, speculative, view):
            return None

    with pytest.raises(IllegalDecision, match=r"`bind` it inherits names a native order.*order = None"):
        run(Stubborn(), tmp_path, ROWS, room=3, n_experts=4)


def test_a_hook_that_does_not_return_is_named(tmp_path, monkeypatch, capfd):
    import _thread

    from sim.options import RunSpec
    from sim.policy import watchdog
    from sim.run import execute, prepare

    path = tmp_path / "loop.py"
    path.write_text(
        "from sim.policy import Policy\n\n\nclass Loop(Policy):\n    name = 'loop'\n\n"
        "    def layer_enter(self, layer, view):\n        while layer == 3:\n            pass\n        return ()\n"
    )
    monkeypatch.setattr(watchdog, "WARN_AFTER_S", 0.05)
    line = watchdog._line

    def interrupting(*args):
        _thread.interrupt_main()
        return line(*args)

    monkeypatch.setattr(watchdog, "_line", interrupting)
    setup = prepare(RunSpec(policy=str(path), hw="rtx3090", requests=1))
    with pytest.raises(KeyboardInterrupt):
        execute(setup)
    setup.close()
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("warning: loop.layer_enter at layer 3 has not returned for 0.")
    assert "and has made no decision: it is at " in said and "loop.py:" in said


def decisions(**fields):
    told = []
    setup = prepare(RunSpec(hw="a6000", requests=2, **fields))
    with setup.trace:
        result = execute(setup, log=lambda *one: told.append(one)).result
    return told, result


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_rule_in_cpp_decides_as_the_one_in_python(tmp_path, capsys):
    """docs/native_rules.md: built, called, in order, and known by its own digest."""
    for name in ("lfu_rule.cpp", "native_rule.py"):
        shutil.copy(ROOT / "docs" / "examples" / name, tmp_path)
    policy, library = str(tmp_path / "native_rule.py"), tmp_path / "lfu_rule.so"
    with pytest.raises(BadInput, match=r"library, got .*lfu_rule\.so: .*build it as docs/native_rules\.md shows"):
        decisions(policy=policy)
    command = ["g++", "-std=c++17", "-Wall", "-Werror", "-O2", "-shared", "-fPIC", "-o", library, "lfu_rule.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert " ".join(map(str, [*command[:2], *command[4:8]])) in (ROOT / "docs" / "native_rules.md").read_text("utf-8")
    native, beside = decisions(policy=policy)
    python, of_python = decisions(policy="lfu", set={"scope": "global"})
    assert native == python
    assert len(native) > 10_000
    assert beside.hit_rate == of_python.hit_rate
    named = decisions(policy=policy, set={"library": str(library)})[1]
    assert named.hit_rate == of_python.hit_rate
    with library.open("ab") as file:
        file.write(b"\0")  # another library, as far as anybody can tell
    assert decisions(policy=policy, set={"library": str(library)})[1].run_id != named.run_id
    assert [one for one in conform(find(policy)) if one.verdict not in (PASS, SKIP)] == []
