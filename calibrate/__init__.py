"""Measure a machine and write its hardware profile."""
