"""Several policies on the same trace, hardware and memory: what each run gave, ranked, and what could not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sim.base.errors import BadInput, IllegalDecision
from sim.base.files import to_struct
from sim.base.units import show_count
from sim.figures import SCHEMA
from sim.options import RunSpec, option_meant
from sim.profiles.overrides import of_profile
from sim.results.routing_words import of_results
from sim.results.text import show_lengths
from sim.setup.naming import called, machine_of, show
from sim.setup.prepare import check_words, prepare
from sim.studies.row_text import LOAD, Table, keeps_slo, lead, set_for_all, show_times, takes, thrifty
from sim.studies.rows import Group, Row, realism_of
from sim.studies.runner.points import run_points
from sim.studies.runner.records import Records
from sim.studies.runner.work import ERRORS, OK, closing_ready, resolve
from sim.studies.sweep.grid import Point

MOST_NAMED = 5
Note = Callable[[str], None]
COLUMNS = (
    f"rank tpot_s.mean times above ttft_s.mean times_ttft {LOAD} hit_rate late_hit_rate copied bottleneck.resource note"
)


def points_of(policies: Sequence[str], shared: Mapping[str, Any], against: str | None = None) -> list[Point]:
    """The runs of policies, each under each scheduler, with the one that they are held against.

    Args:
        policies: with parameters of their own behind their names; `all` stands for every one known.
        shared: fields of every run; `scheduler` may list several, `fcfs,sjf`.

    Raises:
        BadInput: no policy, or words that nothing can be done with.
    """
    if not policies:
        raise BadInput("--policy is missing: name at least one, e.g. --policy fine_moe --policy lru, or --policy all")
    items = [(item, True) for item in policies if item.lower() != "all"]
    if len(items) < len(policies):
        from sim.policy.registry import policies as known
        from sim.policy.registry import unusable

        items += [(name, False) for name in (*known(), *unusable())]
    scheduler = shared.get("scheduler")
    names = [None] if scheduler is None else [name.strip() for name in scheduler.split(",")]
    if not all(names) and names != [None]:
        raise BadInput(f"--scheduler, got {scheduler!r}: an empty name in the list; write e.g. --scheduler fcfs,sjf")
    said = {name: f", {name}" if len(names) > 1 else "" for name in names}
    if against is not None and against not in {item + more for item, _ in items for more in said.values()}:
        if len(said) > 1:
            raise BadInput(
                f"--against, got {against!r}: under {len(said)} schedulers that is no one run; name one of them, e.g. "
                f"--against {against + said[names[0]]!r}, and the policy with --policy"
            )
        items.append((against, True))
    return [
        Point(item + more, _spec_of(item, {**shared, "scheduler": name}), named)
        for name, more in said.items()
        for item, named in items
    ]


def _spec_of(item: str, shared: Mapping[str, Any]) -> RunSpec:
    """`fine_moe variant=code` as a run, with the fields that all have."""
    if not item.split():
        raise BadInput("--policy, got an empty name: name a policy, or `all`; `moesim policies` lists them")
    of_all = shared.get("set") or {}
    # Parameters of one policy are no business of the others: only dotted names hold for all.
    if (bare := next((key for key in of_all if "." not in key), None)) is not None:
        pair = f"{bare}={show(bare, of_all[bare])}"
        meant = option_meant(bare, of_all[bare])
        raise BadInput(
            f"--set, got {pair!r}: which policy's? write it behind the name, --policy 'NAME {pair}'"
            + (f"; of all, {meant}" if meant else "")
        )
    fields = called(item, shared, of_several=True)
    return to_struct({key: value for key, value in fields.items() if value is not None}, RunSpec, "compare")


@dataclass
class Comparison:
    """Runs that were compared.

    Attributes:
        group: those with a result. missing: those without. realism: what is known of the trace. base: the run that
            the others are held against.
    """

    group: Group
    missing: list[Row]
    realism: str
    base: Row | None = None

    @property
    def broken(self) -> Row | None:
        """One whose policy broke a rule."""
        return next((row for row in self.missing if row.broken), None)

    def answer(self) -> str:
        """The first line: who is fastest; with a baseline, how many times as fast the others are."""
        group, where = self.group, f" on {machine_of(self.group.rows[0].ran.hw, set_for_all(self.group.rows))}"
        if self.base is not None:
            text = _against(group, self.base, where)
        elif group.best is None:
            return "only bounds were compared"
        else:
            text = lead(group, _label, where)
        text += keeps_slo(group, _label) + thrifty(group.faithful, _label)
        return text + of_results(row.ran for row in group.rows)

    def lines(self) -> list[str]:
        """The requests that every run served, and what is known of their trace."""
        found = self.group.rows[0].ran
        what = f"{found.trace}, split {found.split}: {show_count(found.n_requests, 'request')}"
        return [f"{what}; {show_lengths(found.lengths)}", self.realism]

    def table(self) -> str:
        """One row per run, fastest first, then those that cannot run, the lower bound, and why they cannot."""
        common = self.group.common
        table = Table(self.group.rows, self.group.ranks, common, self.base)
        own = {} if common is None else common.whose.ran.overrides
        for_all = set_for_all(self.group.rows)
        where = ", ".join(f"{k}={show(k, v)}" for k, v in own.items() if of_profile(k) and k not in for_all)
        text = table.text(["policy"], lambda row: [row.label], COLUMNS, [row.label for row in self.missing])
        text += table.below(_label, where)
        return text + "".join(["\n" * bool(self.missing), *(f"not run: {r.label}: {r.reason}\n" for r in self.missing)])

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        common = self.group.common
        return {
            "schema": SCHEMA,
            "answer": self.answer(),
            "realism": self.realism,
            "common_bound": None if common is None else common.to_dict(),
            **({} if self.base is None else {"against": self.base.label}),
            "runs": [self._facts(row) for row in self.group.rows],
            "not_run": [{"applied_as": row.label, "reason": row.reason} for row in self.missing],
        }

    def _facts(self, row: Row) -> dict[str, Any]:
        """A row as data: its result, and where it stands (bounds, and single requests, nowhere)."""
        rank, common, base = self.group.ranks.get(row), self.group.common, self.base
        times = {} if base is None else {"": row.times(base), "_ttft": row.times(base, "ttft_s")}
        return {
            "applied_as": row.label,
            **row.ran.to_dict(),
            "rank": None if rank is None else [rank.best, rank.worst],
            "tied_with": None if rank is None else [other.label for other in rank.tied],
            "above_common_bound_frac": None if common is None else common.above_frac(row),
            **{f"times_as_fast{time}": value for time, value in times.items()},
        }


def _label(row: Row) -> str:
    return row.label


def _against(group: Group, base: Row, where: str) -> str:
    """What the baseline takes, and how many times as fast the others are, the fastest first; lossy ones last."""
    others = sorted((row for row in group.systems if row is not base), key=lambda row: row.lossy)
    text = f"against {base.label} ({takes(base, where)}): "
    if not others:
        return f"{text}no other system was compared"
    assert base.sample is not None
    said: list[str] = []
    for row in others[:MOST_NAMED]:
        assert row.sample is not None
        times = row.times(base)
        words = f"{row.label} {'-' if times is None else show_times(times)}" + ("" if said else " as fast")
        words += " (lossy)" if row.lossy else ""
        tied = base.sample.n > 1 and not base.sample.significant(row.sample)
        said.append(words + (", not told apart" if tied else ""))
    more = f"; {len(others) - MOST_NAMED} more below" if len(others) > MOST_NAMED else ""
    alone = "" if base.sample.n > 1 else "; of n = 1 no sampling error can be given, so this is no ranking"
    return text + "; ".join(said) + more + alone


@closing_ready()
def compare(
    points: Sequence[Point],
    against: str | None,
    workers: int | None,
    note: Note,
    progress: Callable[[int, int], None],
) -> Comparison:
    """Run them, what they mean being checked before the first starts.

    Args:
        against: the label of the run that the others are held against. note: told of what cannot be had in full, of
            runs that are the same, and why none can run. progress: told of (calls answered, in all).

    Raises:
        BadInput: the words of a policy that was named are wrong, or none can run.
    """
    means = resolve(tuple(point.spec for point in points))
    for text in dict.fromkeys(text for meant in means for text in meant.notes):
        note(text)
    first: dict[str, str] = {}
    for point, meant in zip(points, means, strict=True):
        if meant.status != OK:
            if point.named:
                check_words(point.spec)
            continue
        if meant.id in first and point.named:
            note(f"note: {point.label} is the same run as {first[meant.id]}; it is shown once")
        first.setdefault(meant.id, point.label)
    if not first:
        if len({one.reason for one in means}) == 1:
            prepare(points[0].spec)  # which says the most
        _none_ran([(point.label, one.status, one.reason) for point, one in zip(points, means, strict=True)], note)
    rows, _ = run_points(points, means, Records(), workers, lambda n, n_all, _: progress(n, n_all), by_layer=True)
    ran = [row for row in rows if row.result is not None]
    if not ran:
        _none_ran([(row.label, row.status, row.reason) for row in rows], note)
    base = None
    if against is not None:
        ids = {meant.id for point, meant in zip(points, means, strict=True) if point.label == against}
        if (base := next((row for row in ran if row.asked.id in ids), None)) is None:
            raise BadInput(f"--against, got {against!r}: it cannot run here; hold the others against one that can")
    return Comparison(Group(ran), [row for row in rows if row.result is None], realism_of(ran)[0], base)


def _none_ran(failed: Sequence[tuple[str, str, str]], note: Note) -> NoReturn:
    """Say why none of (label, status, reason) ran: the one reason there is, or each policy's."""
    label, status, why = failed[0]
    if len({reason for *_, reason in failed}) == 1:
        error = ERRORS[status]
        # A rule tells of a decision, not of whose it was.
        raise error(f"policy {label}: {why}" if error is IllegalDecision else why)
    for label, _, reason in failed:
        note(f"not run: {label}: {reason}")
    raise BadInput(f"--policy, got {len(failed)} policies: none of them can run here; the lines above say why")
