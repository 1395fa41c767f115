# %% [markdown]
# # Which policy on my card?
# A notebook in Jupyter (with jupytext) and VS Code, and a script.

# %%
from textwrap import fill

import moesim

HERE = {"hw": "rtx3090", "requests": 2}

# %% The answer in a sentence, and the table behind it.
table = moesim.compare(["lru", "lru scope=global", "lfu", "fine_moe", "belady"], **HERE)
print(fill(table.attrs["answer"], 95))
shown = table[["applied_as", "rank", "tpot_s.mean", "above_common_bound_frac", "hit_rate", "bottleneck.resource"]]
print(shown.to_string(index=False, float_format="{:.3f}".format))

# %% Which of them do these requests not tell apart?
for row in table.to_dict("records"):
    if row["tied_with"]:
        print(f"{row['applied_as']}: not told apart from {', '.join(row['tied_with'])}")

# %% Does the order depend on what share of the experts has room? A row per combination.
budgets = moesim.sweep(["lru", "lfu"], cache=[0.05, 0.1, 0.2], **HERE)
for figure in ("tpot_s.mean", "hit_rate"):
    print(f"\n{figure}")
    pivot = budgets.pivot_table(figure, "cache", "label", sort=False).rename_axis(columns=None).reset_index()
    print(pivot.to_string(index=False, float_format="{:.3f}".format))
