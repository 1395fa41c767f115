"""A run in words: `lru scope=layer engine=llama_cpp`, as `--policy` and `moesim diff` take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.base.errors import BadInput
from sim.base.renamed import refuse_old
from sim.options import OPTIONS
from sim.policy.registry import find
from sim.profiles.overrides import parse_set


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


def for_one(policy: str, words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same for one policy of a comparison, whose machine and requests are those of all.

    Raises:
        BadInput: as `words_of`; or a field that holds for all.
    """
    own, shared = words_of(policy, words)
    free = [row.field for row in OPTIONS.rows if row.per_policy]
    for key in shared:
        if key not in free:
            raise BadInput(
                f"--policy {policy}, got {OPTIONS.by_field[key].key}={shared[key]!r}: it holds for all policies of a "
                f"comparison; give it as an option (per policy: {', '.join(free)}), or take moesim sweep or diff"
            )
    return own, shared
