"""The setup of each of several replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sim.policy.mistakes import blamed

if TYPE_CHECKING:
    from sim.setup.setup import Setup

SEED_STEP = 2**32
"""From one replica's policy to the next, where it draws at random: replicas differ, and so do the replicas of runs by
neighbouring seeds."""


def setups_of(setup: Setup) -> list[Setup]:
    """Of each replica, to which requests are sent as it runs: its own policy, and nobody there yet.

    Made before any policy is bound, which may fill in parameters that were left to be derived.
    """
    return [_setup_of(setup, number) for number in range(setup.spec.replicas)]


def _setup_of(setup: Setup, number: int) -> Setup:
    policy = setup.policy
    settings = dict(policy.settings)
    if "seed" in settings:
        settings["seed"] = (int(settings["seed"] or 0) + number * SEED_STEP) % 2**63
    with blamed(policy):
        own = type(policy)(**settings)
    own.labels = policy.labels
    return replace(setup, policy=own, pieces=setup.pieces.anew(), requests=[], clients=0)
