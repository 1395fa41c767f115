"""The models that `tools.train` trained, as transformers' own (torch): what real runs and predictors read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from sim.base.errors import BadInput

CLASSES = {"mixtral": "MixtralForCausalLM", "phimoe": "PhimoeForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM"}


def of_config(config: Any) -> Any:
    """An initialised model of one of the three classes."""
    import transformers

    return getattr(transformers, CLASSES[config.model_type])._from_config(
        config, attn_implementation="sdpa", experts_implementation="eager"
    )


def load(folder: Path) -> Any:
    """Read a checkpoint as a float32 model in evaluation mode. Raises BadInput for another class or other weights."""
    import transformers

    if not (folder / "config.json").exists():
        raise BadInput(f"{folder}: no config.json in it; give the folder of a checkpoint")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type not in CLASSES:
        raise BadInput(f"{folder}: model_type, got {config.model_type!r}: give a checkpoint of {' or '.join(CLASSES)}")
    model = of_config(config)
    state: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state.update(load_file(file))
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise BadInput(f"{folder}: weights do not match config.json ({[*missing, *unexpected][:3]}); files missing?")
    model.tie_weights()
    return model.float().eval()
