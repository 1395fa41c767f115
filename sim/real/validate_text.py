"""Comparisons of `moesim validate` as tables, for the terminal and for the docs, and read back from their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sim.base.errors import BadInput
from sim.figures import check_schema

if TYPE_CHECKING:
    from sim.real.comparison import Comparison, Report, Talk

MAX_BYTES = 64 * 1024 * 1024


def read(path: Path) -> Report | Talk:
    """Kept comparisons. Raises BadInput."""
    import msgspec

    from sim.base.files import read_object
    from sim.real.comparison import Report, Talk

    way_out = "let `moesim validate --out` write it again"
    data = read_object(path, MAX_BYTES, way_out)
    check_schema(data, path, way_out)
    if not {"comparisons", "policies"} & set(data):
        raise BadInput(f"{path}: not comparisons of `moesim validate --out`; {way_out}")
    try:
        found: Report | Talk = msgspec.convert(data, Talk) if "policies" in data else msgspec.convert(data, Report)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput(f"{path}: not comparisons of `moesim validate --out` ({error}); {way_out}") from None
    return found


def read_report(path: Path) -> Report:
    """Kept comparisons of simulation and measurement. Raises BadInput."""
    found = read(path)
    if "policies" in found:
        raise BadInput(f"{path}: what a checkpoint generated, not comparisons with a simulation; name another file")
    return found


def headline(data: Report) -> str:
    """How far off, in a line."""
    from sim.base.units import show_count

    median, worst = data["tpot_s_median_error_frac"], data["tpot_s_worst_error_frac"]
    head = f"{show_count(len(data['comparisons']), 'comparison')} on {data['device']}"
    return head if median is None else f"{head}: TPOT off by {median:.1%} (median), {worst:.1%} (worst)"


def report(data: Report) -> str:
    """The verdict first, then a row per comparison, lanes of the worst one, and what is wrong."""
    from sim.base.tables import render, table
    from sim.base.units import show_seconds, show_value
    from sim.real.order import told

    rows = table(
        "policy",
        "experts",
        "TPOT predicted",
        "measured",
        "error",
        "TTFT error",
        "hits predicted",
        "measured",
        "bytes",
        "decisions",
        "worst lane",
    )
    for c in data["comparisons"]:
        scatter, said_s = c["plus_minus_frac"], c["tpot_s"]["predicted"]
        spread = f" +- {show_seconds(scatter * said_s)}" if scatter and said_s else ""
        rows.add_row(
            c["policy"],
            _spec(c),
            "-" if said_s is None else show_seconds(said_s) + spread,
            show_value(c["tpot_s"]["measured"], "s"),
            _percent(c["tpot_s"]["error_frac"]),
            _percent(c["ttft_s"]["error_frac"]),
            _percent(c["classes"]["hit_rate"]["predicted"], sign=False),
            _percent(c["classes"]["hit_rate"]["measured"], sign=False),
            _percent(c["bytes"]["h2d_bytes"]["error_frac"]),
            "identical" if c["decisions"]["identical"] else "differ",
            c["worst_lane"],
        )
    text = f"{headline(data)}\n\n{render(rows)}\n"
    furthest = max(data["comparisons"], key=lambda c: abs(c["tpot_s"]["error_frac"] or 0.0))
    lanes = table("per iteration", "predicted", "measured", "off")
    most = sorted(furthest["operations"].items(), key=lambda item: -abs(item[1]["off_s"]))[:8]
    shown = {**furthest["lanes"], **dict(most)}
    for name, row in shown.items():
        lanes.add_row(
            name, show_seconds(row["predicted_s"]), show_seconds(row["measured_s"]), f"{1e3 * row['off_s']:+.3f} ms"
        )
    text += f"lanes and operations of {furthest['policy']}, {_spec(furthest)} experts:\n{render(lanes)}\n"
    for where, ranked in data["order"].items():
        text += told(where, ranked) + "\n"
    for label in sorted({label for c in data["comparisons"] for label in c["caveats"]}):
        text += f"note: {label}\n"
    return text + "".join(f"wrong: {line}\n" for line in data["wrong"])


def talk_report(data: Talk) -> str:
    """A row per policy under which the model generated, and what is wrong."""
    from sim.base.tables import render, table

    rows = table(
        "policy",
        "lossy",
        "tokens",
        "as resident",
        "perplexity",
        "resident",
        "change",
        "changed, closed loop",
        "open loop",
        "gate mass kept, open loop",
    )
    for row in data["policies"]:
        rows.add_row(
            row["policy"],
            "yes" if row["lossy"] else "no",
            str(row["tokens"]),
            _percent(row["tokens_same_frac"], sign=False),
            f"{row['perplexity']:.3f}",
            f"{row['perplexity_resident']:.3f}",
            _percent(row["perplexity_change_frac"]),
            _percent(row["closed_loop_activations_changed_frac"], sign=False),
            _percent(row["open_loop_activations_changed_frac"], sign=False),
            _percent(row["open_loop_gate_mass_kept"], sign=False),
        )
    head = f"{data['checkpoint']} generates under {len(data['policies'])} policies, routing itself"
    return f"{head}\n\n{render(rows)}\n" + "".join(f"wrong: {line}\n" for line in data["wrong"])


def kept_text(kept: Sequence[Report | Talk], width: int | None = None) -> str:
    """What files of comparisons hold: hardware, cores, noise, versions and date, then a row per comparison."""
    return "\n".join(_talked(data, width) if "policies" in data else _compared(data, width) for data in kept)


def _compared(data: Report, width: int | None) -> str:
    from sim.base.tables import fold
    from sim.real.order import order, told

    machine, load = data["machine"], ", ".join(f"{x:.1f}" for x in data["load"])
    head = (
        f"{data['device']}: {machine['cpu']}, {data['cores']} cores, torch {machine['versions']['torch']}, "
        f"{data['date']}, load average {load}, profile {data['profile']}. TPOT off by "
        f"{data['tpot_s_median_error_frac']:.1%} (median), {data['tpot_s_worst_error_frac']:.1%} (worst); TTFT by "
        f"{data['ttft_s_median_error_frac']:.1%} and {data['ttft_s_worst_error_frac']:.1%}."
    )
    models = list(dict.fromkeys(c["model"] for c in data["comparisons"]))
    rows = "\n".join(f"{model}\n{_rows_of(model, data, width)}" for model in models)
    notes = "off: of TPOT. IQR: of the measured iterations. hits: hit rate predicted, and real."
    orders = "".join(f"- {told(where, row)}.\n" for where, row in order(data["comparisons"]).items())
    return f"{fold(head, width)}\n\n{rows}\n{fold(notes, width)}\n{fold(orders, width)}"


def _rows_of(model: str, data: Report, width: int | None) -> str:
    from sim.base.tables import render, table

    rows = table("policy", "experts", "ms per token", "measured", "off", "TTFT off", "IQR", "hits", "real", "decisions")
    for c in data["comparisons"]:
        if c["model"] != model:
            continue
        said_s, real_s, scatter = c["tpot_s"]["predicted"], c["tpot_s"]["measured"], c["plus_minus_frac"]
        spread = f" ± {1e3 * said_s * scatter:.1f}" if scatter and said_s else ""
        rows.add_row(
            c["policy"],
            _spec(c),
            _ms(said_s) + spread,
            _ms(real_s),
            _percent(c["tpot_s"]["error_frac"]),
            _percent(c["ttft_s"]["error_frac"]),
            _percent(c["decode_iqr_frac"], sign=False),
            _percent(c["classes"]["hit_rate"]["predicted"], sign=False),
            _percent(c["classes"]["hit_rate"]["measured"], sign=False),
            "identical" if c["decisions"]["identical"] else "differ",
        )
    return render(rows, width)


def _talked(data: Talk, width: int | None) -> str:
    """What `--checkpoint` kept, as rows."""
    from sim.base.tables import fold, render, table

    rows = table(
        "policy", "lossy", "as resident", "perplexity", "resident", "change", "closed loop", "open loop", "mass kept"
    )
    for row in data["policies"]:
        shares = row["closed_loop_activations_changed_frac"], row["open_loop_activations_changed_frac"]
        rows.add_row(
            row["policy"],
            "yes" if row["lossy"] else "no",
            f"{_percent(row['tokens_same_frac'], sign=False)} of {row['tokens']}",
            f"{row['perplexity']:.2f}",
            f"{row['perplexity_resident']:.2f}",
            _percent(row["perplexity_change_frac"]),
            *(_percent(share, sign=False) for share in (*shares, row["open_loop_gate_mass_kept"])),
        )
    notes = (
        "as resident: tokens that the resident model generates too. closed, open loop: activations changed where "
        "the model routes itself, and in replay. mass kept: of the gate, in replay."
    )
    return f"{render(rows, width)}\n{fold(notes, width)}\n"


def _spec(found: Comparison) -> str:
    return str(found["experts"]) if found["experts"] else f"{found['cache_capacity_bytes'] / 1e6:.0f} MB"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def _percent(value: float | None, sign: bool = True) -> str:
    return "-" if value is None else f"{value:+.1%}" if sign else f"{value:.1%}"
