"""What a log's format never tells and the user has to say: asked for all at once, before anything is read."""

from __future__ import annotations

from pathlib import Path

from sim.base.errors import BadInput
from traces.convert.fields import has_keys
from traces.convert.options import Options

# Source -> options without which it cannot be converted, whatever the file holds.
_SILENT: dict[str, tuple[str, ...]] = {
    "csv": ("model", "n_experts"),
    "warp": ("model", "n_experts"),
    "ggml_log": ("model", "n_experts"),
    "imp": ("model", "n_experts"),
    "llama_csv": ("model", "n_experts"),
    "llama_text": ("model", "n_experts"),
    "sglang": ("model",),
    "esft": ("model", "n_experts", "top_k"),
    "hf": ("model", "top_k", "renormalised"),
}
# Source -> option -> the key by which a first line of facts may tell it.
_FIRST_LINE = {
    "jsonl": {"model": "model", "n_experts": "n_experts"},
    "vllm": {"model": "model_id", "n_experts": "num_experts"},
}
_PHASED = (
    "bigmoe",
    "warp",
    "vllm",
    "sglang",
    "ggml_log",
    "imp",
    "llama_csv",
    "llama_text",
)  # sources that mark, or settle, what is prefill and what decode
_WORDS = {
    "model": "--model NAME",
    "n_experts": "--n-experts N",
    "top_k": "--top-k K",
    "renormalised": "--renormalised or --no-renormalised",
}
_HINTS = {
    "esft": " (ESFT's own logs: --top-k 6 --n-experts 64)",
    "hf": " (whether the model divides the chosen scores by their sum, norm_topk_prob: Mixtral does, Qwen1.5-MoE "
    "does not)",
}


def check(source: str, path: Path, head: bytes, options: Options) -> None:
    """Refuse at once what would be refused after reading.

    Raises:
        BadInput: naming every option that is missing, or one that would change nothing.
    """
    silent = [name for name in _SILENT.get(source, ()) if getattr(options, name) is None]
    for name, key in _FIRST_LINE.get(source, {}).items():
        if head and getattr(options, name) is None and not has_keys(head, key):
            silent.append(name)
    refuse_missing(silent, f"{path} ({source})", _HINTS.get(source, ""))
    if options.prompt_len is not None and source in _PHASED:
        refuse_prompt_len(options.prompt_len, f"{path} ({source})")


def refuse_missing(names: list[str], where: str, hint: str = "") -> None:
    """One line that asks for all of them. Raises BadInput when there are any."""
    if names:
        flags = " and ".join(_WORDS[name].split()[0] for name in names)
        raise BadInput(f"{flags}, got none: {where} does not tell; give {', '.join(_WORDS[n] for n in names)}{hint}")


def refuse_prompt_len(prompt_len: int, where: str) -> None:
    """Where phases are known there is nothing to mark. Raises BadInput."""
    raise BadInput(f"--prompt-len, got {prompt_len}: {where} says itself which rows are prefill; leave it out")
