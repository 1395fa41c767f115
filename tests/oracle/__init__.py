"""The general loop of version 0.1, frozen: what every later engine is held against, to the last bit.

Nothing here is to be improved. It shares with `sim` what describes a run (profiles, traces, setup) and what a policy
says (`sim.policy.api`, decisions); pieces, tickets, gates, views, prices, lanes, counts and figures are its own.
"""
