# %% [markdown]
# # What is the smallest machine for my goal?
# A notebook in Jupyter (with jupytext) and VS Code, and a script.

# %%
from pathlib import Path
from textwrap import fill

import moesim

GOAL = "tpot_s.mean <= 350ms"
ASKED = {"policy": ["lru", "lfu", "fiddler"], "hw": ["rtx3090", "rtx4090", "a6000"], "requests": 2}

# %% The answer, and every candidate: what a lower bound rules out is not replayed.
plan = moesim.plan(GOAL, **ASKED)
print(fill(plan.attrs["answer"], 95))
print(plan[["hw", "policy", "state", "tpot_s.mean", "tpot_s.mean.bound"]].to_string(float_format="{:.3f}".format))

# %% With prices of your own, the cheapest comes first.
PRICES = "schema: 1\nunit: EUR\nprices: {rtx3090: 1, rtx4090: 2, a6000: 3}  # placeholders: write what you pay\n"
Path("prices.yaml").write_text(PRICES, encoding="utf-8")
print(fill(moesim.plan(GOAL, **ASKED, prices="prices.yaml").attrs["answer"], 95))

# %% How much memory would one card need? Time per token by what is left of its memory.
memory = moesim.sweep("lfu", "a6000", vram=["16GB", "32GB", "48GB"], requests=2)
print(memory[["vram_bytes", "tpot_s.mean", "hit_rate"]].to_string(index=False, float_format="{:.3f}".format))

# %% And if the link were faster?
SHOWN = ["tpot_s.mean", "bottleneck.decode.copy"]
links = moesim.sweep("lfu", "a6000", pcie=["gen3x16", "gen4x16", "gen5x16"], requests=2, columns=SHOWN)
print(links[["pcie", *SHOWN]].to_string(index=False, float_format="{:.3f}".format))
