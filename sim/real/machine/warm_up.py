"""Every kernel once before the run, untimed: the first call of a shape loads and plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.real.devices.work import COMPUTE, Work
from sim.real.machine.decoder import Span

if TYPE_CHECKING:
    from sim.profiles.models import Model
    from sim.real.devices.lanes import Lanes
    from sim.real.machine.decoder import Decoder
    from sim.real.weights.weights import Weights


def warm_up(lanes: Lanes, model: Model, weights: Weights, decoder: Decoder, n_tokens: int) -> None:
    """Run the kernels at many widths of up to `n_tokens`, and wait for them."""
    torch, device, number, home = lanes.torch, lanes.device, model.moe_layer_ids[0], weights.matrices(0, 0)
    dense = next((i for i in range(model.n_layers) if i not in model.moe_layer_ids), None)
    widths = {1, n_tokens, *(2**i for i in range(13))}
    if device.place != "cpu":  # which kernel a product takes depends on how many rows it has
        widths |= {*range(3, 65), *range(64, 513, 16)}

    def run() -> None:
        matrices = home.to(decoder.device)
        for n in sorted(width for width in widths if width <= n_tokens):
            decoder.spans = [Span(0, n, 0, *decoder.cache(n))]
            decoder.embed(device.upload(torch.zeros(n, dtype=torch.int64)))
            every, ones = device.upload(torch.arange(n)), device.upload(torch.ones(n, 1))
            for _ in range(3 if n == 1 else 1):
                decoder.attention(number)
                decoder.gate(number)
                out = decoder.ffn(decoder.normed.index_select(0, every), matrices) * ones.to(matrices.dtype)
                if model.shared_intermediate_size:
                    out = out + decoder.shared(number)
                decoder.hidden = decoder.hidden.index_add(0, every, out) + out
                if dense is not None:
                    decoder.dense_ffn(dense)
                decoder.head()

    work = Work(COMPUTE, "warm_up", run)
    lanes.submit(work)
    lanes.wait(work)
    lanes.finished.clear()
