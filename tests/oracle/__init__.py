"""The general loop of version 0.1, frozen: what every later engine is held against, to the last bit.

Nothing here is to be improved. It shares with `sim` what describes a run (profiles, traces, setup) and what a policy
says (`sim.policy.api`, decisions); pieces, tickets, gates, views, prices, lanes, counts and figures are its own.

What version 0.1 had wrong is corrected here where "Correction" says so. There, what had happened by an instant depended
on whether a verb had looked since: a promoted prefetch that had started no longer counted as one under way, a wait for
one of several links blamed the host for another's copy, and of copies that take no time at all a demand at the very
instant did not count as over. An engine on SimPy events, which has no such laziness, told them apart.
"""
