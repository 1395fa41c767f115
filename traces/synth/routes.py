"""Scores as whole routes: all layers together, each part in the directions in which it was seen to vary.

The scores of a token in all layers are a vector, the sum of parts: of its id, its task, what lasts or fades in its
request, the id after one kind of id, what the id before carries on, and what is new. Each part has weights from a few
normal numbers of its own to all layers, the factor of a measured covariance: so tokens go whole routes alike, also
those of different ids, and what lasts in a request turns them in other directions than those in which tokens differ.
Ids are of kinds, so that routes of ids that stand for one another are close, and heed what stands around them, some
more and some less.
"""

from __future__ import annotations

from base64 import b64decode, b64encode

import numpy as np

from sim.base.errors import BadInput
from traces.format.layout import Array, Floats, Ints
from traces.synth.fields import odds
from traces.synth.profile import Profile
from traces.synth.streams import Noise, RequestPlan, stream
from traces.synth.text import CONTEXT_KINDS, Text, hashed

WIDTH = 64  # of synthetic embeddings, and the most directions that ids have
KINDS = 64  # that ids are of
OWN = 10  # most frequent ids that are a kind each
FACTORS = ("token", "task", "last", "pair", "new")
_CONTEXTS = 1 << 14  # vectors that pairs of ids are hashed to
_SETTLING, _SETTLING_MOST, _SETTLING_ROUNDS = 6000, 512, 20  # rows in all, and of one request
# Weights and what they are multiplied by lie on grains: sums of products are exact in single precision.
_WEIGHT_GRAIN, _GRAIN, _MOST = 128, 64, 127


def packed(weights: Floats) -> str:
    """Weights (L * E, n) as text: bytes, in 128ths, up to one."""
    return b64encode(np.clip(np.rint(weights * _WEIGHT_GRAIN), -_MOST, _MOST).astype(np.int8).tobytes()).decode()


def unpacked(text: str, n_rows: int, where: str) -> Array:
    """(n_rows, n) weights from `packed`'s text. Raises BadInput."""
    try:
        flat = np.frombuffer(b64decode(text, validate=True), np.int8)
    except ValueError as error:
        raise BadInput(f"{where}, got no base64 ({str(error).lower()}): weights as bytes; fit again") from None
    if len(flat) % n_rows:
        raise BadInput(f"{where}, got {len(flat)} weights: a multiple of layers x experts ({n_rows}); fit again")
    return flat.reshape(n_rows, -1).astype(np.float32) / _WEIGHT_GRAIN


class Routes:
    """What all requests share: weights, vectors of tasks and ids. seed: decides everything."""

    def __init__(self, profile: Profile, seed: int) -> None:
        assert profile.routes is not None and profile.vocabulary is not None
        self.profile, self.seed, self.plan = profile, seed, profile.routes
        self.bias = np.array(profile.bias, np.float32)
        n, n_tasks = profile.n_layers * profile.n_experts, max(1, len(profile.tasks))
        self.weights = {
            name: unpacked(self.plan.factors.get(name, ""), n, f"profile.routes.factors.{name}") for name in FACTORS
        }
        if self.weights["task"].shape[1] != n_tasks:
            got = self.weights["task"].shape[1]
            raise BadInput(f"profile.routes.factors.task, got {got} columns: one per task ({n_tasks}); fit again")
        self.counts = {name: (factor.astype(np.float64) ** 2).sum(axis=0) for name, factor in self.weights.items()}
        self.carry, self.rest = (
            np.sqrt(np.array(values, np.float32)).repeat(profile.n_experts)
            for values in (self.plan.carry, self.plan.rest)
        )
        self.frequencies = profile.vocabulary.frequencies()
        self.tasks = np.eye(n_tasks) * np.sqrt(n_tasks)
        self.table = _on_grain(self._of_ids(stream(seed, "table")))
        self.contexts = stream(seed, "contexts").standard_normal((_CONTEXTS, self.weights["pair"].shape[1]))
        heed = np.exp(self.plan.spread * stream(seed, "weights").standard_normal(len(self.table)))
        self.heed = (heed / np.sqrt(self.frequencies @ heed**2)).astype(np.float32)[:, None]
        self.text = Text(profile.vocabulary, seed, self.plan.repeat)
        self._settle()

    def _of_ids(self, rng: np.random.Generator) -> Floats:
        """(V, n) vectors of the ids, of one length, and of mean 0 as far as frequent ids decide it."""
        n_ids, n = len(self.frequencies), self.weights["token"].shape[1]
        own, kinds = rng.standard_normal((n_ids, n)), rng.standard_normal((KINDS, n))
        kind = rng.integers(0, KINDS, n_ids)
        share = np.where(np.arange(n_ids) < OWN, 0.0, self.plan.kind)[:, None]
        drawn = np.sqrt(share) * kinds[kind] + np.sqrt(1 - share) * own
        drawn -= self.frequencies @ drawn
        counts = self.counts["token"]
        drawn *= np.sqrt(counts.sum() / np.maximum(drawn**2 @ counts, 1e-9))[:, None]
        return np.asarray(drawn - self.frequencies @ drawn)

    @property
    def embedding_table(self) -> Array | None:
        """(V, WIDTH) embeddings of the token ids, float16: directions count, half as much as they do for routes."""
        if not self.profile.embedding_width:
            return None
        counts = self.counts["token"]
        shaped = np.zeros((len(self.table), WIDTH))
        if counts.any():
            shaped[:, : len(counts)] = self.table * (counts / counts.mean()) ** 0.25
        return (np.rint(shaped * 16) / 16).astype(np.float16)

    def tokens(self, plan: RequestPlan) -> Ints:
        """(n_rows + 1,) token ids."""
        return self.text.ids(plan.n_rows + 1, stream(self.seed, "tokens", plan.index))

    def scores(self, plan: RequestPlan, tokens: Ints | None) -> RouteRows:
        """What gives the scores of a request's rows."""
        assert tokens is not None
        return RouteRows(self, plan, tokens)

    def of(self, part: str, numbers: Array) -> Array:
        """(n, L * E) scores of one part's numbers (n, m)."""
        return np.asarray(_on_grain(numbers) @ self.weights[part].T)

    def _settle(self) -> None:
        """Correct the biases until the requests that the source has are drawn with the popularity that it has.

        What popularity owes to so few requests and ids is in the source's already, and would come twice.
        """
        k, n_experts, requests = self.profile.top_k, self.profile.n_experts, self.profile.requests
        rows, rng = [], np.random.default_rng(self.seed)
        every = -(-sum(min(like.prompt + like.decode, _SETTLING_MOST) for like in requests) // _SETTLING)
        for index, like in enumerate(requests):
            plan = RequestPlan(index, like.prompt, like.decode, like.task, "")
            some = self.scores(plan, self.tokens(plan)).take(min(plan.n_rows, _SETTLING_MOST))
            rows.append(some[index % every :: every])
        drawn = np.concatenate(rows)
        noise = rng.standard_normal((len(drawn), n_experts))
        for layer, bias in enumerate(self.bias):
            wanted, gain, before = odds(noise + bias, k), np.full(n_experts, 0.35), np.zeros(n_experts)
            for _ in range(_SETTLING_ROUNDS):
                step = wanted - odds(drawn[:, layer] + bias, k)
                gain[step * before < 0] /= 2  # an expert whose scores scatter little would swing ever wider
                bias += (gain * (step - step.mean())).astype(np.float32)
                before = step


class RouteRows:
    """The routes of one request, added up row by row."""

    def __init__(self, shared: Routes, plan: RequestPlan, tokens: Ints) -> None:
        self._shared, self._tokens, self._at = shared, tokens, 0
        self._task = shared.of("task", shared.tasks[plan.task : plan.task + 1])
        width = shared.weights["last"].shape[1]
        self._own: Array = stream(shared.seed, "request", plan.index).standard_normal((1, width))
        lasting = [name for name, share in shared.plan.lasting.items() if share]
        self._noise = Noise(shared.seed, plan, ["fresh", "rest"], lasting)
        self.noise = self._noise.of

    def take(self, n: int) -> Array:
        """The next n rows (n, L, E) of g, without popularity."""
        shared, at = self._shared, self._at
        ids = self._tokens[at : at + n]
        before = self._tokens[at - 1 : at + n - 1] if at else np.concatenate([[-1], ids[:-1]])
        kind = np.where(before < 0, -1, hashed(before, before, 0) % CONTEXT_KINDS)
        around = self._task + shared.of("last", self._lasting(n))
        around += shared.of("pair", shared.contexts[hashed(kind, ids, 1) % _CONTEXTS])
        around += shared.of("new", self.noise["fresh"].standard_normal((n, shared.weights["new"].shape[1])))
        around += shared.rest * self.noise["rest"].standard_normal(around.shape, np.float32)
        total = shared.of("token", shared.table[ids]) + shared.heed[ids] * around
        total += shared.carry * shared.of("token", np.where(before[:, None] < 0, 0.0, shared.table[before]))
        self._at += n
        return np.asarray(total.reshape(n, shared.profile.n_layers, shared.profile.n_experts))

    def _lasting(self, n: int) -> Array:
        """(n, m) what lasts in the request, and what fades."""
        share, width = self._shared.plan.lasting, self._own.shape[1]
        found = np.broadcast_to(np.sqrt(share.get("request", 0.0)) * self._own, (n, width)).copy()
        for fade, name in self._noise.fades.items():
            drawn = self.noise[name].standard_normal((n, width))
            found += np.sqrt(share[name]) * self._noise.fading(name, fade, drawn)
        return found


def _on_grain(numbers: Array) -> Array:
    return np.asarray((np.rint(numbers * _GRAIN) / _GRAIN).astype(np.float32))
