"""What the next block of GPU 0's stream does first: wait for experts elsewhere, and add up what experts have made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.real.devices.protocol import Device
    from sim.real.devices.work import Work
    from sim.real.machine.partial import Result


class Combine:
    """Results of experts that are not added up yet, and the work that makes some of them on other streams."""

    def __init__(self) -> None:
        self._results: list[Result] = []
        self._joins: tuple[Work, ...] = ()

    def add(self, *results: Result) -> None:
        self._results += results

    def join(self, work: Work) -> None:
        """The next block starts after `work`."""
        self._joins = (*self._joins, work)

    def take(self) -> tuple[list[Result], tuple[Work, ...]]:
        """All of both, for the block that is launched now. Results come in the order in which they are added."""
        results, self._results = sorted(self._results, key=lambda result: result.key), []
        joins, self._joins = self._joins, ()
        return results, joins


def added_up(hidden: Any, results: list[Result], device: Device) -> Any:
    """Hidden rows with the results added to them; runs on the stream of the block."""
    for result in results:
        if result.foreign:
            for tensor in (result.out, result.rows, result.share):
                if isinstance(tensor, device.torch.Tensor):
                    device.used_here(tensor)
        out = result.out if result.share is None else result.out * result.share
        hidden = hidden + out if result.rows is None else hidden.index_add(0, result.rows, out)
    return hidden
