"""Settings with which policies that bring a trained predictor run on a trace nobody has trained one for."""

from __future__ import annotations

from typing import Any

UNTAUGHT: dict[str, dict[str, Any]] = {
    "duoserve": {"predictor": "surrogate:0.7"},
    "emoe": {"predictor": "frequency"},
}
