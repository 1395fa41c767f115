"""What a sweep's options and files stand for: values, ranges, products, and what is refused before any work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from cli_help import mixtral_shaped, moesim

from sim.base.errors import BadInput
from sim.base.kinds import Kind
from sim.options import OPTIONS
from sim.studies.sweep.grid import Block, given, points_of, policy_of
from sim.studies.sweep.grid_file import read_grid
from sim.studies.sweep.values import FREE, of_text

FILE = """\
grid:
  policy: [lru, "lcp rho=0.5,0.9", {name: lfu, set: {scope: [global, layer]}}]
  hw: [rtx3090, rtx4090]
  cache: {from: 10%, to: 30%, step: 10%}
  set:
    hw.h2d.bandwidth_bytes_per_s: [2.5e10, 5.0e10]
list:
- {policy: belady, hw: a6000, cache: 16experts, seed: 1:2}
"""


def kind_of(name: str) -> Kind:
    """Of an option; any other name is a parameter of a policy."""
    row = OPTIONS.by_name.get(name)
    return FREE if row is None else row.kind


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("cache", "10%:90%:10%", [f"{n}0%" for n in range(1, 10)]),
        ("arrivals.scale", "0.9:0.5:-0.2,0.05", [0.9, 0.7, 0.5, 0.05]),
        ("arrivals.scale", "1", [1.0]),
        ("seed", "0:3", [0, 1, 2, 3]),
        ("cache", "16experts:60experts:16experts,12GB", ["16experts", "32experts", "48experts", "12GB"]),
        ("vram", "8GB:12GB:2GB,16GiB", [8 * 10**9, 10**10, 12 * 10**9, 16 * 2**30]),
        ("", "2.5e10,5e10", [2.5e10, 5e10]),
        ("", "1:4", [1, 2, 3, 4]),
        ("", "0.5:0.9:0.2", [0.5, 0.7, 0.9]),
        ("", "map,true,null", ["map", True, None]),
        ("predictor", "trained,surrogate:0.85", ["trained", "surrogate:0.85"]),
        ("precision", "bf16,int4_g128", ["bf16", "int4_g128"]),
    ],
)
def test_values_of_an_axis(name: str, text: str, values: list[Any]) -> None:
    found = of_text(text, kind_of(name), "--x")
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("arrivals.scale", "0.1:0.9", "a range needs a step"),
        ("arrivals.scale", "0.1:0.9:0", "the step does not lead from 0.1 to 0.9"),
        ("arrivals.scale", "0.9:0.1:0.1", "the step does not lead"),
        ("arrivals.scale", "half", "not a number"),
        ("cache", "half", "no room for experts"),
        ("cache", "40", "of what"),
        ("cache", "150%", "at most 100%"),
        ("cache", "0experts", "at least 1"),
        ("cache", "10%:20experts:5%", "different units"),
        ("seed", "0:1e9", "more than 100,000 values"),
        ("seed", "0:1e999999", "beyond any figure"),
        ("seed", "1.5", "not a whole number"),
        ("seed", "0:2:0.5", "not a whole number"),
        ("vram", "8GB:16GB", "a range needs a step"),
        ("batch", "1,,4", "an empty value"),
        ("", "[1,2]", "a value is a number or a word|not YAML|expected"),
    ],
)
def test_what_is_no_value(name: str, text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        of_text(text, kind_of(name), "--x")


def test_a_grid_is_the_product_and_policies_vary_fastest() -> None:
    block = given(("lru", "lcp rho=0.5,0.9"), {"hw": ("rtx3090", "a6000"), "batch": ("1,4",)}, ())
    points, n_twice = points_of([block], 100)
    labels = ["lru", "lcp rho=0.5", "lcp rho=0.9"]
    assert len(block) == len(points) == 12
    assert n_twice == 0
    assert [(p.spec.hw, p.spec.batch, p.label) for p in points] == [
        (hw, batch, label) for hw in ("rtx3090", "a6000") for batch in (1, 4) for label in labels
    ]
    assert points[1].spec.set == {"rho": 0.5}


def test_a_file_holds_products_and_points(tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text(FILE, encoding="utf-8")
    product, single = read_grid(tmp_path / "g.yaml")
    assert (len(product), len(single)) == (5 * 2 * 3 * 2, 2)
    assert product.axes["cache"] == ["10%", "20%", "30%"]
    points, _ = points_of([single], 100)
    assert [(p.spec.policy, p.spec.cache, p.spec.seed) for p in points] == [
        ("belady", "16experts", 1),
        ("belady", "16experts", 2),
    ]


def test_options_stand_over_the_file() -> None:
    file = Block(policy_of("lru"), {"hw": ["rtx3090"], "cache": ["16experts", "32experts"], "seed": [1]})
    over = file.over(given(("lfu",), {"cache": ("0.5",), "hw": ("a6000",)}, ()))
    assert [axis.name for axis in over.policies] == ["lfu"]
    assert over.axes == {"hw": ["a6000"], "cache": ["50%"], "seed": [1]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("grid: {policy: lru, hw: rtx3090, cachee: 0.1}", "cachee.*did you mean 'cache'"),
        ("grid: {policy: lru, hw: rtx3090, nvme: gen4x4}", "got 'nvme': no such name any more; write drive"),
        ("gird: {policy: lru}", "did you mean 'grid'"),
        ("grid: {policy: lru, hw: rtx3090, seed: '1:8:0'}", "grid.seed.*step does not lead"),
        ("grid: {policy: lru, hw: rtx3090, seed: {from: 1, too: 8}}", "too"),
        ("grid: {policy: lru, hw: rtx3090, seed: [1, [2]]}", "seed"),
        ("grid: {policy: lru, hw: rtx3090, seed: []}", "grid.seed, got an empty list"),
        ("grid: {policy: lru, hw: rtx3090, batch: yes}", "not a whole number"),
        (
            "grid: {policy: lru, hw: rtx3090, arrivals.scale: {from: 0.3, to: .nan, step: 0.1}}",
            "arrivals.scale, got 'nan'",
        ),
        ("grid: {policy: lru, hw: rtx3090, seed: {from: -.inf, to: 3}}", "seed, got '-inf'"),
        ("grid: {policy: lru, hw: rtx3090, vram: .nan}", "vram, got nan"),
        ("grid: {policy: lru, hw: 3090}", "quote it"),
        ("grid: {policy: lru, hw: rtx3090, set: {decay: 1}}", "a policy's own parameters stand behind its name"),
        ("grid: {policy: lru}", "no hardware"),
        ("list: [{hw: rtx3090}]", "no policy"),
        ("{}", "neither `grid:` nor `list:`"),
        ("[]", "mapping"),
        ("grid: &a {policy: lru, hw: *a}", "aliases are not accepted"),
        ("grid: {policy: lru, policy: lfu}", "appears twice"),
        (
            "grid: {policy: lru, hw: rtx3090, seed: '0:99999', requests: '1:99999'}",
            "9,999,900,000 points: more than 10,000",
        ),
    ],
)
def test_files_that_are_wrong_say_where(capsys: Any, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "g.yaml").write_text(text, encoding="utf-8")
    said = moesim(capsys, "sweep", "--grid", tmp_path / "g.yaml").error
    assert re.search(says, said), said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "no policy; name at least one"),
        (("--policy", "lru"), "no hardware; name at least one"),
        (("--policy", "lruu", "--hw", "rtx3090"), "did you mean 'lru'?"),
        (("--policy", "lru", "--hw", "rtx3090,rtx309"), "did you mean 'rtx3090'?"),
        (("--policy", "lru", "--hw", "rtx3090", "--set", "hw.h2d.bandwith=1,2"), "did you mean"),
        (("--policy", "lru", "--hw", "rtx3090", "--cache", "0%,10%"), "a share of all experts, above 0"),
        (("--policy", "lru", "--policy", "lfu", "--hw", "rtx3090", "--set", "scope=layer"), "which policy's?"),
        (("--policy", "lru scope", "--hw", "rtx3090"), "not KEY=VALUES"),
        (("--policy", "lru scope=layer scope=global", "--hw", "rtx3090"), "got it twice"),
        (("--policy", "lru", "--hw", "rtx3090", "--resume"), "without --out"),
        (("--policy", "lru", "--hw", "rtx3090", "--group-by", "batch"), "it does not vary here"),
        (("--policy", "lru", "--hw", "rtx3090", "--seed", "0:99", "--max-points", "99"), "100 points: more than 99"),
    ],
)
def test_options_that_are_wrong(capsys: Any, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    trace = mixtral_shaped(tmp_path)
    assert says in moesim(capsys, "sweep", "--trace", trace, *words).error


def test_a_bound_is_of_how_dense_parts_and_states_cross() -> None:
    """Points of one sweep that differ in these have bounds of their own."""
    from sim.options import RunSpec
    from sim.run import prepare
    from sim.studies.runner.work import bound_terms

    found = []
    for fields in ({}, {"gpus_dispatch": "all-to-all"}, {"parallel": "tensor"}, {"gpus_host_bandwidth": "split"}):
        setup = prepare(RunSpec(policy="lru", hw="rtx3090", gpus=2, requests=1, **fields))
        try:
            found.append(bound_terms(setup))
        finally:
            setup.close()
    assert all(one != two for at, one in enumerate(found) for two in found[:at])
