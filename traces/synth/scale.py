"""A profile for a shape or for lengths that were never recorded. How routing statistics scale with the shape is an
assumption; that they do not change with lengths is another."""

from __future__ import annotations

import msgspec
import numpy as np

from traces.format.layout import Floats
from traces.synth.profile import Profile

RULE = (
    "scaling rule (an assumption, not measured): a layer takes its statistics from the source's layer at the same "
    "relative depth; the spread of popularity over experts, every share of the variance, the correlations between "
    "layers and of predictions, and the gate's sharpness are kept, so that hit rates and accuracies change with the "
    "number of experts and k as those of Gaussian scores do; the gate's function is the source's"
)


def scaled(profile: Profile, n_layers: int, n_experts: int, top_k: int) -> Profile:
    """The profile for another shape, with `RULE` among its assumptions; the same one when the shape is its own."""
    if (n_layers, n_experts, top_k) == (profile.n_layers, profile.n_experts, profile.top_k):
        return profile
    at = _Depths(profile.n_layers, n_layers)
    source = f"{profile.n_layers}x{profile.n_experts}, k={profile.top_k}"
    return msgspec.structs.replace(
        profile,
        n_layers=n_layers,
        n_experts=n_experts,
        top_k=top_k,
        bias=_popularity(np.array(profile.bias), at, n_experts).tolist(),
        shares={name: at.line(values) for name, values in profile.shares.items()},
        depth=[0.0, *at.line([*(profile.depth[1:2] or [0.0]), *profile.depth[1:]])[1:]],
        ahead={d: _with_gap(profile.ahead[d], int(d), at) for d in profile.ahead if n_layers > int(d)},
        shared=None if profile.shared is None or n_layers == 1 else _with_gap(profile.shared, 1, at),
        sharpness=None if profile.sharpness is None else at.line(profile.sharpness),
        offset=None if profile.offset is None else at.line(profile.offset),
        routes=None,  # which way another shape's go together is not known
        assumptions=[*profile.assumptions, f"{RULE}; source shape {source}"],
    )


def with_lengths(profile: Profile, prompt_tokens: int, output_tokens: int) -> Profile:
    """The same routing, with every prompt (answer) longer or shorter by one factor, so that their mean is as asked; 0
    leaves them as they are."""
    requests, rules = profile.requests, list(profile.assumptions)
    if prompt_tokens:
        prompts = _scaled([like.prompt for like in requests], prompt_tokens)
        requests = [msgspec.structs.replace(like, prompt=n) for like, n in zip(requests, prompts, strict=True)]
        rules.append(f"prompts are scaled to a mean of {prompt_tokens} tokens")
    if output_tokens:  # the first of which comes with the prompt
        outputs = _scaled([like.decode + 1 for like in requests], output_tokens)
        requests = [msgspec.structs.replace(like, decode=n - 1) for like, n in zip(requests, outputs, strict=True)]
        rules.append(f"answers are scaled to a mean of {output_tokens} tokens")
    return msgspec.structs.replace(profile, requests=requests, assumptions=rules)


def _scaled(lengths: list[int], mean: int) -> list[int]:
    factor = mean * len(lengths) / sum(lengths)
    return [max(1, round(length * factor)) for length in lengths]


class _Depths:
    """Where the layers of one model lie among those of another, by relative depth."""

    def __init__(self, source: int, target: int) -> None:
        self.source = (np.arange(source) + 0.5) / source
        self.target = (np.arange(target) + 0.5) / target

    def line(self, values: list[float]) -> list[float]:
        """One value per source layer, interpolated to the target's."""
        return [round(float(v), 5) for v in np.interp(self.target, self.source, values)]


def _popularity(bias: Floats, at: _Depths, n_experts: int) -> Floats:
    """(L', E') biases: each layer's sorted ones as a quantile function, and an order that differs between layers.

    The order of experts carries no meaning, so any will do; a fixed generator makes it the same every time.
    """
    ranked = np.sort(bias, axis=-1)
    places = (np.arange(bias.shape[1]) + 0.5) / bias.shape[1]
    wanted = (np.arange(n_experts) + 0.5) / n_experts
    wide = np.array([np.interp(wanted, places, layer) for layer in ranked])
    deep = np.array([np.interp(at.target, at.source, column) for column in wide.T]).T
    deep -= deep.mean(axis=1, keepdims=True)
    rng = np.random.default_rng(n_experts)
    return np.asarray(np.array([layer[rng.permutation(n_experts)] for layer in deep]).round(5))


def _with_gap(known: list[float | None], distance: int, at: _Depths) -> list[float | None]:
    """Correlations of predictions; the last layers have no target, except where distance 1 wraps around."""
    inner = [value for value in known if value is not None]
    n_source, n_target = len(known), len(at.target)
    wraps = known[-1] is not None
    if wraps:
        inner = inner[:-1]
    inner += [inner[-1] if inner else known[-1] or 0.0] * (n_source - len(inner))
    found: list[float | None] = list(at.line(inner))
    found[n_target - distance :] = [known[-1] if wraps else None] * distance
    return found
