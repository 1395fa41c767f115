"""`--pcie`: words for what copies reach over a link, in every command that takes a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from cli_help import mixtral_shaped, moesim, simulated
from easy_numbers import figure, hardware, model, stack

from sim.base.errors import BadInput
from sim.base.files import bundled
from sim.machine.cost import Cost
from sim.profiles.hardware import GPUS, Link, load_hardware
from sim.profiles.pcie import LINKS, SOURCES, bandwidth, bus_of


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixtral_shaped(tmp_path_factory.mktemp("pcie"))


def test_theory_by_hand() -> None:
    """GT/s times lanes / 8, times 128 of 130 bits; from generation 6 on, 236 of 256 bytes of a flit."""
    theory = {word: bus_of(word).theoretical_bytes_per_s for word in LINKS}
    assert len(theory) == 12
    assert theory["gen3x16"] == pytest.approx(15.754e9, rel=1e-4)
    assert theory["gen4x16"] == pytest.approx(31.508e9, rel=1e-4)
    assert theory["gen5x8"] == theory["gen4x16"]
    assert theory["gen6x4"] == pytest.approx(4 * 64e9 / 8 * 236 / 256)
    for path in bundled(GPUS, ".yaml").values():
        hw = load_hardware(path)
        if hw.one_memory:
            with pytest.raises(BadInput, match=r"--pcie, got 'gen5x16' on gb10: CPU and GPU have one memory there"):
                load_hardware(path, link="gen5x16")
            continue
        bus = hw.gpu.link
        assert bus is not None
        assert bus.theoretical_bytes_per_s == pytest.approx(theory[f"gen{bus.generation}x{bus.lanes}"], rel=1e-3)


def test_measured_ones_are_those_of_bundled_cards() -> None:
    """A word and the profile of a card that was measured on such a link do not contradict one another."""
    for card, word in (
        ("rtx5090", "gen5x16"),
        ("rtx5060ti", "gen5x8"),
        ("rtx4090", "gen4x16"),
        ("rtx4060ti", "gen4x8"),
        ("t4", "gen3x16"),
        ("a100-80g-sxm", "gen4x16"),
    ):
        hw = load_hardware(card)
        assert bandwidth(bus_of(word), True).value == hw.h2d.bandwidth_bytes_per_s.value
        assert {key: SOURCES[key] for key in set(SOURCES) & set(hw.sources)}.items() <= hw.sources.items()


def test_a_link_changes_what_goes_over_it_and_nothing_else() -> None:
    own, other = load_hardware("rtx3090"), load_hardware("rtx3090", link="PCIe 5.0 x16")
    assert other.h2d.bandwidth_bytes_per_s == bandwidth(bus_of("gen5x16"), True)
    assert other.d2h.bandwidth_bytes_per_s == bandwidth(bus_of("gen5x16"), False)
    assert other.h2d.latency_s == own.h2d.latency_s
    assert other.p2p.bandwidth_bytes_per_s.value == pytest.approx(1.225e10 * 5.5 / 2.45)  # half of it, as it was
    assert (other.gpu.link, other.h2d_pageable) == (bus_of("gen5x16"), own.h2d_pageable)
    assert (other.cpu, other.host, other.vram_bytes) == (own.cpu, own.host, own.vram_bytes)
    narrow = load_hardware("rtx3090", link="gen3x4")
    assert narrow.h2d_pageable.bandwidth_bytes_per_s == narrow.h2d.bandwidth_bytes_per_s  # no faster than pinned
    nvlink = load_hardware("a100-80g-sxm", link="gen3x16")
    assert nvlink.p2p == load_hardware("a100-80g-sxm").p2p
    desktop = load_hardware("rtx5090", link="gen6x16")
    assert desktop.h2d.bandwidth_bytes_per_s.value == desktop.cpu.memory_bandwidth_bytes_per_s.value


def test_the_own_link_leaves_the_profile_as_it_is() -> None:
    assert load_hardware("rtx3090", link="gen4x16") == load_hardware("rtx3090")


def test_a_figure_that_was_set_wins() -> None:
    for key in ("h2d.bandwidth_bytes_per_s", "h2d.bandwidth_bytes_per_s.value"):
        hw = load_hardware("rtx3090", {key: 4e10}, link="gen5x16")
        assert hw.h2d.bandwidth_bytes_per_s.value == 4e10
        assert hw.d2h.bandwidth_bytes_per_s.value == 5.6e10


@pytest.mark.parametrize("word", ["gen7x16", "gen5x3", "gen9x9", "5x16x", "nvlink", ""])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(BadInput, match=r"^--pcie, got .*: no such link; .*`moesim hw --links` lists them"):
        load_hardware("rtx3090", link=word)


def test_every_command_takes_it(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    args = ("--hw", "rtx3090", "--trace", trace, "--pcie", "gen5x16")
    result = simulated(capsys, "--policy", "lru", *args, "--json", "--out", tmp_path / "a").json
    figures: dict[str, Any] = {figure["figure"]: figure for figure in result["provenance"]["figures"]}
    assert figures["h2d.bandwidth_bytes_per_s"]["value"] == 5.5e10
    assert figures["h2d.bandwidth_bytes_per_s"]["source"] == "assumed"
    assert result["overrides"] == {"pcie": "gen5x16"}
    assert "rtx3090 with pcie=gen5x16 " in result["name"]
    assert yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())["pcie"] == "gen5x16"
    again = simulated(capsys, "--config", tmp_path / "a" / "config.yaml", "--json")
    assert again.err == ""
    assert {**again.json, "wall_s": 0} == {**result, "wall_s": 0}
    other = simulated(capsys, "--config", tmp_path / "a" / "config.yaml", "--pcie", "gen4x8", "--json")
    assert other.err == ""
    assert other.json["tpot_s"]["mean"] > 3 * result["tpot_s"]["mean"]
    row = moesim(capsys, "compare", "--policy", "lru", *args, "--json").json["runs"][0]
    assert (row["tpot_s"], row["lower_bound"]) == (result["tpot_s"], result["lower_bound"])
    plain = simulated(capsys, "--policy", "lru", *args[:4], "--json").json
    own = simulated(capsys, "--policy", "lru", *args[:4], "--pcie", "gen4x16", "--json").json
    assert own["run_id"] == plain["run_id"] != result["run_id"]
    page = moesim(capsys, "hw", "rtx3090", *args[-2:]).out
    assert page.startswith("GeForce RTX 3090 (rtx3090): 55.0 GB/s host to device")


def test_a_copy_takes_the_latency_of_its_link_and_then_its_bytes() -> None:
    """16 bytes a second and 3 s before the first: an expert of 160 bytes takes 13 s, half of it 8 s, on either way."""
    link = Link(latency_s=figure(3.0), bandwidth_bytes_per_s=figure(16.0))
    hw = msgspec.structs.replace(hardware(), h2d=link, d2h=link)
    copies = Cost(hw, model(1, 2, 1), stack(), "bf16").copies
    assert (copies.expert_s(160), copies.expert_s(80, 0.5)) == (13.0, 8.0)
    assert (copies.expert_back_s(160), copies.expert_back_s(80, 0.5)) == (13.0, 8.0)
    assert (copies.h2d_s(16), copies.d2h_s(16)) == (4.0, 4.0)
