"""The weights of a checkpoint, for real runs of a model that was trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from sim.real.weights.weights import TORCH_TYPES, DenseLayer, Weights

if TYPE_CHECKING:
    from sim.profiles.models import Model
    from sim.real.devices.protocol import Device


def checkpoint_weights(folder: Path, model: Model, precision: str, device: Device) -> Weights:
    """A Mixtral-style checkpoint (safetensors) of this project's trainer. Raises BadInput for any other."""
    from traces.record.checkpoint import load

    torch = device.torch
    net = load(folder)
    config = net.config
    if config.model_type != "mixtral":
        raise BadInput(f"{folder}: a {config.model_type} checkpoint; real runs read mixtral ones")
    dtype = getattr(torch, TORCH_TYPES[precision])

    def place(tensor: Any) -> Any:
        return tensor.detach().to(dtype).contiguous().to(device.place)

    size = model.expert_bytes(precision)
    n_all = model.n_moe_layers * model.n_experts
    buffers, experts, layers = iter(device.host_buffers(n_all, size)), [], []
    for layer in net.model.layers:
        attention, mlp, row = layer.self_attn, layer.mlp, []
        layers.append(
            DenseLayer(
                place(layer.input_layernorm.weight),
                place(attention.q_proj.weight),
                place(attention.k_proj.weight),
                place(attention.v_proj.weight),
                place(attention.o_proj.weight),
                place(layer.post_attention_layernorm.weight),
                place(mlp.gate.weight),
            )
        )
        for expert in range(model.n_experts):
            gate, up = mlp.experts.gate_up_proj[expert].detach().chunk(2, 0)
            down = mlp.experts.down_proj[expert].detach()
            matrices = torch.stack((gate, up, down.T)).to(dtype).contiguous()
            row.append(next(buffers).copy_(matrices.view(torch.uint8).view(-1)))
        experts.append(row)
    theta = float(config.rope_parameters["rope_theta"])
    embedding = place(net.model.embed_tokens.weight)
    head = embedding if config.tie_word_embeddings else place(net.lm_head.weight)
    return Weights(
        dtype,
        dtype.itemsize,
        embedding,
        head,
        place(net.model.norm.weight),
        layers,
        experts,
        model.expert_intermediate_size,
        n_all,
        float(config.rms_norm_eps),
        theta,
        precision,
    )
