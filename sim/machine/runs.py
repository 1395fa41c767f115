"""The critical path: which lane held up the run at each instant, walked back from its end.

A lane works in stretches without a pause. A stretch begins when something that the lane waited for has ended on another
lane, so a walk goes back along a stretch to its beginning, then on along the other lane, down to the start of the run.
Every instant is charged to the lane on which the walk passes it. Made a little faster, a lane shortens the run by that
share of what is charged to it, as long as no decision changes.

An iteration is walked once, when it is over. What is left of it then is one sum, and the stretches of lanes that are
still busy: memory does not grow with the run.
"""

from __future__ import annotations

from collections.abc import MutableSequence

from sim.base.flat import floats, ints
from sim.base.lanes import ATTENDED, GPU, H2D, HOST, IDLE, N_SHARED, RESOURCES

_GPU, _H2D, _HOST, _IDLE = GPU, H2D, HOST, IDLE  # machine integers where this is compiled
_N_SHARED, _N_RESOURCES = N_SHARED, len(RESOURCES)


def lane_of(lane: int, gpu: int) -> int:
    """The number of a GPU's stream (`GPU`) or link (`H2D`) among all lanes."""
    return lane if gpu == 0 else _N_SHARED + 2 * (gpu - 1) + (lane == _H2D)


def is_stream(lane: int) -> bool:
    """Whether a lane, by its number, is a compute stream."""
    return lane == _GPU or (lane >= _N_SHARED and (lane - _N_SHARED) % 2 == 0)


class Runs:
    """The stretches of one lane, by its number."""

    def __init__(self, paths: Paths, number: int) -> None:
        self.paths = paths
        self.number = number

    def begin(self, since_s: float, lane: int) -> None:
        """A stretch begins, once something has ended on a lane."""
        paths = self.paths
        n = paths.n[self.number]
        if n == paths.room:
            paths.grow()
        paths.n[self.number] = n + 1
        at = self.number * paths.room + n
        paths.since_s[at] = since_s
        paths.after[at] = lane

    def began_s(self) -> float:
        """When the last stretch began."""
        paths = self.paths
        return paths.since_s[self.number * paths.room + paths.n[self.number] - 1]


class Paths:
    """The stretches of all lanes of a machine, and what has been charged to each resource up to the host's clock.

    Of lane i, the first `n[i]` stretches from place `room` i on: `since_s`, and which lane was waited for (`after`).
    The first is known down to the start of the run: in `base_s`, by resource, is what was charged before it, where
    `based[i]`; else the host began it. `lag_s[i]`: from the end of work on it until the result is there.

    Args:
        n_gpus: each with a link. n_streams: GPUs that compute side by side.
    """

    def __init__(self, n_gpus: int = 1, n_streams: int = 1) -> None:
        resources = [*ATTENDED, *([GPU, H2D] * (n_gpus - 1))]
        self.n_streams = n_streams
        self.n_lanes = n_lanes = len(resources)
        self.room = 16
        self.since_s = floats(n_lanes * self.room)
        self.after = ints(n_lanes * self.room)
        self.resources = ints(n_lanes)
        self.n = ints(n_lanes, 1)
        self.based = ints(n_lanes, 1)
        self.base_s = floats(n_lanes * _N_RESOURCES)
        self.lag_s = floats(n_lanes)
        self.at = ints(n_lanes)  # in a walk, whose stretches follow those it has been at
        self.kept = ints(n_lanes)  # the first stretch that still matters; -1: none
        self.kept_s = floats(n_lanes * _N_RESOURCES)  # what was charged before that
        self.busy_until_s = floats(n_lanes)
        self.charged_s = floats(_N_RESOURCES)
        for lane, resource in enumerate(resources):
            self.resources[lane] = resource
        self.lanes = [Runs(self, lane) for lane in range(n_lanes)]

    def of(self, lane: int, gpu: int) -> Runs:
        """The stretches of a lane."""
        runs: Runs = self.lanes[lane_of(lane, gpu)]
        return runs

    def stream_of(self, gpu: int) -> int:
        """The number of the stream that a GPU computes on."""
        return lane_of(_GPU, gpu) if self.n_streams > 1 else _GPU

    def lags(self, lane: int, lag_s: float) -> None:
        """What ends on a lane is there later."""
        self.lag_s[lane] = lag_s

    def grow(self) -> None:
        """Twice as much room for each lane."""
        room, since_s, after = 2 * self.room, floats(2 * len(self.since_s)), ints(2 * len(self.since_s))
        for lane in range(self.n_lanes):
            for at in range(self.room):
                since_s[lane * room + at] = self.since_s[lane * self.room + at]
                after[lane * room + at] = self.after[lane * self.room + at]
        self.room, self.since_s, self.after = room, since_s, after

    def charge(self, lane: int, time_s: float, from_s: float) -> MutableSequence[float]:
        """Seconds by resource of the time from an instant up to what ended on a lane: what led to that meanwhile."""
        self._walk(lane, time_s, from_s)
        return self.charged_s

    def _walk(self, lane: int, time_s: float, from_s: float) -> None:
        """Charge all time from an instant (-1: the start of the run) up to what ended on a lane, to `charged_s`."""
        for at in range(_N_RESOURCES):
            self.charged_s[at] = 0.0
        for at in range(self.n_lanes):
            self.at[at] = self.n[at]
        while True:
            first = lane * self.room
            at = first + self.at[lane] - 1
            until_s = time_s - self.lag_s[lane]
            while at > first and self.since_s[at] > until_s:
                at -= 1
            if at < first:
                at = first
            self.at[lane] = at - first
            since_s = self.since_s[at]
            if since_s <= from_s:
                self.charged_s[self.resources[lane]] += time_s - from_s
                return
            self.charged_s[self.resources[lane]] += time_s - since_s
            time_s = since_s
            if at > first:
                lane = self.after[at]
            elif self.based[lane]:
                break
            else:
                lane = _HOST
        for at in range(_N_RESOURCES):
            self.charged_s[at] += self.base_s[lane * _N_RESOURCES + at]

    def settle(self, now_s: float) -> MutableSequence[float]:
        """Seconds charged by resource up to the host's clock; from here on stretches before it are forgotten.

        `busy_until_s` says until when each lane is busy with what has been asked of it.
        """
        for lane in range(self.n_lanes):
            self.kept[lane] = -1
            if self.busy_until_s[lane] > now_s and lane != _HOST:
                self._keep(lane, now_s)
        self._walk(_HOST, now_s, -1.0)
        for lane in range(self.n_lanes):
            if self.kept[lane] >= 0:
                self._forget(lane, self.kept[lane])
            elif lane != _IDLE:
                self.n[lane] = 1
                self.since_s[lane * self.room] = now_s
                self.based[lane] = 0
        self.based[_HOST] = 1
        for at in range(_N_RESOURCES):
            self.base_s[_HOST * _N_RESOURCES + at] = self.charged_s[at]
        return self.charged_s

    def _keep(self, lane: int, now_s: float) -> None:
        """Work out what was charged before the stretch in which a lane is now."""
        first = lane * self.room
        at = self.n[lane] - 1
        while at > 0 and self.since_s[first + at] > now_s:
            at -= 1
        self.kept[lane] = at
        own = lane * _N_RESOURCES
        if at == 0 and self.based[lane]:
            for resource in range(_N_RESOURCES):
                self.kept_s[own + resource] = self.base_s[own + resource]
            return
        self._walk(self.after[first + at] if at else _HOST, self.since_s[first + at], -1.0)
        for resource in range(_N_RESOURCES):
            self.kept_s[own + resource] = self.charged_s[resource]

    def _forget(self, lane: int, kept: int) -> None:
        """Forget a lane's stretches before the one that is kept."""
        first, own = lane * self.room, lane * _N_RESOURCES
        for at in range(first, first + self.n[lane] - kept):
            self.since_s[at] = self.since_s[at + kept]
            self.after[at] = self.after[at + kept]
        self.n[lane] -= kept
        self.based[lane] = 1
        for resource in range(_N_RESOURCES):
            self.base_s[own + resource] = self.kept_s[own + resource]
