"""`--set NAME=VALUE`: read once, sorted by what names belong to, and put into nested plain data, strictly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin

import msgspec

from sim.base.errors import BadInput, did_you_mean
from sim.base.files import parse_yaml
from sim.base.quantities import Quantity, user_figure

GROUPS = ("hw", "model", "engine")
"""What keys begin with that name fields of profiles."""


_WORDS = dict.fromkeys(
    ("id", "name", "aliases", "note", "sources", "schema"),
    "what was set is in every result; a file of your own has its own, see docs/profiles.md",
)
_CPU = "set hw.cpu.memory_bandwidth_bytes_per_s and hw.cpu.flops_per_s, which are of all cores"
_LINK = "set hw.h2d.bandwidth_bytes_per_s (and hw.d2h.bandwidth_bytes_per_s), or name a link: --pcie gen5x16"

ONLY_SHOWN: dict[str, dict[str, str]] = {
    "hw": {
        **_WORDS,
        "gpu.link": _LINK,
        "gpu.n_sms": "set hw.gpu.flops_per_s.bf16 and hw.gpu.memory_bandwidth_bytes_per_s, which are of the whole GPU",
        "gpu.l2_bytes": "set hw.gpu.memory_bandwidth_bytes_per_s, which is effective, caches included",
        "cpu.n_cores": _CPU,
        **{f"cpu.{name}": "set hw.cpu=ID for another CPU" for name in ("id", "name", "note")},
    },
    "engine": _WORDS,
    "model": {
        **{key: text for key, text in _WORDS.items() if key != "sources"},
        **dict.fromkeys(("hf_id", "source"), _WORDS["name"]),
        "published": "sizes follow from the geometry: set model.expert_intermediate_size and the like",
        "activation": "set model.matrices_per_expert, which decides an expert's size",
        "gate.order": "set model.gate.score and model.gate.renormalised",
    },
}
"""Fields that are shown and never computed with, so that setting one would change nothing: group -> path (whatever lies
under it too) -> the figure that matters."""


class Overrides(msgspec.Struct, frozen=True):
    """What the user set: dotted paths without the group. `policy` holds bare keys, `policies` prefixed ones."""

    hw: dict[str, object] = {}
    model: dict[str, object] = {}
    engine: dict[str, object] = {}
    policy: dict[str, object] = {}
    policies: dict[str, dict[str, object]] = {}

    def for_policy(self, name: str, others: Iterable[str] = ()) -> dict[str, object]:
        """Parameters meant for the policy `name`: bare keys, then `name.key`, which wins.

        Args:
            others: further policies (or aliases) of the same command, whose prefixes are legal here too.

        Raises:
            BadInput: a prefix that is neither a group nor one of these policies.
        """
        known = {name, *others}
        for prefix, keys in self.policies.items():
            if prefix not in known:
                what = f"--set {prefix}.{next(iter(keys))}"
                raise BadInput(
                    f"{what}, got prefix {prefix!r}: not hw, model, engine or a policy of this run; "
                    f"{did_you_mean(prefix, known | set(GROUPS))}"
                )
        return {**self.policy, **self.policies.get(name, {})}


def of_profile(key: str) -> bool:
    """Whether a name that was set is a figure of a profile (`hw.h2d.latency_s`)."""
    prefix, dot, _ = key.partition(".")
    return bool(dot) and prefix in GROUPS


def parse_set(items: Iterable[str], what: str = "--set") -> dict[str, Any]:
    """Read `["hw.h2d.latency_s=1e-5", "distance=3", "sim.contention=off"]`; values are YAML.

    Raises:
        BadInput: no `=`, an empty or odd key, a value that is not YAML, or a key given twice.
    """
    found: dict[str, Any] = {}
    example = "--set hw.h2d.latency_s=1e-5" if what == "--set" else "distance=3"
    for item in items:
        key, equals, text = item.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise BadInput(f"{what}, got {item!r}: not NAME=VALUE; write e.g. {example}")
        if any(character.isspace() for character in key):
            raise BadInput(f"{what}, got name {key!r}: a name has no spaces; write e.g. --set distance=3")
        if key in found:
            raise BadInput(f"{what} {key}, got it twice: one value each; keep one of them")
        found[key] = parse_yaml(text, f"{what} {key}")
    return found


def grouped(settings: Mapping[str, Any]) -> Overrides:
    """Settings by what their keys belong to."""
    found = Overrides()
    for key, value in settings.items():
        prefix, dot, rest = key.partition(".")
        if not dot:
            found.policy[key] = value
        elif prefix in GROUPS:
            getattr(found, prefix)[rest] = value
        else:
            found.policies.setdefault(prefix, {})[rest] = value
    return found


def apply(data: Mapping[str, Any], overrides: Mapping[str, object], kind: type[msgspec.Struct], group: str) -> Any:
    """Return a copy of plain data with each dotted path set; the Struct `kind` says which paths exist.

    A number put where a `Quantity` belongs becomes that quantity, `assumed` and "set by the user". Types and bounds are
    left to the conversion that follows.

    Raises:
        BadInput: a path that `kind` does not have, or that is only shown (`ONLY_SHOWN`).
    """
    for path, value in overrides.items():
        for label, way_out in ONLY_SHOWN[group].items():
            if path == label or path.startswith(f"{label}."):
                raise BadInput(f"--set {group}.{path}, got {value!r}: it is only shown, never computed with; {way_out}")
    result: dict[str, Any] = dict(data)
    # Shorter paths first: `hw.cpu=...` replaces what `hw.cpu.n_cores=...` then refines, in whichever order they came.
    for path, value in sorted(overrides.items(), key=lambda item: item[0].count(".")):
        _put(result, path.split("."), value, kind, f"--set {group}.{path}")
    return result


def _put(node: dict[str, Any], parts: list[str], value: object, kind: Any, what: str) -> None:
    name, *rest = parts
    child = _child_type(kind, name, value, what)
    if child is Quantity and (not rest or rest == ["value"]):
        # Only the number was given, so neither the old origin nor the old range describes it any more.
        node[name] = user_figure(value, name, what)
    elif not rest:
        node[name] = value
    elif child is None:
        raise BadInput(f"{what}, got {value!r}: {name!r} has no parts; write {what.rpartition(f'.{rest[0]}')[0]}=VALUE")
    else:
        inner = node.get(name)
        node[name] = dict(inner) if isinstance(inner, dict) else {}  # a copy: `data` stays as it is
        _put(node[name], rest, value, child, what)


@cache
def _types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A Struct's fields, by the names they have in files, with their types."""
    return {info.encode_name: info.type for info in msgspec.structs.fields(kind)}


def _child_type(kind: Any, name: str, value: object, what: str) -> Any:
    """The Struct or dict type under `name`, None for a plain value; refuses a name that is not there."""
    if get_origin(kind) is dict:
        keys, child = get_args(kind)
        known = get_args(keys) if get_origin(keys) is Literal else (name,)
    else:
        fields = _types(kind)
        known, child = tuple(fields), fields.get(name)
    if name not in known:
        raise BadInput(f"{what}, got {value!r}: no field {name!r}; {did_you_mean(name, known)}")
    options = [child, *get_args(child)] if get_origin(child) is not dict else [child]
    for option in options:
        if get_origin(option) is dict or (isinstance(option, type) and issubclass(option, msgspec.Struct)):
            return option
    return None
