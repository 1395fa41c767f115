"""`--set`: where a key goes, what a value is, and what is refused."""

from __future__ import annotations

import pytest

from sim.base.errors import BadInput
from sim.base.quantities import USER_REF
from sim.options import RunSpec
from sim.profiles.hardware import Hardware, load_hardware
from sim.profiles.overrides import Overrides, apply, grouped, parse_set
from sim.run import prepare


def grouped_of(items: list[str]) -> Overrides:
    return grouped(parse_set(items))


def test_keys_find_their_group() -> None:
    found = grouped_of(
        [
            "hw.h2d.bandwidth_bytes_per_s=5e10",
            "model.top_k=2",
            "engine.per_layer_s=1e-3",
            "distance=3",
            "fine_moe.distance=4",
            "fine_moe.store.size=9",
        ]
    )
    assert found == Overrides(
        hw={"h2d.bandwidth_bytes_per_s": 5e10},
        model={"top_k": 2},
        engine={"per_layer_s": 1e-3},
        policy={"distance": 3},
        policies={"fine_moe": {"distance": 4, "store.size": 9}},
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("5e10", 5e10),
        ("5.0e10", 5e10),
        ("50e9", 5e10),
        ("true", True),
        ("paper", "paper"),
        ("[1, 2]", [1, 2]),
        ("{value: 5e10, source: measured}", {"value": 5e10, "source": "measured"}),
        ("", None),
        ("a=b", "a=b"),
        ("'3'", "3"),
        ("1e-5", 1e-5),
    ],
)
def test_values_are_yaml(text: str, value: object) -> None:
    parsed = parse_set([f"key={text}"])["key"]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["distance"], r"--set, got 'distance': not NAME=VALUE; write e\.g\. --set hw\.h2d\.latency_s=1e-5"),
        (["=3"], r"--set, got '=3': not NAME=VALUE"),
        (["hw.=3"], r"not NAME=VALUE"),
        (["hw..x=3"], r"not NAME=VALUE"),
        (["my key=3"], r"--set, got name 'my key': a name has no spaces"),
        (["x=[1"], r"--set x line 1"),
        (["x=*a"], r"--set x.*"),
        (["x=1", "x=2"], r"--set x, got it twice: one value each; keep one of them"),
        (["hw.a=1", "hw.a=2"], r"--set hw\.a, got it twice"),
    ],
)
def test_malformed_items_are_refused(items: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        parse_set(items)
    assert "\n" not in str(error.value)


def test_apply_leaves_the_original_alone() -> None:
    data = {"h2d": {"latency_s": {"value": 1e-5, "source": "measured", "low": 1e-6}}}
    changed = apply(data, {"h2d.latency_s": 2e-5}, Hardware, "hw")
    assert changed["h2d"]["latency_s"] == {"value": 2e-5, "source": "assumed", "ref": USER_REF}
    assert data["h2d"]["latency_s"]["source"] == "measured"


@pytest.mark.parametrize(
    ("path", "text", "n"),
    [
        ("vram_bytes", "8GB", 8_000_000_000),
        ("vram_bytes", "8GiB", 8 * 2**30),
        ("vram_bytes.value", "8GB", 8_000_000_000),
        ("h2d.bandwidth_bytes_per_s", "25GB/s", 25_000_000_000),
        ("vram_bytes", "{value: 8GB}", 8_000_000_000),
    ],
)
def test_figures_in_bytes_take_the_units_of_sizes(path: str, text: str, n: int) -> None:
    hw = load_hardware("rtx3090", grouped_of([f"hw.{path}={text}"]).hw)
    figure = hw.vram_bytes if "vram" in path else hw.h2d.bandwidth_bytes_per_s
    assert (figure.value, figure.source, figure.ref) == (n, "assumed", USER_REF)


@pytest.mark.parametrize(
    ("setting", "way_out"),
    [
        (
            "hw.gpu.link.generation=5",
            "set hw.h2d.bandwidth_bytes_per_s (and hw.d2h.bandwidth_bytes_per_s), or name a link: --pcie gen5x16",
        ),
        ("hw.gpu.link.theoretical_bytes_per_s=6e10", "set hw.h2d.bandwidth_bytes_per_s"),
        ("hw.gpu.n_sms=1", "set hw.gpu.flops_per_s.bf16"),
        ("hw.gpu.l2_bytes=6e6", "set hw.gpu.memory_bandwidth_bytes_per_s"),
        ("hw.cpu.n_cores=64", "set hw.cpu.memory_bandwidth_bytes_per_s and hw.cpu.flops_per_s"),
        ("hw.cpu.name=x", "set hw.cpu=ID"),
        ("hw.name=x", "what was set is in every result"),
        ("hw.id=x", "a file of your own"),
        ("engine.note=x", "file of your own"),
        ("model.published.total_params=1e9", "sizes follow from the geometry"),
        ("model.activation=relu", "model.matrices_per_expert"),
    ],
)
def test_what_is_only_shown_cannot_be_set(setting: str, way_out: str) -> None:
    """It changed nothing and said nothing: a faster link by its label copied no faster."""
    with pytest.raises(BadInput) as error:
        prepare(RunSpec(policy="lru", hw="rtx3090", set=dict([setting.split("=")])))
    path, value = setting.split("=")
    assert str(error.value).startswith(f"--set {path}, got {value!r}: it is only shown, never computed with; ")
    assert way_out in str(error.value)


def test_apply_creates_missing_parents_and_orders_by_depth() -> None:
    latency = {"value": 1e-6, "source": "assumed"}
    changed = apply({}, {"h2d.latency_s": 2e-6, "h2d": {"latency_s": latency}}, Hardware, "hw")
    assert changed["h2d"]["latency_s"]["value"] == 2e-6
    fresh = apply({}, {"gpu.flops_per_s.bf16": 1e12}, Hardware, "hw")
    assert fresh["gpu"]["flops_per_s"]["bf16"]["value"] == 1e12


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("h3d.latency_s", r"--set hw\.h3d\.latency_s, got 1: no field 'h3d'; did you mean 'h2d'\?"),
        ("gpu.flops_per_s.bf17", r"no field 'bf17'; did you mean 'bf16'\?"),
        ("curves.model.x.y", r"'model' has no parts; write --set hw\.curves\.model=VALUE"),
        ("h2d.latency_s.valu", r"no field 'valu'; did you mean 'value'\?"),
    ],
)
def test_unknown_paths_are_refused(path: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        apply({}, {path: 1}, Hardware, "hw")
