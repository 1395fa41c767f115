"""Weights of a geometry: experts in host memory, everything else on the device.

An expert lies as [3, intermediate, hidden]: `gate`, `up`, and `down` transposed. So a whole matrix, which a policy may
copy alone, is one contiguous run of bytes, and a slice of the expert's columns is three.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from sim.real.weights.forms import Form, pack
from sim.real.weights.latent import LatentLayer

if TYPE_CHECKING:
    from sim.profiles.models import Model
    from sim.real.devices.protocol import Device

TORCH_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def check_supported(model: Model, precision: str) -> None:
    """Raises BadInput naming what a real run cannot carry out, and a model that it can."""
    out = "; try --model cpu-small"
    if precision not in TORCH_TYPES:
        raise BadInput(f"--real, got --precision {precision}: real kernels here take {', '.join(TORCH_TYPES)}{out}")
    if model.encoder is not None:
        raise BadInput(f"--real, got --model {model.id}: an encoder is not carried out, only decoders are{out}")
    if model.other_attention or model.extra_params or model.host_params:
        raise BadInput(
            f"--real, got --model {model.id}: layers of other attention and parts beside them are not carried out{out}"
        )
    if model.matrices_per_expert != 3:
        raise BadInput(
            f"--real, got --model {model.id}: experts of {model.matrices_per_expert} matrices are not "
            f"carried out, only gated ones (3) are{out}"
        )


@dataclass
class DenseLayer:
    """One decoder layer but for its routed experts; matrices as torch's linear wants them."""

    norm1: Any
    q: Any  # of latent attention q, k and v are in `latent`
    k: Any
    v: Any
    o: Any
    norm2: Any
    gate: Any = None  # router [experts, hidden]
    ffn: Any = None  # dense FFN or shared experts, matrices as of an expert
    shared_gate: Any = None
    latent: LatentLayer | None = None


@dataclass
class Weights:
    """Everything a decoder computes with.

    `experts[layer][expert]` is uint8 host memory; `distinct` tells how many host buffers there are for all of them.
    """

    dtype: Any
    element_bytes: int
    embedding: Any
    head: Any
    final_norm: Any
    layers: list[DenseLayer]
    experts: list[list[Any]]
    rows: int  # of an expert: its intermediate size
    distinct: int
    norm_eps: float = 1e-5
    rope_theta: float = 1e6
    precision: str = "fp32"  # the serving one
    forms: dict[str, Form] = field(default_factory=dict)  # by precision

    def form(self, precision: str, device: Device) -> Form:
        """All experts in a precision, packed when first asked for. Raises BadInput for a precision there is not."""
        found = self.forms.get(precision)
        if found is None:
            hidden, n_rows = self.embedding.shape[1], 3 * self.rows
            buffers = list({raw.data_ptr(): raw for row in self.experts for raw in row}.values())
            if precision == self.precision:
                row_bytes = hidden * self.element_bytes
                found = Form(precision, row_bytes, hidden, self.dtype, buffers, None, self.dtype)
            else:
                found = pack(precision, buffers, self.dtype, hidden, n_rows, device)
            self.forms[precision] = found
        return found

    @property
    def hidden_size(self) -> int:
        """Values of a hidden row."""
        return int(self.embedding.shape[1])

    def matrices(self, layer: int, expert: int) -> Any:
        """An expert's matrices [3, intermediate, hidden] as they lie in host memory."""
        values = self.experts[layer][expert].view(self.dtype)
        return values[: 3 * self.rows * self.hidden_size].view(3, self.rows, self.hidden_size)

    def index(self, layer: int, expert: int) -> int:
        """Which of the distinct buffers holds an expert."""
        return (layer * len(self.experts[0]) + expert) % self.distinct

    def checksum(self, layer: int, expert: int) -> int:
        """CRC-32 of an expert as it lies in host memory."""
        return zlib.crc32(self.experts[layer][expert].numpy())

    def perturb(self, layer: int, expert: int) -> None:
        """Change one number of one expert: what is computed with it must change."""
        values = self.experts[layer][expert].view(self.dtype)
        values[7] = values[7] + 1.0
        self.forms.clear()
