"""What passes have computed, as far as a run keeps it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.real.machine.decoder import Decoder
    from sim.workload.iterations import Iteration


class Output:
    """A digest of all hidden rows, and the rows and logits themselves for those who ask."""

    def __init__(self) -> None:
        self.digest = 0
        self.keep_hidden = False
        self.hidden: list[Any] = []  # of each iteration, on the host, where `keep_hidden` asks for it
        self.on_logits: Any = None  # called with (iteration, logits on the host)

    def read(self, iteration: Iteration, decoder: Decoder) -> None:
        """A pass is over."""
        hidden = decoder.hidden.to("cpu")
        self.digest = zlib.crc32(hidden.view(decoder.torch.uint8).numpy(), self.digest)
        if self.keep_hidden:
            self.hidden.append(hidden.clone())
        if self.on_logits is not None:
            self.on_logits(iteration, decoder.out[0].to("cpu"))
