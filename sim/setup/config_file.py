"""A run's configuration as a file: what `--out` saves and `--config` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from sim.base.errors import BadInput
from sim.base.files import read_yaml
from sim.base.yaml_rules import FLOAT
from sim.options import OPTIONS, RunSpec, spec_of


def read_spec(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a saved configuration, and what its names meant when it was saved (informative only).

    Raises:
        BadInput: naming file and field.
    """
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise BadInput(f"{path}, got {type(data).__name__}: a configuration is a mapping; save one with --out")
    resolved = data.pop("resolved", None)
    fields = OPTIONS.values(data, str(path))
    spec_of({"policy": "x", "hw": "x", **fields}, str(path))
    return fields, resolved if isinstance(resolved, dict) else {}


class _Dumper(yaml.SafeDumper):
    """Quotes text that our reader, with YAML 1.2 numbers, would take for a number (`5e10`)."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", *FLOAT)


def dump_spec(spec: RunSpec, resolved: dict[str, Any]) -> str:
    """The specification as YAML that `read_spec` reads back to the same values, with the `resolved` block."""
    fields = msgspec.to_builtins(spec)
    named = {row.key: fields[row.field] for row in OPTIONS.rows}
    return yaml.dump({**named, "resolved": resolved}, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
