"""Turn what `moesim record` wrote of a checkpoint into the file that ships, in fewer bits, and say what they cost.

    python -m tools.train.pack --recording chat.safetensors \
      --checkpoint RUN --out traces/data/mixtral-8x7b-chat.safetensors

Gate scores keep six bits, predictions four; weights follow from the scores (FORMAT.md, version 3). Predictions of the
next layer are kept in prefill, too; those from farther away and through the shared expert for decode rows, as policies
ask for them there. With many experts only the 2 K highest of the far ones are kept. Embeddings become the model's
table, looked up by token id.

Of more than 16 experts the 4 K highest gate scores may be kept alone, the others at their mean, and of the next layer's
predictions the 2 K highest (`--highest`); weights are stored then, to seven bits (0.8 % off at most). So few scores may
keep four bits, too (`--gate-bits 4`), which name others than the K highest in a sixth of all places, by ties.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from sim.base.errors import BadInput
from tools.train.log import NAME, labels_of, stands_for
from traces.format.header import Header
from traces.format.layout import DISTANCES, U4_SQUARE, U6_SQUARE, Array, Code
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import Layout, TraceWriter
from traces.record.checkpoint import load

FAR = ("next_scores_2", "next_scores_3", "shared_scores")
MANY_EXPERTS = 16  # above this the far predictions are sparse
_ROUND, _KEEP = 0x0008, 0xFFF0  # of a half precision number whose last four bits are rounded away
_ROWS = 1024


class Gates(Enum):
    """How gate scores are kept: bits of each, and whether those of the 4 K highest alone (without, four bits would make
    weights that follow from them 14 % off)."""

    ALL = (6, False)
    HIGHEST = (6, True)
    HIGHEST_IN_FOUR_BITS = (4, True)

    @property
    def bits(self) -> int:
        return self.value[0]

    @property
    def highest(self) -> bool:
        return self.value[1]


def code_of(tensor: str, gates: Gates = Gates.ALL) -> Code:
    """The code a score tensor is stored in."""
    return U6_SQUARE if tensor == "scores" and gates.bits == 6 else U4_SQUARE


def layout_of(n_experts: int, top_k: int, gates: Gates = Gates.ALL) -> Layout:
    """How the tensors are stored."""
    codes = {name: code_of(name, gates).name for name in ("scores", "next_scores_1", *FAR)}
    return Layout(codes, frozenset(FAR), dict.fromkeys(FAR, 2 * top_k) if n_experts > MANY_EXPERTS else {})


def codes_of(tensor: str, scores: Array, top_k: int, gates: Gates = Gates.ALL) -> Array:
    """Codes of a score tensor's rows. Gate scores keep the nearest: their choice is stored, and they must sum to 1."""
    code = code_of(tensor, gates)
    if tensor == "scores":
        return levelled(scores, code, 4 * top_k) if gates.highest else code.encode(scores)
    codes = coded(scores, code, top_k)
    return highest(codes, 2 * top_k) if tensor == "next_scores_1" and gates.highest else codes


def levelled(scores: Array, code: Code, n: int) -> Array:
    """Codes of scores [rows, L, E]: the n highest as near as can be, all others at their mean."""
    rest = np.argsort(-scores, axis=-1, kind="stable")[..., n:]
    found = code.encode(scores)
    if rest.shape[-1]:
        mean = np.take_along_axis(scores, rest, axis=-1).mean(axis=-1, keepdims=True)
        np.put_along_axis(found, rest, np.broadcast_to(code.encode(mean), rest.shape), axis=-1)
    return found


def highest(codes: Array, n: int) -> Array:
    """Codes [n, L, E] of the highest alone, the lowest id first among equals; all others are 0."""
    least = np.argsort(-codes.astype(np.int64), axis=-1, kind="stable")[..., n:]
    found = codes.copy()
    np.put_along_axis(found, least, 0, axis=-1)
    return found


def rounded(weights: Array) -> Array:
    """Weights as half precision with seven bits of a number, the last rounded: 0.8 % off at most."""
    bits = weights.astype(np.float16).view(np.uint16)
    found: Array = ((bits + np.uint16(_ROUND)) & np.uint16(_KEEP)).view(np.float16)
    return found


def coded(scores: Array, code: Code, top_k: int) -> Array:
    """Codes of scores [n, L, E]: the nearest, lowered by one where equal codes would put another expert among the K
    highest, or these in another order. Whoever ranks codes, the lowest id first among equals, finds the same K.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")
    codes = np.take_along_axis(code.encode(scores).astype(np.int64), order, axis=-1)
    for rank in range(1, codes.shape[-1]):
        above = min(rank, top_k) - 1  # the one that this one must not pass
        passes = order[..., rank] < order[..., above]
        codes[..., rank] = np.minimum(codes[..., rank], codes[..., above] - passes)
    found = np.empty_like(codes)
    np.put_along_axis(found, order, np.maximum(codes, 0), axis=-1)
    return found


@dataclass
class Cost:
    """What fewer bits do to one tensor: errors of its scores, and how many of the K highest are others than before
    (where a code of 0 leaves no room below)."""

    name: str
    top_k: int
    gates: Gates = Gates.ALL
    largest: float = 0.0
    total: float = 0.0
    values: int = 0
    named: int = 0
    others: int = 0

    def add(self, scores: Array) -> None:
        """Judge scores [n, L, E] from 0 to 1 against what their code gives back."""
        code = code_of(self.name, self.gates)
        stored = code.decode(codes_of(self.name, scores, self.top_k, self.gates), code.scale) / code.scale
        error = np.abs(stored - scores)
        self.largest = max(self.largest, float(error.max(initial=0)))
        self.total, self.values = self.total + float(error.sum()), self.values + error.size
        before, after = (np.argsort(-values, axis=-1, kind="stable")[..., : self.top_k] for values in (scores, stored))
        same = (before[..., :, None] == after[..., None, :]).any(axis=-1)
        self.named, self.others = self.named + same.size, self.others + int((~same).sum())

    def __str__(self) -> str:
        return (
            f"{self.name}: mean error {self.total / max(1, self.values):.4f}, largest {self.largest:.4f}, "
            f"{self.others / max(1, self.named):.2%} of the {self.top_k} highest are others"
        )


def pieces(request: Request) -> Iterator[tuple[int, int, bool]]:
    """(first row, end row, whether they are decode rows) of a request, some rows at a time."""
    middle = request.first_decode_row
    for begin, end, decode in ((request.first_row, middle, False), (middle, request.end_row, True)):
        for a in range(begin, end, _ROWS):
            yield a, min(end, a + _ROWS), decode


def rows_of(trace: Trace, a: int, b: int, decode: bool) -> dict[str, Array]:
    """Tensors of rows [a, b) as floats; of far predictions only decode rows."""
    scale = trace.score_scale
    found: dict[str, Array] = {
        "scores": trace.scores(a, b) / scale,
        "next_scores_1": trace.next_scores(1, a, b) / scale,
    }
    if decode:
        found |= {f"next_scores_{d}": trace.next_scores(d, a, b)[:, :-d] / scale for d in DISTANCES if d > 1}
        found["shared_scores"] = trace.shared_scores(a, b)[:, :-1] / scale
    else:
        n_layers, n_experts = trace.n_layers, trace.n_experts
        missing = {"next_scores_2": 2, "next_scores_3": 3, "shared_scores": 1}
        found |= {name: np.zeros((0, n_layers - less, n_experts)) for name, less in missing.items()}
    return {"experts": trace.experts[a:b], "token_ids": trace.token_ids[a:b], **found}


def facts_of(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The figures of `evaluate.py` that belong beside the trace."""
    routing, predicted = evaluation["routing"], evaluation["predicted_tokens"]
    return {
        "heldout_nats_per_token": {name: by_task["all"] for name, by_task in evaluation["loss"].items()},
        "heldout_tokens": sum(predicted.values()),
        "dead_experts": routing["dead_experts"],
        "gate_reuse_accuracy": routing["gate_reuse_accuracy"],
        "gate_reuse_accuracy_by_distance": routing["gate_reuse_accuracy_by_distance"],
        "popularity_accuracy": routing["popularity_accuracy"],
    }


def read_facts(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint. Raises BadInput."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {error}; train and evaluate first") from None
    return data


def header_of(trace: Trace, checkpoint: Path, name: str, cut: str, n_tokens: int, weights_kind: str) -> Header:
    """What the trace is and is not, from the recording, the training log and the evaluation."""
    log, evaluation = read_facts(checkpoint / NAME), read_facts(checkpoint / "evaluation.json")
    settings, header = log["settings"], trace.header
    begun = f", begun from {Path(settings['begin_from']).name}" if settings["begin_from"] else ""
    return msgspec.structs.replace(
        header,
        model=name,
        model_source=(
            f"small model with the routing shape of {settings['shape']} ({header.n_layers}x{header.n_experts}, "
            f"k={header.top_k}), hidden size {settings['hidden']}, {log['parameters']} parameters, trained by "
            f"tools/train on {log['tokens_seen']} tokens{begun} ({log['hardware']}, {log['seconds']:.0f} s, torch "
            f"{log['torch']}, seed {settings['seed']}); not the published {settings['shape']}"
        ),
        stands_for=stands_for(log),
        weights_kind=weights_kind,
        labels=(*header.labels, *labels_of(log)),
        tokenizer=f"byte-level BPE of {n_tokens} tokens trained on the same corpus",
        text_source="documentation and text packages of Debian listed in traces/train/corpus.yaml",
        text_licence="free licences per package, listed in traces/train/corpus.yaml; recorded text is the model's own",
        notes=f"Prompts are cut from held-out documents. {cut} {header.notes}",
        extra={key: json.dumps(value) for key, value in facts_of(evaluation).items()},
    )


def pack(recording: Path, checkpoint: Path, out: Path, cut: str, gates: Gates = Gates.ALL) -> dict[str, Cost]:
    """Write the trace. Raises BadInput when a level or a file of the checkpoint is missing, or bits are too few."""
    table = load(checkpoint).model.embed_tokens.weight.detach().numpy()
    with Trace(recording) as trace:
        trace.require_all({"scores", "token_ids", "next_scores_1", *FAR}, "packing")
        if gates.highest and trace.n_experts <= MANY_EXPERTS:
            raise BadInput(
                f"{'--gate-bits 4' if gates.bits == 4 else '--highest'}, got a recording of {trace.n_experts} experts: "
                f"it is for more than {MANY_EXPERTS}; leave it out"
            )
        costs = {name: Cost(name, trace.top_k, gates) for name in ("scores", "next_scores_1", *FAR)}
        for a, b, decode in (piece for request in trace.requests for piece in pieces(request)):
            rows = rows_of(trace, a, b, decode)
            for name, cost in costs.items():
                cost.add(rows[name])
        told = "Fewer bits: " + "; ".join(str(cost) for cost in costs.values()) + "."
        stored = gates.highest or trace.header.gate.score == "sparsemixer"  # weights that do not follow from scores
        name, kind = out.name.removesuffix(".safetensors"), "applied" if stored else "derived"
        header = header_of(trace, checkpoint, name, f"{cut} {told}".strip(), len(table), kind)
        layout = layout_of(trace.n_experts, trace.top_k, gates)
        with TraceWriter(out, header, layout, table) as writer:
            for request in trace.requests:
                writer.start_request(request.prompt_len, request.task, request.split, request.arrival_s)
                for a, b, decode in pieces(request):
                    rows = rows_of(trace, a, b, decode)
                    for name in costs:
                        rows[name] = codes_of(name, rows[name], trace.top_k, gates)
                    if stored:
                        rows["weights"] = rounded(trace.weights(a, b))
                    writer.append(**rows)
    return costs


@click.command()
@click.option("--recording", type=click.Path(path_type=Path, exists=True), required=True, help="of `moesim record`")
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--lengths", "cut", default="", help="a sentence for the notes: where lengths and arrivals come from")
@click.option(
    "--gate-bits", type=click.Choice(["6", "4"]), default="6", help="of gate scores; 4 for more than 16 experts"
)
@click.option("--highest", is_flag=True, help="gate scores of the 4 K highest alone, as --gate-bits 4 has them anyway")
def main(recording: Path, checkpoint: Path, out: Path, cut: str, gate_bits: str, highest: bool) -> None:
    """Write a recording of a checkpoint as a trace that ships."""
    gates = Gates((int(gate_bits), highest or gate_bits == "4"))
    for cost in pack(recording, checkpoint, out, cut, gates).values():
        click.echo(cost)
    click.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
