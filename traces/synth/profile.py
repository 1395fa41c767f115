"""What a fitted source is reduced to: a few numbers per layer, from which traces of any length are drawn.

A token's score of an expert is b + g (see `latent`). g is a sum of independent standard normal fields, each with its
share of the variance: the task's, the request's, fields that fade over 64, 16, 4 and 1 tokens, the token id's, those of
the last two and three ids, what a token carries on of the id before (`carry`), and what is left over, new at every
token. So a stretch of text that comes again is routed alike, in the measured degree. Part of every field (`core`) is
the same in all layers; of the rest a layer keeps its `depth` correlation with the layer before. The expert of one rank
in popularity follows the expert of the same rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from sim.base.errors import BadInput
from traces.format.header import GateRule
from traces.format.layout import Floats

FADES = (64, 16, 4, 1)  # tokens after which a fading field has decayed to 1/e
PARTS = ("task", "last", "token", "pair", "carry", "new")  # of a route
GRAMS = ("token", "pair", "triple")  # fields of the last one, two and three token ids
FIELDS = ("task", "request", *(f"fade{n}" for n in FADES), *GRAMS, "carry")
ALONE = "the source is a single prompt"  # among its assumptions
TAUGHT = "the source's routers were trained to repeat themselves from token to token"  # among its assumptions
Share = Annotated[float, Meta(ge=0, le=1)]
Correlation = Annotated[float, Meta(ge=-1, le=1)]
Score = Annotated[float, Meta(ge=-1000, le=1000)]  # of a normal deviate, so far beyond any


class Vocabulary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How token ids recur: their sorted frequencies, at some ranks, and how often one repeats an earlier one.

    rank: increasing, from 1 to the number of ids; log_p: natural logarithm of the frequency at that rank.
    reuse: probability that a token repeats one drawn evenly from those before it in its request.
    follow, follow2: probability that a token is one that often follows the token before, or the two before, in any
        request: how often pairs and triples of ids come again.
    """

    rank: list[Annotated[int, Meta(ge=1, le=1 << 20)]]
    log_p: list[Score]
    reuse: Share
    follow: Share = 0.0
    follow2: Share = 0.0

    def frequencies(self) -> Floats:
        """(V,) probabilities by rank, interpolated between the ranks kept."""
        ranks = np.arange(1, self.rank[-1] + 1)
        p = np.exp(np.interp(np.log(ranks), np.log(self.rank), self.log_p))
        return np.asarray(p / p.sum())


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of the source: what synthetic requests take their lengths and tasks from."""

    prompt: Annotated[int, Meta(ge=1, le=10_000_000)]
    decode: Annotated[int, Meta(ge=0, le=10_000_000)]
    task: Annotated[int, Meta(ge=0)]
    store: bool


class RouteShares(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What whole routes are drawn by, all layers together: see `routes`.

    factors: part -> weights (L * E, n) from n normal numbers to all scores, as `routes.packed` writes them: of the
        token id, the task, what lasts in a request, a pair of ids, and what is new at every token.
    lasting: of what lasts, the share that lasts for the request and those that fade.
    carry: (L,) how much the id before adds, as a share of what its own token has of it. rest: (L,) what is new in no
        direction. shares: part -> (L,) share of the variance, for whom it may concern.
    spread: how much ids differ in what they heed of what is around them: deviation of the logarithm.
    kind: share of an id's part that it has in common with ids of its kind.
    repeat: probability that a stretch of ids which comes again in its request goes on.
    """

    factors: dict[str, str]
    lasting: dict[str, Share]
    carry: list[Annotated[float, Meta(ge=0, le=1e6)]]
    rest: list[Share]
    shares: dict[str, list[Share]]
    spread: Annotated[float, Meta(ge=0, le=10)]
    kind: Share
    repeat: Share


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The statistics of one source. Lists over layers have one entry per MoE layer.

    bias: (L, E) popularity b of each expert.
    shares: field name -> (L,) share of the variance of g; what they leave of 1 is new at every token.
    core: share of every field that all layers have in common. depth: (L,) correlation of the rest of a layer's fields
        with those of the layer before; the first entry is 0.
    ahead: distance -> (L,) correlation of layer l's prediction with the g of layer l + distance; null without a target.
    shared: (L,) the same for scores predicted through the shared expert (L4s), or null when the source has none.
    sharpness, offset: (L,) a layer's gate is softmax(sharpness * score), or sigmoid(sharpness * score + offset).
    embedding_width: width of the embeddings to draw, 0 for none.
    routes: whole routes, where the source has token ids, for its own shape alone: how they scale is not known. They are
        drawn in place of `shares`, `core` and `depth`.
    """

    source: str
    n_layers: Annotated[int, Meta(ge=1, le=1024)]
    n_experts: Annotated[int, Meta(ge=1, le=4096)]
    top_k: Annotated[int, Meta(ge=1)]
    score: Literal["softmax", "sigmoid"]
    renormalised: bool
    scaling: Annotated[float, Meta(gt=0, le=1000)]
    bias: list[list[Score]]
    shares: dict[str, list[Share]]
    depth: list[Correlation]
    core: Share = 0.0
    ahead: dict[str, list[Correlation | None]]
    shared: list[Correlation | None] | None
    sharpness: list[Score] | None
    offset: list[Score] | None
    vocabulary: Vocabulary | None
    embedding_width: Annotated[int, Meta(ge=0, le=4096)]
    tasks: list[str]
    requests: list[Lengths]
    routes: RouteShares | None = None
    assumptions: list[str] = []

    @property
    def gate(self) -> GateRule:
        """The gate as a header describes it. Selection is always the plain top K."""
        return GateRule(self.score, self.renormalised, "topk", self.scaling)

    def share(self, field: str) -> Floats:
        """(L,) share of one field; zeros when the source gave none."""
        return np.array(self.shares.get(field, [0.0] * self.n_layers))

    def times(self, factors: Mapping[str, Floats | float]) -> Profile:
        """Shares times a factor each; where they would pass 1 together, all of them are brought back to it."""
        shares = {name: self.share(name) * factors.get(name, 1.0) for name in self.shares}
        total = np.maximum(sum(shares.values(), np.zeros(self.n_layers)), 1.0)
        found = {name: (values / total).round(5).tolist() for name, values in shares.items()}
        return msgspec.structs.replace(self, shares=found)

    def fresh_share(self) -> Floats:
        """(L,) share that is new at every token."""
        return np.clip(1.0 - sum((self.share(field) for field in FIELDS), np.zeros(self.n_layers)), 0.0, 1.0)

    def varies_with(self) -> dict[str, float]:
        """What a token's scores vary with: each part's mean share of the variance, and what is new at every token."""
        if self.routes is not None:
            return {name: float(np.mean(self.routes.shares[name])) for name in PARTS}
        return {name: float(self.share(name).mean()) for name in FIELDS} | {"new": float(self.fresh_share().mean())}


def with_target(level: str, distance: int, n_layers: int) -> int:
    """How many layers have a target to predict: the last one's is the next token's first layer, in one level alone."""
    return n_layers if level == "next_scores_1" else max(0, n_layers - distance)


def to_json(profile: Profile) -> str:
    """One line of JSON, numbers as they are."""
    return msgspec.json.encode(profile).decode()


def from_json(text: str, where: str) -> Profile:
    """Read `to_json`'s line. Raises BadInput naming the field."""
    try:
        return msgspec.json.decode(text, type=Profile)
    except msgspec.DecodeError as error:
        raise BadInput(f"{where}: {error}; fit the source again") from None
