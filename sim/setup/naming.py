"""What a run is called, with everything that was set on top of its files, and a run in words as it is typed:
`lru scope=layer engine=llama_cpp`, of `--policy` and `moesim diff`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from sim.base.kinds import NUMBER, RAM_SIZE
from sim.base.plug_ins import read_from
from sim.base.renamed import refuse_old
from sim.base.units import RAM
from sim.machine.several import GPU0
from sim.options import OPTIONS, RunSpec, unusual
from sim.policy.policy_file import file_of, split
from sim.policy.registry import find
from sim.profiles.overrides import GROUPS, parse_set

if TYPE_CHECKING:
    from sim.setup.setup import Setup

Value = bool | int | float | str | None
Overrides = Mapping[str, Value]
"""What was set -> to what."""

REPLACES = tuple(row.field for row in OPTIONS.rows if row.replaces)
"""Options of the machine and its expert part that stand for figures of profiles."""
NAMED = ("policy", "hw", "model", "precision", "trace", "set", "predictor", "sim_simulator", *REPLACES)
"""Options that a title does not list one by one."""


def overrides_of(spec: RunSpec) -> dict[str, Value]:
    """All that was set on top of what the names stand for: options that replace figures, then `--set` as given."""
    options = {name: getattr(spec, name) for name in (*REPLACES, "predictor") if getattr(spec, name) is not None}
    return {**options, **spec.set}


def title_of(setup: Setup) -> str:
    """One line that tells this run from others: `lfu scope=layer on rtx3090 with cache=40% (mixtral-8x7b bf16, T)`."""
    spec, own, file = setup.spec, overrides_of(setup.spec), file_of(type(setup.policy))
    who = policy_of(setup.policy.name, None if file is None else file.path.name, own)
    model = f"{setup.model.id} {spec.precision}"
    if changed := words(own, "model"):
        model += f" with {changed}"
    rest = [model, setup.trace.name]
    for row, value in unusual(spec):
        if row.field not in NAMED and value is not None and (row.field, value) not in UNSAID:
            called = _called(setup, row.field, value)
            rest += [] if called is None else [row.titled(called)]  # no drafts are none
    return f"{who} on {machine_of(setup.hw.id, own)} ({', '.join(rest)})"


UNSAID = (("parallel", GPU0),)


def _called(setup: Setup, field: str, value: Any) -> Any:
    """What is a file of one's own by its name, with what it defines; others as they are."""
    if field == "gpus_map":
        return Path(value).name
    if field == "engine":
        return setup.stack.id
    if field == "draft":
        return None if setup.drafter is None else setup.drafter.draft.title
    if field not in ("router", "scheduler"):
        return value
    kind = setup.router if field == "router" else setup.scheduler
    own_file = read_from(kind)
    return kind.name + (f" of {own_file.path.name}" if own_file else "")


def policy_of(policy: str, file: str | None, overrides: Overrides) -> str:
    """The policy, the file it is in where that was named, and what was set of its parameters."""
    of = [] if file is None else [f"of {file}"]
    return " ".join([policy, *of, *filter(None, [words(overrides, "", " ")])])


def machine_of(hw: str, own: Overrides) -> str:
    """`rtx3090 with h2d.bandwidth_bytes_per_s=5e10, cache=40%`: the profile, and what was set of it and around it."""
    engine = {key: value for key, value in own.items() if key.startswith("engine.")}
    said = [words(own, "options"), words(own, "hw"), ", ".join(f"{k}={show(k, v)}" for k, v in engine.items())]
    return " with ".join([hw, *filter(None, [", ".join(filter(None, said))])])


def words(overrides: Overrides, group: str, between: str = ", ") -> str:
    """`key=value, ...` of one group, without its prefix. "options": what options replaced; "": the policy's own."""
    chosen = {key.removeprefix(f"{group}."): value for key, value in overrides.items() if _group(key) == group}
    return between.join(f"{key}={show(key, value)}" for key, value in chosen.items())


def _group(key: str) -> str:
    prefix, dot, _ = key.partition(".")
    return prefix if dot and prefix in GROUPS else "options" if key in REPLACES else ""


def show(key: str, value: Any) -> str:
    """A value as it can be typed again; never rounded, so that names of different runs differ."""
    if value is not None and (row := OPTIONS.by_field.get(key) or OPTIONS.by_name.get(key)) is not None:
        return row.show(value)
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float) and key in RAM:
        return RAM_SIZE.show(value)
    if isinstance(value, float):
        return NUMBER.show(value).replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
    return str(value)


def words_of(policy: str, words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What words behind a policy's name set: its parameters and hw.*, model.*, engine.*; and fields of the run. A word
    that is both is the policy's.

    Raises:
        BadInput: a word that is no NAME=VALUE, or an unknown policy.
    """
    values = parse_set(words, f"--policy {policy}".strip())
    texts = OPTIONS.settings(words, bare=True)
    options = {key for key in values if key in OPTIONS.by_name and key != "policy"}
    bare = [key for key in values if "." not in key]
    params = {param.name for param in find(policy).params} if policy and bare else set()
    options -= params
    own = {key: value for key, value in values.items() if key not in options}
    for key in bare:
        if key in own and key not in params:
            refuse_old(key, f"{key}, got it in a run's words")
    return own, OPTIONS.values({key: texts[key] for key in options})


def called(item: str, fields: Mapping[str, Any], of_several: bool = False) -> dict[str, Any]:
    """The fields of a run, whose policy is called `NAME KEY=VALUE ...`.

    Args:
        fields: of the run otherwise. of_several: it is one of several, whose machine and requests are those of all.

    Raises:
        BadInput: as `words_of`; a value that is given twice, or one that holds for all.
    """
    name, *words = split(item) or [item]
    own, shared = words_of(name, words)
    free = [row.field for row in OPTIONS.rows if row.per_policy or not of_several]
    for key in shared:
        if key not in free:
            raise BadInput(
                f"--policy {name}, got {OPTIONS.by_field[key].key}={shared[key]!r}: it holds for all policies of a "
                f"comparison; give it as an option (per policy: {', '.join(free)}), or take moesim sweep or diff"
            )
    given = fields.get("set") or {}
    if (twice := next((key for key in own if key in given), None)) is not None:
        raise BadInput(f"--set {twice}, got it behind the policy's name, too: one value each; keep one of them")
    return {**fields, **shared, "policy": name, "set": {**given, **own}}
