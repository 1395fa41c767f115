# %% [markdown]
# # Why is one policy faster than another?
# A notebook in Jupyter (with jupytext) and VS Code, and a script.

# %%
from textwrap import fill

import moesim

slow = moesim.simulate("lru", "rtx3090", requests=2, set={"scope": "global"})
fast = moesim.simulate("lfu", "rtx3090", requests=2)
print(f"{slow.policy}: {slow.tpot_s.mean:.3f} s a token; {fast.policy}: {fast.tpot_s.mean:.3f} s")

# %% What does the GPU wait for? Shares of decode.
for result in (slow, fast):
    decode = result.to_dict()["bottleneck"]["decode"]
    print(result.policy, {cause: round(share, 3) for cause, share in decode.items() if share})

# %% It waits for copies of experts that were missing. Why were they missing?
WHY = ["miss_cold_n", "miss_capacity_n", "miss_evicted_unused_n", "miss_wrong_prediction_n", "miss_too_late_n"]
layers = {result.policy: result.layers.query("phase == 'decode'").set_index("layer") for result in (slow, fast)}
for name, table in layers.items():
    print(name, table[["asked_n", "hit_n", "miss_n"]].sum().to_dict())
    print("  misses:", {why: n for why, n in table[WHY].sum().items() if n})

# %% In which layers does the faster one save its waiting?
saved_s = layers["lru"]["wait_demand_s"] - layers["lfu"]["wait_demand_s"]
print(saved_s.sort_values(ascending=False).head(3).round(2).to_dict(), "of", round(saved_s.sum(), 2), "s")

# %% Which experts does it keep there?
experts = fast.experts.query("phase == 'decode' and layer == @saved_s.idxmax()")
print(experts.sort_values("hit_n", ascending=False)[["expert", "asked_n", "hit_n", "evict_n"]].to_string(index=False))

# %% The same question in one call; print(why) says the rest.
why = moesim.diff(slow, fast)
print(fill(why.answer, 95))
print(why.parts.query("abs(difference_s) > 0.001").to_string(index=False, float_format="{:.3f}".format))
