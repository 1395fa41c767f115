"""What a policy decided, by layer: counted from the tables `iterations` and `decisions`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame

# Column -> kind of decision that it counts.
COUNTED = {
    "gpu_n": "gpu",
    "cpu_n": "cpu",
    "cpu_ahead_n": "cpu_ahead",
    "part_n": "part",
    "fetch_n": "fetch",
    "prefetch_n": "prefetch",
    "evict_n": "evict",
    "cancel_n": "cancel",
    "write_back_n": "write_back",
}
COLUMNS = ("run_id", "phase", "layer", "iterations_n", "experts_n", *COUNTED, "fetched_frac")


def by_layer(iterations: DataFrame, decisions: DataFrame, n_layers: int) -> DataFrame:
    """One row per phase that ran and MoE layer, in this order.

    `experts_n` are those that ran, on GPU or CPU; `fetched_frac` is the share of them that were copied after their gate
    had asked. What is decided between two iterations counts as the later one's, after the last as that one's.
    """
    import pandas as pd

    phase_of = iterations["phase"].to_numpy()
    ran = iterations["phase"].value_counts()
    phases = [phase for phase in ("prefill", "decode") if phase in ran.index]
    rows = pd.MultiIndex.from_product([phases, range(n_layers)], names=["phase", "layer"])
    when = decisions["iteration"].clip(upper=len(iterations) - 1).to_numpy()
    keys = [pd.Series(phase_of[when], name="phase"), decisions["layer"].reset_index(drop=True)]
    counts = decisions["kind"].reset_index(drop=True).groupby([*keys, decisions["kind"].reset_index(drop=True)]).size()
    wide = counts.unstack(fill_value=0).reindex(rows, fill_value=0)
    found = pd.DataFrame({name: wide.get(kind, 0) for name, kind in COUNTED.items()}, index=rows).reset_index()
    found["run_id"] = iterations["run_id"].iloc[0] if len(iterations) else ""
    found["iterations_n"] = found["phase"].map(ran)
    found["experts_n"] = found[["gpu_n", "cpu_n", "cpu_ahead_n"]].sum(axis=1)
    found["fetched_frac"] = found["fetch_n"] / found["experts_n"].where(found["experts_n"] > 0)
    return found[list(COLUMNS)]
