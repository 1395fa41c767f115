"""Fields that are shown and never computed with: setting one would change nothing, so `--set` refuses it."""

from __future__ import annotations

from collections.abc import Iterable

from sim.base.errors import BadInput

_NAMES = dict.fromkeys(
    ("id", "name", "aliases", "note", "sources", "schema"),
    "what was set is in every result; a file of your own has its own, see docs/profiles.md",
)
_CPU = "set hw.cpu.memory_bandwidth_bytes_per_s and hw.cpu.flops_per_s, which are of all cores"
_LINK = "set hw.h2d.bandwidth_bytes_per_s (and hw.d2h.bandwidth_bytes_per_s), or name a link: --pcie gen5x16"

ONLY_SHOWN: dict[str, dict[str, str]] = {
    "hw": {
        **_NAMES,
        "gpu.link": _LINK,
        "gpu.n_sms": "set hw.gpu.flops_per_s.bf16 and hw.gpu.memory_bandwidth_bytes_per_s, which are of the whole GPU",
        "gpu.l2_bytes": "set hw.gpu.memory_bandwidth_bytes_per_s, which is effective, caches included",
        "cpu.n_cores": _CPU,
        **{f"cpu.{name}": "set hw.cpu=ID for another CPU" for name in ("id", "name", "note")},
    },
    "engine": _NAMES,
    "model": {
        **{key: text for key, text in _NAMES.items() if key != "sources"},
        **dict.fromkeys(("hf_id", "source"), _NAMES["name"]),
        "published": "sizes follow from the geometry: set model.expert_intermediate_size and the like",
        "activation": "set model.matrices_per_expert, which decides an expert's size",
        "gate.order": "set model.gate.score and model.gate.renormalised",
    },
}
"""Group -> path (whatever lies under it too) -> the figure that matters."""


def refuse_labels(group: str, paths: Iterable[tuple[str, object]]) -> None:
    """Raises BadInput for the first of these (path, value) that no figure of a run depends on."""
    for path, value in paths:
        for label, way_out in ONLY_SHOWN[group].items():
            if path == label or path.startswith(f"{label}."):
                raise BadInput(f"--set {group}.{path}, got {value!r}: it is only shown, never computed with; {way_out}")
