"""Ablations move in the published direction: what the pages say in words is what their pasted tables show.

`test_docs.py` runs the commands again and compares; here the tables are read, so that a table renewed by a change
cannot part from the sentences around it.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
OUTPUT = re.compile(r"<!-- output of: (?P<command>.+?) -->\n```text\n(?P<text>.*?)\n```\n", re.DOTALL)


def tables(page: str, word: str) -> list[str]:
    """Pasted outputs of a page whose command has this word."""
    found = OUTPUT.finditer((DOCS / page).read_text(encoding="utf-8"))
    return [match["text"] for match in found if word in match["command"]]


def column(text: str, pattern: str) -> dict[str, float]:
    """First group -> second group, a number, of every line that matches."""
    rows = [re.match(pattern, line) for line in text.splitlines()]
    found = {row[1].strip(): float(row[2]) for row in rows if row is not None}
    assert found, f"no line matches {pattern}"
    return found


def cells(text: str, of: str) -> dict[str, str]:
    """First column -> one other column of a table; a long name goes on in lines of few cells."""
    lines = text.splitlines()
    rule = next(index for index, line in enumerate(lines) if line.startswith("──"))
    at = re.split(r"  +", lines[rule - 1].strip()).index(of)
    found: list[tuple[str, str]] = []
    for line in lines[rule + 1 :]:
        row = re.split(r"  +", line.rstrip())
        if not line.strip() or line.startswith("left out to fit"):
            break
        if len(row) >= 5:
            found.append((row[0], row[at]))
        elif row[0]:
            found[-1] = (f"{found[-1][0]} {row[0]}", found[-1][1])
    assert len(found) > 1
    return dict(found)


def compared(text: str, of: str) -> dict[str, float]:
    """Policy -> figure of one column of a table of `moesim compare`."""
    return {name: float(cell.split()[0].rstrip("%")) for name, cell in cells(text, of).items()}


def ranked(text: str) -> dict[str, tuple[int, int]]:
    """Policy -> best and worst rank that the requests leave open, of a table of `moesim compare`."""
    ends = {name: [int(end) for end in cell.split("-")] for name, cell in cells(text, "rank").items()}
    return {name: (both[0], both[-1]) for name, both in ends.items()}


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def falls(values: list[float], strictly: bool = True) -> bool:
    return all(a > b if strictly else a >= b for a, b in pairwise(values))


STEPS = ["base*", "+CE", "+ER", "+Pre", "+BA"]
"""Of Figure 16, from the base whose TPOT moves as published: each adds one part to the one before."""


def figure_16(world: str) -> tuple[dict[str, float], dict[str, float]]:
    """TPOT and cache ratio of every step of Figure 16."""
    (text,) = tables("importance.md", f'{world} --requests 2 --json --policy "importance low_score_rule=none')
    found = column(text, r"(\S+) +TPOT ([\d.]+) ms"), column(text, r"(\S+) .*cache ratio ([\d.]+)")
    assert set(found[0]) == set(found[1]) == {"base", "-Pre", *STEPS}
    return found


def test_importance_figure_16_on_s1():
    """The router and the balancer save about what is published, eviction by score and prefetching nothing, as told."""
    tpot, ratio = figure_16("--hw rtx3080ti --trace deepseek-moe-16b-chat")
    assert falls([tpot[step] for step in ("+CE", "+ER", "+BA")])
    assert tpot["+CE"] == pytest.approx(tpot["base*"], rel=0.03)
    assert tpot["+Pre"] == pytest.approx(tpot["+ER"], rel=0.03)
    assert 1 - tpot["+ER"] / tpot["+CE"] == pytest.approx(0.20, abs=0.04)
    assert 1 - tpot["+BA"] / tpot["+Pre"] == pytest.approx(0.34, abs=0.04)
    assert tpot["base"] < 0.9 * tpot["+CE"], "against the base as worded, score eviction is a loss"
    assert falls([-ratio[step] for step in ("base", "+CE", "+ER", "+Pre")])
    assert ratio["+CE"] == pytest.approx(ratio["base*"], abs=0.02)
    assert ratio["+BA"] == pytest.approx(ratio["+Pre"], abs=0.02)
    assert tpot["-Pre"] < 0.9 * tpot["+BA"], "the page explains why"


def test_importance_figure_16_on_two_of_eight():
    """All but prefetching, which pays once the link has idle time and a prediction is free."""
    tpot, ratio = figure_16("--hw rtx3090")
    assert falls([tpot[step] for step in ("base*", "+CE", "+ER")])
    assert tpot["+ER"] < tpot["+Pre"] < 1.1 * tpot["+ER"], "prefetching costs a little time"
    assert ratio["+Pre"] > ratio["+ER"], "though more is there when it is asked for"
    assert tpot["-Pre"] < 0.9 * min(tpot[step] for step in STEPS), "by far the fastest step"
    (isolated,) = tables("importance.md", "--hw a6000")
    tpot = compared(isolated, "TPOT")
    free, without = (tpot[f"importance {how}"] for how in ("balance=load prediction_s=0", "prefetch=none balance=load"))
    assert free < without < tpot["importance balance=load"]


def test_moepic_table_3():
    """Without the prefetcher a token takes longer, without the configurator a little; the cache priority is not told
    apart from replacement at random."""
    (text,) = tables("moepic.md", "--hw rtx3090 --requests 2")
    tpot, rank = compared(text, "TPOT"), ranked(text)
    assert tpot["moepic"] < tpot["moepic configure=false"] < tpot["moepic prefetch=random"]
    gained = {how: tpot[f"moepic {how}"] / tpot["moepic"] - 1 for how in ("configure=false", "prefetch=random")}
    assert 2 * gained["configure=false"] < gained["prefetch=random"], "the prefetcher matters most"
    assert rank["moepic"][1] < rank["moepic prefetch=random"][0], "beyond what other requests may change"
    assert overlap(rank["moepic"], rank["moepic evict=random"])
    assert tpot["moepic evict=random"] == pytest.approx(tpot["moepic"], rel=0.03)
    ttft = compared(text, "TTFT")
    same = [ttft[f"moepic{without}"] for without in ("", " evict=random", " configure=false", " prefetch=random")]
    limits = [f"moepic configure=false split={limit}" for limit in ("0", "1 prefetch=none")]
    assert max(same) < 1.01 * min(same), "the page says that prompts do not tell them apart"
    assert min(ttft[name] for name in limits) > 1.05 * max(same), "and that these take longer"
    assert tpot["moepic configure=false"] < min(tpot[name] for name in limits), "between its limits it beats both"


def test_moepic_table_3_on_its_testbed():
    """Prefetcher and configurator count, the cache priority is not told apart; the configurator finds nearly whole
    experts, which on this trace equal budgets of them match."""
    (text,) = tables("moepic.md", "configure=false prefetch=none")
    tpot, rank = compared(text, "TPOT"), ranked(text)
    assert tpot["moepic"] < tpot["moepic configure=false"] < tpot["moepic prefetch=random"]
    assert rank["moepic"][1] < rank["moepic prefetch=random"][0]
    assert overlap(rank["moepic"], rank["moepic evict=random"])
    assert tpot["moepic evict=random"] == pytest.approx(tpot["moepic"], rel=0.03)
    assert tpot["moepic configure=false split=1"] == pytest.approx(tpot["moepic"], rel=0.02)


def test_moepic_prefetching_ends_between_copies():
    """The finer a segment is copied, the faster; the less a random prefetch costs, the more the configurator gains."""
    (text,) = tables("moepic.md", "for n in 1 3 6")
    full = column(text, r"copies=(\d) +full (\d+) ms")
    prefetcher = column(text, r"copies=(\d) .*w/o SP ([\d.]+) times")
    configurator = column(text, r"copies=(\d) .*w/o CCA ([\d.]+) times")
    assert list(full) == ["1", "3", "6"]
    assert falls(list(full.values()))
    assert falls(list(prefetcher.values()))
    assert falls([-gain for gain in configurator.values()])
    assert configurator["1"] < 1 < configurator["3"]


def test_moepic_table_1():
    """RND is the share cached; LCP is ahead of LFU and of LRU as published; LRU is ahead of LFU, as is replacement at
    random, since tasks take turns."""
    (text,) = tables("moepic.md", "lcp scope=layer")
    sizes = {int(line.split()[0]): dict(re.findall(r"([a-z][\w= ]*?) ([\d.]+) %", line)) for line in text.splitlines()}
    assert list(sizes) == [10, 20, 30, 40, 50]
    for cached, shares in sizes.items():
        hit = {name: float(share) for name, share in shares.items()}
        lfus = [hit.pop(f"lfu{counts}") for counts in ("", " tokens")]
        assert hit["random static"] == pytest.approx(100 * cached / 60, abs=1.5)
        assert hit["random static"] < min(*lfus, *(hit[name] for name in ("random", "lru", "lcp")))
        assert hit["lcp"] > max(*lfus, hit["lru"])
        assert lfus[1] < hit["lru"]
        assert hit["random"] >= lfus[0]
        assert 0 < lfus[1] - lfus[0] < 2, "a prompt as one use, or as many as its tokens: little changes"


def test_fine_moe_figure_14():
    """Hit rates: counts are worst, every part of the map adds or leaves them; LRU keeps least, LFU as p x freq."""
    (text,) = tables("fine_moe_parts.md", 'track=map_t"')
    hit = compared(text, "hit")
    parts = [hit[f"fine_moe track={name}"] for name in ("hit_count", "map_t", "map_ts", "map_tsd")]
    assert falls([-share for share in parts], strictly=False)
    assert parts[0] < parts[1] < parts[2]
    assert hit["fine_moe evict=lru"] < hit["fine_moe track=map_tsd"]
    assert hit["fine_moe evict=lfu"] == pytest.approx(hit["fine_moe track=map_tsd"], rel=0.02)


def test_fine_moe_threshold_and_speculation():
    """With a store of four the threshold finds more and is right less; speculation loses with distance."""
    (text,) = tables("fine_moe_parts.md", "capacity=4")
    predicted = column(text, r"fine_moe (.*?) +predicted ([\d.]+)")
    right = column(text, r"fine_moe (.*?) +predicted .* right ([\d.]+)")
    few, more = "track=map_ts capacity=4", "track=map_tsd capacity=4"
    assert predicted[few] < predicted[more]
    assert right[few] > right[more]
    assert predicted["track=map_ts"] == predicted["track=map_tsd"]
    assert falls([predicted[f"track=speculate distance={d}"] for d in (1, 2, 3)])
    assert predicted["track=speculate distance=3"] > predicted["track=map_tsd"], "why it is best here"


def test_emoe_open_and_closed_loop():
    """Predicted, task-agnostic, random: the published order in mass kept and perplexity; all experts change nothing."""
    (text,) = tables("emoe.md", "for s in")
    mass = column(text, r"(.*?) +gate mass kept ([\d.]+)")
    apart = "p=3 --set "
    assert falls([mass[n] for n in ("reload=request", "p=1", apart + "task_aware=false", apart + "selection=random")])
    (text,) = tables("emoe.md", "poisson")
    latency = column(text, r"(.*?) +([\d.]+) s ")
    assert latency["emoe kept_frac=0.6"] < latency["gpu_only"] < latency["emoe kept_frac=0.6 reload=request"]
    (text,) = tables("emoe.md", "--table emoe")
    change = compared(text, "change")
    sizes = [change[f"emoe experts_per_layer={n} memory_bytes=0 reload=request"] for n in (3, 4, 5, 6, 7, 8)]
    assert falls(sizes)
    assert sizes[-1] == 0.0
    five = "emoe experts_per_layer=5 "
    order = ["predictor=surrogate:1 p=1", "p=1", "task_aware=false reload=request", "selection=random"]
    assert falls([-change[five + how] for how in order])
