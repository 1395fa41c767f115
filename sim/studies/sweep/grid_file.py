"""A grid as a YAML file: `grid:` is one product, `list:` holds blocks of their own, explicit points among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sim.base.errors import BadInput
from sim.base.files import read_yaml, to_struct
from sim.options import OPTIONS
from sim.studies.sweep.grid import Block, PolicyAxis, block_of, policy_of
from sim.studies.sweep.values import FREE, Range, kind_of, of_data
from sim.workload.slo import slo_of

One = bool | int | float | str | Range | None
Several = bool | int | float | str | Range | list[One] | None


_SEVERAL: Any = Several  # a union, which `type` is not


class OnePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`{name: lcp, set: {rho: [0.5, 0.9]}}`."""

    name: str
    set: dict[str, Several] = {}


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """One block: options of a run by the names that a configuration has, each with one value or several."""

    policy: str | OnePolicy | list[str | OnePolicy] = msgspec.field(default_factory=list)
    set: dict[str, Several] = {}
    slo: str | dict[str, dict[str, int | float | str]] = {}
    axes: dict[str, Any] = {}

    def block(self, what: str) -> Block:
        """Its axes. Raises BadInput."""
        asked = self.policy if isinstance(self.policy, list) else [self.policy]
        policies = [axis for one in asked for axis in _axes_of(one, what)]
        axes: dict[str, Any] = {}
        for name, value in self.axes.items():
            row = OPTIONS.row(name, what)
            axes[row.field] = of_data(value, row.kind, f"{what}.{name}")
        bare = next((key for key in self.set if "." not in key), None)
        if bare is not None:
            raise BadInput(
                f"{what}.set, got {bare!r}: it takes hw.*, model.*, engine.* and dotted names of options; a policy's "
                f"own parameters stand behind its name, policy: 'NAME {bare}=...'"
            )
        sets = {key: of_data(value, kind_of(key), f"{what}.set.{key}") for key, value in self.set.items()}
        return block_of(policies, axes, sets, slo_of(self.slo, f"{what}.slo") if self.slo else {}, f"{what}.set")


def gathered(data: Any, what: str, own: tuple[str, ...] = ()) -> Any:
    """A block as `Written` has it: options of a run go under `axes`. Raises BadInput for a name that is none.

    Args:
        own: further keys that such a block has.
    """
    if not isinstance(data, dict):
        return data  # the conversion says so
    axes: dict[str, Any] = {}
    for name in [name for name in data if name not in ("policy", "set", "slo", *own)]:
        if not isinstance(name, str) or not OPTIONS.row(name, what).axis:
            raise BadInput(f"{what}, got {name!r}: it is no axis; correct it")
        axes[name] = to_struct(data[name], _SEVERAL, f"{what}.{name}")
    return {name: value for name, value in data.items() if name not in axes} | {"axes": axes}


class GridFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `--grid FILE` reads."""

    grid: Written | None = None
    blocks: list[Written] = msgspec.field(name="list", default_factory=list)


def _axes_of(one: str | OnePolicy, what: str) -> list[PolicyAxis]:
    if isinstance(one, str):
        return policy_of(one)
    params = {key: of_data(value, FREE, f"{what}.policy {one.name}.{key}") for key, value in one.set.items()}
    return [PolicyAxis(one.name, params)]


def read_grid(path: Path) -> list[Block]:
    """The blocks of a file.

    Raises:
        BadInput: naming file and field.
    """
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise BadInput(
            f"{path}, got {type(data).__name__}: a grid file is a mapping with `grid:` or `list:`; see docs/sweep.md"
        )
    if "grid" in data:
        data["grid"] = gathered(data["grid"], f"{path}: grid")
    if isinstance(data.get("list"), list):
        data["list"] = [gathered(one, f"{path}: list[{at}]") for at, one in enumerate(data["list"])]
    found = to_struct(data, GridFile, str(path))
    blocks = [] if found.grid is None else [found.grid.block(f"{path}: grid")]
    blocks += [block.block(f"{path}: list[{at}]") for at, block in enumerate(found.blocks)]
    if not blocks:
        raise BadInput(f"{path}: neither `grid:` nor `list:` holds anything; see docs/sweep.md")
    return blocks
