"""A machine before a machine hands on every verb there is; who stands in between says of each what it does about it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from sim.base.flat import floats
from sim.engine.recorder import Recorder
from sim.machine.forwarding import ForwardingMachine
from sim.machine.protocol import Machine
from sim.machine.turn import Turn
from sim.policy.pieces import Pieces
from sim.policy.tickets import Ticket

PROTOCOL = Path(__file__).resolve().parent.parent / "sim" / "machine" / "protocol.py"
STATED = [node for node in ast.walk(ast.parse(PROTOCOL.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)]
VERBS = {node.name: node for node in STATED if not node.name.startswith("_")}  # as written: compiled, less is known
UNSAID = {"now", "gate", "shared", "ends_after_s", "route", "parts_s", "path_s", "drain"}
"""What says nothing of decisions, or only comes with what does: a recorder has no part in it."""


def handed_over() -> dict[str, Any]:
    """Something to hand over for every parameter of a verb."""
    whole = dict.fromkeys(("layer", "expert", "n_bytes", "priority", "n_pages", "page_bytes"), 3)
    several = {"after": (Ticket(1.0, 0),), "parts": (), "ids": [1], "weights": [2.0], "basis": "measured"}
    one = {"ticket": Ticket(1.0, 0), "turn": Turn(4, 8), "piece": Pieces(1, 4, "bf16", 1, lambda _: 8).whole[0][2]}
    seconds = dict.fromkeys(("arrived_s", "ready_s", "duration_s", "time_s"), 0.5)
    return {**whole, **several, **one, **seconds, "lane": "side", "down": True, "blocking": True, "iteration": None}


def answer_of(verb: str) -> Any:
    answer = ast.unparse(VERBS[verb].returns or ast.Constant(None))
    made: dict[str, Any] = {
        "None": None,
        "float": 2.5,
        "bool": True,
        "list[Piece]": [],
        "list[float]": [1.0],
        "MutableSequence[float]": floats(1, 1.0),
    }
    return made[answer] if answer in made else Ticket(4.0, 1)


class Noted(Machine):
    """Answers every verb, and notes it with what was handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, tuple[Any, ...]]] = []
        self.ends_s, self.cause = 7.0, 2


def answering(verb: str) -> Any:
    def answer(self: Noted, *given: Any) -> Any:
        self.noted.append((verb, given))
        return answer_of(verb)

    return answer


for name in VERBS:
    setattr(Noted, name, answering(name))


@pytest.mark.parametrize("verb", VERBS)
def test_it_is_handed_on_with_all_that_was_handed_over(verb: str) -> None:
    behind, known = Noted(), handed_over()
    parameters = [argument.arg for argument in VERBS[verb].args.args if argument.arg != "self"]
    given = tuple([3, 1] if (verb, name) == ("dispatch", "n_tokens") else known.get(name, 3) for name in parameters)
    before = ForwardingMachine(behind)
    answer, meant = getattr(before, verb)(*given), answer_of(verb)
    assert behind.noted == [(verb, given)]
    if verb == "path_s":  # flat
        answer, meant = list(answer), list(meant)
    assert (answer.end_s, answer.cause) == (4.0, 1) if isinstance(meant, Ticket) else answer == meant
    if verb in ("expert", "copy", "demand"):
        assert (before.ends_s, before.cause) == (7.0, 2)  # where they answer None, that is the answer


def test_a_recorder_writes_down_or_is_spoilt_by_all_that_may_decide() -> None:
    """A new verb that is only handed on would be missing on the tape: it has to be one or the other, or named above."""
    assert {verb for verb in VERBS if verb not in vars(Recorder)} == UNSAID
