"""A sweep as blocks of axes: each block is the product of its axes, and the sweep is all blocks one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import msgspec

from sim.base.errors import BadInput
from sim.options import OPTIONS, RunSpec, option_meant, spec_of
from sim.policy.policy_file import split
from sim.profiles.overrides import of_profile
from sim.setup.naming import show
from sim.studies.sweep.values import Scalar, kind_of, of_text

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
        """The same with what was given on the command line in place of what a file says."""
        policies, slo = given.policies or self.policies, given.slo or self.slo
        return Block(policies, {**self.axes, **given.axes}, {**self.set, **given.set}, slo)

    def check(self, what: str) -> None:
        """Raises BadInput where no run can come of it."""
        if not self.policies:
            raise BadInput(f"{what}: no policy; name at least one, e.g. --policy lru --policy 'lfu scope=global,layer'")
        if "hw" not in self.axes:
            raise BadInput(
                f"{what}: no hardware; name at least one, e.g. --hw rtx3090,rtx4090 (`moesim hw` lists them)"
            )

    def points(self) -> Iterator[Point]:
        """Every point, policies varying fastest: those that compete stand next to one another."""
        names = sorted(self.axes, key=[*OPTIONS.by_field].index)
        keys = sorted(self.set)
        for chosen in product(*(self.axes[name] for name in names), *(self.set[key] for key in keys)):
            fields: dict[str, Any] = dict(zip(names, chosen[: len(names)], strict=True))
            fields = {name: value for name, value in fields.items() if value is not None}
            shared = dict(zip(keys, chosen[len(names) :], strict=True))
            for policy in self.policies:
                for label, own in policy.each():
                    spec = {**fields, "slo": self.slo, "policy": policy.name, "set": {**shared, **own}}
                    yield Point(label, spec_of(spec, "sweep"), policy.named)


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
        found[key] = of_text(text, kind_of(key), f"{what} {key}")
    return found


def given(policies: tuple[str, ...], options: dict[str, Any], sets: tuple[str, ...]) -> Block:
    """The block of the command line's options, by field, each of which may be repeated. Raises BadInput."""
    found: dict[str, list[Scalar]] = {}
    slo = options.get("slo") or {}
    for row in OPTIONS.axes:
        texts = options.get(row.field)
        if texts:
            several = (texts,) if isinstance(texts, str) else texts
            found[row.field] = [value for text in several for value in of_text(text, row.kind, row.said)]
    return block_of([axis for item in policies for axis in policy_of(item)], found, settings(sets), slo, "--set")


def block_of(
    policies: list[PolicyAxis],
    axes: dict[str, list[Scalar]],
    sets: dict[str, list[Scalar]],
    slo: dict[str, dict[str, float]],
    what: str,
) -> Block:
    """A block whose settings are sorted: options of a run are axes, bare names parameters of its one policy.

    Raises:
        BadInput: an option that is given twice, or a parameter of nobody knows which policy.
    """
    block = Block(policies, dict(axes), {}, slo)
    for key, values in sets.items():
        if OPTIONS.names(key):
            row = OPTIONS.by_name[key]
            if not row.axis:
                raise BadInput(f"{what}, got {key!r}: it is no axis; give it by itself")
            if row.field in block.axes:
                raise BadInput(f"{what}, got {key!r} beside {row.said}: one axis; leave one of them out")
            block.axes[row.field] = values
        elif of_profile(key):
            block.set[key] = values
        elif len(policies) == 1:
            policies[0].params[key] = values
        else:
            known = f"{what} takes options by their dotted names, hw.*, model.* and engine.*"
            raise BadInput(
                f"{what}, got {key!r}: which policy's? write it behind the name, --policy 'NAME {key}=...'; of all, "
                f"{option_meant(key, '...') or known}"
            )
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
    found: dict[bytes, Point] = {}
    for block in blocks:
        for point in block.points():
            found.setdefault(key_of(point.spec), point)
    return list(found.values()), n - len(found)


def key_of(spec: RunSpec) -> bytes:
    """What tells specifications apart; 1 and true do not compare equal here."""
    return msgspec.json.encode(spec, order="sorted")
