"""Scores as independent fields, layer by layer: what a profile without whole routes is drawn by.

The parts of a score (see `profile`) are fields over layers and experts that keep some correlation from layer to layer.
"""

from __future__ import annotations

import numpy as np

from traces.format.layout import Array, Floats, Ints
from traces.synth.latent import chosen_mask
from traces.synth.profile import GRAMS, Profile
from traces.synth.streams import Noise, RequestPlan, stream
from traces.synth.text import CONTEXT_KINDS, Text, hashed

_GRAIN = 16  # embeddings are multiples of 1/16 and their weights of 1/256: products and sums of them are exact
_WEIGHT_GRAIN = 256
_CONTEXTS = 1 << 13  # vectors that pairs and triples of ids are hashed to
_SETTLING, _SETTLING_ROUNDS = 4096, 10


class Fields:
    """The fields that all requests share.

    seed: decides everything.
    """

    def __init__(self, profile: Profile, seed: int) -> None:
        self.profile, self.seed = profile, seed
        self.shape = (profile.n_layers + 1, profile.n_experts)  # the first is what all layers have in common
        self.bias = np.array(profile.bias, np.float32)
        self.depth = np.array(profile.depth)
        order = np.argsort(-self.bias, axis=-1, kind="stable")
        self.rank = np.argsort(order, axis=-1)[None]  # fields count experts by popularity, the most popular first
        self.loads = {name: np.sqrt(profile.share(name)).astype(np.float32)[:, None] for name in profile.shares}
        self.fresh = np.sqrt(profile.fresh_share()).astype(np.float32)[:, None]
        n_tasks = max(1, len(profile.tasks))
        tasks = stream(seed, "tasks").standard_normal((n_tasks, *self.shape))
        if n_tasks > 1:  # popularity is the mean over tasks, so what is a task's own sums to nothing
            tasks = (tasks - tasks.mean(axis=0)) * np.sqrt(n_tasks / (n_tasks - 1))
        self.tasks = self.projected(tasks)
        self.table: Array | None = None
        self.text: Text | None = None
        if profile.vocabulary is not None:
            self.text = Text(profile.vocabulary, seed)
            self.frequencies = self.text.frequencies
            width = max(1, profile.embedding_width)
            table = stream(seed, "table").standard_normal((len(self.frequencies), width))
            # Popularity is the mean over tokens, so the mean embedding is nothing, as far as frequent ids decide it.
            table -= (self.frequencies[:, None] * table).sum(axis=0)
            table /= np.sqrt(max(1e-3, 1 - (self.frequencies**2).sum()))
            self.table = np.rint(table * _GRAIN) / _GRAIN
            self.weights = self._weights("weights", width)
            self.contexts = np.rint(stream(seed, "contexts").standard_normal((_CONTEXTS, width)) * _GRAIN) / _GRAIN
            used = [name for name in GRAMS[1:] if profile.share(name).any()]
            self.context_weights = {name: self._weights(name, width) for name in used}
        self._settle()

    def _weights(self, name: str, width: int) -> Array:
        """(width, L * E) from vectors of ids, or of what stands before them, to a field."""
        drawn = self.projected(stream(self.seed, name).standard_normal((width, *self.shape)) / np.sqrt(width))
        return np.asarray(np.rint(drawn.astype(np.float64) * _WEIGHT_GRAIN).reshape(width, -1) / _WEIGHT_GRAIN)

    def _settle(self) -> None:
        """Correct the biases for the tasks and token ids drawn, so that popularity is what the profile says.

        Some ids make up several per cent of all tokens and always want the same experts, and four tasks are a quarter
        each: by the luck of their draw they would add to the skew, which the biases already have all of.
        """
        n_experts = self.profile.n_experts
        task, embedded = np.arange(_SETTLING) % len(self.tasks), None
        if self.table is not None:
            ids = np.searchsorted(np.cumsum(self.frequencies), (np.arange(_SETTLING) + 0.5) / _SETTLING * (1 - 1e-12))
            embedded, weights = self.table[ids], self.weights.reshape(self.table.shape[1], -1, n_experts)
        noise = np.random.default_rng(self.seed).standard_normal((_SETTLING, n_experts))
        zero = np.zeros((self.profile.n_layers, 1), np.float32)
        for layer, rank in enumerate(self.rank[0]):
            loads = [float(self.loads.get(name, zero)[layer, 0]) for name in ("token", "task")]
            if loads == [0.0, 0.0]:
                continue
            rest = np.sqrt(max(0.0, 1 - loads[0] ** 2 - loads[1] ** 2))
            drawn = loads[1] * self.tasks[task, layer]
            if embedded is not None:
                drawn = loads[0] * (embedded @ weights[:, layer]) + drawn
            drawn = drawn[:, rank] + rest * noise
            wanted = odds(noise + self.bias[layer], self.profile.top_k)
            for _ in range(_SETTLING_ROUNDS):
                step = wanted - odds(drawn + self.bias[layer], self.profile.top_k)
                self.bias[layer] += 0.35 * (step - step.mean())

    @property
    def embedding_table(self) -> Array | None:
        """(V, h) embeddings of the token ids, float16, or None without a vocabulary."""
        wanted = self.table is not None and self.profile.embedding_width
        return self.table.astype(np.float16) if wanted and self.table is not None else None

    def tokens(self, plan: RequestPlan) -> Ints | None:
        """(n_rows + 1,) token ids."""
        return None if self.text is None else self.text.ids(plan.n_rows + 1, stream(self.seed, "tokens", plan.index))

    def scores(self, plan: RequestPlan, tokens: Ints | None) -> FieldRows:
        """What gives the scores of a request's rows."""
        return FieldRows(self, plan, tokens)

    def projected(self, fields: Array) -> Array:
        """Fields (..., L, E) that correlate between layers, of independent ones (..., 1 + L, E)."""
        found = np.array(fields[..., 1:, :], np.float32)
        for layer in range(1, found.shape[-2]):
            r = np.float32(self.depth[layer])
            found[..., layer, :] = r * found[..., layer - 1, :] + np.sqrt(1 - r * r) * found[..., layer, :]
        core = np.float32(self.profile.core)
        found *= np.sqrt(1 - core)
        found += np.sqrt(core) * fields[..., :1, :].astype(np.float32)
        return found


def odds(scores: Array, top_k: int) -> Floats:
    """(E,) log odds that a token chooses an expert, from the scores (n, E) of n tokens."""
    share = (chosen_mask(scores, top_k).sum(axis=0) + 0.5) / (len(scores) + 1)
    return np.asarray(np.log(share / np.maximum(1 - share, 1e-6)))


class FieldRows:
    """The fields of one request, added up row by row."""

    def __init__(self, shared: Fields, plan: RequestPlan, tokens: Ints | None) -> None:
        self._shared, self._tokens, self._at = shared, tokens, 0
        profile, seed = shared.profile, shared.seed
        self._shape = (profile.n_layers, profile.n_experts)
        own = shared.projected(stream(seed, "request", plan.index).standard_normal(shared.shape))
        self._constant = np.zeros(self._shape, np.float32)
        for name, field in (("task", shared.tasks[plan.task]), ("request", own)):
            if name in shared.loads:
                self._constant += shared.loads[name] * field
        self._noise = Noise(seed, plan, ["fresh"], [name for name, load in shared.loads.items() if load.any()])
        self.noise = self._noise.of
        self._before: Array | None = None  # the last row's field of its token id

    def take(self, n: int) -> Array:
        """The next n rows (n, L, E) of g, without popularity, by expert id."""
        shared = self._shared
        total = np.broadcast_to(self._constant, (n, *self._shape)).copy()
        if shared.fresh.any():
            drawn = self.noise["fresh"].standard_normal((n, *shared.shape), np.float32)
            total += shared.fresh * shared.projected(drawn)
        for fade, name in self._noise.fades.items():
            fresh = shared.projected(self.noise[name].standard_normal((n, *shared.shape), np.float32))
            total += shared.loads[name] * self._noise.fading(name, fade, fresh)
        if self._tokens is not None and "token" in shared.loads:
            assert shared.table is not None
            ids = self._tokens[self._at : self._at + n]
            field = (shared.table[ids] @ shared.weights).reshape(n, *self._shape).astype(np.float32)
            total += shared.loads["token"] * field
            if "carry" in shared.loads and shared.loads["carry"].any():
                before = field[:1] * 0 if self._before is None else self._before
                total += shared.loads["carry"] * np.concatenate([before, field[:-1]])
                self._before = field[-1:]
            total += self._of_contexts(n)
        self._at += n
        return np.take_along_axis(total, np.broadcast_to(shared.rank, total.shape), -1)

    def _of_contexts(self, n: int) -> Array:
        """Fields (n, L, E) of the last two and three ids: the same wherever these stand."""
        shared, found = self._shared, np.zeros((n, *self._shape), np.float32)
        assert self._tokens is not None
        padded = np.concatenate([[-1, -1], self._tokens[: self._at + n]])[-(n + 2) :]
        key = padded[2:]
        for back, name in ((1, "pair"), (2, "triple")):
            before = padded[2 - back : len(padded) - back]
            kind = np.where(before < 0, -1, hashed(before, before, 0) % CONTEXT_KINDS)
            key = hashed(kind, key, back)
            if name in shared.context_weights:
                field = shared.contexts[key % _CONTEXTS] @ shared.context_weights[name]
                found += shared.loads[name] * field.reshape(n, *self._shape).astype(np.float32)
        return found
