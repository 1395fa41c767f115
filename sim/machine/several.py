"""How several GPUs work together: who computes what is dense, how hidden states cross, what their links share."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sim.base.errors import BadInput

if TYPE_CHECKING:
    from sim.profiles.models import Model

PER_EXPERT, ALL_TO_ALL = "per-expert", "all-to-all"
PEER_WAYS = (PER_EXPERT, ALL_TO_ALL)  # the default first

PER_LINK, SHARED, SPLIT = "per-link", "shared", "split"
HOST_LINKS_WAYS = (PER_LINK, SHARED, SPLIT)

GPU0, TENSOR, DATA, LAYERS = "gpu0", "tensor", "data", "layers"
DENSE_WAYS = (GPU0, TENSOR, DATA, LAYERS)


# Of a share; written in the fewest words it is a whole number of nine digits at most, and read again.
SHARE = re.compile(r"[0-9]{1,9}|[0-9]{0,6}\.[0-9]{1,3}")
MOST_SHARES = 1024


class Way(NamedTuple):
    """Who computes what is dense, as `--parallel` names it: `layers:3/1` is `layers` by these shares."""

    name: str
    shares: tuple[int, ...] = ()  # of the layers, by GPU, as whole numbers; none: the same for each

    @property
    def said(self) -> str:
        """As it is written, in the fewest words."""
        return self.name + (f":{'/'.join(map(str, self.shares))}" if len(set(self.shares)) > 1 else "")


def way_of(said: str | None) -> Way:
    """A way as it is written, None for the default. Raises BadInput for shares that are no numbers, or of no layers."""
    if said is None:
        return Way(GPU0)
    name, colon, text = said.partition(":")
    if not colon:
        return Way(name)
    got = f"--parallel, got {said[:40]!r}"
    if name != LAYERS:
        raise BadInput(f"{got}: only layers come in shares; write e.g. {LAYERS}:3/1")
    words = text.split("/")
    if len(words) > MOST_SHARES or not all(SHARE.fullmatch(word) for word in words):
        raise BadInput(
            f"{got}: shares of the layers are numbers of at most nine digits, or six and three decimals, one for each "
            f"GPU; write e.g. {LAYERS}:3/1"
        )
    thousandths = [round(1000 * float(word)) for word in words]
    if not all(thousandths):
        raise BadInput(f"{got}: a GPU without layers has nothing to do; leave it out, and take fewer --gpus")
    common = gcd(*thousandths)
    return Way(name, tuple(share // common for share in thousandths))


def stages(n_layers: int, shares: Sequence[int]) -> list[int]:
    """The GPU of each layer and, at the end, of the output head where GPUs have whole layers, in these shares.

    llama.cpp's rule (`--split-mode layer`, `--tensor-split`): in order, the head counted as a layer.
    """
    *ends, whole = accumulate(shares)
    scaled = [end * (n_layers + 1) for end in ends]
    return [bisect_right(scaled, layer * whole) for layer in range(n_layers + 1)]


def homes_by_layer(model: Model, of_layer: Sequence[int]) -> tuple[int, ...]:
    """The GPU of each expert, layer by layer, where each lies with its layer."""
    return tuple(of_layer[layer] for layer in model.moe_layer_ids for _ in range(model.n_experts))


class Several(msgspec.Struct, frozen=True):
    """The choices of one run. `n_gpus`: with one, none of the others has a meaning."""

    n_gpus: int = 1
    peer: str = PER_EXPERT
    host_links: str = PER_LINK
    dense: str = GPU0
    shares: tuple[int, ...] = ()  # of layers, by GPU, where they come in shares; none: the same for each
    homes: tuple[int, ...] | None = None  # the GPU of each expert, layer by layer; None: dealt round-robin

    @property
    def together(self) -> bool:
        """Whether dense parts run on all GPUs."""
        return self.n_gpus > 1 and self.dense in (TENSOR, DATA)

    @property
    def in_turn(self) -> bool:
        """Whether each GPU has whole layers, so that one computes at a time."""
        return self.n_gpus > 1 and self.dense == LAYERS

    def stages_of(self, n_layers: int) -> list[int]:
        """The GPU of each layer, and of the head."""
        return stages(n_layers, self.shares or [1] * self.n_gpus)

    def homes_of(self, n_experts: int) -> list[int]:
        """The GPU of each of all experts, layer by layer."""
        return [index % self.n_gpus for index in range(n_experts)] if self.homes is None else list(self.homes)

    @property
    def n_at_once(self) -> int:
        """GPUs that share the experts of a layer."""
        return 1 if self.in_turn else self.n_gpus

    @property
    def gathers(self) -> bool:
        """Whether what crosses to a GPU in a layer crosses together."""
        return self.n_gpus > 1 and self.peer == ALL_TO_ALL and self.dense == GPU0

    @property
    def chosen(self) -> tuple[tuple[str, str, str], ...]:
        """(option, way, the default)."""
        return (
            ("--set gpus.dispatch", self.peer, PEER_WAYS[0]),
            ("--set gpus.host_bandwidth", self.host_links, HOST_LINKS_WAYS[0]),
            ("--parallel", self.dense, DENSE_WAYS[0]),
        )

    @property
    def unusual(self) -> str:
        """The options by which it differs from the default, as they are written; none with one GPU."""
        if self.n_gpus == 1:
            return ""
        said = {self.dense: Way(self.dense, self.shares).said}
        return ", ".join(
            f"{option}{'=' if '.' in option else ' '}{said.get(way, way)}"
            for option, way, usual in self.chosen
            if way != usual
        )


ALONE = Several()
