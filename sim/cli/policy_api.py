"""What a policy can be told, ask and decide, from the docstrings: `moesim policies --api`, and docs/policy_api.md."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, get_args

from sim.base.tables import columns


def reference() -> str:
    """Every hook, decision and question with its signature and docstring, as text."""
    from sim.policy.api import Assignment, Policy, param
    from sim.policy.decisions import Decision
    from sim.policy.order import Insertion, Rank, Recency
    from sim.policy.pieces import Piece
    from sim.policy.view import Prices, View
    from sim.workload.gate import Gate
    from sim.workload.iterations import Iteration, Range, RequestInfo
    from sim.workload.learn_split import StoreSplit, TrainingTrace

    parts = [
        ("What a policy implements (sim.policy)", [*_members(Policy)]),
        ("What its hooks may yield (sim.policy)", [_fields(_source_of(kind)) for kind in get_args(Decision)]),
        ("What it sees (sim.policy)", [*_members(_source_of(View))]),
        ("What things cost, in seconds (view.prices)", [*_members(_source_of(Prices))]),
        ("What the gate says (sim.policy)", [*_members(_source_of(Gate))]),
        ("Which tokens run together (sim.policy)", [*_members(_source_of(Iteration))]),
        ("What else it is handed", [_fields(_source_of(kind)) for kind in (Range, RequestInfo, Piece)]),
        ("What it learns from (sim.policy)", [*_members(StoreSplit), *_members(TrainingTrace)]),
        ("What it declares and returns (sim.policy)", [_fields(kind) for kind in (param, Assignment)]),
        ("Orders that it may name (sim.policy)", [_fields(kind) for kind in (Recency, Insertion, Rank)]),
    ]
    return _text(parts)


def helpers() -> str:
    """The same of the compiled helpers that a policy may use."""
    from sim.policy.outlook import Outlook
    from sim.policy.segments import Buffer, Segment, SplitExpert
    from sim.policy.spared import Spared
    from sim.policy.standings import Counts, Keys, follow_and_count
    from sim.policy.wishes import Wishes

    built = (_source_of(kind) for kind in (Outlook, SplitExpert, Segment, Buffer, Spared))
    records = [_fields(_source_of(kind)) for kind in (Keys, Counts, follow_and_count)]
    told = [_fields(_source_of(Wishes)), *(text for kind in built for text in _built(kind)), *records]
    return _text([("Compiled helpers that it may use (sim.policy)", told)])


def _text(parts: list[tuple[str, list[str]]]) -> str:
    return "\n".join(f"{title}\n{'=' * len(title)}\n\n{chr(10).join(own)}" for title, own in parts)


def _source_of(kind: Any) -> Any:
    """A class or function as its source has it: a compiled one tells no signature and keeps no order of members."""
    file = Path(str(sys.modules[kind.__module__].__file__))
    if file.suffix == ".py":
        return kind
    spec = spec_from_file_location(kind.__module__, file.with_name(f"{file.name.partition('.')[0]}.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kind.__name__)


def _members(kind: type) -> Iterator[str]:
    """The class itself, then what it defines that is public, in the order of its source."""
    yield _told(kind.__name__, inspect.getdoc(kind))
    for name, value in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield _told(name, inspect.getdoc(value))
        elif inspect.isfunction(value):
            yield _told(name + _signature(value), inspect.getdoc(value))


def _built(kind: type) -> Iterator[str]:
    """A class that a policy makes itself: how it is built, then its members."""
    yield _fields(kind)
    yield from list(_members(kind))[1:]


def _fields(kind: Any) -> str:
    """A record with its fields as it is built."""
    defaults = getattr(kind, "_field_defaults", None)
    if defaults is None:
        return _told(kind.__name__ + _signature(kind), inspect.getdoc(kind))
    given = ", ".join(name + (f"={defaults[name]!r}" if name in defaults else "") for name in kind._fields)
    return _told(f"{kind.__name__}({given})", inspect.getdoc(kind))


def _signature(value: Any) -> str:
    """Names and defaults; types are in the source, and mostly in the names."""
    found = inspect.signature(value)
    own = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values() if p.name != "self"]
    return str(found.replace(parameters=own, return_annotation=inspect.Signature.empty))


def _told(head: str, doc: str | None) -> str:
    """A name and what its docstring says, indented."""
    width = columns()
    lines = textwrap.wrap(head, width, subsequent_indent="        ")
    for paragraph in re.split(r"\n\s*\n", doc or ""):
        lines += textwrap.wrap(
            " ".join(paragraph.split()), width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join([*lines, ""])
