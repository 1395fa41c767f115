"""Fits kept as files: the statistics of one real source with their origin, and how far draws from them are off.

`traces/profiles` holds those that come with this installation, fitted to routing that others published; the routing
itself is not part of this project. `moesim traces fit` writes more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from sim.base import index
from sim.base.errors import BadInput
from sim.base.files import bundled, read_yaml, replacing, to_struct
from traces.stats.counts import WHAT_FOR, is_one
from traces.synth.profile import Profile
from traces.synth.scale import scaled
from traces.synth.sound import check

SCHEMA: Literal["moesim.routing-profile/1"] = "moesim.routing-profile/1"
DRAWN_REQUESTS = 24  # of a trace that is drawn because a run asked for the model
_DIGITS = 3


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How draws from the fit to one half differ from the other half, which was not fitted.

    worst_points: of LRU, LFU, LCP and Belady at 25, 50 and 75 % cached, in points; `figure` is where. order: whether
    plain caches that differ by more than a point rank the same way. halves_points: what the two halves of the source
    differ by themselves, at most; a fit to one cannot be asked to be nearer to the other.
    """

    worst_points: float
    figure: str
    order: bool
    rows: int
    halves_points: float | None = None


class Fitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fit as a file.

    shape: layers, experts and k to draw: of the model, where the source logged fewer layers or experts than it has.
    check: None where the source could not be halved.
    """

    schema: Literal["moesim.routing-profile/1"]
    id: str
    source: str
    licence: str
    shape: Annotated[list[Annotated[int, Meta(ge=1, le=4096)]], Meta(min_length=3, max_length=3)]
    check: Check | None
    profile: Profile


def fitted() -> dict[str, Path]:
    """Id -> path of the fits that come with this installation."""
    return bundled("traces.profiles", ".yaml")


def load(name: str | Path) -> Fitted:
    """A bundled fit by id, or a YAML file that `moesim traces fit` wrote. Raises BadInput."""
    path = fitted().get(str(name), Path(name))
    if is_one(path):
        raise BadInput(f"{path}: {WHAT_FOR}")
    found = to_struct(read_yaml(path), Fitted, str(path))
    check(found.profile, found.shape, str(path))
    return found


def shape(name: str) -> tuple[int, int, int]:
    """Layers, experts and k that a bundled fit is drawn in."""
    known = index.facts(fitted()[name])
    n_layers, n_experts, top_k = load(name).shape if known is None else known["shape"]
    return n_layers, n_experts, top_k


def save(path: Path, found: Fitted) -> None:
    """Write a fit as YAML, numbers to three digits behind the point and lists in a line each."""
    data = _rounded(msgspec.to_builtins(found))

    class Dumper(yaml.SafeDumper):
        pass

    def in_a_line(dumper: Any, values: list[Any]) -> Any:
        flat = not any(isinstance(value, (list, dict)) for value in values)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=flat)

    def facts(dumper: Any, value: dict[str, Any]) -> Any:
        flat = not any(isinstance(item, (list, dict)) for item in value.values()) and "source" not in value
        return dumper.represent_mapping("tag:yaml.org,2002:map", value.items(), flow_style=flat)

    Dumper.add_representer(list, in_a_line)
    Dumper.add_representer(dict, facts)
    text = yaml.dump(data, Dumper=Dumper, sort_keys=False, width=118, allow_unicode=True)
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def completed(profile: Profile, lender: Profile) -> Profile:
    """A profile with what its source lacks: predictions, gate, token ids and lengths as another source has them.

    What is lent is scaled to the shape, and every such thing is an assumption that travels with the trace.
    """
    like = scaled(lender, profile.n_layers, profile.n_experts, profile.top_k)
    changes: dict[str, Any] = {}
    if not profile.ahead:
        changes |= {"ahead": like.ahead, "shared": like.shared}
    if profile.sharpness is None:
        changes |= {"sharpness": like.sharpness, "offset": like.offset}
    if profile.vocabulary is None:
        changes |= {"vocabulary": like.vocabulary, "embedding_width": like.embedding_width}
    if not any(request.decode for request in profile.requests) or len(profile.requests) < DRAWN_REQUESTS:
        # Tasks in turn, as many as the source has: what is a task's own in popularity is not there without the others.
        n_tasks = max(1, len(profile.tasks))
        own = [msgspec.structs.replace(request, task=i % n_tasks) for i, request in enumerate(lender.requests)]
        changes |= {"requests": own, "tasks": profile.tasks if n_tasks > 1 else []}
    words = {"ahead": "predictions", "sharpness": "gate scores", "vocabulary": "token ids", "requests": "lengths"}
    lent = [text for key, text in words.items() if key in changes]
    text = f"lent (an assumption): {', '.join(lent)} are those of {lender.source}, not of the source"
    return msgspec.structs.replace(profile, **changes, assumptions=[*profile.assumptions, *([text] if lent else [])])
