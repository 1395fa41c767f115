"""Write the `index.json` of each folder of data (`sim.base.index`): python tools/index.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.base.files import bundled, read_yaml
from sim.base.index import NAME, digest, written
from sim.profiles.find import names_in
from sim.profiles.models import load_model
from traces.synth import fitted

PACKAGES = ("hwprofiles.cpus", "hwprofiles.gpus", "hwprofiles.models", "hwprofiles.stacks", "traces.profiles")


def indexed(package: str) -> dict[str, dict[str, Any]]:
    """What is asked of every file of a package, from the files themselves."""
    found: dict[str, dict[str, Any]] = {}
    for stem, file in bundled(package, ".yaml").items():
        facts: dict[str, Any] = {"sha256": digest(file)}
        if package == "traces.profiles":
            facts["shape"] = list(fitted.load(stem).shape)
        else:
            facts["names"] = names_in(file)
            facts["data"] = read_yaml(file)
        if package == "hwprofiles.models":
            model = load_model(stem)
            facts["shape"] = [model.n_moe_layers, model.n_experts, model.top_k]
        found[stem] = facts
    return found


def text_of(package: str) -> str:
    """The index of a package, a line per file."""
    return written(indexed(package))


def path_of(package: str) -> Path:
    """Where it lies."""
    return Path(*package.split(".")).resolve() / NAME


if __name__ == "__main__":
    for each in PACKAGES:
        path_of(each).write_text(text_of(each), encoding="utf-8", newline="\n")
