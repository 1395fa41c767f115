"""Routers, found by the name of their file: a newcomer is one file here, with one class of that name; or one of the
user's own (`--router ./mine.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.errors import BadInput
from sim.base.plug_ins import Sort, find_in, names_in

if TYPE_CHECKING:
    from sim.workload.router import Router

DEFAULT = "round_robin"
NO_ROUTER = "a router is a class derived from sim.workload.router.Router with a `name`; see docs/replicas.md"


def _base() -> type[Router]:
    from sim.workload.router import Router

    return Router


SORT = Sort("router", "routers", NO_ROUTER, _base)


def routers() -> tuple[str, ...]:
    """Names of those that are installed, without importing any."""
    return names_in(__name__)


def find(name: str) -> type[Router]:
    """The router of that name, or of a file (`./mine.py:Class`). Raises BadInput where there is none to use."""
    from sim.workload.router import Router

    kind: type[Router] = find_in(__name__, name, SORT)
    if not isinstance(kind.name, str):
        raise BadInput(f"router, got {name!r} with name {kind.name!r}: a word; correct the file")
    if kind.choose is Router.choose:
        raise BadInput(f"router, got {name!r} without choose: it says who goes where; see docs/replicas.md")
    return kind
