"""Real runs of what is not a whole expert in the serving precision on one GPU: low precisions, parts, several GPUs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from real_world import ALL, EXPERTS, LAYERS, carried_out, lanes_and_weights, tiny_setup  # noqa: E402

from sim.base.errors import BadInput  # noqa: E402
from sim.policy.pieces import Pieces  # noqa: E402
from sim.profiles.precisions import BITS_PER_PARAM  # noqa: E402
from sim.real.devices.cpu import CpuDevice  # noqa: E402
from sim.real.devices.open import open_lanes  # noqa: E402
from sim.real.machine.partial import Partial  # noqa: E402
from sim.real.machine.store import extent  # noqa: E402
from sim.real.requirements import check  # noqa: E402
from sim.real.run import measure  # noqa: E402
from sim.real.weights.forms import BITS, CASTS, check_form, quantised, unpacked  # noqa: E402
from sim.run import execute  # noqa: E402


@pytest.fixture(scope="module")
def resident(tmp_path_factory):
    return carried_out(tmp_path_factory.mktemp("resident"), "lru", ALL)


# -- low precisions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_are_the_nearest_there_are(bits):
    """Against plain numpy, value by value: no code of the row's grid is nearer than the one that was packed."""
    values = np.random.default_rng(bits).normal(0, 0.02, (5, 16)).astype(np.float32)
    packed, scale = quantised(torch.from_numpy(values), bits)
    assert packed.shape == (5, 16 * bits // 8)
    codes = unpacked(packed, bits).numpy()
    for row in range(5):
        step = float(scale[row, 0])
        grid = [(code - (2**bits - 1) / 2) * step for code in range(2**bits)]
        for column in range(16):
            off = [abs(value - values[row, column]) for value in grid]
            assert off[codes[row, column]] <= min(off) + 1e-7
    restored = (codes - (2**bits - 1) / 2) * scale.numpy()
    error = np.sqrt(np.mean((restored - values) ** 2) / np.mean(values**2))
    assert error < {8: 0.01, 4: 0.12, 2: 0.45}[bits]


def test_bytes_are_packed_lowest_bits_first():
    packed = torch.tensor([[0b11100100, 0b00011011]], dtype=torch.uint8)
    assert unpacked(packed, 2).tolist() == [[0, 1, 2, 3, 3, 2, 1, 0]]
    assert unpacked(packed, 4).tolist() == [[4, 14, 11, 1]]


@pytest.mark.parametrize("precision", [*BITS, "bf16", "fp8"])
def test_a_low_copy_is_as_small_as_it_is_billed(tmp_path, precision):
    setup = tiny_setup(tmp_path, "lru", 8)
    with lanes_and_weights(setup) as (lanes, weights):
        form = weights.form(precision, lanes.device)
        assert form.buffers[3].numel() == setup.model.expert_bytes(precision)
        assert len(form.buffers) == weights.distinct == ALL
        assert weights.form(precision, lanes.device) is form
        whole = form.unpack(form.buffers[3], 3, 0, 3 * weights.rows)
        part = form.unpack(form.buffers[3][10 * form.row_bytes : 12 * form.row_bytes], 3, 10, 12)
        assert torch.equal(whole[10:12], part)
        exact = weights.form("fp32", lanes.device).unpack(weights.experts[0][3], 3, 0, 3 * weights.rows)
        assert 0 < (whole - exact).norm() / exact.norm() < 0.5
    setup.close()


def test_precisions_that_are_not_packed_are_refused(tmp_path):
    for name in set(BITS_PER_PARAM) - set(BITS) - set(CASTS):
        with pytest.raises(BadInput, match=rf"got experts in {name}: real runs pack int8, int4, int2"):
            check_form(name, 64)
    with pytest.raises(BadInput, match="rows fill whole bytes"):
        check_form("int2", 63)


@pytest.mark.parametrize(
    ("policy", "settings", "low"),
    [
        ("floe", {}, "int2"),
        ("floe", {"compressed": "int4", "channels": "token"}, "int4"),
    ],
)
def test_compressed_experts_compute_what_they_hold(tmp_path, resident, policy, settings, low):
    """FloE runs every expert compressed: so does the resident model once its experts hold the unpacked values."""
    done = carried_out(tmp_path, policy, 2, set=settings)
    assert done.machine.output.digest != resident.machine.output.digest
    assert done.result.h2d_bytes % done.setup.model.expert_bytes(low) == 0
    assert done.result.activations_lowered_frac == 1.0
    setup = tiny_setup(tmp_path, "lru", ALL)
    with lanes_and_weights(setup) as (lanes, weights):
        form = weights.form(low, lanes.device)
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                at = weights.index(layer, expert)
                values = form.unpack(form.buffers[at], at, 0, 3 * weights.rows)
                weights.experts[layer][expert].view(weights.dtype)[:] = values.view(-1)
        same = measure(setup, lanes, weights)
    setup.close()
    assert same.machine.output.digest == done.machine.output.digest


def test_hobbit_computes_in_both_precisions(tmp_path, resident):
    """Without prefetches, whose arrival is a matter of time, both worlds copy alike."""
    alone = {"lookahead": 0}
    done = carried_out(tmp_path, "hobbit", 6, set=alone)
    assert done.machine.output.digest != resident.machine.output.digest
    low, high = (done.setup.model.expert_bytes(name) for name in ("int4", "fp32"))
    sizes = {piece.n_bytes for piece in done.machine.store.blocks}
    assert sizes == {low, high}, "both caches hold something at the end"
    setup = tiny_setup(tmp_path, "hobbit", 6, set=alone)
    sim = execute(setup).result
    setup.close()
    assert sim.h2d_bytes == done.result.h2d_bytes


# -- parts ---------------------------------------------------------------------------------------------------------


def pieces():
    return Pieces(1, 2, "fp32", 1, lambda _: 3 * 8 * 4 * 4)


def test_what_a_piece_holds():
    made = pieces()
    assert extent(made.part(0, 0, 0.25, 0.75), 8) == (2, 6, False)
    third = made.part(0, 0, 1 / 3, 2 / 3, matrices=True)
    assert extent(third, 8) == (8, 16, True)
    assert extent(third, 8).n_rows == 8
    assert extent(made.whole[0][0], 8).n_rows == 24


class Reads:
    """Stands for the decoder: an expert of 8 columns over rows of 4."""

    def __init__(self):
        self.torch = torch
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        self.matrices = torch.randn(3, 8, 4, generator=generator, dtype=torch.float64)

    def ffn(self, x, matrices):
        inner = torch.nn.functional.silu(x @ matrices[0].T) * (x @ matrices[1].T)
        return inner @ matrices[2]

    def total(self, bounds, matrices):
        partial, results = Partial(0, 0, 8, (None, None)), []
        for start, stop in bounds:
            part = extent(pieces().part(0, 0, start, stop, matrices=matrices), 8)
            flat = (
                self.matrices.view(24, 4)[part.start : part.stop]
                if part.by_matrix
                else (self.matrices[:, part.start : part.stop].reshape(-1, 4))
            )
            new, call = partial.add(part, lambda flat=flat: flat, self, lambda _: self.x)
            call()
            results += new
        return sum(result.out for result in results)


@pytest.mark.parametrize(
    ("bounds", "matrices"),
    [
        ([(0, 0.25), (0.25, 1)], False),
        ([(0, 0.5), (0.25, 0.75), (0.5, 1)], False),
        ([(0, 1 / 3), (1 / 3, 2 / 3), (2 / 3, 1)], True),
        ([(i / 6, (i + 1) / 6) for i in range(6)], True),
        ([(i / 8, (i + 1) / 8) for i in range(8)], True),
        ([(0, 0.5), (0.5, 1)], True),
        ([(0, 0.5), (1 / 3, 1)], True),
    ],
)
def test_parts_add_up_to_the_expert(bounds, matrices):
    reads = Reads()
    torch.testing.assert_close(reads.total(bounds, matrices), reads.ffn(reads.x, reads.matrices))


def test_columns_and_matrices_of_one_expert_do_not_mix():
    partial = Partial(0, 0, 8, (None, None))
    partial.add(extent(pieces().part(0, 0, 0, 0.5), 8), None, None, None)
    with pytest.raises(BadInput, match="in columns and in matrices: a real run computes one kind"):
        partial.add(extent(pieces().part(0, 0, 0.5, 1, matrices=True), 8), None, None, None)


@pytest.mark.parametrize(("policy", "settings"), [("deepspeed", {}), ("promoe", {}), ("promoe", {"chunks": 5})])
def test_matrices_are_copied_and_computed_one_by_one(tmp_path, resident, policy, settings):
    done = carried_out(tmp_path, policy, ALL if policy == "deepspeed" else 8, set=settings)
    ops = done.result.measured.operations
    assert ops["gpu: expert"].n > resident.result.measured.operations["gpu: expert"].n
    for mine, theirs in zip(done.machine.output.hidden, resident.machine.output.hidden, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    if not settings:  # whole matrices: the very same products
        assert done.machine.output.digest == resident.machine.output.digest


# -- several GPUs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "lfu", "fiddler", "mixtral_offloading"])
def test_two_gpus_compute_what_one_computes_and_decide_as_simulated(tmp_path, resident, policy):
    logs, settings = {"real": [], "sim": []}, {"guesses": 0, "buffer_size": 2} if policy == "mixtral_offloading" else {}
    room = 12
    real = carried_out(tmp_path, policy, room, gpus=2, set=settings, log=lambda *entry: logs["real"].append(entry))
    for mine, theirs in zip(real.machine.output.hidden, resident.machine.output.hidden, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    if policy != "fiddler":
        assert real.machine.output.digest == resident.machine.output.digest
    setup = tiny_setup(tmp_path, policy, room, gpus=2, set=settings)
    sim = execute(setup, spans=lambda *_: None, log=lambda *entry: logs["sim"].append(entry)).result
    setup.close()
    assert logs["real"] == logs["sim"]
    for key in ("h2d_bytes", "d2h_bytes", "cache_peak_bytes", "miss_rate"):
        assert getattr(real.result, key) == getattr(sim, key), key
    assert set(real.result.lane_utilisation) >= {"gpu0", "gpu1", "h2d0", "h2d1"}
    homes = {piece.gpu for piece in real.machine.store.blocks}
    assert homes == {0, 1}
    first, second = (arena._buffer.data_ptr() for arena in real.machine.store.arenas)
    assert first != second


def test_several_cuda_gpus_are_refused():
    with pytest.raises(BadInput, match=r"got --gpus 2 on cuda:0: real runs use one CUDA GPU.*--real=cpu"):
        open_lanes("cuda:0", 2)
    lanes = open_lanes("cpu", 2)
    assert isinstance(lanes.device, CpuDevice)
    lanes.close()


# -- latent attention ----------------------------------------------------------------------------------------------


def expanded(weights, model, ids, number):
    """Layer `number`'s latent attention as it is defined: keys and values of every head written out."""
    mla, layer = model.mla, weights.layers[number]
    dtype = torch.float64

    def norm(x, scale):
        return x * (x.pow(2).mean(-1, keepdim=True) + weights.norm_eps).rsqrt() * scale.to(dtype)

    def turn(x, at):
        half = mla.qk_rope_head_dim // 2
        angle = at / weights.rope_theta ** (torch.arange(0, 2 * half, 2, dtype=dtype) / (2 * half))
        a, b = x[:half], x[half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()))

    x = weights.embedding[ids].to(dtype)
    y, w = norm(x, layer.norm1), layer.latent
    query = norm(y @ w.q_down.T.to(dtype), w.q_norm) @ w.q.T.to(dtype) if w.q_down is not None else y @ w.q.T.to(dtype)
    down = y @ w.kv_down.T.to(dtype)
    latents, ropes = norm(down[:, : mla.kv_lora_rank], w.kv_norm), down[:, mla.kv_lora_rank :]
    out = []
    for t in range(len(x)):
        heads = []
        for head in range(model.n_heads):
            q = query[t].view(model.n_heads, -1)[head]
            q = torch.cat((q[: mla.qk_nope_head_dim], turn(q[mla.qk_nope_head_dim :], t)))
            scores, values = [], []
            for s in range(t + 1):
                key = torch.cat((w.key_up[head].to(dtype) @ latents[s], turn(ropes[s], s)))
                scores.append(q @ key / len(q) ** 0.5)
                values.append(w.value_up[head].to(dtype) @ latents[s])
            heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
        out.append(torch.cat(heads))
    return x + torch.stack(out) @ layer.o.T.to(dtype)


@pytest.mark.parametrize("rank", [None, 12])
def test_latent_attention_is_what_it_is_defined_as(tmp_path, rank):
    from sim.real.machine.decoder import Decoder, Span

    setup = tiny_setup(tmp_path, "lru", ALL, latent=rank or -1)
    with lanes_and_weights(setup) as (_, weights):
        decoder = Decoder(setup.model, weights, torch, "cpu", 16)
        cache = decoder.cache(8)
        assert cache[0].numel() * 4 == 8 * setup.model.kv_bytes_per_token("fp32")
        ids, rows = torch.tensor([3, 1, 4, 1, 5, 9]), []
        for start, stop in ((0, 4), (4, 5), (5, 6)):  # a prompt, then token by token
            decoder.spans = [Span(0, stop - start, start, *cache)]
            decoder.embed(ids[start:stop])
            decoder.attention(1)
            rows.append(decoder.hidden)
        wanted = expanded(weights, setup.model, ids, 1)
        torch.testing.assert_close(torch.cat(rows).double(), wanted, rtol=1e-4, atol=1e-6)
    setup.close()


@pytest.mark.parametrize("rank", [-1, 12])
def test_a_model_with_latent_attention_is_carried_out(tmp_path, rank):
    one = carried_out(tmp_path, "lru", ALL, latent=rank, shared=True, dense=True)
    two = carried_out(tmp_path, "lru", 5, latent=rank, shared=True, dense=True)
    assert one.machine.output.digest == two.machine.output.digest
    together = carried_out(tmp_path, "lru", 6, latent=rank, shared=True, dense=True, batch=2)
    last = [hidden[-1] for hidden in one.machine.output.hidden]
    both = together.machine.output.hidden[-1]
    torch.testing.assert_close(both, torch.stack([last[5], last[11]]), rtol=1e-4, atol=1e-5)


def test_geometries_that_are_not_carried_out_are_refused_in_one_line(tmp_path):
    import msgspec

    setup = tiny_setup(tmp_path, "lru", 8)
    for change, said in (
        ({"matrices_per_expert": 2}, "experts of 2 matrices"),
        ({"encoder": {"n_layers": 2}}, "an encoder is not carried out"),
    ):
        plain = {**msgspec.to_builtins(setup.model), **change}
        setup = replace(setup, model=msgspec.convert(plain, type(setup.model)))
        with pytest.raises(BadInput, match=said):
            check(setup)
    setup.close()
