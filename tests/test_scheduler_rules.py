"""Every scheduler keeps every rule, every rule notices one that breaks it; schedulers in files of one's own."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_help import mixtral_shaped, moesim, simulated

from sim.conformance import scheduling
from sim.conformance.scheduling import CHECKS, Loads
from sim.conformance.suite import FAIL, PASS, conform_scheduler, judge, name_of
from sim.workload.scheduler import Scheduler
from sim.workload.schedulers import find, schedulers

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = [ROOT / "docs" / "examples" / f"{name}.py" for name in ("shortest_prompt", "two_halves")]
PAGE = (ROOT / "docs" / "schedulers.md").read_text(encoding="utf-8")
EVERY = [*schedulers(), *map(str, EXAMPLES)]


@pytest.mark.parametrize("name", EVERY, ids=lambda name: Path(name).stem)
def test_a_scheduler_keeps_every_rule(name: str) -> None:
    verdicts = list(conform_scheduler(find(name)))
    assert [verdict.reason for verdict in verdicts if verdict.verdict != PASS] == []
    assert [verdict.check for verdict in verdicts] == [name_of(check) for check in CHECKS]


def test_no_rule_is_lost() -> None:
    defined = {name for name in vars(scheduling) if name.startswith("check_")}
    assert {check.__name__ for check in CHECKS} == defined
    assert len(CHECKS) == 7
    assert all((check.__doc__ or "").endswith(".") for check in CHECKS)
    loads = [scheduling.drawn(seed) for seed in range(scheduling.N_LOADS)]
    assert {load.batch for load in loads} == {1, 2, 3, 4}
    assert {bool(load.clients) for load in loads} == {load.open_loop for load in loads} == {True, False}
    assert any(len({r.arrival_s for r in load.requests}) < len(load.requests) for load in loads)  # some come together


# -- what breaks a rule -----------------------------------------------------------------------------------------------


class First(Scheduler):
    """First come, first served."""

    name = "first"

    def pick(self, now_s: float) -> Any:
        return next(self.arrived_by(now_s), None)


class Nameless(First):
    name = "no word"


class Needy(First):
    name = "needy"
    needs = ("futures",)


class Slow(First):
    name = "slow"
    sharing_out_s = -1.0


class Mute(Scheduler):
    """It has no pick."""

    name = "mute"


class Idle(First):
    """Waits until several are there, also when nobody else will come."""

    name = "idle"

    def pick(self, now_s: float) -> Any:
        there = list(self.arrived_by(now_s))
        return there[0] if len(there) > 1 else None


class Hasty(First):
    """Picks who has not come."""

    name = "hasty"

    def pick(self, now_s: float) -> Any:
        return self.waiting[-1] if self.waiting else None


class Stale(First):
    """Picks somebody once more."""

    name = "stale"

    def started(self, request: Any) -> None:
        self.last = request

    def pick(self, now_s: float) -> Any:
        return getattr(self, "last", None) or super().pick(now_s)


class Shared(First):
    """Counts over all instances."""

    name = "shared"
    n = 0

    def started(self, request: Any) -> None:
        Shared.n += 1

    def pick(self, now_s: float) -> Any:
        there = list(self.arrived_by(now_s))
        return there[-(Shared.n % 2)] if there else None


class Clairvoyant(First):
    """Shortest answer first."""

    name = "clairvoyant"

    def pick(self, now_s: float) -> Any:
        return min(self.arrived_by(now_s), key=lambda request: request.outputs, default=None)


class Greedy(First):
    """Takes by itself whom it picks."""

    name = "greedy"

    def pick(self, now_s: float) -> Any:
        found = super().pick(now_s)
        if found is not None:
            self.take(found)
        return found


class Fickle(First):
    """Another one each time it is asked."""

    name = "fickle"
    asked = 0

    def pick(self, now_s: float) -> Any:
        self.asked += 1
        there = list(self.arrived_by(now_s))
        return there[self.asked % len(there)] if there else None


class Liar(First):
    """Last come, first served."""

    name = "liar"
    in_order = True

    def pick(self, now_s: float) -> Any:
        return max(self.arrived_by(now_s), key=lambda request: request.index, default=None)


class Lossy(First):
    """Leaves out a token."""

    name = "lossy"

    def passes(self, ranges: Any) -> Any:
        return [ranges[1:]]


class Turning(First):
    """The other way round each time."""

    name = "turning"
    turn = 0

    def passes(self, ranges: Any) -> Any:
        self.turn += 1
        return [ranges[self.turn % 2 :: 2], ranges[1 - self.turn % 2 :: 2]]


BREAKS = {
    "is_declared": (Nameless, Needy, Slow, Mute),
    "serves_everybody_once": (Idle, Hasty, Stale, Greedy, Lossy),
    "is_deterministic": (Shared,),
    "does_not_know_how_long_answers_are": (Clairvoyant,),
    "pick_takes_nobody_away": (Greedy, Fickle),
    "in_order_is_true": (Liar,),
    "passes_share_a_step_out": (Lossy, Turning),
}


@pytest.mark.parametrize(
    ("check", "kind"),
    [(check, kind) for check in CHECKS for kind in BREAKS[name_of(check)]],
    ids=lambda one: one.__name__,
)
def test_a_rule_notices_who_breaks_it(check: Any, kind: type[Scheduler]) -> None:
    verdict = judge(check, Loads(kind))
    assert verdict.verdict == FAIL
    assert verdict.reason
    assert judge(check, Loads(First)).verdict == PASS


def test_a_deadlock_is_named() -> None:
    reason = judge(scheduling.check_serves_everybody_once, Loads(Idle)).reason
    assert re.search(r"pick of scheduler idle, got None: nobody runs, 1 wait, and nobody else will come", reason)
    wrong = judge(scheduling.check_serves_everybody_once, Loads(Hasty)).reason
    assert re.search(r"nobody who waits and is there.*\(test_scheduler_rules|nobody who waits and is there", wrong)


# -- in a file of one's own -------------------------------------------------------------------------------------------


def run(capsys: Any, trace: Path, scheduler: object, *more: object) -> dict[str, Any]:
    world = (
        "--policy",
        "lru",
        "--hw",
        "rtx3090",
        "--trace",
        trace,
        "--batch",
        2,
        "--scheduler",
        scheduler,
        "--json",
        *more,
    )
    told = simulated(capsys, *world)
    assert told.code == 0, told.err
    found: dict[str, Any] = json.loads(told.out)
    return found


def test_a_file_is_a_scheduler_like_any_other(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = mixtral_shaped(tmp_path)
    own = shutil.copy(EXAMPLES[0], tmp_path / "mine.py")
    first = run(capsys, trace, own, "--out", tmp_path / "run")
    assert first["scheduling"]["name"] == "shortest_prompt"
    assert first["scheduling"]["file"]["name"] == "mine.py"
    assert "scheduler shortest_prompt of mine.py" in first["name"]
    assert "scheduling" not in run(capsys, trace, "fcfs")
    # Its text is part of the run's id, its place is not.
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy(own, tmp_path / "elsewhere" / "renamed.py")
    assert run(capsys, trace, f"{moved}:ShortestPrompt")["run_id"] == first["run_id"]
    monkeypatch.chdir("/")
    again = json.loads(simulated(capsys, "--config", tmp_path / "run" / "config.yaml", "--json").out)
    assert again["run_id"] == first["run_id"]
    Path(own).write_text(Path(own).read_text().replace("request.prompt_len,", "-request.prompt_len,"))
    assert run(capsys, trace, own)["run_id"] != first["run_id"]
    assert "keeps every rule that applies" in moesim(capsys, "conformance", "--scheduler", moved).out
    assert "Shortest prompt first" in moesim(capsys, "schedulers", moved).out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, r"scheduler, got '.*wrong\.py': No such file or directory; check the path \(--scheduler takes"),
        ("def f(:\n", r"scheduler, got .*wrong\.py:1: SyntaxError: invalid syntax; correct the file"),
        ("x = 1\n", r"a scheduler is a class derived from sim\.workload\.scheduler\.Scheduler with a `name`"),
        ("from sim.workload.schedulers.fcfs import FirstCome\n", r"a scheduler is a class derived from"),
        (
            EXAMPLES[1].read_text().replace("in_order = True", "needs = ('path',)"),
            r"no such need; did you mean 'paths'\?",
        ),
        (
            EXAMPLES[1].read_text().replace("in_order = True", "needs = 'paths'"),
            r"with needs 'paths': names in a tuple; of",
        ),
        (EXAMPLES[1].read_text().replace("def pick(", "def picks("), r"without pick: it says who goes next; see"),
        (
            EXAMPLES[1].read_text().replace("in_order = True", "sharing_out_s = float('nan')"),
            r"with sharing_out_s nan: seconds from 0 on; correct the file",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(capsys: Any, tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "wrong.py"
    if text is not None:
        path.write_text(text)
    for words in (
        ("run", "--policy", "lru", "--hw", "rtx3090", "--scheduler"),
        ("conformance", "--scheduler"),
        ("schedulers",),
    ):
        told = moesim(capsys, *words, path)
        assert (told.code, told.err.count("\n")) == (2, 1), told.err
        assert re.search(why, told.err), told.err
