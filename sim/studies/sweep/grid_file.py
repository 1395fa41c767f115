"""A grid as a YAML file: `grid:` is one product, `list:` holds blocks of their own, explicit points among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from sim.base.errors import BadInput
from sim.base.files import MAX_YAML_BYTES, compose_yaml, parse_yaml, read_text, to_struct
from sim.profiles.overrides import GROUPS
from sim.studies.sweep.grid import Block, PolicyAxis, policy_of
from sim.studies.sweep.values import AXES, Range, of_data
from sim.workload.slo import slo_of

One = bool | int | float | str | Range | None
Several = bool | int | float | str | Range | list[One] | None


class OnePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`{name: lcp, set: {rho: [0.5, 0.9]}}`."""

    name: str
    set: dict[str, Several] = {}


class Written(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One block: the fields of a run's configuration, each with one value or several."""

    policy: str | OnePolicy | list[str | OnePolicy] = msgspec.field(default_factory=list)
    set: dict[str, Several] = {}
    hw: Several | msgspec.UnsetType = msgspec.UNSET
    model: Several | msgspec.UnsetType = msgspec.UNSET
    trace: Several | msgspec.UnsetType = msgspec.UNSET
    precision: Several | msgspec.UnsetType = msgspec.UNSET
    stack: Several | msgspec.UnsetType = msgspec.UNSET
    arrivals: Several | msgspec.UnsetType = msgspec.UNSET
    rate_scale: Several | msgspec.UnsetType = msgspec.UNSET
    scheduler: Several | msgspec.UnsetType = msgspec.UNSET
    batching: Several | msgspec.UnsetType = msgspec.UNSET
    prefill_chunk: Several | msgspec.UnsetType = msgspec.UNSET
    draft: Several | msgspec.UnsetType = msgspec.UNSET
    split: Several | msgspec.UnsetType = msgspec.UNSET
    link: Several | msgspec.UnsetType = msgspec.UNSET
    hit_definition: Several | msgspec.UnsetType = msgspec.UNSET
    predictor: Several | msgspec.UnsetType = msgspec.UNSET
    gpus: Several | msgspec.UnsetType = msgspec.UNSET
    peer: Several | msgspec.UnsetType = msgspec.UNSET
    dense: Several | msgspec.UnsetType = msgspec.UNSET
    placement: Several | msgspec.UnsetType = msgspec.UNSET
    host_links: Several | msgspec.UnsetType = msgspec.UNSET
    host_memory_bytes: Several | msgspec.UnsetType = msgspec.UNSET
    nvme: Several | msgspec.UnsetType = msgspec.UNSET
    ram_policy: Several | msgspec.UnsetType = msgspec.UNSET
    kv_memory_bytes: Several | msgspec.UnsetType = msgspec.UNSET
    kv_page: Several | msgspec.UnsetType = msgspec.UNSET
    preempt: Several | msgspec.UnsetType = msgspec.UNSET
    replicas: Several | msgspec.UnsetType = msgspec.UNSET
    router: Several | msgspec.UnsetType = msgspec.UNSET
    batch: Several | msgspec.UnsetType = msgspec.UNSET
    requests: Several | msgspec.UnsetType = msgspec.UNSET
    seed: Several | msgspec.UnsetType = msgspec.UNSET
    experts: Several | msgspec.UnsetType = msgspec.UNSET
    cache_frac: Several | msgspec.UnsetType = msgspec.UNSET
    vram_bytes: Several | msgspec.UnsetType = msgspec.UNSET
    expert_cache_bytes: Several | msgspec.UnsetType = msgspec.UNSET
    engine: Several | msgspec.UnsetType = msgspec.UNSET
    contention: Several | msgspec.UnsetType = msgspec.UNSET
    energy: Several | msgspec.UnsetType = msgspec.UNSET
    slo: str | dict[str, dict[str, int | float | str]] = {}

    def block(self, what: str) -> Block:
        """Its axes. Raises BadInput."""
        asked = self.policy if isinstance(self.policy, list) else [self.policy]
        policies = [axis for one in asked for axis in _axes_of(one, what)]
        fields = {name: value for name in AXES if (value := getattr(self, name)) is not msgspec.UNSET}
        axes = {name: of_data(value, name, f"{what}.{name}") for name, value in fields.items()}
        for key in self.set:
            if key.partition(".")[0] not in GROUPS or "." not in key:
                raise BadInput(
                    f"{what}.set, got {key!r}: it takes hw.*, model.* and stack.*; a policy's own parameters stand "
                    f"behind its name, policy: 'NAME {key}=...'"
                )
        sets = {key: of_data(value, "", f"{what}.set.{key}") for key, value in self.set.items()}
        return Block(policies, axes, sets, slo_of(self.slo, f"{what}.slo") if self.slo else {})


class GridFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `--grid FILE` reads."""

    grid: Written | None = None
    blocks: list[Written] = msgspec.field(name="list", default_factory=list)


def _axes_of(one: str | OnePolicy, what: str) -> list[PolicyAxis]:
    if isinstance(one, str):
        return policy_of(one)
    params = {key: of_data(value, "", f"{what}.policy {one.name}.{key}") for key, value in one.set.items()}
    return [PolicyAxis(one.name, params)]


def read_grid(path: Path) -> list[Block]:
    """The blocks of a file.

    Raises:
        BadInput: naming file and field.
    """
    text = read_text(path, MAX_YAML_BYTES)
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise BadInput(
            f"{path}, got {type(data).__name__}: a grid file is a mapping with `grid:` or `list:`; see docs/sweep.md"
        )
    _no_base_60(text, path)
    found = to_struct(data, GridFile, str(path))
    blocks = [] if found.grid is None else [found.grid.block(f"{path}: grid")]
    blocks += [block.block(f"{path}: list[{at}]") for at, block in enumerate(found.blocks)]
    if not blocks:
        raise BadInput(f"{path}: neither `grid:` nor `list:` holds anything; see docs/sweep.md")
    return blocks


def _no_base_60(text: str, path: Path) -> None:
    """Refuse `1:8` without quotes: YAML 1.1 takes it for 68, a number of base 60, where a range was meant."""
    waiting: list[Any] = [compose_yaml(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.ScalarNode):
            if not node.style and ":" in node.value and node.tag.endswith((":int", ":float")):
                raise BadInput(
                    f"{path} line {node.start_mark.line + 1}: {node.value} is one number to YAML, of base 60; quote "
                    f"the range, '{node.value}', or write {{from: ..., to: ..., step: ...}}"
                )
        elif isinstance(node, yaml.MappingNode):
            waiting += [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
