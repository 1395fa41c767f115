"""A result as JSON, which knows neither NaN nor infinities."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(result: dict[str, Any], indent: int | None = None) -> str:
    """JSON text with null where a figure is not finite (JSON has neither NaN nor Infinity)."""
    return json.dumps(finite(result), ensure_ascii=False, allow_nan=False, indent=indent)


def finite(value: Any) -> Any:
    """Plain data without NaN and infinities; numbers of other libraries become Python's own."""
    if type(value) is float:  # most are
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [finite(child) for child in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "item"):
        return finite(value.item())
    number = float(value)
    return number if math.isfinite(number) else None
