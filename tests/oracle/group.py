"""Experts of one layer that share a set of kernels: who is in the group, and what of their floor is left to fill.

An engine that groups launches one product over all experts that are there. So a group is made of experts that the host
launches on one GPU without waiting or working in between, in one precision, whose copies had arrived when the first was
launched. An expert that waits for its copy cannot be part of kernels that have been launched: it begins a group anew.
Correction: unless the first was told to wait for that very copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oracle.protocol import Ticket


class Group:
    """A group that may still grow: when the host launched it, its precision, and the floor its experts have not filled.

    The first expert pays floor and launches; see `Cost.leader` and `Cost.member`.
    """

    __slots__ = ("launched_s", "precision", "slack_s", "waits")

    def __init__(self, launched_s: float, precision: str, slack_s: float, waits: Sequence[Ticket]) -> None:
        self.launched_s = launched_s
        self.precision = precision
        self.slack_s = slack_s
        self.waits = waits
