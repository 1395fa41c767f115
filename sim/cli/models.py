"""`moesim models`: the catalogue, or one model in bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from sim.base.errors import BadInput
from sim.base.tables import fold, render, table
from sim.base.units import show_bytes, show_frac
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions
from sim.profiles import find as profiles
from sim.profiles.models import PACKAGE, Model, load_model, model_names
from sim.profiles.overrides import grouped, parse_set
from sim.profiles.precisions import BITS_PER_PARAM, BLOCKS, MIXES, PLAIN

if TYPE_CHECKING:
    from sim.base.tables import Table


@click.command(cls=UniqueOptions)
@click.argument("name", required=False, metavar="[NAME|FILE]")
@click.option("--set", "settings", multiple=True, metavar="model.KEY=VALUE", help="Change a field, e.g. model.top_k=4.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (a list without NAME).")
@click.option(
    "--yaml", "as_yaml", is_flag=True, help="Print NAME's file without aliases and note: a start for your own."
)
def command(name: str | None, settings: tuple[str, ...], as_json: bool, as_yaml: bool) -> None:
    """List MoE models, or show one: an id, an alias, a model file, or a Hugging Face config.json."""
    changes = grouped(parse_set(settings))
    if changes.hw or changes.engine or changes.policy or changes.policies:
        raise BadInput("--set, got a key of something else: only model.* belongs here; write e.g. --set model.top_k=4")
    if as_yaml:
        click.echo(profiles.as_a_start(PACKAGE, "model", name, alone=not (settings or as_json)), nl=False)
        return
    if name is None:
        if settings:
            raise BadInput("--set, got it without a model: name one, e.g. moesim models mixtral --set model.top_k=4")
        models = [load_model(key) for key in model_names()]
        text = json.dumps([_summary(model) for model in models], indent=2) if as_json else fold(_list(models))
        click.echo(text, nl=as_json)
        return
    model = load_model(name, changes.model)
    if as_json:
        click.echo(json.dumps(_details(model), indent=2))
    else:
        say(_page(model), nl=False)


FACTS = ("id", "name", "aliases", "n_moe_layers", "n_experts", "top_k", "native_precision")
SIZES = ("total_params", "active_params", "expert_bytes", "routed_bytes", "dense_bytes", "all_miss_bytes_per_token")


def _summary(model: Model) -> dict[str, Any]:
    return {name: getattr(model, name) for name in FACTS} | {
        name: getattr(model, name)() for name in (*SIZES, "kv_bytes_per_token")
    }


def _details(model: Model) -> dict[str, Any]:
    import msgspec

    return {
        "schema": 1,
        **msgspec.to_builtins(model),
        "n_moe_layers": model.n_moe_layers,
        "moe_layer_ids": list(model.moe_layer_ids),
        "params": {
            "total": model.total_params(),
            "active": model.active_params(),
            "active_without_input_embedding": model.active_params("head"),
            "active_without_embeddings": model.active_params("none"),
            "expert": model.expert_params(),
            "routed": model.routed_params(),
            "dense": model.dense_params(),
            "total_error_frac": _error(model.total_params(), model.published.total_params),
        },
        "bytes": {
            precision: {
                "expert": model.expert_bytes(precision),
                "routed": model.routed_bytes(precision),
                "dense": model.dense_bytes(precision),
                "all_miss_per_token": model.all_miss_bytes_per_token(precision),
                **({"expert_by_layer": model.expert_bytes_by_layer(precision)} if precision in MIXES else {}),
            }
            for precision in _precisions(model)
        },
        "kv_bytes_per_token": model.kv_bytes_per_token(),
    }


def _list(models: list[Model]) -> str:
    rows = table("id", "layers x experts, k", "shared", "expert", "all experts", "rest", "all-miss/token", "KV/token")
    for model in models:
        sizes = (model.expert_bytes(), model.routed_bytes(), model.dense_bytes(), model.all_miss_bytes_per_token())
        shape = f"{model.n_moe_layers} x {model.n_experts}, {model.top_k}"
        cells = map(show_bytes, (*sizes, model.kv_bytes_per_token()))
        rows.add_row(model.id, shape, str(model.n_shared_experts or "-"), *cells)
    return render(rows) + f"{len(models)} models, bytes in bf16. `moesim models NAME` shows precisions and sources.\n"


def _page(model: Model) -> str:
    head = (
        f"{model.name} ({model.id}): {_params(model.total_params())} parameters, "
        f"{show_bytes(model.expert_bytes())} per expert, {show_bytes(model.all_miss_bytes_per_token())} per token "
        "if every expert misses (bf16)\n"
    )
    facts = table("geometry", "", numbers=False)
    for label, value in _geometry(model):
        facts.add_row(label, value)
    known = _precisions(model)
    sizes = [
        _sizes(model, "bytes", [name for name in known if name in PLAIN]),
        _sizes(model, "GGUF block types", [name for name in known if name in BLOCKS and name not in PLAIN]),
        _sizes(model, "GGUF files", [name for name in known if name not in BLOCKS and name not in PLAIN]),
    ]
    dense = model.dense_layers or (model.encoder is not None and model.encoder.dense_layers)
    of_layer = {
        "attention": model.attention_bytes(),
        "gate": model.gate_bytes(),
        "shared experts": model.shared_expert_bytes() if model.n_shared_experts else None,
        "dense FFN": model.dense_ffn_bytes() if dense else None,
        "KV cache per token": model.kv_bytes_per_token_per_layer(),
        "KV cache per token, all layers": model.kv_bytes_per_token(),
        "input embedding": model.embedding_bytes(),
        "output head": model.head_bytes(),
    }
    parts = table("one layer, bf16", "bytes")
    for label, n_bytes in of_layer.items():
        if n_bytes is not None:
            parts.add_row(label, show_bytes(n_bytes))
    checks, published = table("parameters", "computed", "published", "difference"), model.published
    counts = published.active_counts
    active = f"active ({_COUNTS[counts]})", model.active_params(counts), published.active_params
    for label, ours, theirs in (("total", model.total_params(), published.total_params), active):
        gap = _error(ours, theirs)
        said = ("-", "-") if theirs is None or gap is None else (f"{theirs / 1e9:g}B", f"{100 * gap:+.2f} %")
        checks.add_row(label, f"{ours:,}", *said)
    notes = [("source", model.source), ("published", published.source), ("", published.note), ("note", model.note)]
    tables = [facts, *(part for part in sizes if part.rows), parts, checks]
    if published.files:
        tables.append(_files(model))
    told = "".join(f"{label or 'why'}: {note}\n" for label, note in notes if note)
    return head + "\n".join(render(part) for part in tables) + told


def _precisions(model: Model) -> list[str]:
    """Those the model can be asked for in: llama.cpp has no files of encoder-decoder models, others are of some."""
    mixes = list(MIXES) if model.encoder is None else []
    listed = [stored.precision for stored in model.formats]
    return [name for name in BITS_PER_PARAM if name in {*PLAIN, *BLOCKS, *mixes, *listed}]


def _sizes(model: Model, title: str, precisions: list[str]) -> Table:
    """Bytes in each precision; bits of one weight of an expert as they come out for this model."""
    mixed = any(name in MIXES for name in precisions)
    titles = ["bits/param", "expert", *(["by layer"] if mixed else []), "all routed", "everything else", "total"]
    sizes = table(title, *titles, "all-miss per token")
    for precision in precisions:
        routed, dense = model.routed_bytes(precision), model.dense_bytes(precision)
        bits = BITS_PER_PARAM[precision] if precision in PLAIN else 8 * routed / model.routed_params()
        name = precision + (" (released)" if precision == model.native_precision else "")
        per_param = f"{bits:g}" if precision in PLAIN or precision in BLOCKS else f"{bits:.4g}"
        by_layer = [_by_layer(model, precision)] if mixed else []
        cells = map(show_bytes, (routed, dense, routed + dense, model.all_miss_bytes_per_token(precision)))
        sizes.add_row(name, per_param, show_bytes(model.expert_bytes(precision)), *by_layer, *cells)
    return sizes


def _by_layer(model: Model, precision: str) -> str:
    """The smallest and the largest expert, where layers differ."""
    sizes = model.expert_bytes_by_layer(precision)
    return "-" if min(sizes) == max(sizes) else f"{show_bytes(min(sizes))} .. {show_bytes(max(sizes))}"


def _files(model: Model) -> Table:
    """Released files beside what the precision gives, tables in host memory included."""
    files = table("released files", "computed", "published", "difference", "source", numbers=False)
    for file in model.published.files:
        ours = sum(part(file.precision) for part in (model.routed_bytes, model.dense_bytes, model.host_bytes))
        gap = f"{100 * (ours / file.bytes - 1):+.2f} %"
        files.add_row(file.precision, show_bytes(ours), show_bytes(round(file.bytes)), gap, file.source)
    return files


_COUNTS = {"all": "all", "head": "without input embedding", "none": "without embeddings"}


def _params(n: int) -> str:
    """`46.70B`; small models in millions, where they would round to nothing."""
    return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"


def _geometry(model: Model) -> list[tuple[str, str]]:
    inactive = 1 - model.active_params() / model.total_params()
    heads = f"{model.n_heads} heads, {model.n_kv_heads} KV heads of {model.head_dim}"
    if model.mla:
        heads = f"{model.n_heads} heads, latent of {model.mla.kv_lora_rank} + {model.mla.qk_rope_head_dim} per token"
    if model.other_attention:
        kinds = " and ".join(str(len(other.layers)) for other in model.other_attention)
        heads += f"; shapes of their own in {kinds} of {model.n_layers} layers"
    if model.window:
        heads += f"; {len(model.window.layers)} of {model.n_layers} layers see the last {model.window.tokens} tokens"
    rows = [
        ("layers", f"{model.n_layers}, {model.n_moe_layers} with experts"),
        ("experts", f"{model.n_experts} per layer, top {model.top_k}"),
        ("expert FFN", f"{model.matrices_per_expert} matrices, {model.hidden_size} x {model.expert_intermediate_size}"),
        ("shared experts", f"{model.n_shared_experts}, width {model.shared_intermediate_size} in all"),
        ("attention", heads),
        ("vocabulary", f"{model.vocab_size}{', tied' if model.tied_embeddings else ''}"),
        ("gate", model.gate.order or model.gate.score),
        ("weights sum to 1", "yes" if model.gate.renormalised else "no"),
        ("inactive per token", show_frac(inactive)),
    ]
    if model.encoder:
        rows.insert(1, ("encoder", f"{model.encoder.n_layers} layers, {model.n_encoder_moe_layers} with experts"))
    return [row for row in rows if row[0] != "shared experts" or model.n_shared_experts]


def _error(ours: float, theirs: float | None) -> float | None:
    return None if theirs is None else ours / theirs - 1
