"""A user's own placement: which GPU each expert lives on, from a YAML or JSON file.

experts: [0, 0, 0, 1, 1, 1, 2, 2]   # of every layer, unless it has a line of its own
layers:
  3: [0, 1, 2, 0, 1, 2, 0, 1]       # MoE layers count from 0
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from sim.base.errors import BadInput
from sim.base.files import read_yaml, to_struct


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file as it is written: GPUs by expert, of every layer or of one."""

    experts: list[int] | None = None
    layers: dict[int, list[int]] = {}


def _number(key: object) -> object:
    """A layer's number, where it is written as a word: JSON has no other keys."""
    return int(key) if isinstance(key, str) and re.fullmatch("-?(0|[1-9][0-9]{0,8})", key) else key


def read_placement(path: Path, n_layers: int, n_experts: int, n_gpus: int) -> tuple[int, ...]:
    """The GPU of each expert, layer by layer.

    Raises:
        BadInput: no such file, a layer without a line, a line of another length, or a GPU that there is not.
    """
    found = read_yaml(path)
    if isinstance(found, dict) and isinstance(layers := found.get("layers"), dict):
        found["layers"] = {_number(key): row for key, row in layers.items()}
        if len(found["layers"]) < len(layers):
            raise BadInput(f"{path}: layers, got one of them twice, as a number and as a word; keep one")
    placement = to_struct(found, Placement, str(path))
    for layer in placement.layers:
        if not 0 <= layer < n_layers:
            raise BadInput(f"{path}: layers, got {layer}: the model has MoE layers 0 to {n_layers - 1}; correct it")
    homes: list[int] = []
    for layer in range(n_layers):
        row = placement.layers.get(layer, placement.experts)
        where = f"{path}: layers.{layer}" if layer in placement.layers else f"{path}: experts"
        if row is None:
            raise BadInput(f"{path}: layers, got none for layer {layer}: give it, or `experts` for all that have none")
        if len(row) != n_experts:
            raise BadInput(f"{where}, got {len(row)} GPUs: one for each of the {n_experts} experts of a layer")
        for expert, gpu in enumerate(row):
            if not 0 <= gpu < n_gpus:
                raise BadInput(f"{where}[{expert}], got {gpu}: GPUs are 0 to {n_gpus - 1}; correct it, or --gpus")
        homes += row
    return tuple(homes)
