"""What the numbers of a fit that comes as a file owe to one another; each one's own range is part of its type."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Sized
from itertools import pairwise

from sim.base.errors import BadInput
from traces.format.layout import DISTANCES
from traces.synth.profile import FADES, FIELDS, PARTS, Profile, RouteShares, Vocabulary, with_target

_LASTING = ("request", *(f"fade{n}" for n in FADES))


def check(profile: Profile, shape: Sequence[int], where: str) -> None:
    """Raises BadInput for the first thing that does not fit the rest.

    shape: layers, experts and k that the fit is drawn in.
    """
    n_layers, n_experts, top_k = profile.n_layers, profile.n_experts, profile.top_k
    for what, k, among in (("profile.top_k", top_k, n_experts), ("shape, its k", shape[2], shape[1])):
        if k > among:
            raise BadInput(f"{where}: {what}, got {k}: at most the experts of a layer ({among}); fit again")
    for name, values in _per_layer(profile):
        if len(values) != n_layers:
            raise BadInput(f"{where}: profile.{name}, got {len(values)} values: one per layer ({n_layers}); fit again")
    for layer, values in enumerate(profile.bias):
        if len(values) != n_experts:
            text = f"{where}: profile.bias[{layer}], got {len(values)} values: one per expert ({n_experts})"
            raise BadInput(f"{text}; fit again")
    _known(where, "shares", profile.shares, FIELDS)
    _known(where, "ahead", profile.ahead, [str(d) for d in DISTANCES])
    predicted = [(f"ahead.{d}", f"next_scores_{d}", int(d), values) for d, values in profile.ahead.items()]
    predicted += [("shared", "shared_scores", 1, profile.shared)] if profile.shared is not None else []
    for name, level, distance, values in predicted:
        n_targets = with_target(level, distance, n_layers)
        if [value is not None for value in values] != [layer < n_targets for layer in range(n_layers)]:
            raise BadInput(f"{where}: profile.{name}, got other layers: numbers for the first {n_targets}; fit again")
    if (profile.sharpness is None) != (profile.offset is None):
        raise BadInput(f"{where}: profile.sharpness and offset, got one of them: a gate has both; fit again")
    if profile.vocabulary is not None:
        _check_vocabulary(profile.vocabulary, where)
    if not profile.requests:
        raise BadInput(f"{where}: profile.requests, got none: lengths are drawn from them; fit again")
    last = max(request.task for request in profile.requests)
    if last >= max(1, len(profile.tasks)):
        rule = f"one of {len(profile.tasks)} tasks, from 0; fit again"
        raise BadInput(f"{where}: profile.requests, got task {last}: {rule}")
    if profile.routes is not None:
        _check_routes(profile, profile.routes, where)


def _per_layer(profile: Profile) -> Iterator[tuple[str, Sized]]:
    """Everything that has an entry per layer, with its name."""
    yield "bias", profile.bias
    yield from ((f"shares.{name}", values) for name, values in profile.shares.items())
    yield "depth", profile.depth
    yield from ((f"ahead.{distance}", values) for distance, values in profile.ahead.items())
    for name in ("shared", "sharpness", "offset"):
        if (values := getattr(profile, name)) is not None:
            yield name, values
    if profile.routes is not None:
        yield "routes.carry", profile.routes.carry
        yield "routes.rest", profile.routes.rest
        yield from ((f"routes.shares.{name}", values) for name, values in profile.routes.shares.items())


def _known(where: str, name: str, found: Collection[str], known: Sequence[str], all_of_them: bool = False) -> None:
    """Refuse names that nobody draws by, and, where all are needed, that one is lacking."""
    for other in sorted(set(found) - set(known)):
        raise BadInput(f"{where}: profile.{name}, got {other!r}: known are {', '.join(known)}; fit again")
    for lacking in sorted(set(known) - set(found)) if all_of_them else ():
        rule = f"there is one of each, {', '.join(known)}; fit again"
        raise BadInput(f"{where}: profile.{name}, got no {lacking!r}: {rule}")


def _check_vocabulary(words: Vocabulary, where: str) -> None:
    n_ranks, n_p = len(words.rank), len(words.log_p)
    if n_ranks != n_p or not n_ranks:
        text = f"{where}: profile.vocabulary, got {n_ranks} ranks and {n_p} frequencies: one for each, and one at least"
        raise BadInput(f"{text}; fit again")
    if words.rank[0] != 1 or any(later <= earlier for earlier, later in pairwise(words.rank)):
        ranks = ", ".join(map(str, words.rank))
        raise BadInput(f"{where}: profile.vocabulary.rank, got {ranks}: from 1, increasing; fit again")


def _check_routes(profile: Profile, routes: RouteShares, where: str) -> None:
    from traces.synth.routes import FACTORS, WIDTH, unpacked

    if profile.vocabulary is None:
        raise BadInput(f"{where}: profile.routes, got them without a vocabulary: routes are of token ids; fit again")
    _known(where, "routes.factors", routes.factors, FACTORS, all_of_them=True)
    _known(where, "routes.shares", routes.shares, PARTS, all_of_them=True)
    _known(where, "routes.lasting", routes.lasting, _LASTING)
    for name, text in routes.factors.items():
        here = f"{where}: profile.routes.factors.{name}"
        n_directions = unpacked(text, profile.n_layers * profile.n_experts, here).shape[1]
        if n_directions > WIDTH:
            raise BadInput(f"{here}, got {n_directions} directions: at most {WIDTH}; fit again")
