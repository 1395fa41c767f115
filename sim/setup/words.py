"""A run in words: `lru scope=layer stack=llama_cpp`, as `--policy` and `moesim diff` take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.base.errors import BadInput
from sim.base.files import parse_yaml
from sim.base.units import parse_size
from sim.policy.registry import find
from sim.profiles.overrides import parse_set
from sim.setup.spec import CAPS, RunSpec, as_words
from sim.workload.slo import slo_of

PER_POLICY = ("stack", "predictor")
"""Fields of a run that may differ between the policies of one comparison."""


def words_of(policy: str, words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What words behind a policy's name set: its parameters and hw.*, model.*, stack.*; and fields of the run. A word
    that is both is the policy's.

    Raises:
        BadInput: a word that is no KEY=VALUE, or an unknown policy.
    """
    parse_set(words)
    values = {key.strip(): parse_yaml(value, key) for key, _, value in (word.partition("=") for word in words)}
    params: set[str] = set()
    fields = set(RunSpec.__struct_fields__) - {"policy", "set"}
    if policy and fields & set(values):
        params = {param.name for param in find(policy).params}
    shared = as_words({key: value for key, value in values.items() if key in fields - params})
    own = {key: value for key, value in values.items() if key not in shared}
    for key in own:
        if "." not in key and (meant := f"{key}_bytes") in fields:
            raise BadInput(f"{key}, got it in a run's words: no field of a run; it is {meant}")
    for key in [key for key in shared if key.endswith("_bytes") and isinstance(shared[key], str)]:
        shared[key] = parse_size(shared[key], key, key)
    if shared.get("slo"):
        shared["slo"] = slo_of(shared["slo"])
    return own, shared


def for_one(policy: str, words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same for one policy of a comparison, whose machine and requests are those of all.

    Raises:
        BadInput: as `words_of`; or a field that holds for all.
    """
    own, shared = words_of(policy, words)
    for key in shared:
        if key not in PER_POLICY:
            raise BadInput(
                f"--policy {policy}, got {key}={shared[key]!r}: it holds for all policies of a comparison; give it as "
                f"an option (per policy: {', '.join(PER_POLICY)}), or take moesim sweep or diff"
            )
    return own, shared


def without_caps(fields: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A new cap of the expert part replaces the old one, whichever kind that was."""
    if not any(given.get(name) is not None for name in CAPS):
        return fields
    return {name: value for name, value in fields.items() if name not in CAPS}
