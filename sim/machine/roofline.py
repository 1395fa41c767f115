"""Prices on a GPU from its figures: the longest of kernels x floor, bytes / memory bandwidth and FLOPs / rate.

Where a stack says what a kernel takes beside its bytes and FLOPs, the sum of the three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.machine.price import Price

if TYPE_CHECKING:
    from sim.workload.iterations import Iteration


class Roofline:
    """What bounds an operation on a GPU: its kernels, its bytes or its FLOPs, with the quantity behind each.

    Args:
        adds: the three come one after the other; else the longest hides the others.
        as_weights: bytes of weights that are read in the time of one byte of keys and values: 1 but where weights in
            blocks are read at less than the memory gives.
    """

    __slots__ = ("adds", "as_weights", "bandwidth", "floor_s", "flops", "q_bandwidth", "q_floor", "q_flops")

    def __init__(
        self,
        floor_s: float,
        bandwidth: float,
        flops: float,
        q_floor: int,
        q_bandwidth: int,
        q_flops: int,
        adds: bool = False,
        as_weights: float = 1.0,
    ) -> None:
        self.adds = adds
        self.as_weights = as_weights
        self.floor_s = floor_s
        self.bandwidth = bandwidth
        self.flops = flops
        self.q_floor = q_floor
        self.q_bandwidth = q_bandwidth
        self.q_flops = q_flops

    def price(self, n_kernels: float, n_bytes: float, flops: float) -> Price:
        """The longest of the three, or their sum; it rests on the longest."""
        best_s = n_kernels * self.floor_s
        attributed_to = self.q_floor
        sum_s = best_s + n_bytes / self.bandwidth + flops / self.flops
        if n_bytes / self.bandwidth > best_s:
            best_s = n_bytes / self.bandwidth
            attributed_to = self.q_bandwidth
        if flops / self.flops > best_s:
            best_s = flops / self.flops
            attributed_to = self.q_flops
        return Price(sum_s if self.adds else best_s, attributed_to, n_bytes)


class Attention:
    """The price of one attention block, the mean of all layers: projections for all tokens, then each range against its
    own context, or what a window shows of it.

    Args:
        prompt_kernels: besides, where a prompt runs.
        n_bytes: of its weights. token_bytes: moved for each token besides. key_bytes: of one position of the KV cache
            (as weights: `Roofline.as_weights`).
        params: multiplied with each token. key_flops: half of what one token against one position takes.
        window: positions that a token of layers with a window attends to, 0 where no layer has one. window_key_bytes,
            window_key_flops: of these layers, by position, and not in `key_bytes` and `key_flops`.
        most_context: positions up to which the figures were measured. beyond: told of more than that.
    """

    __slots__ = (
        "beyond",
        "key_bytes",
        "key_flops",
        "most_context",
        "n_bytes",
        "n_kernels",
        "params",
        "prompt_kernels",
        "roofline",
        "token_bytes",
        "window",
        "window_key_bytes",
        "window_key_flops",
        *("_flops", "_kept", "_n_bytes"),
    )

    def __init__(
        self,
        roofline: Roofline,
        n_kernels: float,
        prompt_kernels: float,
        n_bytes: float,
        token_bytes: float,
        key_bytes: float,
        params: float,
        key_flops: float,
        most_context: float,
        beyond: Callable[[int], None],
        window: int = 0,
        window_key_bytes: float = 0.0,
        window_key_flops: float = 0.0,
    ) -> None:
        self.roofline = roofline
        self.n_kernels = n_kernels
        self.prompt_kernels = prompt_kernels
        self.n_bytes = n_bytes
        self.token_bytes = token_bytes
        self.key_bytes = key_bytes
        self.params = params
        self.key_flops = key_flops
        self.most_context = most_context
        self.beyond = beyond
        self.window = window
        self.window_key_bytes = window_key_bytes
        self.window_key_flops = window_key_flops

    def price(self, iteration: Iteration) -> Price:
        """Of one layer."""
        self._begin(iteration.n_tokens)
        for r in iteration.ranges:
            self._add(r.stop_row - r.start_row, r.context)
        n_kernels = self.n_kernels
        if iteration.number != 1:  # not of `PHASES`' decode: a prompt runs, alone or beside others
            n_kernels += self.prompt_kernels
        return self._end(n_kernels)

    def of_one(self, context: int) -> Price:
        """Of one layer of one decode token, behind so many others."""
        self._begin(1)
        self._add(1, context)
        return self._end(self.n_kernels)

    def _begin(self, n_tokens: int) -> None:
        """Nothing is attended to yet."""
        self._n_bytes = self.n_bytes + self.token_bytes * n_tokens
        self._flops = 0.0
        self._kept = 0.0

    def _add(self, n_tokens: int, context: int) -> bool:
        """Tokens of a request attend to its context; always True."""
        keys = self.key_bytes * (context + n_tokens)
        self._n_bytes += keys
        self._kept += keys
        # A prefill token sees on average the context before it plus half of its own prompt.
        self._flops += 2 * n_tokens * (self.params + self.key_flops * (context + (n_tokens + 1) / 2.0))
        if self.window:
            keys = self.window_key_bytes * min(context + n_tokens, self.window + n_tokens - 1)
            self._n_bytes += keys
            self._kept += keys
            # So many of the tokens see all that is before them, the others a full window.
            n_early = min(max(self.window - context, 0), n_tokens)
            seen = n_early * (context + (n_early + 1) / 2.0) + (n_tokens - n_early) * self.window
            self._flops += 2 * self.window_key_flops * seen
        if context + n_tokens > self.most_context:
            self.beyond(context + n_tokens)
        return True

    def _end(self, n_kernels: float) -> Price:
        """What that takes."""
        price = self.roofline.price(n_kernels, self._n_bytes, self._flops)
        if self.roofline.as_weights != 1.0:  # what is moved are all bytes of keys and values
            price.n_bytes += self._kept / self.roofline.as_weights - self._kept
        return price
