"""Lanes that slow one another, on SimPy events."""
