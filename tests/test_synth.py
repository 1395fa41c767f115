"""Synthetic traces: what is fitted comes back when it is drawn, nothing depends on blocks, every level is sound."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from easy_numbers import setup
from tiny_traces import from_rows, tiny_trace

from policies.lcp import Lcp
from policies.lfu import Lfu
from policies.lru import Lru
from sim.base.errors import BadInput
from sim.cli import main
from sim.run import execute
from traces.format.bundled import bundled_traces
from traces.format.check import check_trace
from traces.format.reader import Trace
from traces.stats import observe
from traces.stats.curves import lcp_curve, lfu_curve, lru_curve
from traces.stats.summary import summarise, title
from traces.synth import draw, published
from traces.synth.compare import TOLERANCE, compare
from traces.synth.draw import Drawer
from traces.synth.fit import fit
from traces.synth.latent import GRID, overlap_table, popularity_bias, to_correlation
from traces.synth.profile import Lengths, Profile, RouteShares, Vocabulary, from_json, to_json
from traces.synth.routes import packed
from traces.synth.scale import RULE, scaled, with_lengths
from traces.synth.write import write

SOURCE = "mixtral-8x7b-small"
BUNDLED = pytest.mark.skipif(SOURCE not in bundled_traces(), reason="the default trace is not in this checkout")


def profile(n_layers=4, n_experts=12, top_k=3, **facts):
    """A made-up source: one share of every kind."""
    rng = np.random.default_rng(5)
    base = {
        "source": "made-up",
        "n_layers": n_layers,
        "n_experts": n_experts,
        "top_k": top_k,
        "score": "softmax",
        "renormalised": True,
        "scaling": 1.0,
        "bias": rng.normal(0, 0.3, (n_layers, n_experts)).round(4).tolist(),
        "shares": {
            "task": [0.1] * n_layers,
            "request": [0.1] * n_layers,
            "fade64": [0.1] * n_layers,
            "fade4": [0.2] * n_layers,
            "token": [0.3] * n_layers,
        },
        "depth": [0.0] + [0.5] * (n_layers - 1),
        "ahead": {"1": [0.9] * n_layers, "2": [0.8] * (n_layers - 2) + [None] * 2},
        "shared": [0.95] * (n_layers - 1) + [None],
        "sharpness": [1.5] * n_layers,
        "offset": [0.0] * n_layers,
        "vocabulary": Vocabulary([1, 10, 200], [-3.0, -5.0, -7.0], 0.2),
        "embedding_width": 8,
        "tasks": ["a", "b"],
        "requests": [Lengths(7, 30, i % 2, i % 3 > 0) for i in range(12)],
    } | facts
    return Profile(**base)


def routed(n_layers=4, directions=6, **facts):
    """The made-up source with whole routes in so few directions, and so few ids that they come again."""
    rng, rows = np.random.default_rng(0), n_layers * 12
    shares = {"token": 0.6, "task": 0.1, "last": 0.1, "pair": 0.1, "carry": 0.02, "new": 0.08}

    def factor(share, width):
        return packed(np.sqrt(share / width) * rng.standard_normal((rows, width)))

    widths = {"token": directions, "task": 2, "last": 3, "pair": 2, "new": 2}
    routes = {
        "factors": {name: factor(shares[name], width) for name, width in widths.items()},
        "lasting": {"request": 0.5, "fade64": 0.3, "fade16": 0.2},
        "carry": [0.03] * n_layers,
        "rest": [0.01] * n_layers,
        "shares": {name: [share] * n_layers for name, share in shares.items()},
        "spread": 0.3,
        "kind": 0.5,
        "repeat": 0.5,
    } | facts
    return profile(n_layers, embedding_width=64, routes=RouteShares(**routes))


def all_rows(drawer, plan):
    blocks = list(drawer.rows(plan))
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def test_ties_go_to_the_lowest_expert():
    assert observe.choose(np.array([[1, 3, 3, 0, 3], [2, 2, 2, 2, 2]]), 2).tolist() == [[1, 2], [0, 1]]
    assert observe.choose(np.array([[1, 3, 2]]), 3).tolist() == [[1, 2, 0]]


def test_popularity_comes_back():
    rng = np.random.default_rng(1)
    share = np.array([0.9, 0.5, 0.3, 0.2, 0.1])
    bias = popularity_bias(share, 2, rng)
    drawn = observe.choose(np.random.default_rng(2).standard_normal((40_000, 5)) + bias, 2)
    np.testing.assert_allclose(np.bincount(drawn.ravel(), minlength=5) / len(drawn), share, atol=0.012)


def test_correlation_and_overlap_are_inverse_and_hit_their_ends():
    table = overlap_table(np.zeros(8), 2, np.random.default_rng(0))
    assert table[0] == pytest.approx(2 / 8, abs=0.01)  # independent tokens share K / E
    assert table[-1] == 1.0
    assert (np.diff(table) > 0).all()
    for r, overlap in zip(GRID, table, strict=True):
        assert to_correlation(overlap, table) == pytest.approx(r, abs=1e-9)
    assert to_correlation(0.0, table) == pytest.approx(GRID[0], abs=1e-12)


@pytest.mark.parametrize("made", [profile(), routed()], ids=["fields", "routes"])
def test_blocks_decide_nothing(monkeypatch, made):
    plan = next(Drawer(made, 3).plans(1, None))
    whole = all_rows(Drawer(made, 3), plan)
    monkeypatch.setattr(draw, "_BLOCK_VALUES", 5 * 4 * 12)  # five rows at a time
    pieces = all_rows(Drawer(made, 3), plan)
    assert whole.keys() == pieces.keys()
    assert len(whole["experts"]) == plan.n_rows == 37
    for name, values in whole.items():
        np.testing.assert_array_equal(values, pieces[name], err_msg=name)


def test_a_request_is_the_same_whatever_surrounds_it(tmp_path):
    short = write(tmp_path / "a.safetensors", profile(), seed=9, n_requests=3)
    long = write(tmp_path / "b.safetensors", profile(), seed=9, n_requests=8)
    with Trace(short) as one, Trace(long) as other:
        np.testing.assert_array_equal(one.experts, other.experts[: one.n_tokens])
    again = write(tmp_path / "c.safetensors", profile(), seed=9, n_requests=3)
    assert again.read_bytes() == short.read_bytes()
    changed = write(tmp_path / "d.safetensors", profile(), seed=10, n_requests=3)
    with Trace(short) as one, Trace(changed) as other:
        assert (one.experts != other.experts).mean() > 0.3


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalised", [True, False])
def test_every_level_is_sound_and_labelled(tmp_path, score, renormalised):
    made = profile(score=score, renormalised=renormalised, scaling=2.5 if renormalised else 1.0)
    with Trace(write(tmp_path / "t.safetensors", made, n_tokens=300)) as trace:
        assert check_trace(trace) == []
        assert trace.n_tokens == 300
        assert trace.header.labels == ("synthetic", "fitted-to-made-up")
        assert {
            "weights",
            "scores",
            "next_scores_1",
            "next_scores_2",
            "shared_scores",
            "token_ids",
            "embeddings",
            "tasks",
        } <= trace.levels
        assert from_json(trace.header.extra["profile"], "header") == made
        assert {r.split for r in trace.requests} == {"store", "test"}


def test_a_bad_profile_is_refused():
    with pytest.raises(BadInput, match=r"header: .*n_layers.*fit the source again"):
        from_json(to_json(profile()).replace('"n_layers":4', '"n_layers":0'), "header")


@pytest.mark.thorough
def test_what_is_drawn_is_fitted_again(tmp_path):
    """Shares, depth and prediction correlations come back from the trace that was drawn with them."""
    made = profile(
        n_layers=3,
        requests=[Lengths(4, 196, i % 6, True) for i in range(60)],
        tasks=list("abcdef"),
        embedding_width=64,
        ahead={"1": [0.9, 0.7, 0.5], "2": [0.8, None, None]},
        shared=[0.95, 0.6, None],
    )
    with Trace(write(tmp_path / "t.safetensors", made, n_requests=60)) as trace:
        found = fit(trace)
    assert np.corrcoef(np.ravel(found.bias), np.ravel(made.bias))[0, 1] > 0.95
    for names in (("task",), ("token",), ("request", "fade64"), ("fade16", "fade4", "fade1")):
        got, true = (sum(p.share(name).mean() for name in names) for p in (found, made))
        assert got == pytest.approx(true, abs=0.06), names
    np.testing.assert_allclose(found.depth[1:], made.depth[1:], atol=0.15)  # tokens repeat: affinity sees more
    np.testing.assert_allclose(found.ahead["1"], made.ahead["1"], atol=0.05)
    assert found.ahead["2"][0] == pytest.approx(0.8, abs=0.05)
    assert found.ahead["2"][1:] == [None, None]
    np.testing.assert_allclose(found.shared[:2], [0.95, 0.6], atol=0.05)
    np.testing.assert_allclose(found.sharpness, made.sharpness, rtol=0.06)


def test_a_trace_of_selections_alone_can_be_fitted(tmp_path):
    source = tiny_trace(tmp_path / "s.safetensors", n_layers=3, n_experts=8, top_k=2, levels=frozenset())
    with Trace(source) as trace:
        found = fit(trace)
    assert (found.sharpness, found.shared, found.vocabulary, found.ahead) == (None, None, None, {})
    with Trace(write(tmp_path / "t.safetensors", found, n_requests=4)) as trace:
        assert trace.levels == {"experts"}
        assert check_trace(trace) == []


LARGE = [pytest.param(shape, marks=pytest.mark.thorough) for shape in ((58, 256, 8), (94, 128, 8), (36, 128, 4))]


@pytest.mark.parametrize("shape", [*LARGE, (1, 4, 1)])
def test_other_shapes_are_an_assumption_that_travels(tmp_path, shape):
    made = scaled(profile(), *shape)
    with Trace(write(tmp_path / "t.safetensors", made, n_tokens=40)) as trace:
        assert (trace.n_layers, trace.n_experts, trace.top_k) == shape
        assert "scaled-by-assumption" in trace.header.labels
        assert RULE in trace.header.notes
        assert check_trace(trace) == []
    assert scaled(profile(), 4, 12, 3) == profile()


def test_lengths_are_those_of_the_source_by_one_factor():
    """Prompts of 7 tokens, and answers of 31 with the first token: half of them as long as the others."""
    requests = [Lengths(7 * (1 + i % 2), 30, 0, True) for i in range(4)]
    made = with_lengths(profile(requests=requests), 21, 62)
    assert [(one.prompt, one.decode) for one in made.requests] == [(14, 61), (28, 61)] * 2
    assert made.assumptions[-2:] == [
        "prompts are scaled to a mean of 21 tokens",
        "answers are scaled to a mean of 62 tokens",
    ]
    assert with_lengths(profile(), 0, 0).requests == profile().requests


@pytest.mark.thorough
@BUNDLED
def test_the_held_out_half_of_the_bundled_trace_agrees():
    """LRU and LFU at equal fractions within three points; the figures policies predict from, within three as well."""
    with Trace(bundled_traces()[SOURCE]) as trace:
        found = compare(trace, seed=1)
    apart = found.differences()
    curves = [name for name in apart if name.startswith(("lru_", "lfu_"))]
    assert len(curves) == 9
    assert found.worst_curve()[0] and found.out_of_order() == []
    for name in (
        *curves,
        "overlap_1",
        "overlap_8",
        "overlap_64",
        "overlap_same_task",
        "affinity",
        "predicted_1",
        "predicted_2",
        "predicted_3",
        "predicted_shared",
    ):
        assert abs(apart[name]) <= TOLERANCE, (name, apart[name])
    assert found.heldout.figures["lru_25"] > 0.33  # far from the 25 % of chance, so the agreement means something


def test_published_accuracy_is_met(tmp_path):
    figures = published.PublishedFigures(
        schema=published.SCHEMA,
        id="x",
        source="a paper",
        model="m",
        n_layers=4,
        n_experts=12,
        top_k=3,
        curves={},
        accuracy={1: [None, 0.6, 0.8, 0.95]},
        readings=[],
    )
    bent = published.fit_to(profile(requests=[Lengths(4, 146, 0, True)] * 20), figures)
    assert bent.ahead["1"][3] == 0.9  # the wrap-around is the source's
    with Trace(write(tmp_path / "t.safetensors", bent)) as trace:
        assert "fitted-to-published-figures" in trace.header.labels
        rows = published.reached(figures, trace)
    assert [row.target for row in rows] == [0.6, 0.8, 0.95]
    for row in rows:
        assert row.reached == pytest.approx(row.target, abs=0.03)


def test_summary_of_a_trace_worked_by_hand(tmp_path):
    """Two requests of three decode rows over four experts, one layer: every figure counted by hand."""
    rows = [[[0, 1]], [[0, 1]], [[0, 2]], [[0, 1]]] * 2
    path = from_rows(tmp_path / "t.safetensors", rows, 4, [(1, 4)] * 2)
    with Trace(path) as trace:
        found = summarise(trace, fracs=(0.5, 0.75))
    assert found.figures["chance"] == 0.5
    assert found.figures["top_quarter"] == 0.5  # expert 0 is one of four and half of all choices
    assert found.figures["overlap_1"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert found.figures["overlap_2"] == pytest.approx((0.5 + 1) / 2)
    # Decode rows 01 02 01 01 02 01. Two places: hits -, 0, 0, 01, 0, 0 of twelve. Three: 1 and 2 stay as well.
    assert found.figures["lru_50"] == pytest.approx((0 + 1 + 1 + 2 + 1 + 1) / 12)
    assert found.figures["lru_75"] == pytest.approx((0 + 1 + 2 + 2 + 2 + 2) / 12)
    assert title("lru_cold_50") == "LRU hits, 50 % cached, cold per request"


@pytest.mark.parametrize("kind, curve", [(Lru, lru_curve), (Lfu, lfu_curve), (Lcp, lcp_curve)])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 9])
def test_curves_are_the_policies(kind, curve, size, tmp_path):
    """The engine with one cache per layer copies exactly what the curve misses; prompts are one token long."""
    made = profile(
        n_layers=3,
        n_experts=10,
        top_k=2,
        ahead={},
        shared=None,
        sharpness=None,
        offset=None,
        requests=[Lengths(1, 60, 0, False)] * 4,
    )
    with Trace(write(tmp_path / "t.safetensors", made, seed=4, levels="experts")) as trace:
        misses = execute(setup(kind(scope="layer"), trace, 3 * size)).report.counts.tally.n_demand
        experts = np.array(trace.experts)
        prompts = trace.requests.first_row
        experts[prompts] = np.sort(experts[prompts], axis=-1)  # a prefill asks for its experts in order of their ids
    (hits,) = curve(experts, 10, [size])
    assert 1 - misses / experts.size == pytest.approx(hits.mean(), abs=1e-12)
    assert 0.1 < hits.mean() < 0.99
    cold = np.concatenate([curve(experts[i : i + 61], 10, [size]) for i in range(0, len(experts), 61)])
    np.testing.assert_allclose(curve(experts, 10, [size], np.arange(0, len(experts), 61))[0], cold.mean(axis=0))


@pytest.mark.skipif(sys.platform == "win32", reason="measures memory as Linux and macOS tell it")
@pytest.mark.thorough
def test_memory_does_not_grow_with_the_trace(tmp_path):
    """Drawing and showing four times as many tokens takes hardly more memory; measured in processes of their own."""
    (tmp_path / "profile.json").write_text(to_json(profile(16, 16, 2)), encoding="utf-8")
    verbs = {
        "draw": "from traces.synth.profile import from_json\nfrom traces.synth.write import write\n"
        "write(path, from_json(open(sys.argv[2]).read(), ''), n_tokens=int(sys.argv[3]))",
        "show": "from sim.cli import traces\ntraces.command(['show', str(path), '--json'], standalone_mode=False)",
    }

    def peak_bytes(n_tokens, verb):
        code = (
            f"import resource, sys\nfrom pathlib import Path\npath = Path(sys.argv[1])\n{verbs[verb]}\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        args = [tmp_path / f"{n_tokens}.safetensors", tmp_path / "profile.json", n_tokens]
        done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=True)
        return int(done.stdout.splitlines()[-1]) * (1 if sys.platform == "darwin" else 1024)

    for verb in verbs:
        small, large = peak_bytes(8_000, verb), peak_bytes(32_000, verb)
        size = (tmp_path / "32000.safetensors").stat().st_size
        assert size > 24e6
        assert large - small < 12e6, verb


def moesim(capsys, *args):
    with pytest.raises(SystemExit) as stopped:
        main(["traces", *map(str, args)])
    out, err = capsys.readouterr()
    return stopped.value.code, out, err


def test_the_command_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    source = write(tmp_path / "source.safetensors", profile(), n_requests=8)
    target = tmp_path / "drawn.safetensors"
    code, out, _ = moesim(capsys, "synth", source, "-o", target, "--shape", "6x20,k=4", "--tokens", 90)
    assert code == 0
    assert "assumed: scaling rule" in out
    assert "6x20, k=4" in out
    assert "labels synthetic, fitted-to-source, scaled-by-assumption" in out
    assert moesim(capsys, "synth", source, "-o", target)[0] == 2
    assert "--overwrite" in moesim(capsys, "synth", source, "-o", target)[2]
    assert moesim(capsys, "synth", source, "--shape", "6by20")[0] == 2
    assert "give one of them" in moesim(capsys, "synth", source, "--shape", "6x20,k=4", "--model", "mixtral-8x7b")[2]
    code, out, _ = moesim(capsys, "stats", source, target)
    assert code == 0
    assert "LRU hits, 50 % cached" in out
    found = json.loads(moesim(capsys, "stats", source, "--json")[1])["traces"][0]
    assert found["shape"] == "4x12, k=3"
    assert found["figures"]["predicted_1"] > found["figures"]["predicted_2"] > 0.3
    code, out, _ = moesim(capsys, "synth", "none", "--targets", "list")
    assert "MoEpic" in out


@pytest.mark.parametrize("asked", [{"n_requests": 1}, {"n_tokens": 20}])
def test_a_trace_too_short_for_both_splits_of_its_source_is_refused_before_it_is_drawn(tmp_path, asked):
    made = profile()
    lengths = [msgspec.structs.replace(made.requests[i % len(made.requests)], store=i % 3 == 1) for i in range(6)]
    both = msgspec.structs.replace(made, requests=lengths)
    path = tmp_path / "t.safetensors"
    with pytest.raises(BadInput, match=r"split store.*: --requests [23]") as caught:
        write(path, both, **asked)
    assert not path.exists()
    n_requests = int(str(caught.value).split()[-1])
    with Trace(write(path, both, n_requests=n_requests)) as trace:
        assert {request.split for request in trace.requests} == {"store", "test"}
    scored = msgspec.structs.replace(made, requests=[msgspec.structs.replace(lengths[0], store=False)])
    with Trace(write(tmp_path / "one.safetensors", scored, **asked)) as trace:  # its source has one split too
        assert trace.n_requests == 1


@pytest.mark.parametrize(
    "requests",
    [[Lengths(30, 0, i % 2, False) for i in range(4)], [Lengths(1, 0, 0, False) for _ in range(40)]],
    ids=["prompts alone", "requests of one row"],
)
def test_a_source_without_decode_rows_or_neighbours_is_fitted_and_drawn(tmp_path, requests):
    """Its levels of predictions have no rows, no token has one before: neither is drawn, and nothing fails."""
    made = profile(requests=requests)
    with Trace(write(tmp_path / "source.safetensors", made, seed=1)) as trace:
        found = fit(trace, routes=False)
    assert (found.ahead, found.shared) == ({}, None)
    with Trace(write(tmp_path / "drawn.safetensors", found, seed=2)) as drawn:
        assert drawn.n_tokens == sum(like.prompt for like in requests)
