"""Synthetic routing: a few statistics fitted to a real trace, and traces of any shape and length drawn from them.

The chain, each step a module: `observe` (statistics of a trace), `fit` (statistics -> `profile`), `draw` (profile ->
rows), `scale` (a profile for another shape: an assumption), `published` (statistics that papers print), `compare`
(real and synthetic side by side). The model is explained in docs/traces.md.
"""
