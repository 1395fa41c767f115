"""Draw requests from a profile: scores of every expert, the choices, predictions, token ids and embeddings.

A request is drawn from its own seeds, block by block, so a trace of any length needs constant memory, and request i
is the same whatever comes before or after it. Equal seeds give equal rows on one platform and numpy version; elsewhere
a rounding of the exponential may differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from traces.format.layout import DISTANCES, Array, Ints
from traces.stats.observe import choose
from traces.synth.fields import Fields
from traces.synth.latent import gate_scores
from traces.synth.profile import Profile
from traces.synth.routes import Routes
from traces.synth.streams import RequestPlan, stream

_BLOCK_VALUES = 1 << 21  # scores of one block


class Drawer:
    """A profile made ready to draw. seed: decides everything."""

    def __init__(self, profile: Profile, seed: int) -> None:
        self.profile, self.seed = profile, seed
        self.source: Fields | Routes = (Fields if profile.routes is None else Routes)(profile, seed)
        self.bias = self.source.bias

    @property
    def embedding_table(self) -> Array | None:
        """(V, h) embeddings of the token ids, float16, or None without a vocabulary."""
        return self.source.embedding_table

    def plans(self, n_requests: int | None, n_tokens: int | None) -> Iterator[RequestPlan]:
        """Requests with lengths and tasks of the source's, in the source's order, then drawn at random among them.

        As many are `store` requests, in regular turns, as in the source, so that few requests have both splits.
        Ends after `n_requests`, or at `n_tokens` rows, where the last request is cut.
        """
        source, rng, rows, index = self.profile.requests, stream(self.seed, "requests"), 0, 0
        stored = sum(like.store for like in source)
        while index != n_requests:
            like = source[index if index < len(source) else int(rng.integers(len(source)))]
            room = like.prompt + like.decode if n_tokens is None else n_tokens - rows
            prompt = min(like.prompt, room)
            store = (index + 1) * stored // len(source) > index * stored // len(source)
            plan = RequestPlan(index, prompt, min(like.decode, room - prompt), like.task, "store" if store else "test")
            yield plan
            index, rows = index + 1, rows + plan.n_rows
            if n_tokens is not None and rows >= n_tokens:
                return

    def rows(self, plan: RequestPlan) -> Iterator[dict[str, Array]]:
        """The tensors of a request's rows, in blocks: experts always, everything else as far as the profile goes."""
        profile = self.profile
        tokens = self.source.tokens(plan)
        step = max(1, _BLOCK_VALUES // (profile.n_layers * profile.n_experts))
        source = self.source.scores(plan, tokens)
        now = source.take(min(step, plan.n_rows))
        at = 0
        while at < plan.n_rows:
            # One row more than the block: the last layer's prediction is of the next token. After the last row that
            # token is never processed, but what would have been predicted is recorded.
            following = source.take(min(step, max(1, plan.n_rows - at - len(now))))
            first_next = following[:1]
            block = self._tensors(np.concatenate([now, first_next]), source.noise)
            if tokens is not None:
                block["token_ids"] = tokens[at : at + len(now)].astype(np.int32)
            yield block
            at += len(now)
            now = following

    def _tensors(self, scores: Array, streams: dict[str, np.random.Generator]) -> dict[str, Array]:
        """Tensors of all rows of `scores` (n + 1, L, E) but the last, which only is predicted."""
        profile, own = self.profile, scores[:-1] + self.bias
        tensors: dict[str, Array] = {"experts": choose(own, profile.top_k)}
        if profile.sharpness is None:
            return tensors
        probabilities = self._gate(own, np.arange(profile.n_layers))
        chosen = np.take_along_axis(probabilities, tensors["experts"], -1)
        if profile.renormalised:
            chosen = chosen / chosen.sum(axis=-1, keepdims=True)
        tensors |= {"scores": probabilities, "weights": chosen * profile.scaling}
        for d in DISTANCES:
            known = profile.ahead.get(str(d), [])
            if known.count(None) < len(known):
                tensors[f"next_scores_{d}"] = self._predicted(scores, d, known, streams[f"ahead{d}"])
        if profile.shared is not None and profile.shared.count(None) < profile.n_layers:
            tensors["shared_scores"] = self._predicted(scores, 1, profile.shared, streams["shared"])
        return tensors

    def _predicted(self, scores: Array, distance: int, known: list[float | None], rng: np.random.Generator) -> Array:
        """(n, layers with a target, E) gate scores of what is known of each target's score, and noise for the rest."""
        n_layers = self.profile.n_layers
        layers = [layer for layer, r in enumerate(known) if r is not None]
        targets = np.array([(layer + distance) % n_layers for layer in layers], np.int64)
        ahead = np.concatenate([scores[:-1], scores[1:, :distance]], axis=1)[:, [layer + distance for layer in layers]]
        r = np.array([value for value in known if value is not None], np.float32)[:, None]
        noise = rng.standard_normal(ahead.shape, np.float32)
        return self._gate(r * ahead + np.sqrt(1 - r * r) * noise + self.bias[targets], targets)

    def _gate(self, logits: Array, layers: Ints) -> Array:
        profile = self.profile
        assert profile.sharpness is not None and profile.offset is not None
        sharp, offset = (np.array(v, np.float32)[layers, None] for v in (profile.sharpness, profile.offset))
        return gate_scores(sharp * logits + offset, profile.score)


def selections(profile: Profile, seed: int, n_tokens: int) -> Array:
    """(n_tokens, L, K) selections drawn from a profile."""
    drawer = Drawer(profile, seed)
    return np.concatenate([block["experts"] for plan in drawer.plans(None, n_tokens) for block in drawer.rows(plan)])
