"""Comparisons of simulation and measurement, as `moesim validate --out` keeps them."""
