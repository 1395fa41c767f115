"""How several GPUs work together: who computes what is dense, how hidden states cross, what their links share."""

from __future__ import annotations

from dataclasses import dataclass

PER_EXPERT, ALL_TO_ALL = "per-expert", "all-to-all"
PEER_WAYS = (PER_EXPERT, ALL_TO_ALL)  # the default first

APART, SHARED, SPLIT = "apart", "shared", "split"
HOST_MEMORY_WAYS = (APART, SHARED, SPLIT)


@dataclass(frozen=True)
class Several:
    """The choices of one run. `n_gpus`: with one, none of the others has a meaning."""

    n_gpus: int = 1
    peer: str = PER_EXPERT
    host_memory: str = APART

    @property
    def gathers(self) -> bool:
        """Whether what crosses to a GPU in a layer crosses together."""
        return self.n_gpus > 1 and self.peer == ALL_TO_ALL

    @property
    def unusual(self) -> str:
        """The options by which it differs from the default, as they are written."""
        chosen = (("--peer", self.peer, PEER_WAYS), ("--host-memory", self.host_memory, HOST_MEMORY_WAYS))
        return ", ".join(f"{option} {way}" for option, way, ways in chosen if way != ways[0])


ALONE = Several()
