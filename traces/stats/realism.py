"""What may be concluded from a trace: its figures beside published ones of its shape, and a verdict in words.

Both are cut alike (`cuts`): a hit rate of 6,000 tokens of six tasks says nothing beside one of a single prompt, nor
does one of 128 tokens of four requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sim.base.units import show_count
from traces.format.header import REPEATING
from traces.format.reader import Trace
from traces.format.shapes import apart
from traces.stats import observe
from traces.stats.curves import hit_rates
from traces.stats.cuts import CUTS, PLAIN, cut_figures, definitions, gate_mass, of_one_request, unions
from traces.stats.observe import Sample
from traces.stats.public import Printed, PublicTrace, public

QUICK = ("lru", "lfu", "lcp")  # whose order the verdict is about
ORDER_MARGIN = 0.01  # two published hit rates that differ by less have no order
HITS_MARGIN, SHARE_MARGIN, OVERLAP_MARGIN, ACCURACY_MARGIN = 0.03, 0.05, 0.04, 0.05
FEW_TESTS, SHORT_PROMPT = 100, 100
SHAPE_FACTOR = 1.5  # by how much experts, and the share of them chosen, may differ in "its shape"
MAX_ROWS = 20_000  # more than that is sampled: every second request, or third
ORDER, HITS, SKEW, REPETITION = (
    "order of plain caches",
    "hit rates",
    "skew of popularity",
    "repetition from token to token",
)
TRAINED_FOR = (HITS, f"{HITS} of one request", SKEW, REPETITION)  # of a trace labelled REPEATING


@dataclass(frozen=True)
class Finding:
    """One thing that a comparison shows: whether the trace is fit for `about`, and in what words."""

    about: str
    holds: bool | None
    says: str


@dataclass(frozen=True)
class Row:
    """A figure of the trace beside the published ones, cut alike; None where one side lacks it."""

    what: str
    here: float | None
    published: tuple[float | None, ...]
    share: bool = True


@dataclass(frozen=True)
class Stretches:
    """Figures of stretches of one length, here and in each published trace.

    rows: of a stretch; 0 when there is none that both have. of_one: each is of one request, else of one task. prompts:
    each published trace is one prompt.
    """

    rows: int
    of_one: bool
    prompts: bool
    here: dict[str, float]
    published: tuple[dict[str, float], ...]

    def beside_all(self) -> list[Row]:
        """Every figure beside the published ones."""
        return [
            Row(name, value, tuple(known.get(name) for known in self.published)) for name, value in self.here.items()
        ]

    def beside(self, key: str) -> list[float]:
        """What is published of a figure."""
        return [figures[key] for figures in self.published if key in figures]

    def off(self, key: str) -> float:
        """By how much a figure lies outside the range of the published ones, or, of single prompts, off their mean.

        A task of the trace may be any of those published. The mean of many requests has to be near that of prompts:
        one prompt unlike the others makes their range so wide that anything is inside.
        """
        real = self.beside(key)
        low, high = (sum(real) / len(real),) * 2 if self.prompts else (min(real), max(real))
        return self.here[key] - min(max(self.here[key], low), high)


@dataclass(frozen=True)
class Realism:
    """A trace beside the published ones of its shape.

    task, request: stretches of one task and of one request. judged: the one of both that the verdict is about. Single
    prompts are held against single requests: a stretch of several hits less, for popularity moves between them.
    """

    name: str
    shape: str
    n_experts: int
    top_k: int
    kind: str
    references: tuple[PublicTrace, ...]
    task: Stretches
    request: Stretches
    judged: Stretches
    unions: dict[int, float]
    reuse: dict[str, float]
    gate_mass: list[float]
    accuracy: list[float | None]
    findings: list[Finding] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """Everything beside what is published of it; hits, skew and repetition of one task."""
        found = self.task.beside_all()
        for batch, value in self.unions.items():
            found.append(Row(f"union_{batch}", value, tuple(t.unions.get(batch) for t in self.references), share=False))
        for name, value in self.reuse.items():
            found.append(Row(f"reuse_{name}", value, tuple(t.reuse.get(name) for t in self.references)))
        for rank, value in enumerate(self.gate_mass):
            there = (dict(enumerate(t.gate_mass)).get(rank) for t in self.references)
            found.append(Row(f"mass_{rank + 1}", value, tuple(there)))
        return found

    @property
    def line(self) -> str:
        """The verdict in one line."""
        bad = [finding.says for finding in self.findings if finding.holds is False]
        good = [finding.about for finding in self.findings if finding.holds]
        if not self.references:
            said = f"no published routing of the shape {self.shape} is known to hold it against"
        else:
            names = [t.name for t in self.references]
            more = [f"{len(names) - 1} more of this shape"] if len(names) > 2 else names[1:]
            said = f"held against {' and '.join([names[0], *more])}"
        parts = [f"trace {self.name}: {self.kind}; {said}"]
        if good:
            parts.append(f"as there: {', '.join(good)}")
        return "; ".join([*parts, *bad])


def judge(trace: Trace, quick: bool = False) -> Realism:
    """Hold a trace against published ones. quick: what the one line needs, and no more.

    Raises:
        BadInput: selections that are not sound.
    """
    rows = observe.sample(trace, max_rows=MAX_ROWS)
    like = nearest(trace.n_experts, trace.top_k)
    names = QUICK if quick else PLAIN
    task = _longest(like, quick, False, lambda n: cut_figures(rows, n, names))
    references = tuple(reference for reference in like if task.rows in reference.cuts)
    request = _longest(references, quick, True, lambda n: of_one_request(trace, n, names))
    task = replace(task, published=tuple(reference.cuts[task.rows] for reference in references))
    told = Realism(
        *(trace.name, trace.header.shape, trace.n_experts, trace.top_k, trace.header.kind),
        *(references, task, request, request if request.prompts and request.rows else task),
        *(({}, {}, [], []) if quick else (unions(rows), definitions(rows), gate_mass(rows), _by_layer(trace, rows))),
    )
    told.findings.extend(_findings(told, trace, rows))
    return told


def _longest(
    like: Sequence[PublicTrace], quick: bool, of_one: bool, figures: Callable[[int], dict[str, float] | None]
) -> Stretches:
    """The longest stretches that the trace has, and one of the published ones, too, where there is any."""
    cuts = [reference.of_one if of_one else reference.cuts for reference in like]
    prompts = bool(like) and all(reference.requests == 1 for reference in like)
    wanted = [n for n in CUTS if any(n in known for known in cuts)] or ([] if quick else CUTS)
    for n in sorted(wanted, reverse=True):
        if found := figures(n):
            return Stretches(n, of_one, prompts, found, tuple(known.get(n, {}) for known in cuts))
    return Stretches(0, of_one, prompts, {}, ())


def nearest(n_experts: int, top_k: int) -> list[PublicTrace]:
    """Published traces of the same number of experts and share chosen, or of the nearest within `SHAPE_FACTOR`."""
    limit = math.log(SHAPE_FACTOR) + 1e-9
    distances = {trace.name: apart(n_experts, top_k, trace.n_experts, trace.top_k) for trace in public().traces}
    near = {name: distance for name, distance in distances.items() if max(distance) <= limit}
    least = min((sum(distance) for distance in near.values()), default=0.0)
    return [trace for trace in public().traces if trace.name in near and sum(near[trace.name]) <= least + 1e-9]


def printed(rows: list[Printed], n_experts: int, top_k: int) -> list[Printed]:
    """Figures printed for exactly this shape."""
    return [row for row in rows if (row.n_experts, row.top_k) == (n_experts, top_k)]


def _by_layer(trace: Trace, rows: Sample) -> list[float | None]:
    """Accuracy of the predictions one layer ahead, by the layer that is predicted; None where none is."""
    if "next_scores_1" not in trace.levels:
        return []
    seen = observe.prediction_overlap(rows, "next_scores_1", 1)[:-1]
    return [None, *(None if value != value else float(value) for value in seen)]


def beside_printed(here: list[float | None], row: Printed) -> tuple[float, float, int] | None:
    """Mean difference from what is printed layer by layer, the largest, and its layer; None where it is not."""
    if row.by_layer is None or len(row.by_layer) != len(here):
        return None
    apart = [
        (a - b, i) for i, (a, b) in enumerate(zip(here, row.by_layer, strict=True)) if a is not None and b is not None
    ]
    worst, layer = max(apart, key=lambda pair: abs(pair[0]))
    return sum(value for value, _ in apart) / len(apart), worst, layer


def _findings(told: Realism, trace: Trace, rows: Sample) -> list[Finding]:
    found = []
    if told.references:
        found += [_order(told.judged), *_mix(told, trace), *_hits(told)]
        found.append(_one(told.judged, "top_quarter", SHARE_MARGIN, SKEW, "a layer's top quarter takes"))
        found.append(_one(told.judged, "overlap_1", OVERLAP_MARGIN, REPETITION, "tokens in a row share"))
        if REPEATING in trace.header.labels:
            found = [_no_evidence(finding) if finding.about in TRAINED_FOR else finding for finding in found]
    found += _accuracy(trace, rows)
    tests = trace.requests.in_split("test") or list(trace.requests)
    prompt = sum(request.prompt_len for request in tests) / len(tests)
    if len(tests) < FEW_TESTS or prompt < SHORT_PROMPT:
        has = f"{show_count(len(tests), 'request')} to score, prompts of {prompt:.0f} tokens"
        lacks = f"{has}: nothing on load, p95, KV memory or long prompts"
        found.append(Finding("load and long prompts", False, lacks))
    return found


def _order(cut: Stretches) -> Finding:
    """Do plain caches at a quarter cached rank as they do in every reference that tells them apart?"""
    turned: list[str] = []
    kept: list[str] = []
    for one, other in (("lfu", "lru"), ("lcp", "lru"), ("lcp", "lfu")):
        real = [known[f"{one}_25"] - known[f"{other}_25"] for known in cut.published if f"{one}_25" in known]
        if f"{one}_25" not in cut.here or not real:
            continue
        sure = all(abs(value) > ORDER_MARGIN for value in real) and len({value > 0 for value in real}) == 1
        here = cut.here[f"{one}_25"] - cut.here[f"{other}_25"]
        first, second = (one, other) if real[0] > 0 else (other, one)
        if sure:
            right = here * real[0] > 0
            (kept if right else turned).append(f"{first.upper()} before {second.upper()}")
    if turned:
        no = "no ranking of caches by recency against popularity"
        return Finding(ORDER, False, f"plain caches rank otherwise there ({', '.join(turned)}): {no}")
    return Finding(ORDER, True, ", ".join(kept) or "published traces do not tell them apart")


def _mix(told: Realism, trace: Trace) -> list[Finding]:
    """Is LRU before LFU, or behind, only because requests of several tasks take turns?"""
    tests = trace.requests.in_split("test") or list(trace.requests)
    if len({request.task for request in tests}) < 2 or "lfu_25" not in told.task.here:
        return []
    rows = observe.sample(trace, tests, MAX_ROWS)
    mixed = hit_rates(rows.experts, trace.n_experts, ("lfu", "lru"), [0.25])
    lfu, lru = 100 * mixed["lfu_25"], 100 * mixed["lru_25"]
    apart = 100 * (told.task.here["lfu_25"] - told.task.here["lru_25"])
    if (lfu - lru) * apart > 0 or abs(lfu - lru) < 100 * ORDER_MARGIN:
        return []
    first, second = ("LRU", "LFU") if lru > lfu else ("LFU", "LRU")
    leads = f"{first} leads {second} by {abs(lfu - lru):.0f} points, of one task {second} leads by {abs(apart):.0f}"
    return [Finding("one task at a time", False, f"run as it is, tasks in turn, {leads}")]


def _hits(told: Realism) -> list[Finding]:
    """How far hit rates lie from those of the references (`Stretches.off`)."""
    found = [_farthest(told.judged, HITS)]
    if told.judged is told.task and any(told.request.published):
        found.append(_farthest(told.request, f"{HITS} of one request"))
    return found


def _farthest(cut: Stretches, about: str) -> Finding:
    off = {key: cut.off(key) for key in cut.here if key.split("_")[0] in QUICK and cut.beside(key)}
    name = max(off, key=lambda key: abs(off[key]), default="")
    if not name or not off[name]:
        return Finding(about, True, f"{about} inside the published range")
    policy, _, frac = name.partition("_")
    side = "above" if off[name] > 0 else "below"
    here, real = cut.here[name], cut.beside(name)
    beyond = f"{side} the mean of {len(real)} published prompts" if cut.prompts and len(real) > 1 else side
    where = f"{policy.upper()}, {frac} % cached: {_span(here, here)}, there {_span(min(real), max(real))}"
    says = f"{about} up to {100 * abs(off[name]):.0f} points {beyond} ({where})"
    return Finding(about, abs(off[name]) <= HITS_MARGIN, says)


def _one(cut: Stretches, key: str, margin: float, about: str, words: str) -> Finding:
    real = cut.beside(key)
    if key not in cut.here or not real:
        return Finding(about, None, f"{about}: unknown")
    there = _span(min(real), max(real))
    return Finding(about, abs(cut.off(key)) <= margin, f"{words} {100 * cut.here[key]:.0f} % (there {there})")


def _no_evidence(finding: Finding) -> Finding:
    return replace(finding, holds=None, says=f"{finding.says}: made so by training, no evidence of anything else")


def _accuracy(trace: Trace, rows: Sample) -> list[Finding]:
    """Recorded predictions one layer ahead beside what is printed for the shape."""
    if "next_scores_1" not in trace.levels:
        return [Finding("predictions", None, "no recorded predictions: gate-based prefetching cannot run")]
    known = printed(public().accuracies, trace.n_experts, trace.top_k)
    if not known:
        return []
    seen = observe.prediction_overlap(rows, "next_scores_1", 1)[:-1]
    if np.isnan(seen).all():
        return []
    here = float(np.nanmean(seen))
    low, high = min(row.span[0] for row in known), max(row.span[1] for row in known)
    apart = here - min(max(here, low), high)
    says = f"predictions one layer ahead name {100 * here:.0f} % (printed: {_span(low, high)})"
    return [Finding("accuracy of predictions", abs(apart) <= ACCURACY_MARGIN, says)]


def _span(low: float, high: float) -> str:
    return f"{100 * low:.0f} %" if high - low < 0.005 else f"{100 * low:.0f} to {100 * high:.0f} %"
