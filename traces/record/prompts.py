"""Which requests to record: prompts from a file, or lengths drawn from a distribution with random tokens."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sim.base.errors import BadInput
from sim.base.files import read_text
from traces.format.layout import SPLITS

MAX_PROMPT_FILE_BYTES = 256 * 1024 * 1024
RANDOM_LABEL = "random-prompts"
_DIST = re.compile(
    r"^(?:(?P<fixed>[0-9]{1,9})|(?P<low>[0-9]{1,9})-(?P<high>[0-9]{1,9})|"
    r"lognormal:(?P<median>[0-9.]{1,20}):(?P<sigma>[0-9.]{1,20}))$"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: token ids of its prompt and at most how many tokens to produce.

    fixed_length: exactly `max_outputs` are produced; the end-of-text token is never drawn.
    arrival_s: when it arrives, where the file says so.
    """

    token_ids: tuple[int, ...]
    max_outputs: int
    task: str = ""
    split: str = ""
    fixed_length: bool = False
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: `37`, `20-54` (uniform, ends included) or `lognormal:MEDIAN:SIGMA`."""

    text: str

    def draw(self, rng: np.random.Generator, n: int) -> list[int]:
        """n token counts of at least 1. Raises BadInput for a text that is none of the three forms."""
        form = _DIST.match(self.text)
        if not form:
            raise BadInput(f"lengths, got {self.text!r}: a number (37), a range (20-54) or lognormal:MEDIAN:SIGMA")
        if form["fixed"]:
            low = high = int(form["fixed"])
        elif form["low"]:
            low, high = int(form["low"]), int(form["high"])
        else:
            low, high = 1, 1 << 30
            median, sigma = _number(form["median"], self.text), _number(form["sigma"], self.text)
            with np.errstate(over="ignore"):  # infinity is clipped, too
                drawn = np.clip(np.exp(rng.normal(np.log(max(median, 1e-9)), sigma, n)), low, high)
            return [max(1, round(value)) for value in drawn.tolist()]
        if not 1 <= low <= high:
            raise BadInput(f"lengths, got {self.text!r}: at least 1 token, and the smaller number first")
        return [int(value) for value in rng.integers(low, high, n, endpoint=True)]


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadInput(f"lengths, got {where!r}: {text!r} is not a number; write e.g. lognormal:37:0.5") from None


def read_prompts(
    path: Path, encode: Callable[[str], Sequence[int]] | None, max_outputs: int, max_prompt: int | None = None
) -> list[Prompt]:
    """Prompts of a file: `.jsonl` with one object per line, anything else one prompt per line; blank lines are skipped.

    An object has `prompt` (or `text`), or `token_ids`, and may have `task`, `split` (store or test), `arrival_s`, and
    `max_new_tokens` or `output_tokens` (exactly so many); other keys are left alone. `encode` is None where the model
    has no tokenizer.

    Raises:
        BadInput: the file, a line of it, or no prompt at all; text without a tokenizer.
    """
    lines = [(i, line) for i, line in enumerate(read_text(path, MAX_PROMPT_FILE_BYTES).split("\n"), 1) if line.strip()]
    if not lines:
        raise BadInput(f'{path}: no prompt in it: one per line (or .jsonl objects with a "prompt"); add some')
    read = _from_json if path.suffix in (".jsonl", ".ndjson") else _from_text
    found: list[Prompt] = []
    for number, line in lines:
        where = f"{path} line {number}"
        ids, facts = read(line.rstrip("\r"), encode, where)
        if not ids:
            raise BadInput(f"{where}, got no token: a prompt has at least one; remove the line")
        exactly = "output_tokens" if "output_tokens" in facts else "max_new_tokens"
        outputs = _count(facts.get(exactly), max_outputs, f"{where}: {exactly}")
        task, split = facts.get("task", ""), facts.get("split", "")
        if not isinstance(task, str) or split not in ("", *SPLITS):
            raise BadInput(f"{where}, got task {task!r}, split {split!r}: a task is text, a split store or test")
        at_s = _arrival(facts.get("arrival_s"), found[-1].arrival_s if found else None, where)
        found.append(Prompt(tuple(ids[:max_prompt]), outputs, task, split, exactly == "output_tokens", at_s))
    for what, has in (("a task", [p.task != "" for p in found]), ("arrival_s", [p.arrival_s is None for p in found])):
        if len(set(has)) > 1:
            raise BadInput(f"{path}: some prompts have {what} and some have none: give all of them one, or none")
    return found


def _arrival(value: Any, before_s: float | None, where: str) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < math.inf or (before_s is not None and value < before_s):
        raise BadInput(f"{where}: arrival_s, got {value!r}: seconds from 0, none before those of the line above")
    return float(value)


def _from_text(line: str, encode: Any, where: str) -> tuple[list[int], dict[str, Any]]:
    if encode is None:
        way = "give .jsonl lines with token_ids, or draw random prompts with --prompt-tokens"
        raise BadInput(f"{where}: text, but the model has no tokenizer; {way}")
    return [int(token) for token in encode(line)], {}


def _from_json(line: str, encode: Any, where: str) -> tuple[list[int], dict[str, Any]]:
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise BadInput(f'{where}, got {line[:40]!r}: not a JSON object; write e.g. {{"prompt": "..."}}')
    ids, text = facts.get("token_ids"), facts.get("prompt", facts.get("text"))
    if ids is not None:
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise BadInput(f"{where}: token_ids, got something else: a list of whole numbers from 0")
        return ids, facts
    if not isinstance(text, str):
        raise BadInput(f"{where}: prompt, got {text!r}: text (or token_ids, a list of numbers)")
    return _from_text(text, encode, where)[0], facts


def _count(value: Any, default: int, where: str) -> int:
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise BadInput(f"{where}, got {value!r}: a whole number of at least 1")
    return value


def random_prompts(
    n_requests: int, prompt: Lengths, outputs: Lengths, n_tokens: int, avoid: Sequence[int], seed: int
) -> list[Prompt]:
    """Prompts of uniformly random token ids below `n_tokens`, without those in `avoid` (end of text)."""
    rng = np.random.default_rng(seed)
    lengths, wanted = prompt.draw(rng, n_requests), outputs.draw(rng, n_requests)
    usable = np.setdiff1d(np.arange(n_tokens), np.array(avoid, np.int64))
    return [
        Prompt(tuple(usable[rng.integers(0, len(usable), length)].tolist()), count, fixed_length=True)
        for length, count in zip(lengths, wanted, strict=True)
    ]


def with_output_lengths(prompts: list[Prompt], outputs: Lengths, seed: int) -> list[Prompt]:
    """The same prompts with output lengths drawn instead of left to the model."""
    drawn = outputs.draw(np.random.default_rng([seed, 1]), len(prompts))
    return [replace(p, max_outputs=n, fixed_length=True) for p, n in zip(prompts, drawn, strict=True)]


def splits(prompts: Sequence[Prompt], store_frac: float, seed: int) -> list[str]:
    """Split of every request: its own, else `store` for `store_frac` of each task's, drawn.

    Of a task's undecided requests one is always left to `test`, unless `store_frac` is 1.
    """
    rng = np.random.default_rng([seed, 2])
    chosen = [prompt.split or "test" for prompt in prompts]
    for task in sorted({prompt.task for prompt in prompts}):
        free = [i for i, prompt in enumerate(prompts) if prompt.task == task and not prompt.split]
        order = rng.permutation(free)
        n_store = min(round(store_frac * len(free)), max(0, len(free) - 1)) if store_frac < 1 else len(free)
        for i in order[:n_store].tolist():
            chosen[int(i)] = "store"
    return chosen
