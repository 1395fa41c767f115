"""Draw requests from a profile: scores of every expert, the choices, predictions, token ids and embeddings.

A request is drawn from its own seeds, block by block, so a trace of any length needs constant memory, and request i
is the same whatever comes before or after it. Equal seeds give equal rows on one platform and numpy version; elsewhere
a rounding of the exponential may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter

from traces.format.layout import DISTANCES, Array, Floats, Ints
from traces.stats.observe import choose
from traces.synth.latent import chosen_mask, gate_scores
from traces.synth.profile import FADES, GRAMS, Profile
from traces.synth.text import CONTEXT_KINDS, Text, hashed

_BLOCK_VALUES = 1 << 21  # scores of one block
_GRAIN = 16  # embeddings are multiples of 1/16 and their weights of 1/256: products and sums of them are exact
_WEIGHT_GRAIN = 256
_CONTEXTS = 1 << 13  # vectors that pairs and triples of ids are hashed to
_SETTLING, _SETTLING_ROUNDS = 4096, 10
# Streams of random numbers. A new one goes to the end, so that the others keep what they draw.
_STREAMS = (
    "table",
    "weights",
    "tasks",
    "requests",
    "tokens",
    "request",
    "fresh",
    *(f"fade{n}" for n in FADES),
    *(f"ahead{d}" for d in DISTANCES),
    "shared",
    "contexts",
    "pair",
    "triple",
)


def stream(seed: int, name: str, request: int = 0) -> np.random.Generator:
    """The generator of one purpose, for one request."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, _STREAMS.index(name), request))))


@dataclass(frozen=True)
class RequestPlan:
    """One request to draw: its place in the trace, where its lengths and task come from."""

    index: int
    prompt_len: int
    n_decode: int
    task: int
    split: str

    @property
    def n_rows(self) -> int:
        """Rows of the request."""
        return self.prompt_len + self.n_decode


class Drawer:
    """A profile made ready to draw: the fields that all requests share.

    seed: decides everything.
    """

    def __init__(self, profile: Profile, seed: int) -> None:
        self.profile, self.seed = profile, seed
        self.fields = (profile.n_layers + 1, profile.n_experts)  # the first is what all layers have in common
        self.bias = np.array(profile.bias, np.float32)
        self.depth = np.array(profile.depth)
        order = np.argsort(-self.bias, axis=-1, kind="stable")
        self.rank = np.argsort(order, axis=-1)[None]  # fields count experts by popularity, the most popular first
        self.loads = {name: np.sqrt(profile.share(name)).astype(np.float32)[:, None] for name in profile.shares}
        self.fresh = np.sqrt(profile.fresh_share()).astype(np.float32)[:, None]
        n_tasks = max(1, len(profile.tasks))
        tasks = stream(seed, "tasks").standard_normal((n_tasks, *self.fields))
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
        drawn = self.projected(stream(self.seed, name).standard_normal((width, *self.fields)) / np.sqrt(width))
        found: Array = np.rint(drawn.astype(np.float64) * _WEIGHT_GRAIN).reshape(width, -1) / _WEIGHT_GRAIN
        return found

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
            wanted = self._odds(noise + self.bias[layer])
            for _ in range(_SETTLING_ROUNDS):
                step = wanted - self._odds(drawn + self.bias[layer])
                self.bias[layer] += 0.35 * (step - step.mean())

    def _odds(self, scores: Array) -> Floats:
        """(E,) log odds that a token chooses an expert, from the scores (n, E) of n tokens."""
        share = (chosen_mask(scores, self.profile.top_k).sum(axis=0) + 0.5) / (len(scores) + 1)
        found: Floats = np.log(share / np.maximum(1 - share, 1e-6))
        return found

    @property
    def embedding_table(self) -> Array | None:
        """(V, h) embeddings of the token ids, float16, or None without a vocabulary."""
        wanted = self.table is not None and self.profile.embedding_width
        return self.table.astype(np.float16) if wanted and self.table is not None else None

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
        tokens = self._tokens(plan)
        step = max(1, _BLOCK_VALUES // (profile.n_layers * profile.n_experts))
        source = _Scores(self, plan, tokens)
        now = source.take(min(step, plan.n_rows))
        at = 0
        while at < plan.n_rows:
            # One row more than the block: the last layer's prediction is of the next token. After the last row that
            # token is never processed, but what would have been predicted is recorded.
            following = source.take(min(step, max(1, plan.n_rows - at - len(now))))
            first_next = following[:1]
            block = self._tensors(np.concatenate([now, first_next]), source)
            if tokens is not None:
                block["token_ids"] = tokens[at : at + len(now)].astype(np.int32)
            yield block
            at += len(now)
            now = following

    def _tensors(self, scores: Array, source: _Scores) -> dict[str, Array]:
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
            if str(d) in profile.ahead:
                known, noise = profile.ahead[str(d)], source.noise[f"ahead{d}"]
                tensors[f"next_scores_{d}"] = self._predicted(scores, d, known, noise)
        if profile.shared is not None:
            tensors["shared_scores"] = self._predicted(scores, 1, profile.shared, source.noise["shared"])
        return tensors

    def _predicted(self, scores: Array, distance: int, known: list[float | None], rng: np.random.Generator) -> Array:
        """(n, layers with a target, E) gate scores of what is known of each target's score, and noise for the rest."""
        n_layers = self.profile.n_layers
        layers = [layer for layer, r in enumerate(known) if r is not None]
        targets = np.array([(layer + distance) % n_layers for layer in layers])
        ahead = np.concatenate([scores[:-1], scores[1:, :distance]], axis=1)[:, [layer + distance for layer in layers]]
        r = np.array([value for value in known if value is not None], np.float32)[:, None]
        noise = rng.standard_normal(ahead.shape, np.float32)
        return self._gate(r * ahead + np.sqrt(1 - r * r) * noise + self.bias[targets], targets)

    def _gate(self, logits: Array, layers: Ints) -> Array:
        profile = self.profile
        assert profile.sharpness is not None and profile.offset is not None
        sharp, offset = (np.array(v, np.float32)[layers, None] for v in (profile.sharpness, profile.offset))
        return gate_scores(sharp * logits + offset, profile.score)

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

    def _tokens(self, plan: RequestPlan) -> Ints | None:
        """(n_rows + 1,) token ids."""
        return None if self.text is None else self.text.ids(plan.n_rows + 1, stream(self.seed, "tokens", plan.index))


def selections(profile: Profile, seed: int, n_tokens: int) -> Array:
    """(n_tokens, L, K) selections drawn from a profile."""
    drawer = Drawer(profile, seed)
    return np.concatenate([block["experts"] for plan in drawer.plans(None, n_tokens) for block in drawer.rows(plan)])


class _Scores:
    """The fields of one request, added up row by row."""

    def __init__(self, drawer: Drawer, plan: RequestPlan, tokens: Ints | None) -> None:
        self._drawer, self._tokens, self._at = drawer, tokens, 0
        profile, seed = drawer.profile, drawer.seed
        self._shape = (profile.n_layers, profile.n_experts)
        own = drawer.projected(stream(seed, "request", plan.index).standard_normal(drawer.fields))
        self._constant = np.zeros(self._shape, np.float32)
        for name, field in (("task", drawer.tasks[plan.task]), ("request", own)):
            if name in drawer.loads:
                self._constant += drawer.loads[name] * field
        self._fades = {n: f"fade{n}" for n in FADES if f"fade{n}" in drawer.loads and drawer.loads[f"fade{n}"].any()}
        names = ("fresh", *self._fades.values(), *(f"ahead{d}" for d in DISTANCES), "shared")
        self.noise = {name: stream(seed, name, plan.index) for name in names}
        self._before: Array | None = None  # the last row's field of its token id
        self._memory: dict[str, Array | None] = dict.fromkeys(self._fades.values())

    def take(self, n: int) -> Array:
        """The next n rows (n, L, E) of g, without popularity, by expert id."""
        drawer = self._drawer
        total = np.broadcast_to(self._constant, (n, *self._shape)).copy()
        if drawer.fresh.any():
            drawn = self.noise["fresh"].standard_normal((n, *drawer.fields), np.float32)
            total += drawer.fresh * drawer.projected(drawn)
        for fade, name in self._fades.items():
            total += drawer.loads[name] * self._fading(name, float(np.exp(-1 / fade)), n)
        if self._tokens is not None and "token" in drawer.loads:
            assert drawer.table is not None
            ids = self._tokens[self._at : self._at + n]
            field = (drawer.table[ids] @ drawer.weights).reshape(n, *self._shape).astype(np.float32)
            total += drawer.loads["token"] * field
            if "carry" in drawer.loads and drawer.loads["carry"].any():
                before = field[:1] * 0 if self._before is None else self._before
                total += drawer.loads["carry"] * np.concatenate([before, field[:-1]])
                self._before = field[-1:]
            total += self._of_contexts(n)
        self._at += n
        return np.take_along_axis(total, np.broadcast_to(drawer.rank, total.shape), -1)

    def _of_contexts(self, n: int) -> Array:
        """Fields (n, L, E) of the last two and three ids: the same wherever these stand."""
        drawer, found = self._drawer, np.zeros((n, *self._shape), np.float32)
        assert self._tokens is not None
        padded = np.concatenate([[-1, -1], self._tokens[: self._at + n]])[-(n + 2) :]
        key = padded[2:]
        for back, name in ((1, "pair"), (2, "triple")):
            before = padded[2 - back : len(padded) - back]
            kind = np.where(before < 0, -1, hashed(before, before, 0) % CONTEXT_KINDS)
            key = hashed(kind, key, back)
            if name in drawer.context_weights:
                field = drawer.contexts[key % _CONTEXTS] @ drawer.context_weights[name]
                found += drawer.loads[name] * field.reshape(n, *self._shape).astype(np.float32)
        return found

    def _fading(self, name: str, keep: float, n: int) -> Array:
        """The next n rows of a field of which a row keeps `keep` of the row before; its variance is 1 throughout."""
        fresh = self._drawer.projected(self.noise[name].standard_normal((n, *self._drawer.fields), np.float32))
        gain, state = np.sqrt(1 - keep * keep), self._memory[name]
        if state is None:
            state = np.zeros((1, *self._shape), np.float32)
            fresh[0] /= np.float32(gain)  # nothing comes before the first row, so it is all fresh
        taps = np.array([gain], np.float32), np.array([1, -keep], np.float32)
        rows, self._memory[name] = lfilter(*taps, fresh, axis=0, zi=state)
        found: Array = rows
        return found
