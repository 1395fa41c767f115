"""The flat loop is the general loop: same result bit for bit, wherever it applies."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_traces import tiny_trace

from policies.lfu import Lfu
from policies.lru import Lru
from sim.engine import fast, fused
from sim.run import execute, prepare
from sim.setup.spec import RunSpec

PLAIN = ("lru", "lfu", "fifo", "random")
VOLATILE = ("wall_s",)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    levels = {"scores", "weights", "tasks"}
    return tiny_trace(
        tmp_path_factory.mktemp("t") / "t.safetensors", 32, 8, 2, n_requests=3, prompt=5, outputs=9, levels=levels
    )


def both(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, object], dict[str, object], bool]:
    used = []
    real = fast.drive_flat
    monkeypatch.setattr(fast, "drive_flat", lambda *a: used.append(1) or real(*a))
    flat = execute(prepare(spec)).result
    monkeypatch.setattr(fast, "applies", lambda *a: False)
    general = execute(prepare(spec)).result
    monkeypatch.undo()
    for key in VOLATILE:
        flat.pop(key), general.pop(key)
    return flat, general, bool(used)


@pytest.mark.parametrize("policy", PLAIN)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("experts", [8, 16, 60, 200, 256])
def test_flat_equals_general(
    policy: str, experts: int, batch: int, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RunSpec(policy=policy, hw="h200-sxm", trace=str(trace), model="mixtral-8x7b", split="all", experts=experts,
                   batch=batch)  # fmt: skip
    flat, general, used = both(spec, monkeypatch)
    assert used
    assert flat == general


@pytest.mark.parametrize(("policy", "settings"), [("lfu", {"counts": "tokens"}), ("random", {"selection": "static"})])
@pytest.mark.parametrize("batch", [1, 2])
def test_parameters_agree(
    policy: str, settings: dict[str, object], batch: int, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for experts in (60, 200):
        spec = RunSpec(policy=policy, hw="h200-sxm", trace=str(trace), model="mixtral-8x7b", split="all",
                       experts=experts, batch=batch, set=settings)  # fmt: skip
        flat, general, used = both(spec, monkeypatch)
        assert used and flat == general
        monkeypatch.setattr(fused, "applies", lambda *_: False)  # `both` undoes it
        assert both(spec, monkeypatch)[1] == general


def test_host_bound_and_slow_links_agree(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in ({"hw.host.launch_s": 1e-3}, {"hw.h2d.bandwidth_bytes_per_s": 1e9}, {"hw.host.sync_s": 5e-3}):
        spec = RunSpec(policy="lru", hw="rtx3090", trace=str(trace), model="mixtral-8x7b", split="all", set=settings)
        flat, general, used = both(spec, monkeypatch)
        assert used
        assert flat == general


@pytest.mark.parametrize("experts", [1, 2, 5])
def test_too_little_room_falls_back_to_the_general_loop(
    experts: int, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RunSpec(policy="lru", hw="rtx3090", trace=str(trace), model="mixtral-8x7b", split="all", experts=experts)
    flat, general, used = both(spec, monkeypatch)
    assert used  # it was tried, and gave up
    assert flat == general


def test_a_subclass_that_answers_for_itself_is_asked_one_by_one() -> None:
    class Mine(Lru):
        def accessed(self, piece, hit, view):
            super().accessed(piece, hit, view)

    class Same(Lru):
        pass

    assert fast.exchanges(Lru()) and fast.exchanges(Same())
    assert not fast.exchanges(Mine()) and not fast.exchanges(Lfu())


def test_it_does_not_apply_where_somebody_looks(trace: Path) -> None:
    from sim.run import assemble

    spec = RunSpec(policy="lru", hw="rtx3090", trace=str(trace), model="mixtral-8x7b", split="all")
    for change in ({"policy": "fine_moe"}, {"gpus": 2}, {"policy": "on_demand"}):
        if change.get("policy") == "fine_moe":
            continue  # needs embeddings, which this trace does not carry
        setup = prepare(RunSpec(**{f: getattr(spec, f) for f in spec.__struct_fields__} | change))
        assert not fast.applies(*assemble(setup))
    assert not fast.applies(*assemble(prepare(spec), log=lambda *a: None))
    assert fast.applies(*assemble(prepare(spec)))
