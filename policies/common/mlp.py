"""A trained multi-layer perceptron in integers: the same answer on every machine, whatever order it adds in.

Products of integer weights and integer activations are summed in floats that hold every partial sum exactly, so a
matrix product has no rounding to depend on; what follows is element by element (IEEE 754 multiply, add, rint).

A layer's file tensors: `weight.I` [out, in], int8 or int16; `scale.I` and `bias.I` [out], float64. From activations x
it makes rint((weight @ x) * scale + bias); clipping that to 0 and what the next layer takes is the ReLU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.policy import BadInput, replacing

Floats = NDArray[np.float64]

MAX_FILE_BYTES = 256 * 1024 * 1024
BLOCK = 1024  # inputs summed in float32: 1024 x 127 x 127 < 2**24
LIMITS = {"int8": 127, "int16": 32767}  # largest activation that weights of a type are multiplied with


@dataclass(frozen=True)
class Dense:
    """One fully connected layer with its normalisation folded in."""

    stored: NDArray[Any]  # [out, in], int8 or int16
    scale: Floats
    bias: Floats

    @property
    def limit(self) -> int:
        """The largest activation that its weights are multiplied with."""
        return LIMITS[str(self.stored.dtype)]

    @cached_property
    def weight(self) -> NDArray[Any]:
        """[in, out], integers in floats that hold every sum: float32 for int8, float64 for int16."""
        exact = np.float32 if self.stored.dtype == np.int8 else np.float64
        return np.ascontiguousarray(self.stored.T.astype(exact))

    def product(self, x: Floats) -> Floats:
        """x [n, in] @ weight, exactly."""
        if self.weight.dtype == np.float64:
            return np.asarray(x @ self.weight)  # 2**16 inputs x 32767 x 32767 < 2**53
        small = x.astype(np.float32)
        parts = [small[:, at : at + BLOCK] @ self.weight[at : at + BLOCK] for at in range(0, small.shape[1], BLOCK)]
        return np.asarray(sum(part.astype(np.float64) for part in parts))


class IntMlp:
    """Fully connected layers with ReLU between them, in integers."""

    def __init__(self, layers: Sequence[Dense]) -> None:
        self.layers = list(layers)

    def scores(self, x: Floats) -> Floats:
        """Integer scores [n, out] of integer inputs [n, in]; a larger score is a larger probability."""
        for layer, following in zip(self.layers, [*self.layers[1:], None], strict=True):
            y = np.rint(layer.product(x) * layer.scale + layer.bias)
            if following is None:
                break
            x = np.clip(y, 0.0, following.limit)
        return y


def best(scores: Floats, k: int) -> NDArray[np.int64]:
    """Positions of the k largest along the last axis, largest first, ties to the lowest."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def save(path: Path, layers: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
    """Write tensors and facts as one safetensors file, whole or not at all; the same input gives the same bytes."""
    from safetensors.numpy import save_file

    whole = {name: np.ascontiguousarray(layers[name]) for name in sorted(layers)}
    with replacing(path) as part:
        save_file(whole, part, {"facts": json.dumps(dict(facts))})


def load(path: Path, only: Container[str] | None = None) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Tensors and facts of a file that `save` wrote.

    Args:
        only: the tensors that are read, of those that there are; None: all.

    Raises:
        BadInput: unreadable, too large, or not such a file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise BadInput(f"{path}, got {size_bytes} bytes: at most {MAX_FILE_BYTES} are read; is it a predictor?")
        with safe_open(str(path), framework="numpy") as file:
            facts = json.loads((file.metadata() or {}).get("facts", "null"))
            named = [name for name in file.keys() if only is None or name in only]  # noqa: SIM118 - not a mapping
            tensors = {name: file.get_tensor(name) for name in named}
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}; check the path") from None
    except (SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise BadInput(f"{path}: not a trained predictor ({str(error)[:80]}); train it again") from None
    if not isinstance(facts, dict):
        raise BadInput(f"{path}: it carries no facts about its training; train it with `moesim train`")
    return tensors, facts


def mlp_of(tensors: Mapping[str, NDArray[Any]], n_in: int, n_out: int, path: Path) -> IntMlp:
    """The layers among a file's tensors.

    Raises:
        BadInput: a type, shape or value that does not fit together, naming the tensor.
    """
    layers: list[Dense] = []
    width = n_in
    while f"weight.{len(layers)}" in tensors:
        at = len(layers)
        weight = tensors[f"weight.{at}"]
        scale, bias = (tensors.get(f"{name}.{at}", np.zeros(0)) for name in ("scale", "bias"))
        fits = weight.ndim == 2 and weight.shape[1] == width and width <= 2**16
        if str(weight.dtype) not in LIMITS or not fits or scale.shape != bias.shape or scale.shape != weight.shape[:1]:
            raise BadInput(
                f"{path}: weight.{at}, got {weight.dtype} {weight.shape}: int8 or int16 of {width} inputs, "
                "with a scale and a bias per output; train it again"
            )
        if not (np.isfinite(scale).all() and np.isfinite(bias).all()):
            raise BadInput(f"{path}: scale.{at} or bias.{at}: not finite; train it again")
        kind = str(weight.dtype)
        # The most negative int8 and int16 would break the bounds that exactness rests on.
        if int(weight.min(initial=0)) < -LIMITS[kind]:
            raise BadInput(f"{path}: weight.{at}: values lie in [-{LIMITS[kind]}, {LIMITS[kind]}]; train it again")
        layers.append(Dense(weight, scale.astype(np.float64), bias.astype(np.float64)))
        width = weight.shape[0]
    if not layers or width != n_out:
        raise BadInput(
            f"{path}: its {len(layers)} layers end in {width} outputs, the model has {n_out} experts; "
            "train one for this model"
        )
    return IntMlp(layers)


def quantised(weight: Floats, bias: Floats, in_step: float, out_step: float, kind: str) -> dict[str, NDArray[Any]]:
    """A layer in integers: `weight` [out, in] and `bias` [out] act on values; an activation of 1 stands for a step.

    Args:
        in_step, out_step: the value an input or output integer of 1 stands for. kind: int8 or int16.
    """
    largest = np.abs(weight).max(axis=1)
    step = np.where(largest > 0, largest, 1.0) / LIMITS[kind]
    whole = np.rint(weight / step[:, None]).astype(kind)
    return {"weight": whole, "scale": step * in_step / out_step, "bias": bias / out_step}


def step_for(values: Floats, limit: int) -> float:
    """The step at which integers up to `limit` reach all but the largest 0.1 % of the values."""
    top = float(np.quantile(values, 0.999)) if values.size else 0.0
    return (top if top > 0 and math.isfinite(top) else 1.0) / limit
