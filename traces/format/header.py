"""The header of a trace: what was recorded from what, kept as strings in the container's metadata map."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import msgspec

from sim.base.errors import BadInput, did_you_mean
from traces.format.layout import CODES, FORMAT, MAX_EXPERTS, MAX_LAYERS, MAX_TEXT, TENSORS, VERSION, VERSIONS, Code

REPEATING = "trained-to-repeat"  # label: a loss kept the routers with the experts of the token before
ONE_PROMPT = "one-prompt"  # label: the routing, or what it was fitted to, is of a single prompt
_ID = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")
_WORD = re.compile(r"^[a-z0-9][a-z0-9_-]{0,63}$")
_NUMBER = re.compile(r"^(?:0|[1-9][0-9]{0,8})$")
_DIGEST = re.compile(r"^[0-9a-f]{64}$")
_DECIMAL = re.compile(r"^(?:0|[1-9][0-9]{0,5})(?:\.[0-9]{1,12})?$")
TEXTS = ("model", "model_source", "created_by", "stands_for", "tokenizer", "text_source", "text_licence", "notes")
LISTS = ("labels", "tasks")
GATE = ("gate_score", "gate_renormalised", "gate_selection", "gate_scaling")
REQUIRED = ("format", "version", *TEXTS[:2], "n_layers", "n_experts", "top_k", *GATE[:2], "created_by")
KINDS, DIGESTS = ("weights_kind", "expert_order"), ("plain_sha256", "drawn_sha256")
OPTIONAL = ("stands_for", *GATE[2:], *KINDS, *TEXTS[4:7], *LISTS, "notes", *DIGESTS)


class GateRule(msgspec.Struct, frozen=True):
    """How the recorded model turns router logits into choices and weights.

    score: `softmax` over all experts, `sigmoid` of each, or `sparsemixer` (PhiMoE): the scores are the softmax, but a
        chosen expert's weight is its share among the experts close to it, which the scores do not give.
    renormalised: whether the chosen scores are divided by their sum.
    selection: `topk` when the K highest scores are chosen; `other` for biased or group-limited routing.
    scaling: factor applied to the weights last (DeepSeek's routed_scaling_factor).
    """

    score: str = "softmax"
    renormalised: bool = True
    selection: str = "topk"
    scaling: float = 1.0


class Header(msgspec.Struct, frozen=True):
    """Facts about a whole trace.

    stands_for: id of the model of the catalogue that is replayed on the trace, where `model` is another: a small model
        of its routing shape that was trained here.
    weights_kind: `applied` (what multiplies the expert's output), `raw` (the chosen scores before renormalisation) or
        `derived` (not stored: a reader takes them from the chosen scores).
    expert_order: `router` (heaviest first) or `unranked`, when the source did not keep the order.
    labels: words every result must carry, e.g. `synthetic`, `spliced`.
    tasks: names that the request table refers to by position.
    extra: free facts, stored under `x.NAME`.
    """

    model: str
    model_source: str
    n_layers: int
    n_experts: int
    top_k: int
    gate: GateRule = GateRule()
    created_by: str = "moesim"
    weights_kind: str = "applied"
    expert_order: str = "router"
    tokenizer: str = ""
    text_source: str = ""
    text_licence: str = ""
    labels: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    notes: str = ""
    extra: Mapping[str, str] = {}
    stands_for: str = ""

    @property
    def shape(self) -> str:
        """Layers x experts, k: `32x8, k=2`."""
        return f"{self.n_layers}x{self.n_experts}, k={self.top_k}"

    @property
    def kind(self) -> str:
        """What kind of trace it is, in words: recorded, drawn from a fit to a real model, or scaled to a shape."""
        if "synthetic" in self.labels:
            told = [label.removeprefix("fitted-to-") for label in self.labels if label.startswith("fitted-to-")]
            source = (*told, "a trace")[0]
            if "scaled-by-assumption" not in self.labels:
                return f"synthetic, fitted to {source}"
            if source == self.model:
                return f"synthetic, fitted to {source}, scaled to this shape by assumption"
            return f"synthetic, scaled from {source} by assumption; popularity and repetition over tokens are guesses"
        if "converted" in self.labels:
            return "routing recorded by others and converted"
        small = "small model" in self.model_source or self.model_source.startswith("small ")
        of = " of a small model of this shape, not of the published one" if small else ""
        repeating = "; its routers were trained to repeat themselves from token to token"
        return f"recorded routing{of}{repeating if REPEATING in self.labels else ''}"

    def to_metadata(self) -> dict[str, str]:
        """The strings to store, without the per-tensor ones; empty optional facts are left out."""
        gate = self.gate
        said = gate.score, "true" if gate.renormalised else "false", gate.selection, f"{gate.scaling:.12g}"
        pairs = {"format": FORMAT, "version": VERSION, **dict(zip(GATE, said, strict=True))}
        pairs |= {key: str(getattr(self, key)) for key in ("n_layers", "n_experts", "top_k")}
        pairs |= {key: getattr(self, key) for key in (*TEXTS, *KINDS)}
        lists = {key: list(getattr(self, key)) for key in LISTS}
        pairs |= {key: json.dumps(words, ensure_ascii=False) for key, words in lists.items() if words}
        pairs.update({f"x.{name}": text for name, text in self.extra.items()})
        return {key: text for key, text in pairs.items() if text or key in REQUIRED}


def parse_header(pairs: Mapping[str, str], where: str) -> Header:
    """Read and check the metadata map of a file called `where`.

    Raises:
        BadInput: not a routing trace, an unknown version, a key missing, unknown or with a value outside its rule.
    """
    get = _Facts(pairs, where)
    get.identity()
    n_layers, n_experts = get.count("n_layers", MAX_LAYERS), get.count("n_experts", MAX_EXPERTS)
    top_k = get.count("top_k", n_experts)
    gate = GateRule(
        score=get.choice("gate_score", ("softmax", "sigmoid", "sparsemixer")),
        renormalised=get.choice("gate_renormalised", ("true", "false")) == "true",
        selection=get.choice("gate_selection", ("topk", "other")),
        scaling=get.decimal("gate_scaling"),
    )
    if gate.score == "sparsemixer" and (gate.renormalised or pairs.get("weights_kind") == "raw"):
        raise get.breach("gate_score", gate.score, "its weights are applied ones and not renormalised")
    if gate.score == "sparsemixer" and pairs.get("weights_kind") == "derived":
        raise get.breach("weights_kind", "derived", "the weights of a sparsemixer gate do not follow from its scores")
    for key in DIGESTS:
        if not _DIGEST.match(pairs.get(key, "0" * 64)):
            raise get.breach(key, pairs[key], "64 hexadecimal digits")
    if not _ID.match(pairs.get("stands_for", "id")):
        raise get.breach("stands_for", pairs["stands_for"], "an id is lower-case letters, digits, ., - and _")
    labels = get.words("labels")
    if bad := [word for word in labels if not _WORD.match(word)]:
        raise get.breach("labels", bad[0], "a label is lower-case letters, digits, - and _")
    return Header(
        n_layers=n_layers,
        n_experts=n_experts,
        top_k=top_k,
        gate=gate,
        weights_kind=get.choice("weights_kind", ("applied", "raw", "derived")),
        expert_order=get.choice("expert_order", ("router", "unranked")),
        labels=labels,
        tasks=get.words("tasks"),
        extra={key[2:]: text for key, text in pairs.items() if key.startswith("x.")},
        **{key: pairs.get(key, "") for key in TEXTS},
    )


class _Facts(msgspec.Struct, frozen=True):
    """Typed access to the string map, so that every refusal names file, key, value and rule the same way."""

    pairs: Mapping[str, str]
    where: str

    def breach(self, key: str, got: str, rule: str) -> BadInput:
        short = got if len(got) <= 40 else got[:37] + "..."
        return BadInput(f"{self.where}: metadata {key}, got {short!r}: {rule}; see traces/FORMAT.md, write it again")

    def identity(self) -> None:
        """Format, version, known keys, required keys, harmless text."""
        if self.pairs.get("format") != FORMAT:
            raise BadInput(
                f"{self.where}: metadata format, got {self.pairs.get('format', '')[:40]!r}: a routing trace "
                f"says {FORMAT!r}; convert or record it first"
            )
        if self.pairs.get("version") not in VERSIONS:
            raise BadInput(
                f"{self.where}: metadata version, got {self.pairs.get('version', '')[:40]!r}: this release "
                f"reads versions {', '.join(VERSIONS[:-1])} and {VERSIONS[-1]}; upgrade it, or write it again"
            )
        for key in REQUIRED:
            if not self.pairs.get(key):
                raise self.breach(key, "", "it is required and not empty")
        for key, text in self.pairs.items():
            if not _known(key):
                raise self.breach(key, text, f"no such key; {did_you_mean(key, REQUIRED + OPTIONAL)}")
            shown = text.replace("\n", "") if key == "notes" else text
            if len(text) > MAX_TEXT or not shown.isprintable():
                raise self.breach(key, ascii(text[:30]), f"printable text of at most {MAX_TEXT} characters")

    def count(self, key: str, most: int) -> int:
        text = self.pairs[key]
        if not _NUMBER.match(text) or not 1 <= int(text) <= most:
            raise self.breach(key, text, f"a whole number from 1 to {most}")
        return int(text)

    def decimal(self, key: str) -> float:
        text = self.pairs.get(key, "1")
        if not _DECIMAL.match(text) or float(text) <= 0:
            raise self.breach(key, text, "a positive decimal number such as 2.5")
        return float(text)

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        text = self.pairs.get(key, allowed[0])
        if text not in allowed:
            raise self.breach(key, text, f"one of {', '.join(allowed)}")
        return text

    def words(self, key: str) -> tuple[str, ...]:
        """A JSON list of distinct strings; absent means none."""
        text = self.pairs.get(key, "[]")
        try:
            words = json.loads(text)
        except (ValueError, RecursionError):
            words = None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise self.breach(key, text, 'a JSON list of strings such as ["chat", "code"]')
        if len(set(words)) != len(words):
            raise self.breach(key, text, "names are distinct")
        if not all(word.isprintable() and 0 < len(word) <= 200 for word in words):
            raise self.breach(key, text, "names are printable, of 1 to 200 characters")
        return tuple(words)


def _known(key: str) -> bool:
    if key in REQUIRED or key in OPTIONAL or (key.startswith("x.") and key[2:].isprintable() and len(key) <= 100):
        return True
    tensor, _, what = key.rpartition(".")
    spec = TENSORS.get(tensor)
    if spec is None:
        return False
    return {"code": spec.scored, "rows": "R" in spec.dims, "squeezed": not tensor.startswith("req_")}.get(what, False)


def code_of(tensor: str, pairs: Mapping[str, str], where: str) -> Code:
    """The code a score tensor is stored in, which is not packed where it is squeezed.

    Raises:
        BadInput: it is missing or unknown.
    """
    name = pairs.get(f"{tensor}.code", "")
    if name not in CODES:
        raise _Facts(pairs, where).breach(f"{tensor}.code", name, f"one of {', '.join(CODES)}")
    return msgspec.structs.replace(CODES[name], bits=0) if f"{tensor}.squeezed" in pairs else CODES[name]
