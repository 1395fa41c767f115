"""Checked pieces that several sources share: ids and weights of one token, phases, keys in the head of a file."""

from __future__ import annotations

import re
from typing import Any

from sim.base.errors import BadInput
from traces.convert.spool import DECODE, PREFILL, UNKNOWN
from traces.convert.text import a_list, shown, whole
from traces.format.layout import MAX_EXPERTS, MAX_LAYERS

LARGEST_WEIGHT = 65_504.0  # what float16, the trace's type, can hold
_PHASES = {"prefill": PREFILL, "prompt": PREFILL, "decode": DECODE, 0: PREFILL, 1: DECODE, "0": PREFILL, "1": DECODE}


def expert_ids(where: str, name: str, value: Any) -> list[int]:
    """A list of expert ids. Raises BadInput."""
    ids = a_list(where, name, value)
    if not all(type(i) is int for i in ids) or min(ids) < 0 or max(ids) >= MAX_EXPERTS:
        bad = next(i for i in ids if type(i) is not int or not 0 <= i < MAX_EXPERTS)
        raise BadInput(
            f"{where}: {name}, got {shown(bad)}: an expert id is a whole number from 0 to {MAX_EXPERTS - 1}; mend "
            f"the record"
        )
    return ids


def expert_weights(where: str, name: str, value: Any, n_ids: int) -> list[float]:
    """As many finite weights as there are ids, none negative. Raises BadInput."""
    weights = a_list(where, name, value)
    for weight in weights:
        if type(weight) not in (int, float) or not 0 <= weight <= LARGEST_WEIGHT:
            raise BadInput(
                f"{where}: {name}, got {shown(weight)}: a weight is a number from 0 to {LARGEST_WEIGHT:.0f}; mend the "
                f"record"
            )
    if len(weights) != n_ids:
        raise BadInput(f"{where}: {name}, got {len(weights)} for {n_ids} experts: one each; mend the record")
    return weights


def token_layers(where: str, name: str, ids: Any, weights: Any = None) -> tuple[list[list[int]], list[list[float]]]:
    """One token's ids of every layer, and its weights (an empty list without any). Raises BadInput."""
    layers = a_list(where, name, ids)
    if len(layers) > MAX_LAYERS:
        raise BadInput(f"{where}: {name}, got {len(layers)} layers: at most {MAX_LAYERS}; is it the right file?")
    chosen = [expert_ids(where, f"{name}[{layer}]", one) for layer, one in enumerate(layers)]
    if weights is None:
        return chosen, []
    given = a_list(where, "weights", weights)
    if len(given) != len(chosen):
        raise BadInput(f"{where}: weights, got {len(given)} layers: {len(chosen)} as for the experts; mend the record")
    return chosen, [
        expert_weights(where, f"weights[{layer}]", one, len(chosen[layer])) for layer, one in enumerate(given)
    ]


def phase_of(where: str, value: Any) -> int:
    """`prefill` or `decode` (or 0, 1); UNKNOWN for None. Raises BadInput."""
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, (str, int)) and not isinstance(value, bool) and value in _PHASES:
        return _PHASES[value]
    raise BadInput(f"{where}: phase, got {shown(value)}: prefill or decode; mend the record")


def text_of(where: str, name: str, value: Any, most: int = 200) -> str:
    """A short printable string, empty for None. Raises BadInput."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise BadInput(
            f"{where}: {name}, got {shown(value)}: printable text of at most {most} characters; mend the record"
        )
    return value


def request_key(where: str, value: Any) -> str | int:
    """What a file calls a request: text or a whole number. Raises BadInput."""
    if isinstance(value, int) and not isinstance(value, bool):
        return whole(where, "request", value, -(2**63), 2**63 - 1)
    return text_of(where, "request", value, 1000)


def has_keys(head: bytes, *names: str) -> bool:
    """Whether the head of a file has all these JSON names in it."""
    return all(re.search(rb'"' + re.escape(name.encode()) + rb'"\s*:', head) for name in names)


def starts_object(head: bytes) -> bool:
    """Whether a file begins with `{`."""
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
