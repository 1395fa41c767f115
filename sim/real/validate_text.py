"""Comparisons of `moesim validate`: the columns that text and pages show, and the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.tables import fold, tabled
from sim.base.units import show_change, show_count, show_value
from sim.real.order import order, told

if TYPE_CHECKING:
    from sim.real.comparison import Comparison, Off, Report, Talk

MOST_OPERATIONS = 8
MEASURED = "error: of the prediction, as a share of what was measured. IQR: of measured iterations. hits: hit rates."
GENERATED = (
    "as resident: tokens that the resident model generates too. closed, open loop: activations changed where the model "
    "routes itself, and in replay. mass kept: of the gate, in replay."
)


class Shown(NamedTuple):
    """A column: its title, its unit (`s`, `frac`, `n`, `x`, nothing for words), and what it reads of a row."""

    title: str
    unit: str
    read: Callable[[Any], Any]
    signed: bool = False


def experts_of(found: Comparison) -> str:
    """The capacity of a case as it was asked for."""
    return str(found["experts"]) if found["experts"] else f"{found['cache_capacity_bytes'] / 1e6:.0f} MB"


def case_of(found: Comparison) -> str:
    """A case in a few words."""
    return f"{found['policy']}, {experts_of(found)} experts, {found['model']}"


CASE = (
    Shown("policy", "", lambda c: c["policy"]),
    Shown("experts", "", experts_of),
    Shown("TPOT", "s", lambda c: c["tpot_s"]["predicted"]),
    Shown("+-", "frac", lambda c: c["plus_minus_frac"]),
    Shown("real", "s", lambda c: c["tpot_s"]["measured"]),
    Shown("error", "frac", lambda c: c["tpot_s"]["error_frac"], signed=True),
    Shown("TTFT", "s", lambda c: c["ttft_s"]["predicted"]),
    Shown("TTFT real", "s", lambda c: c["ttft_s"]["measured"]),
    Shown("TTFT error", "frac", lambda c: c["ttft_s"]["error_frac"], signed=True),
    Shown("IQR", "frac", lambda c: c["decode_iqr_frac"]),
    Shown("hits", "frac", lambda c: c["classes"]["hit_rate"]["predicted"]),
    Shown("hits real", "frac", lambda c: c["classes"]["hit_rate"]["measured"]),
    Shown("bytes error", "frac", lambda c: c["bytes"]["h2d_bytes"]["error_frac"], signed=True),
    Shown("decisions", "", lambda c: "identical" if c["decisions"]["identical"] else "differ"),
    Shown("worst lane", "", lambda c: c["worst_lane"]),
)
SPARE = ("tokens", "worst lane", "bytes error", "TTFT", "TTFT real", "IQR")
LANE = (
    Shown("per iteration", "", lambda row: row[0]),
    Shown("predicted", "s", lambda row: row[1]["predicted_s"]),
    Shown("measured", "s", lambda row: row[1]["measured_s"]),
    Shown("off", "s", lambda row: row[1]["off_s"], signed=True),
)
POLICY = (
    Shown("policy", "", lambda row: row["policy"]),
    Shown("lossy", "", lambda row: "yes" if row["lossy"] else "no"),
    Shown("tokens", "n", lambda row: row["tokens"]),
    Shown("as resident", "frac", lambda row: row["tokens_same_frac"]),
    Shown("perplexity", "x", lambda row: row["perplexity"]),
    Shown("resident", "x", lambda row: row["perplexity_resident"]),
    Shown("change", "frac", lambda row: row["perplexity_change_frac"], signed=True),
    Shown("closed loop", "frac", lambda row: row["closed_loop_activations_changed_frac"]),
    Shown("open loop", "frac", lambda row: row["open_loop_activations_changed_frac"]),
    Shown("mass kept", "frac", lambda row: row["open_loop_gate_mass_kept"]),
)


def headline(data: Report | Talk) -> str:
    """How far off, or what generated, in a line."""
    if "policies" in data:
        return f"{data['checkpoint']} generates under {len(data['policies'])} policies, routing itself"
    head = f"{show_count(len(data['comparisons']), 'comparison')} on {data['device']}"
    for name in ("TPOT", "TTFT"):
        median, worst = (data[f"{name.lower()}_s_{which}_error_frac"] for which in ("median", "worst"))  # type: ignore[literal-required]
        if median is not None:
            head += f"{':' if name == 'TPOT' else ';'} {name} off by {median:.1%} (median), {worst:.1%} (worst)"
    return head


def machine_of(data: Report) -> str:
    """What it was measured on, and how busy that was."""
    load = ", ".join(f"{x:.1f}" for x in data["load"])
    return (
        f"{data['machine']['cpu']}, {data['cores']} cores, torch {data['machine']['versions']['torch']}, "
        f"{data['date']}, load average {load}, profile {data['profile']}"
    )


def furthest(data: Report) -> Comparison:
    """The case whose time per token is furthest off."""
    return max(data["comparisons"], key=lambda c: abs(c["tpot_s"]["error_frac"] or 0.0))


def lanes_of(found: Comparison) -> list[tuple[str, Off]]:
    """Lanes of a case, and the operations that are furthest off."""
    worst = sorted(found["operations"].items(), key=lambda item: -abs(item[1]["off_s"]))
    return list({**found["lanes"], **dict(worst[:MOST_OPERATIONS])}.items())


def orders_of(data: Report) -> list[str]:
    """A sentence about each order of policies."""
    return [f"{told(where, row)}." for where, row in order(data["comparisons"]).items()]


def remarks_of(data: Report | Talk) -> list[str]:
    """What is wrong, and what else has to be known."""
    caveats = sorted({label for c in data.get("comparisons", ()) for label in c["caveats"]})  # type: ignore[attr-defined]
    return [*(f"note: {label}" for label in caveats), *(f"wrong: {line}" for line in data["wrong"])]


def kept_text(kept: Sequence[Report | Talk], width: int | None = None) -> str:
    """Comparisons for people: how far off, on what, a row for each, and what follows."""
    return "\n".join(_text(data, width) for data in kept)


def _text(data: Report | Talk, width: int | None) -> str:
    if "policies" in data:
        tables, notes = [_table(POLICY, data["policies"], width)], [GENERATED]
    else:
        worst = furthest(data)
        tables = [
            f"{model}\n{_table(CASE, [c for c in data['comparisons'] if c['model'] == model], width)}"
            for model in dict.fromkeys(c["model"] for c in data["comparisons"])
        ]
        tables.append(f"furthest off: {case_of(worst)}\n{_table(LANE, lanes_of(worst), width)}")
        notes = [MEASURED, machine_of(data), *(f"- {line}" for line in orders_of(data))]
    rest = "\n".join([*notes, *remarks_of(data)])
    return "\n".join([fold(headline(data), width) + "\n", *tables, fold(rest, width) + "\n"])


def _table(columns: Sequence[Shown], rows: Sequence[Any], width: int | None) -> str:
    words = [at for at, one in enumerate(columns) if at and not one.unit]
    cells = [[_cell(one, one.read(row)) for one in columns] for row in rows]
    return tabled([one.title for one in columns], cells, words, SPARE, width)


def _cell(column: Shown, value: Any) -> str:
    if not column.unit or value is None:
        return "-" if value is None else str(value)
    if column.signed and column.unit == "frac":
        return f"{100 * value:+.1f} %"
    if column.signed:
        return show_change(0.0, value, column.unit)
    return show_value(value, column.unit)
