"""What a routing trace may contain, versions 1 to 4: tensors, score codes, limits (the specification is FORMAT.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Array = NDArray[Any]

FORMAT: Final = "moe-routing"
VERSION: Final = "1"
VERSIONS: Final = ("1", "2", "3", "4")  # a writer states the lowest that suffices
SUFFIX: Final = ".safetensors"

MAX_HEADER_BYTES: Final = 8 * 1024 * 1024
MAX_LAYERS: Final = 1024
MAX_EXPERTS: Final = 4096
MAX_TEXT: Final = 65_536
REMEDY: Final = "see traces/FORMAT.md, write it again"
SPLITS: Final = ("store", "test")  # the value in `req_split` is the position here
DISTANCES: Final = (1, 2, 3)

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(code)
    for name, code in {
        "U8": "u1",
        "U16": "<u2",
        "I32": "<i4",
        "I64": "<i8",
        "F16": "<f2",
        "F32": "<f4",
        "F64": "<f8",
    }.items()
}


class Code(msgspec.Struct, frozen=True):
    """A way to store a score from [0, 1] as a small integer that decodes to an exact integer."""

    name: str
    dtype: str
    top: int  # the largest code
    power: int  # a code q decodes to q ** power
    bits: int = 0  # of a packed code: 6 (four in three bytes) or 4 (two in one); 0: one code per stored value

    @property
    def scale(self) -> int:
        """What a probability of 1 decodes to."""
        return int(self.top**self.power)

    def encode(self, scores: Array) -> Array:
        """Nearest codes of float scores in [0, 1] (same shape); values outside are clipped, the caller has checked.

        Rounding never reverses an order: a >= b gives code(a) >= code(b).
        """
        exact = np.clip(np.asarray(scores, np.float64), 0.0, 1.0)
        root = exact if self.power == 1 else np.sqrt(exact)
        return np.rint(root * self.top).astype(DTYPES[self.dtype])

    def decode(self, codes: Array, scale: int) -> Floats:
        """Integers held in float64; `scale`, a multiple of `self.scale`, is what 1 becomes."""
        whole = codes.astype(np.float64)
        if self.power == 2:
            whole *= whole
        if scale != self.scale:
            whole *= scale // self.scale
        return whole

    def width(self, n: int) -> int:
        """Stored values that hold n codes."""
        return -(-n * self.bits // 8) if self.bits else n

    def store(self, codes: Array) -> Array:
        """Codes (..., n) as they lie in the file, (..., width(n)): code i is the bits from `bits` * i of a row's bytes,
        lowest bit first; bits left over in the last byte are 0."""
        if not self.bits:
            return codes
        n, per = codes.shape[-1], 24 // self.bits  # codes in three bytes
        room = np.zeros((*codes.shape[:-1], -(-n // per) * per), np.uint32)
        room[..., :n] = codes
        word = room[..., 0::per].copy()
        for i in range(1, per):
            word |= room[..., i::per] << (self.bits * i)
        whole = np.stack([word, word >> 8, word >> 16], axis=-1).astype(np.uint8)
        return whole.reshape(*codes.shape[:-1], 3 * word.shape[-1])[..., : self.width(n)]

    def unstore(self, stored: Array, n: int) -> Array:
        """The n codes (..., n) of what `store` made; nothing happens to codes that are not packed."""
        if not self.bits:
            return stored
        per = 24 // self.bits
        room = np.zeros((*stored.shape[:-1], -(-n // per) * 3), np.uint32)
        room[..., : stored.shape[-1]] = stored
        word = room[..., 0::3] | room[..., 1::3] << 8 | room[..., 2::3] << 16
        parts = np.stack([word >> (self.bits * i) for i in range(per)], axis=-1) & self.top
        return parts.astype(np.uint8).reshape(*stored.shape[:-1], per * word.shape[-1])[..., :n]

    def max_error(self, score: float = 1.0) -> float:
        """Largest |decoded / scale - score| of any score up to `score`: half a step, wider where codes are squares."""
        if self.power == 1:
            return 0.5 / self.top
        return math.sqrt(score) / self.top + 0.25 / self.scale


U16_LINEAR: Final = Code("u16_linear", "U16", 4095, 1)
U8_SQUARE: Final = Code("u8_square", "U8", 255, 2)
U6_SQUARE: Final = Code("u6_square", "U8", 63, 2, bits=6)
U4_SQUARE: Final = Code("u4_square", "U8", 15, 2, bits=4)
CODES: Final = {code.name: code for code in (U16_LINEAR, U8_SQUARE, U6_SQUARE, U4_SQUARE)}


def common_scale(codes: Iterable[Code]) -> int:
    """The scale all score tensors of one trace decode to: the least common multiple, 4095 when there are none."""
    return math.lcm(*(code.scale for code in codes)) if (codes := list(codes)) else U16_LINEAR.scale


class Spec(msgspec.Struct, frozen=True):
    """One tensor the format knows: its data types and its dimensions by letter.

    T rows of the trace, R rows stored (T, or the decode rows), L MoE layers, E experts, K experts per token,
    M entries of a sparse list, N requests; H, G and V (embedding, gate input, vocabulary) are whatever the file has.
    `L-2` and `N+1` mean what they say.
    """

    dtypes: tuple[str, ...]
    dims: tuple[str, ...]

    @property
    def scored(self) -> bool:
        """Whether the tensor holds codes, so that its metadata names one of `CODES`."""
        return self.dtypes == ("U16", "U8")

    @property
    def by_row(self) -> bool:
        """Whether the first dimension is rows, so that the writer takes it chunk by chunk."""
        return self.dims[0] in ("T", "R")


_CODE_TYPES = ("U16", "U8")
TENSORS: Final[dict[str, Spec]] = {
    "experts": Spec(("U8", "U16"), ("T", "L", "K")),
    "weights": Spec(("F16",), ("R", "L", "K")),
    "scores": Spec(_CODE_TYPES, ("R", "L", "E")),
    "next_scores_1": Spec(_CODE_TYPES, ("R", "L", "E")),
    "next_scores_2": Spec(_CODE_TYPES, ("R", "L-2", "E")),
    "next_scores_3": Spec(_CODE_TYPES, ("R", "L-3", "E")),
    "next_scores_2.ids": Spec(("U8", "U16"), ("R", "L-2", "M")),
    "next_scores_3.ids": Spec(("U8", "U16"), ("R", "L-3", "M")),
    "shared_scores": Spec(_CODE_TYPES, ("R", "L-1", "E")),
    "shared_scores.ids": Spec(("U8", "U16"), ("R", "L-1", "M")),
    "gate_inputs": Spec(("F16",), ("R", "L", "G")),
    "gate_input_norms": Spec(("F32",), ("R", "L")),
    "embeddings": Spec(("F16",), ("R", "H")),
    "embedding_table": Spec(("F16",), ("V", "H")),
    "token_ids": Spec(("I32",), ("T",)),
    "iterations": Spec(("I32",), ("T",)),
    "req_offsets": Spec(("I64",), ("N+1",)),
    "req_prompt_len": Spec(("I64",), ("N",)),
    "req_split": Spec(("U8",), ("N",)),
    "req_task": Spec(("U16",), ("N",)),
    "req_arrival_s": Spec(("F64",), ("N",)),
}
REQUIRED_TENSORS: Final = ("experts", "req_offsets", "req_prompt_len", "req_split")
SPARSE: Final = ("next_scores_2", "next_scores_3", "shared_scores")

# Level name, as `Trace.levels` and a policy's needs speak of it -> the alternative sets of tensors that provide it.
LEVELS: Final[dict[str, tuple[frozenset[str], ...]]] = {
    **{
        name: (frozenset({name}),)
        for name, spec in TENSORS.items()
        if spec.by_row and not name.endswith(".ids") and name != "embeddings"
    },
    "embeddings": (frozenset({"embeddings"}), frozenset({"embedding_table", "token_ids"})),
    "tasks": (frozenset({"req_task"}),),
    "arrivals": (frozenset({"req_arrival_s"}),),
}


def expert_dtype(n_experts: int) -> str:
    """The narrowest type for expert ids, which the writer uses."""
    return "U8" if n_experts <= 256 else "U16"
