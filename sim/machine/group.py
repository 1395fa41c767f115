"""Experts of one layer that share a set of kernels: who is in the group, and what of their floor is left to fill.

An engine that groups launches one product over all experts that are there. So a group is made of experts that the host
launches on one GPU without waiting or working in between, in one precision, whose copies had arrived when the first was
launched. An expert that waits for its copy cannot be part of kernels that have been launched: it begins a group anew.
"""

from __future__ import annotations


class Group:
    """The group launched last on a GPU: `open` while others may join it.

    `launched_s`: when the host launched it. `place`: how many of its experts went before the last, as long as each is
    whole and serves one token; -1 once that no longer says all. `slack_s`: the floor left to fill, where it does not.
    The first expert pays floor and launches; see `Cost.leader` and `Cost.member`.
    """

    __slots__ = ("launched_s", "open", "place", "precision", "slack_s")

    def __init__(self) -> None:
        self.open = False
        self.launched_s = 0.0
        self.precision = ""
        self.slack_s = 0.0
        self.place = -1
