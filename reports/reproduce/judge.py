"""Compare what was simulated with what was published: within the tolerance, inside the range, in the right order."""

from __future__ import annotations

import math
import statistics
from itertools import combinations, pairwise
from operator import mul
from typing import NamedTuple

from reports.reproduce.answer import Spread
from reports.reproduce.rows import LADDER_TOLERANCE, TOLERANCE, Figure, Relation, Row

BEST = "best baseline"
ENDS = ("smallest cell", "largest cell")  # of a range that is printed for all cells of a figure together


def is_of_cells(row: Row) -> bool:
    """Whether a row prints the ends of a range over all cells: every case against every other system."""
    return ENDS[0] in row.published


class Pair(NamedTuple):
    """Two systems of which the first was published as the better one."""

    better: str
    worse: str
    right: bool


def half_digit(figure: float) -> float:
    """Half a unit of the last printed digit: what rounding may have taken."""
    text = repr(figure)
    return 0.5 * 10.0 ** -len(text.partition(".")[2]) if "." in text and not text.endswith(".0") else 0.5


def agrees(published: Figure, simulated: Figure, tolerance: float, step: float = 0.0) -> bool:
    """Within a relative tolerance of the printed figure, or rounding to it; inside a printed range, ends rounded.

    Args:
        step: what printed figures are multiples of, where that is more than their last digit.
    """
    if isinstance(published, list):
        low, high = simulated if isinstance(simulated, list) else (simulated, simulated)
        return published[0] - half_digit(published[0]) <= low and high <= published[1] + half_digit(published[1])
    if isinstance(simulated, list):
        return all(agrees(published, end, tolerance, step) for end in simulated)
    apart = abs(simulated - published)
    return apart <= tolerance * abs(published) or apart <= max(step / 2, half_digit(published))


FACTOR = 1.5  # an order is reached when its magnitudes are right within this factor too, either way


def ratio(published: Figure, simulated: Figure) -> float | None:
    """Simulated over published; of a printed range over its nearer end, 1 inside.

    None where a range was simulated, nothing was published, or only a direction (a range that begins at 0).
    """
    if isinstance(simulated, list) or not math.isfinite(simulated):
        return None
    low, high = published if isinstance(published, list) else (published, published)
    if not low or (isinstance(published, list) and low <= 0):
        return None
    return 1.0 if low <= simulated <= high else simulated / (low if simulated < low else high)


def factor(of: float) -> float:
    """By which factor a ratio is off, either way; infinite where the signs differ (a gain that is a loss)."""
    return max(of, 1 / of) if of > 0 else math.inf


def spread(ratios: list[float]) -> Spread:
    """How far magnitudes are off: median, quartiles and greatest factor, and the median of simulated over published.

    A factor that is infinite, because the sign is the other one, is None.
    """
    factors = sorted(map(factor, ratios))
    told: Spread = {"n": len(ratios), "other_sign": sum(map(math.isinf, factors))}
    if ratios:
        told["within"] = sum(one <= FACTOR for one in factors)
        told["median_ratio"] = statistics.median(ratios)
        told["least"] = _known(factors, 0.0)
        told["lower_quartile"] = _known(factors, 0.25)
        told["median"] = _known(factors, 0.5)
        told["upper_quartile"] = _known(factors, 0.75)
        told["greatest"] = _known(factors, 1.0)
    return told


def _known(ordered: list[float], p: float) -> float | None:
    found = _quantile(ordered, p)
    return found if math.isfinite(found) else None


def _quantile(ordered: list[float], p: float) -> float:
    """Linear between order statistics, in logarithms, since these are factors."""
    at = p * (len(ordered) - 1)
    low, part = int(at), at - int(at)
    if not part:
        return ordered[low]
    return math.exp((1 - part) * math.log(ordered[low]) + part * math.log(ordered[low + 1]))


def slope(row: Row, simulated: dict[str, Figure]) -> float:
    """Simulated over printed steps of a ladder from its first rung, by least squares; of rates, steps of their seconds.

    A constant that every rung shares leaves it as it is. Not a number where a rung is missing.
    """
    steps = []
    for figures in (row.published, simulated):
        at = [standing(row.relation, one) for one in map(figures.get, row.published) if isinstance(one, float)]
        steps.append([one - at[0] for one in at[1:]])
    printed, found = steps
    if len(found) != len(printed):
        return math.nan
    return math.fsum(map(mul, printed, found)) / math.fsum(map(mul, printed, printed))


def reached(row: Row, simulated: dict[str, Figure]) -> bool:
    """Whether every figure of a row agrees; of a ladder, its slope; of a ratio, every figure within `FACTOR`."""
    if row.check == "ladder":
        return abs(slope(row, simulated) - 1) <= LADDER_TOLERANCE
    if row.check == "ratio":
        sized = [ratio(figure, simulated.get(label, math.inf)) for label, figure in row.published.items()]
        return all(one is not None and factor(one) <= FACTOR for one in sized)
    tolerance = TOLERANCE.get(row.flag, 0.0)
    return all(
        label in simulated and agrees(figure, simulated[label], tolerance, row.step)
        for label, figure in row.published.items()
    )


def related(relation: Relation, own: float, other: float) -> float:
    """A system's raw value (seconds or a rate) in the published form; `own` is the system it is compared with."""
    match relation:
        case "milli":
            return 1000 * other
        case "percent":
            return 100 * other
        case "rate":
            return 1 / other
        case "speedup":
            return other / own
        case "slowdown":
            return own / other
        case "reduction":
            return 100 * (1 - own / other)
        case "improvement":
            return 100 * (own / other - 1) if other else math.inf
        case "hideable":
            return 100 * own / (other - own) if other > own else math.inf
        case _:
            return other


def standing(relation: Relation, figure: float) -> float:
    """What orders systems as their raw values do, from the published form; `own` stands at 1 where it is relative."""
    match relation:
        case "rate" | "slowdown":
            return 1 / figure if figure else math.inf
        case "reduction":
            return 1 / (1 - figure / 100) if figure < 100 else math.inf
        case "improvement":
            return 1 / (1 + figure / 100)
        case _:
            return figure


def memory_gb(target: float, cases: list[tuple[float, float | None]]) -> float | None:
    """The least memory, GB, with which a figure that falls with memory is at `target`, by a straight line between the
    two cases on either side; None where there are no two such.

    Args:
        cases: bytes of GPU memory, and the figure; None where the system could not run.
    """
    ran = sorted((n_bytes, figure) for n_bytes, figure in cases if figure is not None)
    for (less, above), (more, below) in pairwise(ran):
        if above > target >= below:
            return (less + (more - less) * (above - target) / (above - below)) / 1e9
    return None


RELATIVE = ("speedup", "slowdown", "reduction", "improvement")


def pairs(row: Row, cases: list[dict[str, float]]) -> list[Pair]:
    """Every pair of systems that the row orders and that ran, and whether it came out so. A tie is wrong.

    Args:
        cases: label -> figure in the published form, one per case; two systems are compared by their means over the
            cases in which both ran, so that none is judged by another workload than the other.
    """
    published: dict[str, Figure] = dict(row.published)
    if row.relation in RELATIVE:
        one = related(row.relation, 1.0, 1.0)
        published[row.own] = one
        cases = [{**case, row.own: one} for case in cases]
    only = row.own if is_of_cells(row) else row.pairs_of  # the smallest is below the largest by construction
    found = []
    for first, second in combinations(published, 2):
        both = [case for case in cases if first in case and second in case]
        if not both or (only and only not in (first, second)):
            continue
        ends = [_ends(row.relation, published[label]) for label in (first, second)]
        if ends[0][1] <= ends[1][0] and ends[0] != ends[1]:
            low, high = first, second
        elif ends[1][1] <= ends[0][0] and ends[0] != ends[1]:
            low, high = second, first
        else:
            continue  # equal, or ranges that overlap: nothing was published about these two
        better, worse = (low, high) if row.better == "low" else (high, low)
        at = [standing(row.relation, sum(case[label] for case in both) / len(both)) for label in (low, high)]
        found.append(Pair(better, worse, at[0] < at[1]))
    return found


def _ends(relation: Relation, figure: Figure) -> tuple[float, float]:
    both = figure if isinstance(figure, list) else [figure, figure]
    low, high = sorted(standing(relation, end) for end in both)
    return low, high
