"""`moesim reproduce`: every row has an answer or a reason, constants come from rows nobody scores, verdicts by hand."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_help import mixtral_shaped, moesim
from convert_samples import jsonl
from tiny_traces import ALL, tiny_trace

from reports.reproduce import inputs, judge, rows, runs, show, table, work
from reports.reproduce.closed_form import ADAPMOE_SIZES, METHODS, cost_of, model_of
from reports.reproduce.constants import Fitted, NotFitted, fit, published, solve
from reports.reproduce.rows import (
    Constant,
    Experiment,
    Row,
    load_constants,
    load_experiments,
    load_rows,
    pick,
)
from sim.base.errors import BadInput
from sim.profiles.hardware import load_hardware
from traces.format.reader import Trace

ROWS, EXPERIMENTS, CONSTANTS = load_rows(), load_experiments(), load_constants()


def quiet(_title: str) -> Any:
    return nullcontext(lambda _done, _total: None)


def row(**changes: Any) -> Row:
    """An order row of three systems, unless told otherwise."""
    facts: dict[str, Any] = {
        "id": "X-1",
        "flag": "T",
        "where": "Table 1",
        "metric": "TPOT",
        "check": "order",
        "experiment": "mine",
        "value": "tpot_s",
        "published": {"lru": 2.0, "on_demand": 4.0},
    }
    return msgspec.convert({**facts, **changes}, Row)


class TestData:
    def test_every_row_is_answered_or_says_why_not(self) -> None:
        for one in ROWS.values():
            table.check_names(one, EXPERIMENTS, CONSTANTS)
            if one.check in ("none", "fit"):
                assert one.reason
            elif one.experiment:
                assert runs.systems_of(one, EXPERIMENTS[one.experiment])
            assert one.source
            assert one.flag not in ("Q", "X", "T!") or one.check == "none", one.id

    def test_constants_come_from_rows_that_are_not_scored_and_are_one_per_testbed_and_system(self) -> None:
        of_systems = {name for experiment in EXPERIMENTS.values() for name in experiment.constants.values()}
        assert {one.constant for one in ROWS.values() if one.constant} | of_systems == set(CONSTANTS)
        for constant in CONSTANTS.values():
            assert ROWS[constant.row].check == "fit"
        assert {one.id for one in ROWS.values() if one.check == "fit"} == {one.row for one in CONSTANTS.values()}
        assert len({one.testbed for one in CONSTANTS.values()}) == len(CONSTANTS)
        # One testbed rests on one constant, whichever row it is, and a system's own one belongs to it alone.
        for one in ROWS.values():
            if one.constant and one.testbed:
                others = {
                    other.constant
                    for other in ROWS.values()
                    if (other.id[:2], other.testbed) == (one.id[:2], one.testbed) and other.constant
                }
                assert others == {one.constant}
                assert not (one.experiment and EXPERIMENTS[one.experiment].constants)
        for experiment in EXPERIMENTS.values():
            assert set(experiment.constants) <= set(experiment.systems)
            assert set(experiment.could_not) <= set(experiment.systems)
            for system, name in experiment.constants.items():
                assert CONSTANTS[name].label == system

    def test_no_row_judges_the_figure_that_a_constant_is_solved_for(self) -> None:
        """The same system in the same experiment, compared by the same value, comes out by construction."""
        for constant in CONSTANTS.values():
            source = ROWS[constant.row]
            for one in ROWS.values():
                if (
                    one.check in ("order", "within")
                    and (one.experiment, one.value, one.own, one.cases)
                    == (source.experiment, source.value, source.own, source.cases)
                    and one.experiment
                ):
                    judged = one.published if not one.pairs_of else (one.pairs_of, one.own)
                    assert constant.label not in judged, one.id

    def test_what_a_constant_is_solved_with_is_run_as_where_it_is_used(self) -> None:
        """The system of the row a constant comes from is set up like the system that has it."""
        for experiment in EXPERIMENTS.values():
            for system, name in experiment.constants.items():
                source = EXPERIMENTS[ROWS[CONSTANTS[name].row].experiment]
                assert source.systems[CONSTANTS[name].label] == experiment.systems[system]

    def test_systems_of_experiments_are_known_policies(self) -> None:
        from sim.policy.registry import find

        for name, experiment in EXPERIMENTS.items():
            for system in experiment.systems:
                for case in range(len(experiment.cases)):
                    spec = work.spec_of(experiment, case, system, Path("t"), {})
                    own = {key: value for key, value in spec.set.items() if "." not in key}
                    find(spec.policy)(**own), name
            assert set(experiment.systems) & {
                s for r in ROWS.values() if r.experiment == name for s in runs.systems_of(r, experiment)
            }, name

    @pytest.mark.parametrize(
        ("changes", "rule"),
        [
            ({"check": "none"}, "give the reason"),
            ({"method": "inactive"}, "exactly one"),
            ({"check": "within"}, "tolerance"),
            ({"check": "shown"}, "which term"),
            ({"value": ""}, "which key"),
            ({"relation": "speedup"}, "own"),
            ({"published": {}}, "nothing to compare"),
        ],
    )
    def test_a_row_that_contradicts_itself_is_refused(self, changes: dict[str, Any], rule: str) -> None:
        rows.check_row(row(), {}, "f.yaml")
        with pytest.raises(BadInput, match=rule):
            rows.check_row(row(**changes), {}, "f.yaml")
        with pytest.raises(BadInput, match="once"):
            rows.check_row(row(), {"X-1": row()}, "f.yaml")

    def test_names_that_lead_nowhere_are_refused(self) -> None:
        mine = {"mine": Experiment(why="", cases=[], systems={"lru": "lru"})}
        with pytest.raises(BadInput, match="no such system"):
            runs.systems_of(row(), mine["mine"])
        for changes in ({"experiment": "other"}, {"experiment": "", "method": "other"}, {"constant": "other"}):
            with pytest.raises(BadInput, match="none of that name"):
                table.check_names(row(**changes), mine, CONSTANTS)
        with pytest.raises(BadInput, match="fitted to this row"):
            table.check_names(row(id="ME-7", constant="moepic-a6000"), mine, CONSTANTS)
        of_systems = {"mine": msgspec.structs.replace(mine["mine"], constants={"lru": "moepic-a6000"})}
        with pytest.raises(BadInput, match="fitted to this row"):
            table.check_names(row(id="ME-7"), of_systems, CONSTANTS)
        with pytest.raises(BadInput, match="one at most"):
            table.check_names(row(constant="emoe-a100"), of_systems, CONSTANTS)
        unknown = {"mine": msgspec.structs.replace(mine["mine"], constants={"lru": "other"})}
        with pytest.raises(BadInput, match="none of that name"):
            table.check_names(row(), unknown, CONSTANTS)

    def test_rows_are_picked_by_id_system_flag_and_geometry(self) -> None:
        assert [one.id for one in pick(("FM-2,FM-1",), ROWS)] == ["FM-1", "FM-2"]
        assert {one.id.split("-")[0] for one in pick(("ME", "AD"), ROWS)} == {"ME", "AD"}
        assert {one.flag for one in pick(("G+",), ROWS)} == {"G+"}
        assert all(one.method for one in pick(("geometry",), ROWS))
        assert all(one.experiment for one in pick(("experiments",), ROWS))
        groups = [one.id for group in rows.GROUPS for one in pick((group,), ROWS)]
        assert sorted(groups) == sorted(ROWS)
        assert len(pick((), ROWS)) == len(ROWS)
        with pytest.raises(BadInput, match="ME-12"):
            pick(("ME-122",), ROWS)


class TestClosed:
    def test_inactive_parameters_of_mixtral_by_hand(self) -> None:
        # 32 layers, 6 of 8 experts idle, three matrices of 4096 x 14336, two bytes.
        idle = 32 * 6 * 3 * 4096 * 14336
        found = METHODS["inactive"](ROWS["FM-1"], {})
        assert found["GB"] == pytest.approx(idle * 2 / 1e9)
        assert found["share"] == pytest.approx(100 * idle / 46_702_792_704)

    def test_duoserve_differences_are_experts_and_predictor(self) -> None:
        found = METHODS["duoserve_peaks"](ROWS["DS-4"], {}), METHODS["duoserve_peaks"](ROWS["DS-5"], {})
        assert found[0]["MoESys - ACC"] == pytest.approx(6 * 176_160_768 * 4.15625 / 8 / 1e9)
        assert found[1]["DuoServe - ACC"] == pytest.approx(0.3)

    def test_a_larger_model_saves_what_its_experts_weigh(self) -> None:
        found = METHODS["emoe_memory"](ROWS["EM-26"], {})
        assert isinstance(found["all"], float)
        assert isinstance(found["60 %"], float)
        assert found["all"] - found["60 %"] == pytest.approx(0.4 * 90.194313216)

    def test_adapmoe_sizes_are_whole_and_of_the_right_total(self) -> None:
        assert {label: sum(map(int, text)) for label, text in ADAPMOE_SIZES.items()} == {
            "64": 64,
            "64 gated": 64,
            "128": 128,
            "128 gated": 128,
        }
        assert set(METHODS["adapmoe_sizes"](ROWS["AD-4"], {}).values()) == {32.0}

    def test_switch_models_round_to_the_printed_parameters_with_three_embedding_tables(self) -> None:
        assert model_of("switch-large-128").expert_params() == 8_388_608
        found = METHODS["switch_weights"](ROWS["PG-1"], {})
        for label, hidden, billions in (
            ("base-8", 768, 0.7),
            ("base-64", 768, 3.8),
            ("base-128", 768, 7.5),
            ("large-128", 1024, 26.4),
        ):
            tied, gb = model_of(f"switch-{label}").total_params(), found[label]
            assert gb == pytest.approx(4 * (tied + 2 * 32128 * hidden) / 1e9)
            assert isinstance(gb, float)
            assert round(gb / 4, 1) == billions
            assert ROWS["PG-1"].published[label] == pytest.approx(4 * billions)

    def test_fiddler_counts_what_its_code_leaves_room_for(self) -> None:
        # 46,702,792,704 parameters, of which 256 experts of three 4096 x 14336 matrices; two bytes each.
        expert = 3 * 4096 * 14336 * 2
        dense = 46_702_792_704 * 2 - 256 * expert
        rotary = 32 * 2 * 32768 * 128 * 2  # layers, cosine and sine, positions, width, bytes
        by_hand = {
            label: (0.95 * gib * 1024**3 - dense - expert - rotary) // expert
            for label, gib in (("24 GB", 23.65), ("48 GB", 47.5))
        }
        assert METHODS["fiddler_experts"](ROWS["FD-1"], {}) == by_hand == {"24 GB": 56.0, "48 GB": 125.0}

    def test_pregated_moe_holds_two_experts_of_the_decoder(self) -> None:
        shares = []
        for n_experts in (8, 64, 128):  # in numbers of 768 x 768: an expert is 8, a layer's two attentions 2 x 4
            dense = 2 * 32128 / 768 + 12 * 8 + 6 * 8
            shares.append([100 * (dense + held * 8) / (dense + 6 * n_experts * 8) for held in (2, 2 * n_experts)])
        found = METHODS["pregated_memory"](ROWS["PG-8"], {})
        means = [sum(column) / 3 for column in zip(*shares, strict=True)]
        assert [found["Pre-gated"], found["MoE-Prefetch"]] == pytest.approx(means)

    def test_every_method_answers_every_figure_of_its_rows(self) -> None:
        settings = fit(CONSTANTS["emoe-a100"], ROWS).settings("a100-40g-pcie", "openmoe-8b", "bf16")
        asked = [one for one in ROWS.values() if one.method]
        for one in asked:
            assert set(one.published) <= set(METHODS[one.method](one, settings if one.constant else {})), one.id
        assert {one.method for one in asked} == set(METHODS)


class TestConstants:
    def test_one_rate_of_a_link_for_all_models_by_hand(self) -> None:
        # 165 ms for 96 experts of three 2048 x 1408 matrices, each copy of which takes 10 us to begin.
        rate = 3 * 2048 * 1408 * 2 / (0.165 / 96 - 1e-5)
        found = fit(CONSTANTS["moepic-a6000"], ROWS)
        assert found.value_s == pytest.approx(1e9 / rate)
        for model, precision in (("qwen1.5-moe-a2.7b", "bf16"), ("mixtral-8x7b", "hqq2")):
            assert found.settings("a6000", model, precision) == {"hw.h2d.bandwidth_bytes_per_s": pytest.approx(rate)}

    def test_seconds_per_copy_by_hand(self) -> None:
        # The same figure as seconds of each copy: 25 GB/s explain 0.692 ms of it.
        link = load_hardware("a6000").h2d.bandwidth_bytes_per_s.value
        by_hand = 0.165 / 96 - 1e-5 - 3 * 2048 * 1408 * 2 / link
        found = fit(msgspec.structs.replace(CONSTANTS["moepic-a6000"], form="per_copy"), ROWS)
        assert found.value_s == pytest.approx(by_hand)
        # Mixtral's experts in 2 bits take the same seconds more, half of one half of them.
        n_bytes = 3 * 4096 * 14336 * 3.0625 / 8
        (bandwidth,) = found.settings("a6000", "mixtral-8x7b", "hqq2").values()
        assert n_bytes / bandwidth == pytest.approx(n_bytes / link + by_hand)
        assert n_bytes / 2 / bandwidth == pytest.approx((n_bytes / link + by_hand) / 2)

    def test_emoe_predicts_the_other_model_from_its_own_row(self) -> None:
        fitted = fit(CONSTANTS["emoe-a100"], ROWS)
        loads = {}
        for model in ("mixtral-8x7b", "openmoe-8b"):
            settings = fitted.settings("a100-40g-pcie", model, "bf16")
            loads[model] = METHODS["emoe_load"](row(model=model), settings)["load"]
        assert loads["mixtral-8x7b"] == pytest.approx(12.744)
        assert loads["openmoe-8b"] == pytest.approx(0.67 * 128 * (12.744 / 199.68 - (352_321_536 - 134_217_728) / 25e9))

    def test_an_experts_time_on_the_cpu_is_the_printed_share_of_its_copy(self) -> None:
        fitted = fit(CONSTANTS["importance-a6000"], ROWS)
        plain = cost_of("a6000", "qwen2-57b-a14b")
        slower = cost_of("a6000", "qwen2-57b-a14b", settings=fitted.settings("a6000", "qwen2-57b-a14b", "bf16"))
        copy_s = plain.copies.h2d_s(3 * 3584 * 2560 * 2)
        assert slower.expert_cpu_s(1) == pytest.approx(0.333 * copy_s)
        assert plain.expert_cpu_s(1) < slower.expert_cpu_s(1)

    def test_constants_are_solved_for_until_their_figures_are_printed(self) -> None:
        """Per layer: a rate that is bound by the host beyond 0.125 ms a layer. Per copy: a speed-up, linear in it."""
        asked = [CONSTANTS["pregated-a100"], CONSTANTS["duoserve-acc"]]
        steps: list[dict[str, float]] = []

        def figures(values: dict[str, float]) -> dict[str, float]:
            steps.append(values)
            rate = 1 / max(0.002, 0.0005 + 12 * values["pregated-a100"])
            return {"pregated-a100": rate, "duoserve-acc": 0.8 + 0.2e3 * values["duoserve-acc"]}

        found, lost = solve(asked, ROWS, figures)
        assert lost == {}
        assert found["pregated-a100"].value_s == pytest.approx((1 / 137 - 0.0005) / 12, rel=2e-3)
        assert found["duoserve-acc"].value_s == pytest.approx((1.52 - 0.8) / 0.2e3, rel=2e-3)
        assert steps[0] == {"pregated-a100": 0.0, "duoserve-acc": 0.0}
        assert len(steps) <= 5
        assert found["pregated-a100"].settings("a100-80g-pcie", "switch-base-8", "fp32") == {
            "engine.per_layer_s": found["pregated-a100"].value_s
        }
        assert solve([], ROWS, figures) == ({}, {})
        of_a_range = msgspec.structs.replace(ROWS["DS-17"], published={"ACC": [1.47, 1.52]})
        assert published(CONSTANTS["duoserve-acc"], {"DS-17": of_a_range}) == 1.495  # the middle

    def test_a_constant_that_does_nothing_or_has_no_room_is_lost_and_the_others_are_found(self) -> None:
        asked = [CONSTANTS["pregated-a100"], CONSTANTS["duoserve-acc"]]
        for speed_up, why in ((1.6, "slower than DS-17"), (1.1, "not found in 8 steps")):
            found, lost = solve(
                asked,
                ROWS,
                lambda values, speed_up=speed_up: {
                    "pregated-a100": 1 / (0.0005 + 12 * values["pregated-a100"]),
                    "duoserve-acc": speed_up,
                },
            )
            assert list(found) == ["pregated-a100"]
            assert found["pregated-a100"].value_s == pytest.approx((1 / 137 - 0.0005) / 12, rel=2e-3)
            assert list(lost) == ["duoserve-acc"]
            assert why in lost["duoserve-acc"]

    def test_copies_from_pageable_memory_are_slowed_down_there(self) -> None:
        n_bytes = 3 * 4096 * 14336 * 2
        found = Fitted(CONSTANTS["readme-accelerate"], 5e-3)
        for pinned, link in ((True, "h2d"), (False, "h2d_pageable")):
            plain = getattr(load_hardware("a5000"), link).bandwidth_bytes_per_s.value
            assert found.settings("a5000", "mixtral-8x7b", "bf16", pinned) == {
                f"hw.{link}.bandwidth_bytes_per_s": pytest.approx(n_bytes / (n_bytes / plain + 5e-3))
            }

    def test_an_experts_seconds_on_the_gpu_are_the_rate_of_its_memory(self) -> None:
        found = Fitted(CONSTANTS["offloading-a100"], 5e-3).settings("a100-80g-sxm", "mixtral-8x7b", "hqq2")
        assert found == {"hw.gpu.memory_bandwidth_bytes_per_s": 3 * 4096 * 14336 * 3.0625 / 8 / 5e-3}

    def test_hardware_slower_than_the_row_leaves_nothing_to_fit(self) -> None:
        slow = msgspec.structs.replace(CONSTANTS["moepic-a6000"], copies=960.0)
        with pytest.raises(NotFitted, match="slower than ME-7"):
            fit(slow, ROWS)
        with pytest.raises(BadInput, match="no figure"):
            fit(msgspec.structs.replace(slow, label="nothing"), ROWS)


class TestJudge:
    @pytest.mark.parametrize(
        ("published", "simulated", "tolerance", "holds"),
        [
            (100.0, 103.0, 0.03, True),
            (100.0, 103.6, 0.03, False),
            (0.24, 0.2360, 0.0, True),  # rounds to it
            (0.24, 0.2340, 0.0, False),
            (15.0, 14.6, 0.0, True),
            ([20.0, 80.0], [19.6, 80.4], 0.0, True),
            ([20.0, 80.0], [19.4, 77.0], 0.0, False),
            ([20.0, 80.0], 50.0, 0.0, True),
            (50.0, [49.9, 50.1], 0.03, True),
            (50.0, [40.0, 50.0], 0.03, False),
        ],
    )
    def test_agreement(self, published: Any, simulated: Any, tolerance: float, holds: bool) -> None:
        assert judge.agrees(published, simulated, tolerance) == holds

    def test_a_figure_that_was_not_simulated_is_not_reached(self) -> None:
        one = row(flag="G", check="within", published={"a": 1.0, "b": 2.0})
        assert judge.reached(one, {"a": 1.0, "b": 2.0})
        assert not judge.reached(one, {"a": 1.0})

    @pytest.mark.parametrize(
        ("relation", "own", "other", "form"),
        [
            ("value", 1.0, 3.0, 3.0),
            ("milli", 1.0, 3.0, 3000.0),
            ("percent", 1.0, 0.3, 30.0),
            ("rate", 1.0, 4.0, 0.25),
            ("speedup", 2.0, 3.0, 1.5),
            ("slowdown", 3.0, 2.0, 1.5),
            ("reduction", 3.0, 4.0, 25.0),
            ("improvement", 0.6, 0.5, 20.0),
            ("hideable", 1.0, 5.0, 25.0),
            ("improvement", 0.6, 0.0, math.inf),
            ("hideable", 5.0, 5.0, math.inf),
        ],
    )
    def test_forms(self, relation: Any, own: float, other: float, form: float) -> None:
        assert judge.related(relation, own, other) == pytest.approx(form)

    @pytest.mark.parametrize("relation", ["rate", "speedup", "slowdown", "reduction"])
    def test_what_is_faster_stands_lower_in_every_form(self, relation: Any) -> None:
        own, fast, slow = 2.0, 1.5, 5.0  # seconds
        standing = [judge.standing(relation, judge.related(relation, own, time)) for time in (fast, own, slow)]
        assert standing == sorted(standing)
        if relation != "rate":
            assert standing[1] == pytest.approx(1.0)
            assert standing == pytest.approx([time / own for time in (fast, own, slow)])

    def test_pairs_of_printed_values(self) -> None:
        one = row(published={"a": 1.0, "b": 2.0, "c": 3.0})
        pairs = judge.pairs(one, [{"a": 5.0, "b": 4.0, "c": 9.0}])
        assert pairs == [("a", "b", False), ("a", "c", True), ("b", "c", True)]
        assert judge.pairs(one, [{"a": 5.0, "b": 5.0}]) == [("a", "b", False)]  # a tie is not the printed order
        few = judge.pairs(msgspec.structs.replace(one, pairs_of="c"), [{"a": 1.0, "b": 2.0, "c": 3.0}])
        assert [pair[:2] for pair in few] == [("a", "c"), ("b", "c")]
        higher = msgspec.structs.replace(one, better="high", published={"a": 10.0, "b": 20.0})
        assert judge.pairs(higher, [{"a": 0.1, "b": 0.2}]) == [("b", "a", True)]
        rates = msgspec.structs.replace(one, relation="rate", published={"a": 3.0, "b": 2.0})
        assert judge.pairs(rates, [{"a": 0.5, "b": 0.1}]) == [("a", "b", True)]

    def test_the_ends_of_a_range_are_the_smallest_and_the_largest_cell(self) -> None:
        """Two cases and two baselines make four cells; a mean over cases would hide the 0.5."""
        one = row(relation="speedup", own="mine", published=dict(zip(judge.ENDS, (1.42, 7.54), strict=True)))
        experiment = Experiment(
            why="", cases=[{"model": "m"}] * 2, systems=dict.fromkeys(("mine", "a", "b"), "lru"), constants={"a": "one"}
        )
        seconds = [{"mine": 2.0, "a": 1.0, "b": 6.0}, {"mine": 1.0, "a": 2.0, "b": 4.0}]
        raw = {
            runs.Unit("X-1", "b", case, system): {"tpot_s": of}
            for case, by_system in enumerate(seconds)
            for system, of in by_system.items()
        }
        found = runs.combine(one, experiment, raw, "b")
        assert found["values"] == dict(zip(judge.ENDS, (0.5, 4.0), strict=True))
        told = table.answer_of(one, {}, {"b": found}, {"mine": experiment})["traces"]["b"]
        assert told["ratio"] == {judge.ENDS[0]: 0.5 / 1.42, judge.ENDS[1]: 4.0 / 7.54}
        verdicts = [(pair["better"], pair["worse"], pair["right"]) for pair in told["pairs"]]
        assert verdicts == [("mine", judge.ENDS[0], False), ("mine", judge.ENDS[1], True)]
        for name in (name for name, of in ROWS.items() if name.startswith("DS-") and judge.is_of_cells(of)):
            assert set(ROWS[name].published) == set(judge.ENDS)

    def test_other_readings_are_rows_of_their_own_and_never_judged(self) -> None:
        others = [one for one in ROWS.values() if one.reading_of]
        for one in others:
            judged = ROWS[one.reading_of]
            assert one.check == "shown" and one.experiment != judged.experiment
            assert (one.published, one.value, one.relation) == (judged.published, judged.value, judged.relation)
        assert {"IM-2-minmax", "IM-2-pytorch", "DS-16-pageable"} <= {one.id for one in others}
        assert [one.id for one in pick(("IM-3",), ROWS)] == ["IM-3", "IM-3-minmax", "IM-3-pytorch", "IM-3-software"]
        assert not EXPERIMENTS["duoserve-pageable"].constants

    def test_a_reduction_orders_all_systems(self) -> None:
        one = row(relation="reduction", own="own", published={"a": 50.0, "b": 20.0})
        assert judge.pairs(one, [{"a": 10.0, "b": 30.0}]) == [("b", "a", False), ("own", "a", True), ("own", "b", True)]
        assert judge.pairs(one, [{"a": 60.0, "b": -5.0}]) == [("b", "a", True), ("own", "a", True), ("own", "b", False)]

    def test_ranges_order_only_what_they_separate(self) -> None:
        one = row(relation="speedup", own="own", published={"a": [1.2, 3.0], "b": [1.1, 2.0]})
        assert judge.pairs(one, [{"a": 1.5, "b": 0.9}]) == [("own", "a", True), ("own", "b", False)]
        slower = row(relation="slowdown", own="own", published={"a": [1.2, 3.0]})
        assert judge.pairs(slower, [{"a": 1.5}]) == [("a", "own", True)]
        hits = row(relation="improvement", better="high", own="own", published={"a": 66.0})
        assert judge.pairs(hits, [{"a": 10.0}]) == [("own", "a", True)]
        assert judge.pairs(hits, [{"a": -10.0}]) == [("own", "a", False)]

    @pytest.mark.parametrize(
        ("published", "simulated", "ratio"),
        [
            (14.0, 1.4, 0.1),
            (2.0, 3.0, 1.5),
            ([2.0, 3.0], 2.5, 1.0),
            ([2.0, 3.0], 1.0, 0.5),
            ([2.0, 3.0], 6.0, 2.0),
            ([0.0, 100.0], 5.0, None),
            (0.0, 5.0, None),
            (14.0, -7.0, -0.5),
            (14.0, math.inf, None),
        ],
    )
    def test_ratios_of_magnitudes(self, published: Any, simulated: float, ratio: float | None) -> None:
        assert judge.ratio(published, simulated) == (None if ratio is None else pytest.approx(ratio))

    def test_the_spread_of_magnitudes_by_hand(self) -> None:
        """Factors 1, 2, 2, 4 and the other sign: a fifth of what was a gain is a loss."""
        told = judge.spread([1.0, 0.5, 2.0, 0.25, -3.0])
        assert told == {
            "n": 5,
            "other_sign": 1,
            "within": 1,
            "median_ratio": 0.5,
            "least": 1.0,
            "lower_quartile": 2.0,
            "median": 2.0,
            "upper_quartile": 4.0,
            "greatest": None,
        }
        assert judge.spread([1.0, 4.0])["median"] == pytest.approx(2.0)  # the middle of two factors
        assert judge.spread([]) == {"n": 0, "other_sign": 0}

    @pytest.mark.parametrize(
        ("simulated", "changes", "status"),
        [
            (14.0, {}, "reached"),
            (1.0, {}, "order only"),
            (22.0, {}, "order only"),
            (-1.0, {}, "missed"),
            (14.0, {"other_quantity": True}, "order only"),
            (14.0, {"fitted_traces": ["b"]}, "shown"),
        ],
    )
    def test_an_order_is_reached_only_with_its_magnitude(
        self, simulated: float, changes: dict[str, Any], status: str
    ) -> None:
        one = row(relation="reduction", own="lru", published={"on_demand": 14.0}, **changes)
        experiment = Experiment(why="", cases=[], systems={"lru": "lru", "on_demand": "on_demand"})
        found = {
            "values": {"on_demand": simulated},
            "cases": [{"on_demand": simulated}],
            "left_out": {},
            "did_not_run": {},
        }
        told = table.answer_of(one, {}, {"b": found}, {"mine": experiment})
        assert told["status"] == status

    def test_memory_for_a_time_lies_between_the_cases_on_either_side(self) -> None:
        assert judge.memory_gb(0.14, [(8e9, 0.12), (6e9, 0.16), (4e9, None)]) == pytest.approx(7.0)
        assert judge.memory_gb(0.14, [(6e9, 0.13), (8e9, 0.12)]) is None  # reached by all of them: how low is not known
        assert judge.memory_gb(0.10, [(6e9, 0.13), (8e9, 0.12)]) is None

    def test_magnitudes_of_systems_that_are_not_judged_do_not_count(self) -> None:
        one = row(relation="reduction", own="lru", published={"on_demand": 14.0, "sure": 14.0})
        experiment = Experiment(why="", cases=[], systems=dict.fromkeys(("lru", "on_demand", "sure"), "lru"))
        simulated = {"on_demand": 14.0, "sure": 1.0}
        found = {"values": simulated, "cases": [simulated], "left_out": {}, "did_not_run": {}}
        for changes, status in (({}, "order only"), ({"pairs_of": "on_demand"}, "reached")):
            told = table.answer_of(msgspec.structs.replace(one, **changes), {}, {"b": found}, {"mine": experiment})
            assert told["status"] == status
        scaled = row(relation="ratio", published={"lru": 2.0, "on_demand": 4.0})
        assert table.inputs_not_sized(scaled) == ["lru"]

    def test_two_systems_are_judged_by_the_cases_both_ran(self) -> None:
        one = row(published={"a": 1.0, "b": 2.0})
        assert judge.pairs(one, [{"a": 9.0}, {"a": 1.0, "b": 2.0}]) == [("a", "b", True)]  # a's mean alone is 5
        assert judge.pairs(one, [{"a": 1.0}, {"b": 2.0}]) == []


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows and experiments of this test on a tiny trace of Mixtral's shape, bundled and synthetic alike."""
    trace = mixtral_shaped(tmp_path)
    cases = [{"model": "mixtral-8x7b", "hw": "rtx3090"}, {"model": "mixtral-8x7b", "hw": "a6000", "cache": "64experts"}]
    systems = {"lru": "lru scope=layer", "on_demand": "on_demand", "sure": "random", "unable": "moepic split=7"}
    found = {"mine": Experiment(why="a test", cases=cases, systems=systems)}
    monkeypatch.setattr(table, "load_experiments", lambda: found)
    monkeypatch.setattr(table, "load_rows", dict)
    monkeypatch.setattr(inputs, "bundled_for", lambda _model: trace)
    monkeypatch.setattr(inputs, "synthesise", lambda _asked, _folder: str(trace))
    return trace


class TestFigureOf:
    def test_misses_per_activation_by_hand(self) -> None:
        """Ten steps of 32 tokens, k = 2: 64 activations, which ask for 4 experts a step; a quarter is missing."""
        result = {
            "miss_rate": 0.25,
            "distinct_experts.per_layer": 4.0,
            "phases.decode.iterations": 10,
            "phases.decode.tokens": 32,
            "shape.top_k": 2,
        }
        assert work.figure_of(result, work.MISSES_PER_ACTIVATION) == 10 / 64
        assert work.figure_of({**result, "phases.decode.tokens": 0}, work.MISSES_PER_ACTIVATION) is None


class TestTable:
    def test_means_over_cases_of_what_the_simulator_says(
        self, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        one = row(relation="speedup", own="lru", published={"on_demand": [1.5, 4.0], "unable": 3.0})
        result = table.reproduce([one], ("a", "b"), tmp_path / "out", 1, quiet)
        (told,) = result["rows"]
        ratios = []
        for words in (("--hw", "rtx3090"), ("--hw", "a6000", "--cache", "64experts")):
            runs = [
                moesim(capsys, "run", "--policy", *policy, *words, "--trace", mine, "--json").json
                for policy in (("on_demand",), ("lru", "--set", "scope=layer"))
            ]
            ratios.append(runs[0]["tpot_s"]["mean"] / runs[1]["tpot_s"]["mean"])
        for kind in "ab":
            assert told["traces"][kind]["simulated"] == {"on_demand": sum(ratios) / 2}
            assert told["traces"][kind]["cases"] == {"on_demand": 2}
            assert "must lie in" in told["left_out"][kind]["unable, mixtral-8x7b"]
        assert sum(ratios) / 2 > 1
        assert told["status"] == ("reached" if sum(ratios) / 2 <= 1.5 * 4.0 else "order only")
        assert {**result["totals"]["orders"]["b"], "magnitudes": {}} == {
            "right": 1,
            "right_fitted": 1,
            "pairs": 1,
            "magnitudes": {},
        }
        assert result["traces"]["b"]["of"]["mixtral-8x7b"]["labels"] == ["synthetic"]

    def test_requests_arrive_when_the_experiment_says(
        self, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A latency then counts from the arrival, not from when its turn comes."""
        plain = table.load_experiments()["mine"]
        all_at_once = [{**case, "arrivals": "poisson:1000000"} for case in plain.cases]
        loaded = msgspec.structs.replace(plain, cases=all_at_once)  # each waits for those before
        one = row(value="e2e_s", relation="value", published={"lru": 1.0}, cases=[0], check="shown", unknown="a test")
        found = {}
        for name, experiment in (("back to back", plain), ("load", loaded)):
            monkeypatch.setattr(table, "load_experiments", lambda experiment=experiment: {"mine": experiment})
            (told,) = table.reproduce([one], ("a",), tmp_path / "out", 1, quiet)["rows"]
            found[name] = told["traces"]["a"]["simulated"]["lru"]
        n = loaded.requests  # drawn from fewer
        assert found["load"] == pytest.approx(found["back to back"] * (n + 1) / 2, rel=0.2)

    def test_a_systems_own_constant_slows_that_system_alone(
        self, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Solved on another row until `on_demand` takes twice LRU's time; its order is also told without."""
        plain = table.load_experiments()["mine"]
        own = msgspec.structs.replace(plain, constants={"on_demand": "mine"}, could_not={"sure": ["mixtral-8x7b"]})
        constant = Constant(id="mine", testbed="here", row="X-0", label="on_demand", form="per_copy")
        fit_row = row(
            id="X-0",
            check="fit",
            reason="fitted",
            cases=[0],
            relation="speedup",
            own="lru",
            published={"on_demand": 2.0},
        )
        one = row(cases=[0], published={"lru": 2.0, "on_demand": 4.0, "sure": 5.0})
        monkeypatch.setattr(table, "load_experiments", lambda: {"mine": own})
        monkeypatch.setattr(table, "load_rows", lambda: {"X-0": fit_row})
        monkeypatch.setattr(table, "load_constants", lambda: {"mine": constant})
        slower = table.reproduce([one], ("b",), tmp_path / "out", 1, quiet)
        other_stack = table.reproduce([one], ("b",), tmp_path / "out", 1, quiet, "hf")
        assert other_stack == {**slower, "engine": "hf"}  # a constant stands for the stack it was fitted on
        monkeypatch.setattr(table, "load_experiments", lambda: {"mine": plain})
        faster = table.reproduce([one], ("b",), tmp_path / "out", 1, quiet)
        on, plain_on = (result["rows"][0]["traces"]["b"] for result in (slower, faster))
        with_it, without = on["fitted"]["simulated"], plain_on["simulated"]
        assert on["simulated"] == {name: without[name] for name in ("lru", "on_demand")}  # judged without the constant
        assert "fitted" not in plain_on
        assert with_it["lru"] == without["lru"]
        assert with_it["on_demand"] == pytest.approx(2 * with_it["lru"], rel=2e-3)
        assert without["on_demand"] < 1.9 * without["lru"]
        assert set(with_it) == {"lru", "on_demand"}
        assert "says the paper" in slower["rows"][0]["left_out"]["b"]["sure, mixtral-8x7b"]
        assert slower["rows"][0]["constants"] == {"on_demand": "mine"}
        assert faster["constants"] == []
        (told,) = slower["constants"]
        assert told["seconds"] > 0
        apart = slower["totals"]["apart"]
        assert list(apart) == ["a constant of a single system"]
        assert apart["a constant of a single system"]["ids"] == ["X-1"]
        assert list(faster["totals"]["apart"]) == ["no constant"]
        text = show.as_text(slower)
        assert "on_demand*" in text
        assert "rest on a constant of a single system: 1 of 1 (100 %), 1 with them" in text
        assert "from row X-0 (on_demand), which is not scored" in text
        fitted = table.reproduce([fit_row], ("b",), tmp_path / "out", 1, quiet)
        assert fitted["rows"][0]["status"] == "fitted"

    def test_equal_runs_are_done_once_and_kept(
        self, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[Any] = []
        real = work.simulate
        monkeypatch.setattr(work, "simulate", lambda spec: done.append(spec) or real(spec))
        asked = [row(cases=[0]), row(id="X-2", value="ttft_s", cases=[0])]
        first = table.reproduce(asked, ("a", "b"), tmp_path / "out", 1, quiet)
        assert len(done) == 2  # two systems; rows and kinds of traces share their runs
        assert table.reproduce(asked, ("a", "b"), tmp_path / "out", 1, quiet) == first
        assert len(done) == 2
        table.reproduce([row(cases=[1])], ("b",), tmp_path / "out", 1, quiet)
        assert len(done) == 4

    def test_kept_runs_are_those_of_this_code_and_this_trace(self, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = work.spec_of(table.load_experiments()["mine"], 0, "lru", mine, {})
        before = work.key_of(spec)
        assert work.key_of(spec) == before
        monkeypatch.setattr(work, "code_digest", lambda: "edited")
        assert work.key_of(spec) != before
        monkeypatch.undo()
        work.file_digest.cache_clear()
        mine.write_bytes(mine.read_bytes() + b" ")
        assert work.key_of(spec) != before

    def test_processes_change_nothing(self, mine: Path, tmp_path: Path) -> None:
        experiment = table.load_experiments()["mine"]
        specs = [work.spec_of(experiment, case, system, mine, {}) for case in (0, 1) for system in ("lru", "on_demand")]
        alone = work.run_all(specs, tmp_path / "a", 1, lambda _d, _t: None)
        assert work.run_all(specs, tmp_path / "b", 2, lambda _d, _t: None) == alone

    def test_a_row_whose_mechanism_did_not_run_is_neither_judged_nor_counted(
        self, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = table.load_experiments()["mine"]
        rows_asked = [row(cases=[0]), row(id="X-2", cases=[0], published={"on_demand": 4.0, "sure": 2.0})]
        for condition, ran in (("hit_rate > 0", True), ("hit_rate > 1", False), ("policy_stats.nothing > 0", False)):
            monkeypatch.setattr(
                table,
                "load_experiments",
                lambda condition=condition: {"mine": msgspec.structs.replace(plain, mechanism={"lru": condition})},
            )
            result = table.reproduce(rows_asked, ("b",), tmp_path / "out", 1, quiet)
            first, second = result["rows"]
            assert (first["status"] != "not run") == ran
            assert second["status"] != "not run"  # it compares others
            assert result["totals"]["did_not_run"] == ([] if ran else ["X-1"])
            assert result["totals"]["scored"]["pairs"] == 1 + ran
            assert ("its mechanism did not run" in show.as_text(result)) != ran

    def test_rows_are_scored_on_the_trace_their_experiment_names(
        self, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = table.load_experiments()["mine"]
        other = mixtral_shaped(tmp_path / "other", n_requests=6)
        monkeypatch.setattr(inputs, "bundled_for", lambda _model: other)
        told = {}
        for kind in ("a", "b"):
            monkeypatch.setattr(
                table, "load_experiments", lambda kind=kind: {"mine": msgspec.structs.replace(plain, scored=kind)}
            )
            result = table.reproduce([row(cases=[0])], ("a", "b"), tmp_path / "out", 1, quiet)
            told[kind] = result["totals"]["scored"]
            assert told[kind] == result["totals"]["orders"][kind]
            alone = table.reproduce([row(cases=[0])], (), tmp_path / "out", 1, quiet)
            assert list(alone["rows"][0]["traces"]) == [kind]
            assert alone["totals"]["scored"] == told[kind]
        assert told["a"]["magnitudes"] != told["b"]["magnitudes"]

    def test_runs_serve_so_many_requests_and_keep_every_figure(self, mine: Path, tmp_path: Path) -> None:
        plain = table.load_experiments()["mine"]
        for asked, served in ((1, 1), (0, 2)):
            spec = work.spec_of(msgspec.structs.replace(plain, requests=asked), 0, "lru", mine, {})
            (result,) = work.run_all([spec], tmp_path, 1, lambda _done, _total: None)
            assert result["requests"] == served
            assert work.figure_of(result, "tpot_s") == result["tpot_s.mean"]
            assert work.figure_of(result, "phases.decode.time_s") == result["phases.decode.time_s"] > 0
            assert work.figure_of(result, "policy_stats.nothing") is None
        one = row(cases=[0], value="phases.decode.tokens", value_of={"lru": "hit_rate"})
        found = table.reproduce([one], ("b",), tmp_path, 1, quiet)["rows"][0]["traces"]["b"]["simulated"]
        assert 0 < found["lru"] < 1 < found["on_demand"]

    def test_a_kept_run_that_was_cut_short_is_run_again(self, mine: Path, tmp_path: Path) -> None:
        spec = work.spec_of(table.load_experiments()["mine"], 0, "on_demand", mine, {})
        first = work.run_all([spec], tmp_path, 1, lambda _done, _total: None)
        (kept,) = (tmp_path / "runs").glob("*.json")
        kept.write_text("{")
        assert work.run_all([spec], tmp_path, 1, lambda _done, _total: None) == first

    def test_a_defect_is_told_beside_the_other_results_and_not_kept(
        self, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from sim import run

        real = run.prepare

        def broken(spec: Any) -> Any:
            if spec.policy == "on_demand":
                raise IndexError("off the end")
            return real(spec)

        monkeypatch.setattr(run, "prepare", broken)
        one = row(cases=[0], published={"lru": 2.0, "on_demand": 4.0, "sure": 3.0})
        result = table.reproduce([one], ("b",), tmp_path / "out", 1, quiet)
        text = show.as_text(result)
        assert "runs ended by a defect of the program, see below: X-1" in text
        assert "IndexError: off the end" in text
        assert result["totals"]["scored"]["pairs"] == 1
        monkeypatch.undo()
        spec = work.spec_of(
            Experiment(why="", cases=[{"model": "mixtral-8x7b", "hw": "rtx3090"}], systems={"on_demand": "on_demand"}),
            0,
            "on_demand",
            mine,
            {},
        )
        (found,) = work.run_all([spec], tmp_path / "out", 1, lambda _done, _total: None)
        assert "error" not in found

    def test_a_gain_over_nothing_is_left_out_and_the_result_stays_json(self, mine: Path, tmp_path: Path) -> None:
        """Loading on demand hits nothing, so hits are improved infinitely."""
        one = row(
            value="hit_rate",
            relation="improvement",
            own="lru",
            better="high",
            cases=[0],
            published={"on_demand": 66.0, "sure": 10.0},
        )
        result = table.reproduce([one], ("b",), tmp_path / "out", 1, quiet)
        assert "Infinity" not in json.dumps(result, allow_nan=False)
        (told,) = result["rows"]
        assert list(told["traces"]["b"]["simulated"]) == ["sure"]
        assert "over nothing" in told["left_out"]["b"]["on_demand, mixtral-8x7b"]


class TestInputs:
    def test_a_synthetic_trace_has_the_models_shape_and_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = tiny_trace(
            tmp_path / "s.safetensors",
            n_layers=6,
            n_experts=8,
            top_k=2,
            n_requests=6,
            prompt=8,
            outputs=12,
            levels=ALL - {"arrivals", "iterations"},
        )
        monkeypatch.setattr(inputs, "DEFAULT", str(source))
        asked = inputs.Drawn("openmoe-8b", 3)
        path = Path(inputs.synthesise(asked, str(tmp_path / "out")))
        with Trace(path) as trace:
            assert (trace.n_layers, trace.n_experts, trace.top_k) == (4, 32, 2)
            assert {"synthetic", "scaled-by-assumption"} <= set(trace.header.labels)
        before = path.stat().st_mtime_ns
        assert inputs.synthesise(asked, str(tmp_path / "out")) == str(path)
        assert path.stat().st_mtime_ns == before

    def test_a_synthetic_trace_may_come_from_a_fit_to_public_routing(self, tmp_path: Path) -> None:
        asked = inputs.Drawn("qwen3-30b-a3b", 2, 8, 4, "qwen3-30b-a3b")
        with Trace(Path(inputs.synthesise(asked, str(tmp_path / "out")))) as trace:
            assert (trace.n_layers, trace.n_experts, trace.top_k) == (48, 128, 8)
            assert trace.header.labels[:2] == ("synthetic", "fitted-to-qwen3-30b-a3b")
            assert trace.n_requests == 2
        assert asked.title.endswith("from the fit qwen3-30b-a3b")
        assert inputs.synthetic_path(asked, tmp_path) != inputs.synthetic_path(asked._replace(fit=""), tmp_path)

    def test_the_largest_public_trace_of_a_shape_is_taken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "public" / "logs"
        folder.mkdir(parents=True)
        meta = {"meta": {"model": "m", "n_experts": 4, "gate_score": "softmax", "gate_renormalised": True}}
        for name, n in (("short", 2), ("long", 5)):
            lines = [{"phase": "decode" if t else "prefill", "experts": [[0, 1], [2, 3]]} for t in range(n)]
            (folder / f"{name}.jsonl").write_bytes(jsonl(meta, *lines))
        (folder / "README").write_text("no log")
        monkeypatch.delenv(inputs.EXTRA, raising=False)
        assert inputs.public_traces(tmp_path / "out") == {}
        monkeypatch.setenv(inputs.EXTRA, str(tmp_path / "public"))
        ((shape, path),) = inputs.public_traces(tmp_path / "out").items()
        assert shape == (2, 4, 2)
        assert path.name == "logs-long.safetensors"
        monkeypatch.setenv(inputs.EXTRA, str(tmp_path / "nowhere"))
        with pytest.raises(BadInput, match="not a folder"):
            inputs.public_traces(tmp_path / "out")


class TestCommand:
    def test_geometry_takes_no_trace_and_says_what_the_last_run_says(self, capsys: pytest.CaptureFixture[str]) -> None:
        result = moesim(capsys, "reproduce", "--rows", "geometry", "--json").json
        assert result["schema"] == table.SCHEMA
        assert result["traces"] == {}
        counts = result["totals"]["flags"]["G"]
        assert counts["reached"] + counts["missed"] + counts["shown"] == counts["rows"]
        assert counts["reached"] >= 15  # what the project aims at
        by_id = {one["id"]: one for one in result["rows"]}
        assert by_id["FM-1"]["status"] == "reached"
        assert by_id["EM-19"]["status"] == "missed"
        assert by_id["EM-19"]["simulated"]["saved"][0] < 20
        last = {one["id"]: one for one in moesim(capsys, "reproduce", "--last", "--json").json["rows"]}
        for name, one in by_id.items():
            assert json.dumps(one["simulated"]) == json.dumps(last[name]["simulated"]), f"{name}: run it again"

    def test_the_last_full_run_covers_every_row(self, capsys: pytest.CaptureFixture[str]) -> None:
        result = moesim(capsys, "reproduce", "--last", "--json").json
        told = {one["id"]: one for one in result["rows"]}
        assert list(told) == list(ROWS)
        for one in ROWS.values():  # figures are as they are printed now: none was edited after the run
            assert told[one.id]["published"] == msgspec.to_builtins(one.published), one.id
            assert told[one.id]["check"] == one.check, one.id
        assert result["totals"] == table.totals(result["rows"])
        some = moesim(capsys, "reproduce", "--last", "--rows", "MO", "--json").json
        assert [one["id"] for one in some["rows"]] == ["MO-1", "MO-1f", "MO-1n", "MO-4", "MO-4f", "MO-4n"]
