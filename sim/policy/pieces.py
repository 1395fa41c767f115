# cython: boundscheck=True, wraparound=True
"""The unit of residency, copy and accounting: a slice of one expert at one precision on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Piece:
    """`[start_frac, stop_frac)` of expert `(layer, expert)` at `precision`, destined for `gpu`.

    `layer` counts MoE layers from 0. Pieces are interned by `Pieces`: within a run, equal means identical,
    so they hash by identity, which is what keeps the cache fast. `index` orders them (ties go to the lowest id).
    `serving`: a whole expert in the serving precision on its home GPU, the common case. `kernels_frac`: the share of
    the expert's kernels that computing the piece launches; a slice of columns runs all of them, each smaller (1.0), a
    slice of whole matrices only its own.
    """

    __slots__ = (
        "expert",
        "gpu",
        "index",
        "kernels_frac",
        "layer",
        "n_bytes",
        "precision",
        "serving",
        "start_frac",
        "stop_frac",
    )

    def __init__(
        self,
        layer: int,
        expert: int,
        start_frac: float,
        stop_frac: float,
        precision: str,
        gpu: int,
        n_bytes: int,
        index: int,
        serving: bool = False,
        kernels_frac: float = 1.0,
    ) -> None:
        self.layer = layer
        self.expert = expert
        self.start_frac = start_frac
        self.stop_frac = stop_frac
        self.precision = precision
        self.gpu = gpu
        self.n_bytes = n_bytes
        self.index = index
        self.serving = serving
        self.kernels_frac = kernels_frac

    @property
    def whole(self) -> bool:
        """True when the piece holds all of its expert."""
        return self.start_frac == 0.0 and self.stop_frac == 1.0

    def __repr__(self) -> str:
        part = "" if self.whole else f", {self.start_frac:g}..{self.stop_frac:g}"
        return f"Piece(layer={self.layer}, expert={self.expert}{part}, {self.precision}, gpu={self.gpu})"


class Pieces:
    """The interned pieces of one run.

    Args:
        n_layers: MoE layers. n_experts: routed experts per layer. precision: the precision weights are served in.
        n_gpus: experts are dealt round-robin over GPUs (FineMoE section 5); `home` is that rule.
        expert_bytes: bytes of a whole expert at a precision.
        homes: the GPU of each expert, layer by layer, in place of that rule.
    """

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        precision: str,
        n_gpus: int,
        expert_bytes: Callable[[str], int],
        homes: Sequence[int] | None = None,
    ) -> None:
        self.n_layers = n_layers
        self.n_experts = n_experts
        self.precision = precision
        self.n_gpus = n_gpus
        self._homes = homes
        self._expert_bytes = expert_bytes
        size = expert_bytes(precision)
        self._sizes = {precision: size}  # bytes of a whole expert
        self.whole: list[list[Piece]] = [
            [
                Piece(
                    layer, expert, 0.0, 1.0, precision, self.home(layer, expert), size, layer * n_experts + expert, True
                )
                for expert in range(n_experts)
            ]
            for layer in range(n_layers)
        ]
        self.all: list[Piece] = [piece for layer in self.whole for piece in layer]  # by index
        self._parts: dict[tuple[int, int, float, float, str, int, bool], Piece] = {}

    def anew(self) -> Pieces:
        """Those of another run alike, with no parts made yet."""
        return Pieces(self.n_layers, self.n_experts, self.precision, self.n_gpus, self._expert_bytes, self._homes)

    @property
    def n_parts(self) -> int:
        """Pieces made so far that are not whole experts in the serving precision."""
        return len(self._parts)

    def home(self, layer: int, expert: int) -> int:
        """GPU that owns an expert: round-robin over all experts in layer order, unless a placement says otherwise."""
        index: int = layer * self.n_experts + expert
        if self._homes is not None:
            gpu: int = self._homes[index]
            return gpu
        return index % self.n_gpus

    def part(
        self,
        layer: int,
        expert: int,
        start_frac: float,
        stop_frac: float,
        precision: str | None = None,
        gpu: int | None = None,
        matrices: bool = False,
    ) -> Piece:
        """The piece with these bounds; its bytes are `round(stop * size) - round(start * size)`, so parts add up.

        Args:
            matrices: the slice is made of whole matrices, not of columns.
        """
        precision = precision or self.precision
        gpu = self.home(layer, expert) if gpu is None else gpu
        whole = self.whole[layer][expert]
        if start_frac == 0.0 and stop_frac == 1.0 and precision == whole.precision and gpu == whole.gpu:
            return whole
        key = (layer, expert, start_frac, stop_frac, precision, gpu, matrices)
        piece = self._parts.get(key)
        if piece is None:
            if not 0.0 <= start_frac < stop_frac <= 1.0:
                raise ValueError(f"piece bounds, got {start_frac}..{stop_frac}: need 0 <= start < stop <= 1")
            size = self._sizes.get(precision)
            if size is None:
                size = self._sizes[precision] = self._expert_bytes(precision)
            n_bytes = round(stop_frac * size) - round(start_frac * size)
            kernels_frac = stop_frac - start_frac if matrices else 1.0
            piece = Piece(
                layer, expert, start_frac, stop_frac, precision, gpu, n_bytes, len(self.all), False, kernels_frac
            )
            self._parts[key] = piece
            self.all.append(piece)
        return piece
