"""Of several replicas: what may be asked for, and the setup of each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sim.base.errors import BadInput
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


def check_replicas(setup: Setup) -> None:
    """Raises BadInput where requests do not come one after the other, or somebody would have to know who goes where."""
    spec, policy = setup.spec, setup.policy
    if spec.replicas == 1:
        return
    if not setup.open_loop:
        raise BadInput(
            f"--replicas, got {spec.replicas} with requests back to back: a router sends requests on as they come; add "
            "--arrivals poisson:RATE, or closed:CLIENTS for machines that are never idle"
        )
    if "oracle" in policy.traits:
        raise BadInput(
            f"policy {policy.name} with --replicas {spec.replicas}: which requests a replica gets depends on time, so "
            "there is no future to know; leave --replicas out, or take another policy"
        )
