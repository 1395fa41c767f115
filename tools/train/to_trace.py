"""Turn a recording into the trace file that ships, with everything a reader must know about it in its header.

    python -m tools.train.to_trace --checkpoint RUN --recording RUN --out traces/data/mixtral-8x7b-small.safetensors

Scores are stored as `u8_square` codes (FORMAT.md bounds the error), predictions for decode rows only, and embeddings
as the model's table indexed by token ids, so that about 64 requests of Mixtral's routing shape take 15 MB. With
`--compact`, for shapes of many experts, scores are `u6_square` codes, and of the predictions two and three layers ahead
and through the shared expert only the 2 K highest are kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sim.base.errors import BadInput
from tools.train.log import NAME, labels_of, stands_for
from tools.train.record import DISTANCES, Recording, load_recording
from traces.format.header import GateRule, Header
from traces.format.layout import U6_SQUARE, U8_SQUARE
from traces.format.requests import Request
from traces.format.writer import Layout, write_trace
from traces.record.families import FAMILIES

PREDICTIONS = (*(f"next_scores_{d}" for d in DISTANCES), "shared_scores")


def header_of(
    recording: Recording, meta: dict[str, Any], log: dict[str, Any], facts: dict[str, Any], name: str
) -> Header:
    """What the trace is and is not, from the training log and the evaluation."""
    settings = log["settings"]
    n_layers, n_experts, top_k = meta["layers"], meta["experts"], meta["top_k"]
    return Header(
        model=name,
        model_source=(
            f"small {meta['model_type']} model with the routing shape of {settings['shape']} ({n_layers}x{n_experts}, "
            f"k={top_k}), hidden size {recording.embedding.shape[1]}, {log['parameters']} parameters, trained by "
            f"tools/train on {log['tokens_seen']} tokens ({log['hardware']}, {settings.get('workers', 1)} workers, "
            f"{log['seconds']:.0f} s, "
            f"torch {log['torch']}, seed {settings['seed']}); not the published {settings['shape']}"
        ),
        n_layers=n_layers,
        n_experts=n_experts,
        top_k=top_k,
        gate=GateRule(score=FAMILIES[meta["model_type"]].score, renormalised=bool(meta["weights_renormalised"])),
        created_by="tools.train",
        stands_for=stands_for(log),
        weights_kind="applied",
        tokenizer=f"byte-level BPE of {recording.embedding.shape[0]} tokens trained on the same corpus",
        text_source="documentation and text packages of Debian listed in traces/train/corpus.yaml",
        text_licence="free licences per package, listed in traces/train/corpus.yaml; recorded text is the model's own",
        tasks=tuple(sorted(set(recording.task))),
        labels=labels_of(log),
        notes=(
            f"Prompts are cut from held-out documents; outputs are sampled at temperature {meta['temperature']}. "
            f"Mean lengths: {recording.prompt_len.mean():.0f} prompt and "
            f"{(recording.n_rows - recording.prompt_len + 1).mean():.0f} output tokens."
        ),
        extra={key: text_of(value) for key, value in facts.items() if value != {}},
    )


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def facts_of(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The figures of `evaluate.py` that belong beside the trace."""
    routing, predicted = evaluation["routing"], evaluation["predicted_tokens"]
    return {
        "heldout_nats_per_token": {name: by_task["all"] for name, by_task in evaluation["loss"].items()},
        "heldout_tokens": sum(predicted.values()),
        "dead_experts": routing["dead_experts"],
        "gate_reuse_accuracy": routing["gate_reuse_accuracy"],
        "gate_reuse_accuracy_by_distance": routing.get("gate_reuse_accuracy_by_distance", {}),
        "popularity_accuracy": routing["popularity_accuracy"],
    }


def requests_of(recording: Recording, limit: int | None) -> list[Request]:
    """The request table; `limit` keeps the first so many requests."""
    found, first = [], 0
    rows = zip(recording.prompt_len, recording.n_rows, recording.task, recording.split, strict=True)
    for index, (prompt_len, n_rows, task, split) in enumerate(rows):
        if limit is not None and index == limit:
            break
        found.append(Request(index, first, int(prompt_len), int(n_rows), task, None, split))
        first += int(n_rows)
    return found


def layout_of(top_k: int, compact: bool) -> Layout:
    """How the tensors of a bundled trace are stored."""
    scored = ("scores", *PREDICTIONS)
    if not compact:
        return Layout(codes=dict.fromkeys(scored, U8_SQUARE.name), decode_only=frozenset(PREDICTIONS))
    far = ("next_scores_2", "next_scores_3", "shared_scores")
    return Layout(dict.fromkeys(scored, U6_SQUARE.name), frozenset(PREDICTIONS), dict.fromkeys(far, 2 * top_k))


def convert(
    checkpoint: Path, recording_folder: Path, out: Path, limit: int | None = None, compact: bool = False
) -> Path:
    """Write the trace. Raises BadInput when a file of the checkpoint is missing or the writer finds a fault."""
    recording, meta = load_recording(recording_folder)
    log = read_facts(checkpoint / NAME)
    facts = facts_of(read_facts(checkpoint / "evaluation.json"))
    scores = {"scores": recording.scores["scores"], "shared_scores": recording.scores["skip_attention"][:, :-1]}
    for d in DISTANCES:
        ahead = recording.scores[f"ahead{d}"]
        scores[f"next_scores_{d}"] = ahead if d == 1 else ahead[:, :-d]
    requests = requests_of(recording, limit)
    end = requests[-1].end_row
    layout = layout_of(meta["top_k"], compact)
    return write_trace(
        out,
        header_of(recording, meta, log, facts, out.name.removesuffix(".safetensors")),
        requests,
        layout,
        recording.embedding,
        experts=recording.ids[:end],
        weights=recording.weights[:end],
        token_ids=recording.tokens[:end],
        **{name: values[:end] for name, values in scores.items()},
    )


def read_facts(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint. Raises BadInput."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {error}; train and evaluate first") from None
    return data


@click.command()
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--recording", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--requests", "limit", type=int, default=None, help="keep the first so many requests")
@click.option("--compact/--no-compact", default=False, help="six-bit scores, and only the highest of far predictions")
def main(checkpoint: Path, recording: Path, out: Path, limit: int | None, compact: bool) -> None:
    """Write a recording as a routing trace."""
    path = convert(checkpoint, recording, out, limit, compact)
    click.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
