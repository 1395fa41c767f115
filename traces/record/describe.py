"""What a recording is: the plan that decides its rows, and the header that tells a reader."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sim import __version__
from traces.format.header import GateRule, Header
from traces.format.layout import DISTANCES, U8_SQUARE, U16_LINEAR
from traces.format.writer import Layout
from traces.record.families import MoeLayer
from traces.record.load import Settings
from traces.record.prompts import RANDOM_LABEL, Prompt
from traces.record.session import Session

PREDICTIONS = (*(f"next_scores_{d}" for d in DISTANCES), "shared_scores")
_LAYERS_NEEDED = {"next_scores_1": 1, "next_scores_2": 3, "next_scores_3": 4, "shared_scores": 2}


def plan_of(settings: Settings, config: Any, prompts: list[Prompt], device: str) -> dict[str, Any]:
    """Everything that decides the recorded rows, as plain data."""
    import torch
    import transformers

    text = json.dumps([[p.token_ids, p.max_outputs, p.task, p.split, p.fixed_length, p.arrival_s] for p in prompts])
    facts = json.dumps(config.to_dict(), sort_keys=True, default=str)
    how = (
        "text_licence",
        "batch",
        "dtype",
        "temperature",
        "seed",
        "store_frac",
        "hidden",
        "compact",
        "embedding_width",
    )
    return {
        "version": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": settings.source.name,
        "commit": getattr(config, "_commit_hash", None),
        "revision": settings.source.revision,
        "config": hashlib.sha256(facts.encode()).hexdigest(),
        "weights": _weights(settings.source.name),
        "prompts": hashlib.sha256(text.encode()).hexdigest(),
        "requests": len(prompts),
        "name": name_of(settings),
        "text": _text_source(settings),
        "text_licence": settings.text_licence,
        "device": device.split(":")[0],
        **{name: getattr(settings, name) for name in how},
    }


def _weights(name: str) -> dict[str, int]:
    """Names and sizes of the weight files of a local checkpoint."""
    folder = Path(name)
    return {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))} if folder.is_dir() else {}


def layout_of(settings: Settings, n_layers: int) -> Layout:
    """How scores are coded, and which tensors keep decode rows only."""
    code = U8_SQUARE if settings.compact else U16_LINEAR
    predictions = {name for name in PREDICTIONS if n_layers >= _LAYERS_NEEDED[name]}
    return Layout(
        codes=dict.fromkeys(("scores", *PREDICTIONS), code.name),
        decode_only=frozenset(predictions) if settings.compact else frozenset(),
    )


def name_of(settings: Settings) -> str:
    """The model's name in the trace."""
    folder = Path(settings.source.name)
    return settings.name or (folder.resolve() if folder.is_dir() else folder).name


def _text_source(settings: Settings) -> str:
    if settings.prompts is None:
        return "uniformly random token ids"
    digest = hashlib.sha256(settings.prompts.read_bytes()).hexdigest()
    return f"{settings.prompts.name} (sha256 {digest[:16]}), continued by the model"


def header_of(
    settings: Settings, session: Session, model: Any, layers: list[MoeLayer], gate: GateRule, tokenizer: Any
) -> Header:
    """What the trace is; `notes` says how the model was run and what was cut."""
    config, plan = model.config, session.plan
    source = settings.source
    place = Path(source.name).name if Path(source.name).is_dir() else f"huggingface.co/{source.name}"
    at = f" at {revision}" if (revision := plan["commit"] or source.revision) else ""
    libraries = f"transformers {plan['transformers']}, torch {plan['torch']}"
    drawn = "greedily" if settings.temperature == 0 else f"at temperature {settings.temperature:g}"
    notes = [
        f"Run in {str(model.dtype).removeprefix('torch.')} on {plan['device']} in batches of {settings.batch}, "
        f"outputs taken {drawn}, seed {settings.seed}."
    ]
    if session.prompts[0].fixed_length:
        notes.append("Output lengths were drawn; the end of text was never taken.")
    if settings.embedding_width:
        notes.append(f"Embeddings are a random-sign projection to {settings.embedding_width} values.")
    if settings.max_prompt_tokens:
        notes.append(f"Prompts were cut to {settings.max_prompt_tokens} tokens.")
    if gate.selection == "other":
        kept, groups = getattr(config, "topk_group", None) or 1, getattr(config, "n_group", None) or 1
        how = f"within {kept} of {groups} groups" if kept < groups else "by biased scores"
        notes.append(f"Experts are chosen {how}; the scores recorded are those before that.")
    return Header(
        model=name_of(settings),
        model_source=f"{place}{at}, {type(model).__name__} of {libraries}",
        n_layers=len(layers),
        n_experts=int(layers[0].router.weight.shape[0]),
        top_k=int(config.num_experts_per_tok),
        gate=gate,
        created_by=f"moesim record {__version__}",
        tokenizer="" if tokenizer is None else f"{type(tokenizer).__name__} of {name_of(settings)}",
        text_source=_text_source(settings),
        text_licence=settings.text_licence,
        labels=(RANDOM_LABEL,) if settings.prompts is None else (),
        tasks=tuple(sorted({prompt.task for prompt in session.prompts if prompt.task})),
        notes=" ".join(notes),
        extra=session.facts,
    )
