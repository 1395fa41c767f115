"""Measure this machine: copies, experts, attention and host costs, as raw samples and a fitted hardware profile."""
