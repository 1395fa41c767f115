"""A sweep as blocks of axes: each block is the product of its axes, and the sweep is all blocks one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from sim.base.errors import BadInput
from sim.base.files import to_struct
from sim.base.json import to_json
from sim.policy.policy_file import split
from sim.profiles.overrides import GROUPS
from sim.setup.naming import show
from sim.setup.spec import CAPS, RunSpec
from sim.studies.sweep.values import AXES, Scalar, of_text, option_of
from sim.workload.slo import parse_slo

MOST_POINTS = 10_000
"""Without `--max-points`: a slip in a range should cost a line, not a night."""


class Point(NamedTuple):
    """One run of a sweep: its policy as it was called, parameters included, and whether the user named it."""

    label: str
    spec: RunSpec
    named: bool


@dataclass
class PolicyAxis:
    """A policy and the values of its parameters."""

    name: str
    params: dict[str, list[Scalar]] = field(default_factory=dict)
    named: bool = True  # not one of those that `all` stands for

    def __len__(self) -> int:
        return math.prod(len(values) for values in self.params.values())

    def each(self) -> Iterator[tuple[str, dict[str, Scalar]]]:
        """(label, parameters) of every combination."""
        for chosen in product(*self.params.values()):
            own = dict(zip(self.params, chosen, strict=True))
            yield " ".join([self.name, *(f"{key}={show(key, value)}" for key, value in own.items())]), own


@dataclass
class Block:
    """Axes whose product is run: fields of a run by name, shared keys of `set`, and policies; `slo` holds for all."""

    policies: list[PolicyAxis] = field(default_factory=list)
    axes: dict[str, list[Scalar]] = field(default_factory=dict)
    set: dict[str, list[Scalar]] = field(default_factory=dict)
    slo: dict[str, dict[str, float]] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many points it has, without making one."""
        values = [*self.axes.values(), *self.set.values()]
        return sum(len(policy) for policy in self.policies) * math.prod(len(found) for found in values)

    def over(self, given: Block) -> Block:
        """The same with what was given on the command line in place of what a file says; a cap replaces any cap."""
        axes = dict(self.axes)
        if any(name in given.axes for name in CAPS):
            axes = {name: values for name, values in axes.items() if name not in CAPS}
        policies, slo = given.policies or self.policies, given.slo or self.slo
        return Block(policies, {**axes, **given.axes}, {**self.set, **given.set}, slo)

    def check(self, what: str) -> None:
        """Raises BadInput where no run can come of it."""
        if not self.policies:
            raise BadInput(f"{what}: no policy; name at least one, e.g. --policy lru --policy 'lfu scope=global,layer'")
        if "hw" not in self.axes:
            raise BadInput(
                f"{what}: no hardware; name at least one, e.g. --hw rtx3090,rtx4090 (`moesim hw` lists them)"
            )
        caps = [name for name in CAPS if name in self.axes]
        if len(caps) > 1:
            said = " and ".join(option_of(name) for name in caps)
            raise BadInput(
                f"{what}, got {said}: one kind of budget in a product; keep one, or put the other into a block of its "
                "own under `list:` of a --grid file"
            )

    def points(self) -> Iterator[Point]:
        """Every point, policies varying fastest: those that compete stand next to one another."""
        names = sorted(self.axes, key=AXES.index)
        keys = sorted(self.set)
        for chosen in product(*(self.axes[name] for name in names), *(self.set[key] for key in keys)):
            fields: dict[str, Any] = dict(zip(names, chosen[: len(names)], strict=True))
            fields = {name: value for name, value in fields.items() if value is not None}
            shared = dict(zip(keys, chosen[len(names) :], strict=True))
            for policy in self.policies:
                for label, own in policy.each():
                    spec = {**fields, "slo": self.slo, "policy": policy.name, "set": {**shared, **own}}
                    yield Point(label, to_struct(spec, RunSpec, "sweep"), policy.named)


def policy_of(item: str) -> list[PolicyAxis]:
    """`lcp rho=0.5,0.9` as an axis; `all` as one for every policy that is known. Raises BadInput."""
    if not item.split():
        raise BadInput("--policy, got an empty name: name a policy, or `all`; `moesim policies` lists them")
    name, *words = split(item)
    if name.lower() == "all" and not words:
        from sim.policy.registry import policies, unusable

        return [PolicyAxis(name, named=False) for name in (*policies(), *unusable())]
    return [PolicyAxis(name, settings(words, f"--policy {name}"))]


def settings(words: list[str] | tuple[str, ...], what: str = "--set") -> dict[str, list[Scalar]]:
    """`KEY=V1,V2` and `KEY=FROM:TO:STEP` as axes. Raises BadInput for what is no such pair, or a key given twice."""
    found: dict[str, list[Scalar]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")) or any(letter.isspace() for letter in key):
            raise BadInput(f"{what}, got {word!r}: not KEY=VALUES; write e.g. distance=1,2,3 or distance=1:3")
        if key in found:
            raise BadInput(f"{what} {key}, got it twice: list its values, {key}=A,B")
        found[key] = of_text(text, "", f"{what} {key}")
    return found


def given(
    policies: tuple[str, ...], axes: dict[str, tuple[str, ...]], sets: tuple[str, ...], slo: str | None = None
) -> Block:
    """The block of the command line's options, each of which may be repeated. Raises BadInput."""
    found = {
        name: [value for text in texts for value in of_text(text, name, option_of(name))]
        for name, texts in axes.items()
        if texts
    }
    promised = {} if slo is None else parse_slo(slo)
    block = Block([axis for item in policies for axis in policy_of(item)], found, settings(sets), promised)
    own = [key for key in block.set if key.partition(".")[0] not in GROUPS or "." not in key]
    for key in own:
        if len(block.policies) != 1:
            raise BadInput(
                f"--set, got {key!r}: which policy's? write it behind the name, --policy 'NAME {key}=...'; --set takes "
                "hw.*, model.* and stack.*"
            )
        block.policies[0].params[key] = block.set.pop(key)
    return block


def points_of(blocks: list[Block], most: int) -> tuple[list[Point], int]:
    """Every point once, in order, and how many were said twice.

    Raises:
        BadInput: more than `most`, said before one of them is made.
    """
    n = sum(len(block) for block in blocks)
    if n > most:
        raise BadInput(
            f"grid, got {n:,} points: more than {most:,}; narrow an axis, or say that you mean it with --max-points {n}"
        )
    found: dict[tuple[Any, ...], Point] = {}
    for block in blocks:
        for point in block.points():
            found.setdefault(key_of(point.spec), point)
    return list(found.values()), n - len(found)


def key_of(spec: RunSpec) -> tuple[Any, ...]:
    """What tells specifications apart; 1 and true do not compare equal here."""
    fields = (getattr(spec, name) for name in spec.__struct_fields__ if name not in ("set", "slo"))
    return (*fields, to_json(spec.slo), *sorted((key, type(value).__name__, value) for key, value in spec.set.items()))
