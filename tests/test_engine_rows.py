"""Measured rows of engines: the data, how ladders and ratios are judged, closed forms by hand, one experiment."""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from reports.reproduce import engine_forms, judge, rows, runs, table
from reports.reproduce.closed_form import METHODS, cost_of
from reports.reproduce.rows import ENGINES, Row, load_constants, load_experiments, load_rows
from sim.base.errors import BadInput
from sim.profiles.hardware import load_hardware
from sim.profiles.stack import load_stack
from tools.merge_reproduced import merged

ROWS, EXPERIMENTS = load_rows(), load_experiments()
MINE = {name: one for name, one in ROWS.items() if one.group == ENGINES}
PER_LAYER = ("attention", "gate", "expert", "shared_expert")
KERNELS_OF_MAY = {
    "imp-graphs": {"attention": 8, "head": 5},
    "imp-graphs-gemma": {"attention": 15, "gate": 8, "expert": 7, "shared_expert": 14, "head": 9},
}


def ladder(**changes: Any) -> Row:
    facts: dict[str, Any] = {
        "id": "X",
        "flag": "T",
        "where": "a thread",
        "metric": "tokens/s",
        "check": "ladder",
        "method": "imp_ladder",
        "published": {"low": 10.0, "high": 20.0},
    }
    return msgspec.convert({**facts, **changes}, Row)


class TestData:
    def test_a_figure_that_is_an_input_is_not_scored(self) -> None:
        """Rows whose figures profiles and stacks cite are told, not judged."""
        for name in ("B1", "B2", "B8", "S7", "C1-order"):
            one = ROWS[name]
            assert one.check in ("none", "shown"), name
            assert "an input" in one.reason + one.unknown, name

    def test_engines_have_one_constant_at_most(self) -> None:
        used = {one.id: one.constant for one in MINE.values() if one.constant}
        assert used == {"M22": "llama-gb10", "M22-122b": "llama-gb10", "N4": "flash-moe-m3max"}
        sources = {name: load_constants()[name].row for name in used.values()}
        assert sources == {"llama-gb10": "M22f", "flash-moe-m3max": "N4f"}
        assert {name for name, one in MINE.items() if one.check == "fit"} == set(sources.values())

    def test_what_can_be_answered_from_geometry_is_judged(self) -> None:
        """Of rows flagged G or G+ that something answers, only a printed range is shown."""
        shown = {one.id for one in MINE.values() if one.flag in ("G", "G+") and one.check == "shown"}
        assert shown == {"B9"}

    def test_kernels_of_the_build_of_may_add_up_to_what_the_docs_count(self) -> None:
        """docs/engine_kernels.md: 15 a layer of Qwen3-Coder and 5 about them, 44 and 9 of Gemma 4."""
        stack = load_stack("imp").resident
        assert stack is not None
        shipped = msgspec.structs.asdict(stack.kernels)
        for name, parts in {"imp-graphs": ("attention", "gate", "expert"), "imp-graphs-gemma": PER_LAYER}.items():
            kernels = shipped | KERNELS_OF_MAY[name]
            assert (sum(kernels[part] for part in parts), kernels["head"]) == {3: (15, 5), 4: (44, 9)}[len(parts)]

    @pytest.mark.parametrize(
        ("changes", "rule"),
        [
            ({"published": {"low": 10.0}}, "rungs"),
            ({"published": {"low": 10.0, "high": [19.0, 21.0]}}, "rungs"),
            ({"method": ""}, "exactly one"),
        ],
    )
    def test_a_ladder_that_contradicts_itself_is_refused(self, changes: dict[str, Any], rule: str) -> None:
        rows.check_row(ladder(), {}, "f.yaml")
        with pytest.raises(BadInput, match=rule):
            rows.check_row(ladder(**changes), {}, "f.yaml")


class TestJudge:
    def test_a_ladder_is_judged_by_its_slope(self) -> None:
        """Steps from the first rung by least squares: (10 x 11 + 30 x 33) / (100 + 900) = 1.1, whatever all share."""
        one = ladder(published={"low": 10.0, "middle": 20.0, "high": 40.0})
        found: dict[str, Any] = {"low": 110.0, "middle": 121.0, "high": 143.0}
        assert judge.slope(one, found) == pytest.approx(1.1)
        assert judge.reached(one, found)
        assert not judge.reached(one, {**found, "high": 145.0})
        assert not judge.reached(one, {"low": 110.0, "middle": 120.0})

    def test_a_ladder_of_rates_is_one_of_seconds(self) -> None:
        """100 and 50 ms printed, 80 and 25 simulated: 55 over 50."""
        one = ladder(relation="rate")
        assert judge.slope(one, {"low": 12.5, "high": 40.0}) == pytest.approx(1.1)

    def test_a_ratio_is_right_within_its_factor_either_way(self) -> None:
        one = ladder(check="ratio", published={"rate": 30.0})
        for simulated, right in ((45.0, True), (20.0, True), (46.0, False), (19.0, False), (math.inf, False)):
            assert judge.reached(one, {"rate": simulated}) is right
        assert not judge.reached(one, {})


class TestForms:
    def test_two_lanes_share_what_the_memory_gives(self) -> None:
        """The product's own law, against the figures by hand."""
        found = METHODS["together"](ROWS["C2"], {})
        assert found["CPU"] == pytest.approx(29.97 * 31.75 / (29.97 + 13.09))
        assert found["copies"] == pytest.approx(13.09 * 31.75 / (29.97 + 13.09))
        roomy = {**engine_forms.ALONE, "C1": (1e3, 63.8, 24.9)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_forms, "ALONE", roomy)
            assert METHODS["together"](ROWS["C1"], {}) == {"CPU": 63.8, "copies": 24.9}

    def test_a_share_of_the_most_asked_grows_and_stays_below_all(self) -> None:
        found = list(METHODS["top_share"](ROWS["ZH-8"], {}).values())
        assert found == sorted(found)  # type: ignore[type-var]
        for share, at_least in zip(found, (10, 20, 30, 40), strict=True):
            assert isinstance(share, float)
            assert at_least < share < 100

    def test_the_steps_of_imps_ladder_are_its_misses(self) -> None:
        """Between two rungs the time differs by misses of 384 activations, each three pageable copies on the link."""
        found = METHODS["imp_ladder"](ROWS["I1-ladder"], {})
        n_bytes = cost_of("rtx5090", "qwen3-30b-a3b", "q4_k_m").model.expert_bytes("q4_k_m")
        link = load_hardware(engine_forms.IMP).h2d_pageable
        miss_s = 3 * link.latency_s.value + n_bytes / link.bandwidth_bytes_per_s.value
        slow, fast = found["8 of 128"], found["81 of 128"]
        assert slow == 10.51
        assert isinstance(fast, float)
        assert 1 / slow - 1 / fast == pytest.approx(384 * (0.962 - 0.366) * miss_s)

    def test_what_offloading_adds_is_launches_routers_and_copies(self) -> None:
        """48 kernels more in each of 20 layers, launched at 9 us; routers are read in 31 us; 19.5 MB are copied, an
        expert in three calls of 20 us and its bytes at 12 GB/s."""
        n_bytes = cost_of("rtx5090", "qwen3.6-35b-a3b", "q4_k_m").model.expert_bytes("q4_k_m")
        copy_s = max(3 * 20e-6 + n_bytes / 12e9, 3 * 76.2e-6)
        by_hand_s = 20 * ((3091 - 790) / 48 * 9e-6 + 31e-6) + 19.5e6 / n_bytes * copy_s
        assert METHODS["imp_added"](ROWS["B5"], {}) == {"added": pytest.approx(1e3 * by_hand_s)}

    def test_two_lanes_ask_the_products_law(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a profile in which a pair was measured they are slowed by that pair, as a run there would be."""
        monkeypatch.setattr(engine_forms, "UNMEASURED", "rtx4090-5955wx")  # a pair was measured there: 0.18 and 0.04
        found = METHODS["together"](ROWS["C1"], {})
        stated = load_hardware("rtx4090-5955wx").contention.stated
        assert found["CPU"] == pytest.approx(63.8 / (1 + stated["cpu_slowdown_by_h2d"].value))
        assert found["copies"] == pytest.approx(24.9 / (1 + stated["h2d_slowdown_by_cpu"].value))

    def test_a_rung_of_the_drive_is_its_misses_more(self) -> None:
        """A miss is three reads of 4.25 MiB, one after the other (71 us and its bytes at 3.75 GB/s), each uploaded at
        17.694 GB/s; from four misses of a layer on the drive is longer (1.1 us and the bytes at 10.52 GB/s)."""
        part = 4096 * 2048 * 4.25 / 8
        upload_s = part / 17.694e9
        own_s = 3 * (71e-6 + part / 3.75e9 + upload_s)

        def waits_ms(rate: float) -> float:
            n_asked = [math.comb(6, n) * rate**n * (1 - rate) ** (6 - n) for n in range(7)]
            by_drive = sum(n_asked[n] * (3 * n * (1.1e-6 + part / 10.52e9) + upload_s) for n in (4, 5, 6))
            return 43e3 * (sum(n_asked[1:4]) * own_s + by_drive)

        found = METHODS["drive_ladder"](ROWS["N1"], {})
        assert found["24 slots"] == 184.0
        misses = {"24 slots": 9399, "32 slots": 8079, "40 slots": 7583}
        rates = {rung: (n - (30_270 - 113 * 258)) / (113 * 258) for rung, n in misses.items()}
        waits = {rung: waits_ms(rate) for rung, rate in rates.items()}
        assert found == {rung: pytest.approx(184.0 + wait - waits["24 slots"]) for rung, wait in waits.items()}
        steps = [(found[rung] - 184.0, ROWS["N1"].published[rung] - 184.0) for rung in ("32 slots", "40 slots")]
        assert sum(a * b for a, b in steps) / sum(b * b for _, b in steps) == pytest.approx(0.507, abs=0.001)

        # 113 tokens and one prompt of 43 calls each; a token's waits are its calls'.
        by_call = METHODS["drive_calls"](ROWS["N1-calls"], {})
        assert by_call == {rung: pytest.approx(wait * 113 / (114 * 43)) for rung, wait in waits.items()}

        found = METHODS["drive_stall"](ROWS["N1-stall"], {})
        misses = {"24 slots": 29_053, "32 slots": 25_375, "40 slots": 22_545}
        rates = {rung: (n - (70_540 - 255 * 258)) / (255 * 258) for rung, n in misses.items()}
        assert found == {rung: pytest.approx(waits_ms(rate)) for rung, rate in rates.items()}
        stalls_ms = {"24 slots": 52_726, "32 slots": 47_733, "40 slots": 44_533}
        assert ROWS["N1-stall"].published == {rung: round(n / 255, 1) for rung, n in stalls_ms.items()}

    def test_a_cold_cache_by_another_replay(self) -> None:
        """Hits of LRU from a cold start over the same draws, counted with an ordered dictionary."""
        rng = np.random.default_rng(0)
        logits = -0.8 * np.log(np.arange(1, 513))
        drawn = logits + rng.gumbel(size=(300, 8, 512))
        n_hits = 0
        for draw in range(8):
            held: OrderedDict[int, None] = OrderedDict()
            for row in drawn[:, draw]:
                wanted = [int(expert) for expert in np.argsort(row)[-10:]]
                n_hits += sum(expert in held for expert in wanted)
                for expert in sorted(wanted, key=lambda one: one not in held):  # hits are told before misses
                    held[expert] = None
                    held.move_to_end(expert)
                while len(held) > 93:
                    held.popitem(last=False)
        (found,) = engine_forms.cold_hits(0.8, [93])
        assert found == pytest.approx(100 * n_hits / (300 * 8 * 10), abs=0.1)

    def test_the_first_rung_fixes_the_constant_and_hits_rise(self) -> None:
        found = METHODS["cold_ladder"](ROWS["I8"], {})
        assert found["31 experts"] == pytest.approx(43.5, abs=0.1)
        assert list(found.values()) == sorted(found.values())  # type: ignore[type-var]


def test_a_row_of_policies_runs_and_is_judged(tmp_path: Path) -> None:
    """S1-layers, cut down to two policies: what each holds when prompts ask differs, and LFU holds more."""
    one = msgspec.structs.replace(ROWS["S1-layers"], published={"LFU": 59.0, "LRU": 27.5})

    def quiet(_title: str) -> Any:
        return nullcontext(lambda _done, _total: None)

    result = table.reproduce([one], (), tmp_path, 1, quiet)
    (answer,) = result["rows"]
    on = answer["traces"]["b"]
    assert on["pairs"] == [{"better": "LFU", "worse": "LRU", "right": True}]
    assert runs.systems_of(one, EXPERIMENTS["tinyserve-s1"]) == ["LFU", "LRU"]


class TestMerge:
    def test_rows_of_a_part_replace_theirs_and_totals_are_counted_again(self) -> None:
        def answered(name: str, status: str) -> dict[str, Any]:
            return {"id": name, "flag": "G", "check": "within", "status": status, "constant": ""}

        def whole(*found: dict[str, Any], **facts: Any) -> Any:
            told: Any = list(found)
            return {"rows": told, "traces": {}, "constants": [], "totals": table.totals(told), **facts}

        old = whole(answered("FM-1", "missed"), answered("FM-2", "reached"), answered("gone", "reached"), date="old")
        part = whole(answered("C1", "reached"), answered("FM-1", "reached"), date="new", version="v")
        found = merged(old, part, ["FM-1", "FM-2", "C1"])
        assert [(row["id"], row["status"]) for row in found["rows"]] == [
            ("FM-1", "reached"),
            ("FM-2", "reached"),
            ("C1", "reached"),
        ]
        assert found["totals"]["flags"]["G"] == {"rows": 3, "reached": 3}
        assert found["date"] == "new"

    def test_a_row_keeps_the_traces_that_the_part_did_not_run_on(self) -> None:
        def whole(status: str, **on: int) -> Any:
            row = {"id": "A", "flag": "T", "check": "within", "status": status, "constant": "", "scored": "a"}
            traces = {kind: {"simulated": {"x": value}} for kind, value in on.items()}
            told = {"rows": [{**row, "traces": traces, "left_out": {}}], "traces": {}, "constants": []}
            return {**told, "date": "d", "version": "v"}

        (row,) = merged(whole("reached", a=1, b=2), whole("not run", b=3), ["A"])["rows"]
        assert {kind: on["simulated"]["x"] for kind, on in row["traces"].items()} == {"a": 1, "b": 3}
        assert row["status"] == "reached"  # it is judged on the other
        (row,) = merged(whole("reached", a=1, b=2), whole("missed", a=4), ["A"])["rows"]
        assert {kind: on["simulated"]["x"] for kind, on in row["traces"].items()} == {"a": 4, "b": 2}
        assert row["status"] == "missed"

    def test_a_row_that_neither_has_is_refused(self) -> None:
        empty: Any = {"rows": [], "traces": {}, "constants": []}
        with pytest.raises(BadInput, match="C1"):
            merged(empty, empty, ["C1"])
