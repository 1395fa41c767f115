"""Record the routing of generated requests through the Hugging Face class of a trained model.

    python -m tools.train.record --checkpoint RUN --data .traindata/tokens --out RUN --requests 120

Prompts are cut from held-out documents, outputs are sampled. A request with P prompt and G output tokens has P + G
- 1 rows: its prompt tokens (one prefill forward), then one row per decode forward; the first output comes out of
the prefill, the last output is never processed. Requests of equal prompt length are decoded side by side without
padding, which changes no row: each attends to its own key-value cache only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch

from sim.base.errors import BadInput
from sim.base.files import replacing
from tools.train.probe import Routing, RoutingProbe, ahead_scores, router_weights, skip_attention_scores
from tools.train.tokens import END_OF_TEXT_ID, Tokens, load_split, split_documents
from traces.record.checkpoint import load

DISTANCES = (1, 2, 3)
STORE_SHARE = 0.7
PROMPT_TOKENS = (20, 54)  # uniform, mean 37
OUTPUT_TOKENS = (102, 152)  # uniform, mean 127
SCORES = ("scores", *(f"ahead{d}" for d in DISTANCES), "skip_attention")


@dataclass(frozen=True)
class PromptedRequest:
    """One request to generate: its task label, prompt ids and number of output tokens."""

    task: str
    prompt: Tokens
    output_tokens: int


@dataclass(frozen=True)
class Recording:
    """Arrays over all rows of all requests (request order, position order), plus one entry per request.

    ids uint8 and weights float32 [T,L,K]; scores float32 [T,L,E] by name (see `SCORES`); tokens uint16 [T]; embedding
    float32 [V,h]; prompt_len, n_rows int32 [R]; task and split names [R].
    """

    ids: npt.NDArray[np.uint8]
    weights: npt.NDArray[np.float32]
    scores: dict[str, npt.NDArray[np.float32]]
    tokens: Tokens
    embedding: npt.NDArray[np.float32]
    prompt_len: npt.NDArray[np.int32]
    n_rows: npt.NDArray[np.int32]
    task: list[str]
    split: list[str]


def draw_requests(
    heldout: dict[str, Tokens],
    count: int,
    group: int,
    seed: int,
    prompt_tokens: tuple[int, int] = PROMPT_TOKENS,
    output_tokens: tuple[int, int] = OUTPUT_TOKENS,
) -> list[PromptedRequest]:
    """Balanced requests: tasks in turn, a new prompt length for every `group` requests, prompts inside one document.

    Lengths are drawn evenly from the two ranges, ends included.
    """
    rng = np.random.default_rng(seed)
    documents = {task: [d for d in split_documents(ids) if len(d) >= prompt_tokens[1]] for task, ids in heldout.items()}
    tasks = sorted(documents)
    requests = []
    for start in range(0, count, group):
        length = int(rng.integers(*prompt_tokens, endpoint=True))
        for i in range(start, min(start + group, count)):
            task = tasks[i % len(tasks)]
            document = documents[task][int(rng.integers(len(documents[task])))]
            at = int(rng.integers(len(document) - length, endpoint=True))
            outputs = int(rng.integers(*output_tokens, endpoint=True))
            requests.append(PromptedRequest(task, document[at : at + length], outputs))
    return requests


def stratified_split(tasks: list[str], seed: int) -> list[str]:
    """`store` for 70 % of each task's requests, `test` for the others."""
    rng = np.random.default_rng(seed)
    split = ["test"] * len(tasks)
    for task in sorted(set(tasks)):
        members = rng.permutation([i for i, name in enumerate(tasks) if name == task])
        for i in members[: round(STORE_SHARE * len(members))]:
            split[i] = "store"
    return split


@torch.no_grad()
def _generate(
    model: Any, group: list[PromptedRequest], temperature: float, rng: torch.Generator
) -> list[tuple[Routing, Tokens]]:
    """Routing and processed token ids of requests with one common prompt length."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(np.stack([r.prompt for r in group]).astype(np.int64)).to(device)
    steps = max(r.output_tokens for r in group)
    cache = None
    routings: list[list[Routing]] = [[] for _ in group]
    tokens: list[list[torch.Tensor]] = [[] for _ in group]
    with RoutingProbe(model) as probe:
        for _ in range(steps):  # forward 0 is the prefill; G outputs take G forwards
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            seen = probe.take()
            width = ids.shape[1]
            for i in range(len(group)):
                rows = slice(i * width, (i + 1) * width)
                routings[i].append(Routing(*(getattr(seen, n)[rows] for n in Routing.__dataclass_fields__)))
                tokens[i].append(ids[i])
            logits = out.logits[:, -1].float().cpu() / temperature
            logits[:, END_OF_TEXT_ID] = -torch.inf  # lengths are drawn, not left to the model
            ids = torch.multinomial(logits.softmax(-1), 1, generator=rng).to(device)
    result = []
    for request, parts, seen_tokens in zip(group, routings, tokens, strict=True):
        row_ids = torch.cat(seen_tokens[: request.output_tokens]).cpu().numpy().astype(np.uint16)
        result.append((Routing.joined(parts[: request.output_tokens]), row_ids))
    return result


@torch.no_grad()
def record_requests(model: Any, requests: list[PromptedRequest], temperature: float = 0.8, seed: int = 1) -> Recording:
    """Generate every request with the model (evaluation mode, float32) and return its routing."""
    if model.training:
        raise BadInput("model: in training mode; call eval() first, routers may draw at random while training")
    rng = torch.Generator().manual_seed(seed)
    done: dict[int, tuple[Routing, Tokens]] = {}
    by_length: dict[int, list[int]] = {}
    for i, request in enumerate(requests):
        by_length.setdefault(len(request.prompt), []).append(i)
    for members in by_length.values():
        results = _generate(model, [requests[i] for i in members], temperature, rng)
        done.update(zip(members, results, strict=True))
    weights = router_weights(model)
    scores: dict[str, list[torch.Tensor]] = {name: [] for name in SCORES}
    for i in range(len(requests)):
        routing = done[i][0]
        scores["scores"].append(routing.logits.softmax(-1).cpu())
        for d in DISTANCES:
            scores[f"ahead{d}"].append(ahead_scores(weights, routing.gate_input, d).cpu())
        scores["skip_attention"].append(skip_attention_scores(model, routing.gate_input, routing.residual).cpu())
    tasks = [r.task for r in requests]
    order = range(len(requests))
    return Recording(
        ids=torch.cat([done[i][0].ids for i in order]).cpu().numpy().astype(np.uint8),
        weights=torch.cat([done[i][0].weights for i in order]).cpu().numpy(),
        scores={name: torch.cat(parts).numpy() for name, parts in scores.items()},
        tokens=np.concatenate([done[i][1] for i in order]),
        embedding=model.model.embed_tokens.weight.detach().float().cpu().numpy(),
        prompt_len=np.array([len(r.prompt) for r in requests], np.int32),
        n_rows=np.array([len(done[i][1]) for i in order], np.int32),
        task=tasks,
        split=stratified_split(tasks, seed),
    )


def save_recording(recording: Recording, folder: Path, meta: dict[str, Any], precision: str) -> list[Path]:
    """Write `routing.npz` and one `routing_<name>.npz` per score array, without pickle.

    `precision` f16 stores scores as float16, u8 as the code round(255 * sqrt(score)) in a quarter of the space; `meta`
    in routing.npz (JSON) says which, so that `load_recording` restores either.
    """
    text = json.dumps(
        {
            "schema": "moe-train-recording/1",
            "precision": precision,
            "score_names": list(SCORES),
            "tasks": sorted(set(recording.task)),
            **meta,
        }
    )
    tasks = sorted(set(recording.task))
    base = {
        "ids": recording.ids,
        "weights": recording.weights.astype(np.float16),
        "tokens": recording.tokens,
        "embedding": recording.embedding.astype(np.float16),
        "prompt_len": recording.prompt_len,
        "n_rows": recording.n_rows,
        "task": np.array([tasks.index(t) for t in recording.task], np.uint8),
        "is_store": np.array([s == "store" for s in recording.split]),
        "meta": np.array(text),
    }
    paths = [folder / "routing.npz"]
    _save_npz(paths[0], base)
    for name, values in recording.scores.items():
        coded = values.astype(np.float16) if precision == "f16" else np.rint(255 * np.sqrt(values)).astype(np.uint8)
        paths.append(folder / f"routing_{name}.npz")
        _save_npz(paths[-1], {name: coded})
    return paths


def _save_npz(path: Path, arrays: dict[str, Any]) -> None:
    with replacing(path) as part, part.open("wb") as handle:
        np.savez_compressed(handle, **arrays)


def load_recording(folder: Path) -> tuple[Recording, dict[str, Any]]:
    """Read what `save_recording` wrote: the recording (float32 again) and its meta data. Raises BadInput."""
    try:
        with np.load(folder / "routing.npz", allow_pickle=False) as stored:
            base = {key: stored[key] for key in stored.files}
        meta: dict[str, Any] = json.loads(str(base["meta"]))
        scores = {}
        for name in meta["score_names"]:
            with np.load(folder / f"routing_{name}.npz", allow_pickle=False) as stored:
                coded = stored[name].astype(np.float32)
            scores[name] = coded if meta["precision"] == "f16" else (coded / 255) ** 2
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{folder}: not a recording ({error}); write one with python -m tools.train.record") from None
    recording = Recording(
        ids=base["ids"],
        weights=base["weights"].astype(np.float32),
        scores=scores,
        tokens=base["tokens"],
        embedding=base["embedding"].astype(np.float32),
        prompt_len=base["prompt_len"],
        n_rows=base["n_rows"],
        task=[meta["tasks"][i] for i in base["task"]],
        split=["store" if s else "test" for s in base["is_store"]],
    )
    return recording, meta


@click.command()
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="folder of tokens.py")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--requests", "count", default=120, show_default=True)
@click.option("--group", default=8, show_default=True, help="requests that share a prompt length")
@click.option("--prompt-tokens", type=(int, int), default=PROMPT_TOKENS, show_default=True, help="shortest, longest")
@click.option("--output-tokens", type=(int, int), default=OUTPUT_TOKENS, show_default=True, help="shortest, longest")
@click.option("--seed", default=1, show_default=True)
@click.option("--temperature", default=0.8, show_default=True)
@click.option("--precision", type=click.Choice(["f16", "u8"]), default="f16", show_default=True)
@click.option("--experts", default="", help="loop or batched (default: batched on a GPU, the class's loop on a CPU)")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
def main(
    checkpoint: Path,
    data: Path,
    out: Path,
    count: int,
    group: int,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    seed: int,
    temperature: float,
    precision: str,
    experts: str,
    device: str,
) -> None:
    """Generate requests from held-out prompts and write their routing."""
    model = load(checkpoint).to(device)
    if experts == "batched" or (device.startswith("cuda") and not experts):
        model.set_experts_implementation("batched_mm")  # one gather and product per layer, not a loop over experts
    requests = draw_requests(load_split(data, "heldout"), count, group, seed, prompt_tokens, output_tokens)
    recording = record_requests(model, requests, temperature, seed)
    config = model.config
    meta = {
        "model_type": config.model_type,
        "layers": recording.ids.shape[1],
        "experts": recording.scores["scores"].shape[2],
        "top_k": recording.ids.shape[2],
        "seed": seed,
        "temperature": temperature,
        "torch": torch.__version__,
        "weights_renormalised": bool(config.model_type == "mixtral" or getattr(config, "norm_topk_prob", False)),
    }
    out.mkdir(parents=True, exist_ok=True)
    paths = save_recording(recording, out, meta, precision)
    sizes = ", ".join(f"{p.name} {p.stat().st_size / 1e6:.1f} MB" for p in paths)
    click.echo(f"{len(recording.tokens)} rows of {count} requests: {sizes}")


if __name__ == "__main__":
    main()
