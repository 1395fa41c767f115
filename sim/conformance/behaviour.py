"""Rules about decisions: the same again, blind to the future and to the clock, honest about what they need."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from sim.base.errors import BadInput, DoesNotFit
from sim.conformance import seeded
from sim.conformance.world import ALL, HALF, QUARTER, Seen, Skip, World, require

if TYPE_CHECKING:
    from sim.policy.api import Param, ParamValue


def check_is_deterministic(world: World) -> None:
    """Two runs of the same input make the same decisions and the same result, to the last bit."""
    for experts in (world.room(QUARTER), world.room(HALF)):
        once, again = world.run(experts), world.run(experts, again=1)
        require(once.log == again.log, f"decision {_first(once.log, again.log)} differs")
        require(json.dumps(once.facts()) == json.dumps(again.facts()), "same decisions, other figures")


def check_result_is_json(world: World) -> None:
    """Settings and figures of its own are plain JSON without NaN or infinity."""
    seen = world.run(world.room(HALF))
    try:
        json.dumps(seen.facts(), allow_nan=False)
    except (TypeError, ValueError) as error:
        require(False, f"the result is not JSON: {error}")


def check_knows_no_future(world: World) -> None:
    """When the trace changes from some token on, or from some layer of it, every decision made before stays as it was,
    and so does what was learnt from the store split and put in place."""
    if "oracle" in world.kind.traits:
        raise Skip("oracle: it may read the future")
    n = seeded.N_BEFORE_CHANGE
    for experts in (world.room(QUARTER), world.room(HALF)):
        as_was = world.run(experts)
        if as_was.engine.arrays.n_at_once:
            mine, other = as_was.log, world.run(experts, hides_later=True).log
            require(mine == other, f"decision {_first(mine, other)} rests on scores of layers still to come")
        for layer in (0, seeded.CHANGED_LAYER):
            changed = world.run(experts, trace=world.trace(changed=True, from_layer=layer))
            require(as_was.initial == changed.initial, "what is there first differs: it was learnt from the test split")
            ahead = as_was.policy.known_ahead if layer else 0
            require(not ahead or "fine-tuned" in as_was.policy.labels, "known_ahead without the label 'fine-tuned'")
            mine, other = _before(as_was, n, layer - ahead), _before(changed, n, layer - ahead)
            differs = any(as_was.needs[n][at] != changed.needs[n][at] for at in range(layer, seeded.N_LAYERS))
            same = all(as_was.needs[n][at] == changed.needs[n][at] for at in range(layer))
            require(differs and same, "the change has no effect, or too much (a fault of this check)")
            where = f"the first {n} iterations" + (f" and {layer} layers" if layer else "")
            require(mine == other, f"decision {_first(mine, other)} of {where} differs")


def _before(seen: Seen, iteration: int, layer: int) -> list[tuple[str, int, int]]:
    """The decisions made before the gate of this layer of this iteration could speak."""
    if layer <= 0:
        return seen.log[: seen.steps[iteration - 1]]
    events = takewhile(lambda e: e.iteration < iteration or e.at_layer < layer, seen.events)
    return [(event.kind, event.layer, event.expert) for event in events]


def check_knows_no_clock(world: World) -> None:
    """Without the trait `timing`, a machine much faster or slower than the prices it sees changes no decision."""
    if "timing" in world.kind.traits:
        raise Skip("timing: it may react to completions")
    for experts in (world.room(QUARTER), world.room(HALF)):
        log = world.run(experts).log
        for pace in (0.02, 50.0):
            other = world.run(experts, pace=pace).log
            require(log == other, f"decision {_first(log, other)} differs on a machine {pace:g} times as fast")


def check_needs_are_honoured(world: World) -> None:
    """A trace without a level it needs is refused, naming the level; a trace with its needs and no more is enough."""
    kind = world.kind
    world.run(world.room(HALF))  # the world's trace has its needs and nothing else
    for level in sorted(kind.needs - {"experts"}):
        try:
            world.setup(HALF, trace=world.trace(kind.needs - {level}))
        except BadInput as error:
            require(level in str(error), f"the refusal does not name {level}: {error}")
        else:
            require(False, f"a trace without {level} was accepted")


def check_rebuilds_from_its_settings(world: World) -> None:
    """The settings a result saves, through JSON and back, make the same policy and the same decisions."""
    seen = world.run(world.room(HALF))
    saved = json.loads(json.dumps(seen.policy.settings))
    require(world.kind(**saved).settings == seen.policy.settings, f"settings {saved} come back as others")
    again = world.run(world.room(HALF), settings=saved, again=2)
    require(again.log == seen.log, f"decision {_first(again.log, seen.log)} differs after a round trip")


def check_every_parameter_can_be_set(world: World) -> None:
    """Every parameter takes its default and other legal values, and runs with them; values out of range are refused."""
    kind = world.kind
    if not kind.params:
        raise Skip("it has no parameters")
    for param in kind.params:
        require(param.check(param.default, kind.name) == param.default, f"{param.name} refuses its default")
        for value in others(param):
            settings = {param.name: value}
            try:
                seen = world.run(world.room(HALF, settings=settings), settings=settings)
            except DoesNotFit:  # it asks for more room
                seen = world.run(ALL, settings=settings)
            require(seen.policy.settings[param.name] == value, f"{param.name}={value!r} did not arrive")
        for wrong in illegal(param):
            try:
                kind(**{param.name: wrong})
            except BadInput as error:
                require(param.name in str(error), f"the refusal does not name {param.name}: {error}")
            else:
                require(False, f"{param.name}={wrong!r} was accepted")


def others(param: Param) -> Sequence[ParamValue]:
    """Legal values beside the default."""
    default = param.default
    if param.choices:
        return [choice for choice in param.choices if choice != default]
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, str):
        return []  # free text has no value that is legal everywhere
    if default is None:
        return [param.low if math.isfinite(param.low) else 1]
    if isinstance(default, int):
        return [value for value in (default + 1, default - 1) if param.low <= value <= param.high]
    near = [default * 1.5 if default else 0.5, default / 2]
    return [value for value in near if param.low <= value <= param.high and value != default][:1]


def illegal(param: Param) -> list[object]:
    """Values outside what the parameter declares."""
    if param.choices or isinstance(param.default, bool):
        return ["no such choice"]
    if isinstance(param.default, str):
        return [1]
    found: list[object] = ["a word", math.nan]
    if math.isfinite(param.low):
        found.append(param.low - 1)
    if math.isfinite(param.high):
        found.append(param.high + 1)
    return found


def _first(one: list[tuple[str, int, int]], two: list[tuple[str, int, int]]) -> str:
    for at, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return f"{at} ({a} / {b})"
    return f"{min(len(one), len(two))} (one log ends)"


CHECKS = (
    check_is_deterministic,
    check_result_is_json,
    check_knows_no_future,
    check_knows_no_clock,
    check_needs_are_honoured,
    check_rebuilds_from_its_settings,
    check_every_parameter_can_be_set,
)
