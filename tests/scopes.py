"""Plain caches as one cache over all layers, which tests with little room and few layers need."""

from __future__ import annotations

from sim.policy import Policy


def one_cache(kind: type[Policy]) -> Policy:
    """The policy with one cache over all layers of a GPU, whatever its default is."""
    scoped = any(param.name == "scope" for param in kind.params)
    return kind(scope="global") if scoped else kind()
