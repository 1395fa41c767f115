"""Levels of a trace that a policy reads, held against those that it declares in `needs`."""

from __future__ import annotations

from collections.abc import Collection

from sim.base.errors import IllegalDecision


def require_declared(level: str, needs: Collection[str]) -> None:
    """Raises IllegalDecision for a level that `needs` does not have: traces without it would fail half way."""
    if level not in needs:
        whole = ", ".join(map(repr, sorted({*needs, level})))
        raise IllegalDecision(
            f"got a read of {level!r}, which `needs` does not declare; write needs = frozenset({{{whole}}})"
        )
