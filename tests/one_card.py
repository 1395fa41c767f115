"""What every stand-in for `torch.cuda` says of the machine: one card, always chosen."""

from __future__ import annotations


class OneCard:
    """Base of the stand-ins."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None:
        pass
