"""Typed access to a Hugging Face `config.json`, with errors that name the file and the key."""

from __future__ import annotations

from typing import Any

from sim.base.errors import BadInput
from sim.profiles.geometry import MAX_LAYERS

_NEEDED = object()


class Config:
    """The configuration as read; every getter refuses a value of the wrong type."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def get(self, *keys: str, default: Any = _NEEDED) -> Any:
        """The first key present and not null, else the default; a key without default is required."""
        for key in keys:
            if self.data.get(key) is not None:
                return self.data[key]
        if default is _NEEDED:
            raise BadInput(f"{self.where}: {keys[0]}, got nothing: this architecture needs it; is the file complete?")
        return default

    def count(self, *keys: str, default: Any = _NEEDED) -> int:
        """A whole number of at least 0."""
        value = self.get(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BadInput(f"{self.where}: {keys[0]}, got {value!r}: a whole number of at least 0; correct the field")
        return value

    def layer_count(self, *keys: str, default: Any = _NEEDED) -> int:
        """A number of layers, so few that they may be listed."""
        value = self.count(*keys, default=default)
        if value > MAX_LAYERS:
            raise BadInput(f"{self.where}: {keys[0]}, got {value}: at most {MAX_LAYERS} layers; correct the field")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth value."""
        value = self.get(key, default=default)
        if not isinstance(value, bool):
            raise BadInput(f"{self.where}: {key}, got {value!r}: true or false; correct the field")
        return value

    def number(self, key: str, default: float) -> float:
        """A number."""
        value = self.get(key, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadInput(f"{self.where}: {key}, got {value!r}: a number; correct the field")
        return float(value)

    def layers(self, key: str, default: Any = _NEEDED) -> list[int]:
        """A list of layer numbers."""
        value = self.get(key, default=default)
        if not isinstance(value, list) or not all(type(layer) is int for layer in value):
            raise BadInput(f"{self.where}: {key}, got {value!r}: a list of layer numbers; correct the field")
        return value
