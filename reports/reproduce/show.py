"""The table as text: rows that were compared, orders, what a simulator cannot speak to, constants, traces, totals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from reports.reproduce.answer import Answer, OnTrace, Orders, Reproduction, Spread
from reports.reproduce.judge import FACTOR
from reports.reproduce.rows import FLAGS, SCORED, TOLERANCE, Figure
from reports.reproduce.table import RESTS
from reports.reproduce.work import DEFECT
from sim.base.tables import fold, tabled

Said = Literal["unknown", "note", "reason"]
FORMS = {
    "per_copy": "of software per expert copied",
    "link_gb": "per GB over the link",
    "per_layer": "of software per layer",
    "on_cpu": "per expert on the CPU",
    "gpu_gb": "per GB of weights that the GPU reads",
    "on_gpu": "per expert on the GPU, which reads all weights at that rate",
}


def figure(value: Figure | None) -> str:
    """Three or four digits; a range with a dash between."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return "-".join(figure(end) for end in value)
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def as_text(result: Reproduction, misses: bool = False) -> str:
    """Everything, verdict first; with `misses` the verdict, and the rows that do not come out as published."""
    # What was missed comes first.
    rows = sorted(result["rows"], key=lambda row: STATUSES.index(row["status"]))
    if misses:
        rows = [_as_scored(row) for row in rows if row["status"] in MISSES]
    compared = [row for row in rows if row["check"] in ("within", "inside", "ladder", "ratio", "shown")]
    orders = [row for row in rows if row["check"] == "order"]
    others = [row for row in rows if row["check"] in ("none", "fit")]
    unknown = [row for row in compared if row["unknown"]]
    noted = [row for row in (*compared, *orders) if row["note"]]
    blocks = (
        ("Figures (ratio = simulated / published)", compared and _figures(compared)),
        ("Shown, not judged, for a term that is unknown", unknown and _listed(unknown, "unknown")),
        (
            "Orders of systems, without constants of single systems (with: figures in brackets; a range has "
            "the ratio to its nearer end)",
            orders and _orders(orders),
        ),
        (
            "Not judged, since a mechanism they compare did not run",
            "\n".join(line for row in orders for line in _idle(row)),
        ),
        ("Notes", noted and _listed(noted, "note")),
        ("What a simulator cannot speak to, or rests on", others and _listed(others, "reason")),
    )
    parts = [verdict(result), *(f"{title}\n{text}" for title, text in blocks if text)]
    return "\n\n".join(part.rstrip("\n") for part in (*parts, "" if misses else _basis(result)) if part)


def totals_of(result: Reproduction) -> str:
    """The verdict, and the rows that do not come out as published by their ids."""
    ids = {status: [row["id"] for row in result["rows"] if row["status"] == status] for status in MISSES}
    return "\n".join([verdict(result), *(f"{status}: {', '.join(found)}" for status, found in ids.items() if found)])


def _as_scored(row: Answer) -> Answer:
    """A row with the one kind of trace that it is judged on."""
    if "traces" not in row:
        return row
    scored = row.get("scored", SCORED)
    return {**row, "traces": {kind: on for kind, on in row["traces"].items() if kind == scored}}


def verdict(result: Reproduction) -> str:
    """Counts, one line per flag; orders and magnitudes as scored, what they rest on, and per kind of trace."""
    lines = []
    for flag, count in result["totals"]["flags"].items():
        counts = ", ".join(f"{count[name]} {name}" for name in STATUSES if count.get(name))
        lines.append(f"{flag:<3} {count['rows']:>3} rows: {counts}   ({FLAGS[flag]})")
    for flag, tolerance in TOLERANCE.items():
        ratios = list(_judged_ratios(result, flag))
        if ratios:
            near = sum(abs(one - 1) <= tolerance for one in ratios)
            lines.append(f"single figures of {flag} rows within {100 * tolerance:.0f} %: {near} of {len(ratios)}")
    if any("added" in row for row in result["rows"]):
        lines += _first_named(result)
    totals = result["totals"]
    scored = totals["scored"]
    if scored["pairs"]:
        lines.append(f"orders: {_share(scored)} pairs of systems are right")
        lines.append(f"magnitudes of these: {_magnitudes(scored['magnitudes'])}")
        lines += [
            f"- rest on {name}: {_share(of)}{_with_constants(name, of)}; {_short(of['magnitudes'])}; "
            f"{', '.join(of['ids'])}"
            for name, of in totals["apart"].items()
        ]
    if totals["did_not_run"]:
        lines.append(f"not judged, their mechanism did not run: {', '.join(totals['did_not_run'])}")
    broken = sorted(
        {
            row["id"]
            for row in result["rows"]
            for left in row.get("left_out", {}).values()
            if any(why.startswith(DEFECT) for why in left.values())
        }
    )
    if broken:
        lines.append(f"runs ended by a defect of the program, see below: {', '.join(broken)}")
    for kind, order in totals["orders"].items():
        if order["pairs"]:
            lines.append(f"orders on trace ({kind}): {_share(order)}; {_short(order['magnitudes'])}")
    return fold("\n".join(lines))


def _share(order: Orders) -> str:
    share = f" ({100 * order['right'] / order['pairs']:.0f} %)" if order["pairs"] else ""
    return f"{order['right']} of {order['pairs']}{share}"


def _with_constants(name: str, order: Orders) -> str:
    return f", {order['right_fitted']} with them" if name == RESTS[-1] else ""


def _factor(value: float | None) -> str:
    return "the other sign" if value is None else f"{value:.2f}"


def _magnitudes(of: Spread) -> str:
    """How far sizes are off, in words."""
    if not of["n"]:
        return "none can be compared"
    least, lower, median, upper, greatest = (
        _factor(of[name]) for name in ("least", "lower_quartile", "median", "upper_quartile", "greatest")
    )
    return (
        f"{of['within']} of {of['n']} are right within a factor of {FACTOR}; off by a factor of {median} in the "
        f"median (half of them by {lower} to {upper}, all by {least} to {greatest}; {of['other_sign']} have the "
        f"other sign); simulated / published is {of['median_ratio']:.2f} in the median"
    )


def _short(of: Spread) -> str:
    return f"magnitudes off by {_factor(of['median'])} in the median of {of['n']}" if of["n"] else "no magnitudes"


def _idle(row: Answer) -> list[str]:
    on = row["traces"].get(row.get("scored", SCORED))
    found = {} if on is None else on.get("did_not_run", {})
    return [f"{row['id']}: {who}: its mechanism did not run: {why}" for who, why in found.items()]


def _judged_ratios(result: Reproduction, flag: str) -> Iterator[float]:
    """Simulated over published of every figure that a row of this flag is judged by."""
    for row in result["rows"]:
        if row["flag"] == flag:
            yield from _ratios(row)


def _ratios(row: Answer) -> Iterator[float]:
    if row["check"] == "within":
        on = row["traces"].get(row.get("scored", SCORED)) if "traces" in row else row
        yield from (one for one in (on or row).get("ratio", {}).values() if one is not None)


def _first_named(result: Reproduction) -> list[str]:
    """Rows with a tolerance that were there before any of their group was run: none was chosen by what comes out."""
    rows = [row for row in result["rows"] if row["flag"] in TOLERANCE and "added" not in row]
    judged = [row for row in rows if row.get("status") in ("missed", "reached")]
    reached = sum(row.get("status") == "reached" for row in judged)
    near = [abs(one - 1) <= TOLERANCE[row["flag"]] for row in rows for one in _ratios(row)]
    said = (
        f"without rows that were added later: {reached} of {len(judged)} rows of {' and '.join(TOLERANCE)} are reached"
    )
    return [f"{said}, {sum(near)} of {len(near)} single figures within"] if judged else []


STATUSES = ("missed", "not run", "order only", "reached", "shown", "fitted", "not applicable")
MISSES = STATUSES[:3]


def _by_trace(row: Answer, otherwise: OnTrace) -> list[tuple[str, OnTrace]]:
    """What a row comes to on each kind of trace; of one that asks for none, this under a dash."""
    found: list[tuple[str, OnTrace]] = list(row.get("traces", {}).items())
    return found or [("-", otherwise)]


def _labels(row: Answer, on: OnTrace) -> list[str]:
    """Systems of which something is printed, then those that ran beside them."""
    return list(dict.fromkeys([*row["published"], *on["simulated"]]))


def _table(titles: str, rows: Iterable[Sequence[str]]) -> str:
    columns = titles.split("|")
    return tabled(columns, rows, words=range(1, len(columns)))


def _figures(rows: list[Answer]) -> str:
    found = []
    for row in rows:
        alone: OnTrace = {"simulated": row.get("simulated", {}), "ratio": row.get("ratio", {})}
        for kind, on in _by_trace(row, alone):
            for label in _labels(row, on):
                told = [row["id"], row["flag"], _what(row, label), *_sizes(row, on, label, 3)]
                status = row["status"] + (f", slope {row['slope']:.2f}" if "slope" in row else "")
                found.append([*told, kind + ("*" if row["constant"] else ""), status])
    return _table("row|F|what|published|simulated|ratio|trace|result", found)


def _sizes(row: Answer, on: OnTrace, label: str, digits: int) -> tuple[str, str, str]:
    """Printed, simulated (in brackets with the constants of single systems), and their ratio."""
    ratio, with_it = on.get("ratio", {}).get(label), on.get("fitted", {}).get("simulated", {}).get(label)
    simulated = figure(on["simulated"].get(label)) + (f" ({figure(with_it)})" if with_it else "")
    return figure(row["published"].get(label)), simulated, "-" if ratio is None else f"{ratio:.{digits}f}"


def _what(row: Answer, label: str) -> str:
    of = ", ".join(part for part in (row["model"], row["setting"]) if part)
    return f"{row['metric']}: {label}{_unit(row)}" + (f" [{of}]" if of else "")


def _orders(rows: list[Answer]) -> str:
    found = []
    for row in rows:
        for kind, on in _by_trace(row, {"simulated": {}, "pairs": [], "counted": True}):
            lead = [row["id"], row["flag"], kind + ("*" if row["constant"] else ""), row["metric"] + _unit(row)]
            right, wrong = _pairs(on)
            judged = [right, row["status"] if kind in ("-", row.get("scored", SCORED)) else "", wrong]
            for label in _labels(row, on):
                own = "*" if label in row.get("constants", {}) else ""
                found.append([*lead, label + own, *_sizes(row, on, label, 2), *judged])
                lead, judged = [""] * len(lead), [""] * len(judged)
    return _table("row|F|trace|what|system|published|simulated|ratio|pairs|result|wrong", found)


def _pairs(on: OnTrace) -> tuple[str, str]:
    """Right pairs of all, and the wrong ones as the paper has them, the better system first."""
    wrong = [f"{pair['better']} < {pair['worse']}" for pair in on["pairs"] if not pair["right"]]
    count = f"{len(on['pairs']) - len(wrong)}/{len(on['pairs'])}"
    apart = "" if on["counted"] else " (idle)" if "did_not_run" in on else " (fitted)"
    return count + apart, "; ".join(wrong)


def _unit(row: Answer) -> str:
    return f" ({row['unit']})" if row["unit"] not in ("", "1") else ""


def _listed(rows: list[Answer], field: Said) -> str:
    found = []
    for row in rows:
        printed = ", ".join(f"{label} {figure(value)}" for label, value in row["published"].items())
        found.append([row["id"], row["flag"], f"{row['metric']}: {printed}" if printed else row["metric"], row[field]])
    return _table("row|F|published|why", found)


def _basis(result: Reproduction) -> str:
    """Constants, traces and what was left out."""
    lines = [
        f"* constant fitted for {one['testbed']}: {1e3 * one['seconds']:.4g} ms {FORMS[one['form']]}, "
        f"from row {one['row']} ({one['label']}), which is not scored"
        for one in result["constants"]
    ]
    lines += [f"no constant {name}: {why}; rows are told without" for name, why in result.get("not_fitted", {}).items()]
    for kind, told in result["traces"].items():
        if told["of"]:
            lines.append(f"trace ({kind}): {told['is']}")
        for model, one in told["of"].items():
            lines.append(
                f"  {model}: {one['trace']}, {one['requests']:,} requests, {one['tokens']:,} tokens, of "
                f"{one['recorded_model']}; labels {', '.join(one['labels']) or 'none'}"
            )
    if "date" in result:
        lines.append(f"run on {result['date']} with version {result['version']}, engine {result['engine']}")
    left_out = _left_out(result)
    return "\n".join(lines) + (f"\n\nSystems that could not run\n{left_out}" if left_out else "")


def _left_out(result: Reproduction) -> str:
    """Who could not run on which trace, by reason; the way out that an error names is left away."""
    by_reason: dict[tuple[str, str], dict[str, None]] = {}
    for row in result["rows"]:
        for kind, left in row.get("left_out", {}).items():
            for who, why in left.items():
                told = by_reason.setdefault((kind, why.partition("; ")[0]), {})
                told[f"{row['experiment']['name']}: {who}"] = None
    if not by_reason:
        return ""
    found = [(kind, "; ".join(told), why) for (kind, why), told in sorted(by_reason.items())]
    return _table("trace|experiment: system, model|why", found)
