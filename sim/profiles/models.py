"""MoE models as data: one YAML file per model under `hwprofiles/models`, or a Hugging Face `config.json`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from sim.base.errors import BadInput
from sim.base.files import bundled
from sim.profiles import find as profiles
from sim.profiles import overrides as sets
from sim.profiles.geometry import Geometry
from sim.profiles.precisions import BITS_PER_PARAM

PACKAGE = "hwprofiles.models"


class ModelGate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a router turns logits into experts and weights."""

    score: Literal["softmax", "sigmoid", "sparsemixer", "sqrtsoftplus"]
    renormalised: bool  # the weights of the selected experts are scaled to sum to 1
    order: str = ""  # the exact sequence of steps, in words
    scale: float = 1.0  # factor on the weights (DeepSeek's routed_scaling_factor)
    n_groups: int = 1
    top_groups: int = 1
    selection_bias: bool = False  # a learnt bias that changes the selection but not the weights
    applied_to: Literal["output", "input"] = "output"


class PublishedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A released file, to hold the bytes of a precision against."""

    precision: str
    bytes: float
    source: str


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the authors print, to hold the geometry against."""

    total_params: float | None = None
    active_params: float | None = None
    active_counts: Literal["all", "head", "none"] = "all"  # see `Geometry.active_params`
    source: str = ""
    note: str = ""
    files: tuple[PublishedFile, ...] = ()


class Model(Geometry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model: identity, geometry (see `Geometry` for the arithmetic), gate, and published sizes."""

    schema: Literal[1]
    id: str
    name: str
    source: str
    gate: ModelGate
    hf_id: str = ""
    aliases: tuple[str, ...] = ()
    architecture: str = ""  # `model_type` of a config.json: tells the family of a checkpoint whose name does not
    native_precision: str = "bf16"  # of the released experts
    published: Published = Published()
    note: str = ""

    @property
    def without_newer(self) -> dict[str, Any]:
        """Its fields, less those that models did not always have where they say nothing, and less released files and
        the architecture, which decide nothing beside the trace: a run keeps its `run_id`.
        """
        fields: dict[str, Any] = msgspec.to_builtins(self)
        for name in ("other_attention", "window", "extra_params", "host_params", "formats"):
            if not getattr(self, name):
                del fields[name]
        del fields["published"]["files"], fields["architecture"]
        return fields


def model_names() -> dict[str, Path]:
    """Bundled model ids and their files, sorted."""
    return bundled(PACKAGE, ".yaml")


def load_model(name_or_path: str | os.PathLike[str], overrides: Mapping[str, object] | None = None) -> Model:
    """Load a bundled model by id or alias, an own YAML file, or a Hugging Face `config.json` (or its folder).

    Args:
        overrides: dotted field -> value, as `--set model.top_k=4` gives them.

    Raises:
        BadInput: unknown name, unreadable or malformed file, a geometry that contradicts itself.
    """
    path = profiles.find(PACKAGE, "model", str(name_or_path))
    data = profiles.read(path, "model")
    if path.suffix == ".json" or "model_type" in data:
        from sim.profiles.model_hf import from_hf_config

        data = from_hf_config(data, str(path))
    data = sets.apply(data, overrides or {}, Model, "model")
    where = profiles.where(path, overrides)
    model = profiles.convert(data, Model, where)
    _check(model, where)
    return model


def _figures(model: Model) -> Iterator[tuple[str, float]]:
    """Figures that are no part of a geometry, by name."""
    yield "gate.scale", model.gate.scale
    for name in ("total_params", "active_params"):
        figure = getattr(model.published, name)
        if figure is not None:
            yield f"published.{name}", figure
    for at, file in enumerate(model.published.files):
        yield f"published.files[{at}].bytes", file.bytes


def _check(model: Model, where: str) -> None:
    def require(holds: bool, what: str, rule: str) -> None:
        if not holds:
            raise BadInput(f"{where}: {what}: {rule}")

    require(bool(model.id.strip()), f"id, got {model.id!r}", "results are told apart by it; write a word")
    require(
        model.top_k <= model.n_experts,
        f"top_k, got {model.top_k}",
        f"a token cannot use more than the {model.n_experts} experts of a layer; lower it",
    )
    for what, figure in _figures(model):
        # What is held against a figure is divided by it.
        require(0.0 < figure < math.inf, f"{what}, got {figure:g}", "a finite number above 0; correct it")
    _check_layers(model.dense_layers, model.n_layers, "dense_layers", require)
    if model.encoder is not None:
        _check_layers(model.encoder.dense_layers, model.encoder.n_layers, "encoder.dense_layers", require)
    n_dense = len(model.dense_layers) + (len(model.encoder.dense_layers) if model.encoder else 0)
    require(
        n_dense == 0 or model.dense_intermediate_size > 0,
        "dense_intermediate_size, got 0",
        f"{n_dense} layers are dense; give the width of their FFN",
    )
    require(
        (model.n_shared_experts > 0) == (model.shared_intermediate_size > 0),
        f"shared_intermediate_size, got {model.shared_intermediate_size}",
        f"n_shared_experts is {model.n_shared_experts}; give both, or neither",
    )
    require(
        (model.attention == "mla") == (model.mla is not None),
        f"mla, got {'nothing' if model.mla is None else 'a block'}",
        f"attention is {model.attention!r}; the block belongs to attention: mla, and only there",
    )
    require(
        model.n_heads % model.n_kv_heads == 0,
        f"n_kv_heads, got {model.n_kv_heads}",
        f"must divide n_heads, {model.n_heads}; correct one of the two",
    )
    named = [("native_precision", model.native_precision)]
    named += [("published.files", file.precision) for file in model.published.files]
    for stored in model.formats:
        named += [("formats.precision", stored.precision), ("formats.dense", stored.dense)]
        named += [("formats.embedding", stored.embedding)] if stored.embedding else []
        named += [("formats.tables", stored.tables)] if stored.tables else []
    for field, precision in named:
        require(precision in BITS_PER_PARAM, f"{field}, got {precision!r}", "known: " + ", ".join(BITS_PER_PARAM))
    others = tuple(layer for other in model.other_attention for layer in other.layers)
    _check_layers(others, model.n_layers, "other_attention.layers", require)
    if model.window is not None:
        _check_layers(model.window.layers, model.n_layers, "window.layers", require)


def _check_layers(dense: tuple[int, ...], n_layers: int, field: str, require: Any) -> None:
    require(
        len(set(dense)) == len(dense) and all(layer < n_layers for layer in dense),
        f"{field}, got {list(dense)}",
        f"distinct layer numbers below {n_layers}; correct the list",
    )
    require(len(dense) < n_layers or field != "dense_layers", field, "at least one layer must hold experts; shorten it")
