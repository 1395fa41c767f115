"""Open a Hugging Face model by folder or hub name: safetensors weights only, foreign code on request only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from sim.base.errors import BadInput
from sim.base.extras import need
from traces.record.families import family_of

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Source:
    """Which model to open, and how far to trust it."""

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    offline: bool = False

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that every `from_pretrained` takes."""
        return {
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "local_files_only": self.offline or Path(self.name).is_dir(),
        }


@dataclass(frozen=True, slots=True)
class Settings:
    """What to record. Defaults are those of the command line, which explains them."""

    source: Source
    out: Path
    prompts: Path | None = None
    prompt_tokens: str | None = None
    output_tokens: str | None = None
    n_requests: int | None = None
    max_new_tokens: int = 128
    max_prompt_tokens: int | None = None
    chat: bool = False
    batch: int = 1
    device: str | None = None
    dtype: str = "auto"
    temperature: float = 1.0
    seed: int = 0
    store_frac: float = 0.7
    hidden: bool = False
    compact: bool = False
    embedding_width: int | None = None  # None: as wide as the model; 0: not recorded
    name: str = ""
    text_licence: str = ""


def named(name: str) -> str:
    """The folder of a checkpoint that comes with this installation, or the name as it is."""
    bundled = Path(str(resources.files("traces"))) / "models" / name
    return (
        str(bundled) if name.isprintable() and (bundled / "config.json").is_file() and Path(name).name == name else name
    )


def load_config(source: Source) -> Any:
    """The model's configuration, once its architecture is known to be one that can be recorded. Raises BadInput."""
    path = Path(source.name)
    if not path.is_dir() and (path.is_absolute() or source.name.startswith(".") or source.name.count("/") > 1):
        raise BadInput(f"model, got {source.name!r}: no such folder; give the folder of a checkpoint, or owner/name")
    transformers = _transformers()
    with _one_line(source):
        config = transformers.AutoConfig.from_pretrained(source.name, **source.arguments())
    family_of(str(getattr(config, "model_type", "")), source.name)
    return config


def load_tokenizer(source: Source) -> Any | None:
    """The tokenizer, or None where the checkpoint has none."""
    transformers = _transformers()
    path = Path(source.name)
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if path.is_dir() and not any((path / file).exists() for file in files):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(source.name, **source.arguments())
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError):
        return None  # a caller with text to encode says so, with the way out


def load_model(source: Source, config: Any, dtype: str, device: str) -> Any:
    """The model in evaluation mode on `device` (`auto` spreads it over all GPUs, with accelerate).

    `dtype` as torch names it; `auto` is the checkpoint's own, but float32 on a CPU, where half precision is slow.

    Raises:
        BadInput: no such model, no safetensors weights, no such device, or not enough memory.
    """
    import torch

    transformers = _transformers()
    wanted = dtype if dtype == "auto" and device != "cpu" else getattr(torch, dtype.replace("auto", "float32"))
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    placed = {"device_map": "auto"} if device == "auto" else {}
    with _one_line(source), memory_errors(f"loading {source.name} on {device}", "a smaller --dtype, or --device auto"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.name, config=config, dtype=wanted, use_safetensors=True, **placed, **source.arguments()
        )
        return (model if placed else model.to(device)).eval()


def usable_device(name: str | None) -> str:
    """The device to run on: the one named, or a GPU if there is one, or the CPU. Raises BadInput."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "auto":
        from importlib.util import find_spec

        if find_spec("accelerate") is None:
            raise BadInput("--device, got 'auto': it needs accelerate; pip install accelerate")
        return name
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = _first_line(error)
        raise BadInput(f"--device, got {name!r}: not usable here ({why}); try cpu, cuda or cuda:0") from None
    return str(device)


@contextmanager
def memory_errors(doing: str, way_out: str) -> Iterator[None]:
    """Turn running out of memory, on a GPU or on the host, and a lost GPU into BadInput."""
    import torch

    from sim.base.device_faults import fault_of

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error).lower()
        told = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not (told or "not enough memory" in text or "out of memory" in text):
            fault = fault_of(error, doing)
            if fault is error:
                raise
            raise BadInput(f"{fault}; --resume keeps finished requests") from None
        raise BadInput(f"memory, ran out while {doing}: try {way_out}") from None


@contextmanager
def _one_line(source: Source) -> Iterator[None]:
    """What `from_pretrained` raises for a missing or unknown model, as one line."""
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError) as error:
        text = _first_line(error)
        if "trust_remote_code" in str(error):
            text = "it wants to run code of its own; --trust-remote-code allows that, if you trust it"
        elif "safetensors" in str(error):
            text = "no safetensors weights in it; pickled weights are not loaded, convert them first"
        raise BadInput(f"model, got {source.name!r}: cannot be loaded: {text}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _transformers() -> Any:
    need("record", "torch", "transformers")
    import transformers

    return transformers
