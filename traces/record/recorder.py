"""Record the routing of a Hugging Face MoE model: from settings to a finished trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.base.errors import BadInput
from traces.format.layout import Array
from traces.format.requests import Request
from traces.record.describe import header_of, layout_of, name_of, plan_of
from traces.record.load import Settings, load_config, load_model, load_tokenizer, memory_errors, usable_device
from traces.record.prompts import Lengths, Prompt, random_prompts, read_prompts, splits, with_output_lengths
from traces.record.session import BatchWriter, Session

if TYPE_CHECKING:
    from traces.record.probe import Rows

DEFAULT_REQUESTS = 32  # random prompts, when nobody says how many


@dataclass(frozen=True, slots=True)
class Recorded:
    """What came of it. `fresh` is False when the very same recording was there already."""

    path: Path
    config: Path
    n_requests: int
    fresh: bool = True


OnProgress = Callable[[int, int, int], None]


def record(
    settings: Settings, resume: bool = False, force: bool = False, on_progress: OnProgress | None = None
) -> Recorded:
    """Run the requests and write `settings.out`, and the model's configuration beside it as `NAME.config.json`.

    `on_progress(requests done, requests, rows so far)` is called after every forward.

    Raises:
        BadInput: settings, model or prompts that cannot be used; memory; a recording that is in the way.
        CheckFailed: the model does not route the way its class is known to.
    """
    config = load_config(settings.source)
    tokenizer = load_tokenizer(settings.source)
    prompts = _prompts(settings, config, tokenizer)
    device = usable_device(settings.device)
    plan = plan_of(settings, config, prompts, device)
    session = Session(settings.out, plan, {**config.to_dict(), "_name_or_path": name_of(settings)}, prompts)
    fresh = session.open(resume, force)
    if fresh:
        _run(settings, session, config, tokenizer, device, on_progress or (lambda *_: None))
    return Recorded(settings.out, session.copy, len(prompts), fresh)


def _prompts(settings: Settings, config: Any, tokenizer: Any) -> list[Prompt]:
    """The requests, checked against the model's vocabulary and positions."""
    if (settings.prompts is None) == (settings.prompt_tokens is None):
        raise BadInput("prompts, got both or neither of --prompts FILE and --prompt-tokens LENGTHS: give one of them")
    if settings.prompts is None:
        n = DEFAULT_REQUESTS if settings.n_requests is None else settings.n_requests
        outputs = Lengths(settings.output_tokens or str(settings.max_new_tokens))
        lengths = Lengths(settings.prompt_tokens or "")
        found = random_prompts(n, lengths, outputs, config.vocab_size, _end_ids(config), settings.seed)
        found = [Prompt(p.token_ids[: settings.max_prompt_tokens], p.max_outputs, fixed_length=True) for p in found]
    else:
        encode = None if tokenizer is None else partial(_encode, tokenizer, settings.chat)
        found = read_prompts(settings.prompts, encode, settings.max_new_tokens, settings.max_prompt_tokens)
        if settings.n_requests is not None and settings.n_requests > len(found):
            rule = f"{settings.prompts} has {len(found)} prompts; lower it"
            raise BadInput(f"--requests, got {settings.n_requests}: {rule}")
        found = found[: settings.n_requests]
        if settings.output_tokens is not None:
            found = with_output_lengths(found, Lengths(settings.output_tokens), settings.seed)
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    for i, prompt in enumerate(found):
        if max(prompt.token_ids) >= config.vocab_size:
            rule = f"the model's vocabulary has {config.vocab_size}; is it the right tokenizer?"
            raise BadInput(f"request {i}, got token id {max(prompt.token_ids)}: {rule}")
        if len(prompt.token_ids) + prompt.max_outputs - 1 > limit:
            got = f"{len(prompt.token_ids)} prompt tokens and up to {prompt.max_outputs} outputs"
            way = "lower --max-prompt-tokens, --max-new-tokens or the drawn lengths"
            raise BadInput(f"request {i}, got {got}: the model has {limit} positions; {way}")
    return found


def _encode(tokenizer: Any, chat: bool, text: str) -> list[int]:
    if not chat:
        return list(tokenizer(text)["input_ids"])
    try:
        said = [{"role": "user", "content": text}]
        filled = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    except ValueError:
        raise BadInput("--chat: the tokenizer has no chat template; leave the flag out") from None
    return list(tokenizer(filled, add_special_tokens=False)["input_ids"])


def _end_ids(config: Any, model: Any = None) -> tuple[int, ...]:
    """Token ids that end a request, from the generation configuration where there is one."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    ids = getattr(config, "eos_token_id", None) if ids is None else ids
    return tuple(ids) if isinstance(ids, (list, tuple)) else () if ids is None else (int(ids),)


def _run(
    settings: Settings, session: Session, config: Any, tokenizer: Any, device: str, on_progress: OnProgress
) -> None:
    """Run every batch that is not finished yet, each request into a trace of its own, and join them."""
    from traces.record.families import FAMILIES, gate_of, moe_layers
    from traces.record.generate import Sampling, prefill_tokens, run_batch
    from traces.record.probe import RoutingProbe

    model = load_model(settings.source, config, settings.dtype, device)
    layers = moe_layers(model, settings.source.name)
    gate = gate_of(model, layers)
    header, layout = header_of(settings, session, model, layers, gate, tokenizer), layout_of(settings, len(layers))
    embedding = None if settings.embedding_width == 0 else model.get_input_embeddings()
    sampling = Sampling(settings.temperature, settings.seed, _end_ids(config, model))
    prompts = session.prompts
    chosen = splits(prompts, settings.store_frac, settings.seed)
    project = _projection(settings, model.get_input_embeddings().weight.shape[1])
    most = prefill_tokens(settings.batch, header.n_layers, header.n_experts)
    way_out = "a smaller --batch or --dtype and --overwrite, or shorter prompts"
    rows_done = 0
    with RoutingProbe(layers, gate, FAMILIES[config.model_type].ranked, embedding, settings.hidden) as probe:
        for first in range(0, len(prompts), settings.batch):
            own = prompts[first : first + settings.batch]
            if session.finished(first, first + len(own)):
                continue
            requests = [
                Request(i, 0, len(p.token_ids), len(p.token_ids), p.task, p.arrival_s, chosen[first + i])
                for i, p in enumerate(own)
            ]
            doing = f"recording requests {first} to {first + len(own) - 1} in batches of {settings.batch}"
            with BatchWriter(session, header, layout, first, requests) as writer, memory_errors(doing, way_out):
                for slot, rows in run_batch(model, probe, own, first, sampling, most):
                    writer.add(slot, project(rows))
                    rows_done += len(rows["experts"])
                    on_progress(first, len(prompts), rows_done)
        on_progress(len(prompts), len(prompts), rows_done)
    session.join(header, layout, len(prompts))


def _projection(settings: Settings, width: int) -> Callable[[Rows], Rows]:
    """What shortens embeddings: nothing, or random signs (Achlioptas 2003), which keep cosines on average."""
    wanted = settings.embedding_width
    if not wanted:
        return lambda rows: rows
    signs = np.random.default_rng([settings.seed, 3]).integers(0, 2, (width, wanted)) * 2 - 1
    matrix: Array = signs.astype(np.float32) / np.float32(math.sqrt(wanted))
    return lambda rows: {**rows, "embeddings": rows["embeddings"] @ matrix}
