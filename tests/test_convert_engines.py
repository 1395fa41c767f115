"""Converters of what engines write: vLLM, SGLang and Hugging Face, and the recipes of docs/convert.md."""

import json
from dataclasses import replace

import numpy as np
import pytest
from convert_samples import EXPERTS, HF, SAMPLES, SHAPE, converted, jsonl, logits, put, refused, vllm

from sim.base.errors import BadInput
from traces.convert import Options, convert
from traces.format.check import check_trace


class TestVllm:
    def records(self, tmp_path):
        return [json.loads(line) for line in vllm(tmp_path).read_text().splitlines()]

    def test_profiling_rows_are_dropped_and_said(self, tmp_path):
        done = convert([vllm(tmp_path)], tmp_path / "out.safetensors")
        assert done.notes == ("65 rows of the engine's profiling passes were dropped.",)

    def test_each_prompt_begins_a_request(self, tmp_path):
        lines = self.records(tmp_path)
        path = put(tmp_path / "two.jsonl", jsonl(*lines, *lines[-8:]))  # prompt of two, two decode steps, again
        with converted(tmp_path, path, Options()) as trace:
            assert [(r.prompt_len, r.n_rows) for r in trace.requests] == [(2, 4), (2, 4)]
            assert trace.iterations.tolist() == [2, 2, 3, 4, 5, 5, 6, 7]

    def test_names_tell_requests_apart_in_a_batch(self, tmp_path):
        rows = []
        for forward, names in enumerate((["a", "a", "b"], ["a", "b"], ["a", "b"])):
            for layer in (0, 1):
                rows += [
                    {
                        "type": "route",
                        "req_id": name,
                        "token_idx": i,
                        "layer": layer,
                        "topk_ids": [(forward + i + layer) % 4],
                    }
                    for i, name in enumerate(names)
                ]
        path = put(tmp_path / "named.jsonl", jsonl(*rows))
        with converted(tmp_path, path) as trace:
            assert [(r.prompt_len, r.n_rows) for r in trace.requests] == [(2, 4), (1, 3)]
            assert trace.experts[:, 0, 0].tolist() == [0, 1, 1, 2, 2, 2, 3]

    def test_unnamed_batches_are_refused_or_one_stream(self, tmp_path):
        rows = [
            {"type": "route", "req_id": "r0", "token_idx": i, "layer": 0, "topk_ids": [(f + i) % 4]}
            for f in range(4)
            for i in range(3)
        ]
        path = put(tmp_path / "batch.jsonl", jsonl(*rows))
        message = refused(tmp_path, path)
        assert "batch.jsonl:7: req_id" in message
        assert "--one-stream" in message
        with converted(tmp_path, path, replace(SHAPE, one_stream=True)) as trace:
            assert trace.header.labels == ("unsegmented",)
            assert (trace.n_tokens, trace.requests.n_decode_rows) == (12, 0)

    def test_layers_in_files_of_their_own_are_one_run(self, tmp_path):
        """Split by layer, a log converts to the same trace as whole."""
        lines = self.records(tmp_path)
        with converted(tmp_path, put(tmp_path / "whole.jsonl", jsonl(*lines)), Options()) as trace:
            whole = (trace.experts.tolist(), trace.weights(0, trace.n_tokens).tolist(), list(trace.requests))
        files = [
            put(
                tmp_path / f"layer{layer}.jsonl",
                jsonl(*(line for line in lines if line["type"] == "meta" or line["layer"] == layer)),
            )
            for layer in sorted({line["layer"] for line in lines if line["type"] == "route"})
        ]
        assert len(files) > 1
        with converted(tmp_path, files, Options()) as trace:
            assert (trace.experts.tolist(), trace.weights(0, trace.n_tokens).tolist(), list(trace.requests)) == whole
        longer = put(tmp_path / "longer.jsonl", files[1].read_bytes() + jsonl(lines[-1]))
        with pytest.raises(BadInput, match=r"one token more than in .*layer0\.jsonl"):
            convert([files[0], longer], tmp_path / "x.safetensors")

    def test_one_counter_over_one_layer_shows_no_forwards(self, tmp_path):
        ids = [[3, 2]] * 100 + [[0, 1], [1, 2], [2, 3]]
        rows = [
            {"type": "route", "req_id": "r0", "token_idx": i, "layer": 0, "topk_ids": own} for i, own in enumerate(ids)
        ]
        path = put(tmp_path / "counter.jsonl", jsonl(*rows))
        assert "forward passes cannot be told apart" in refused(tmp_path, path)
        with converted(tmp_path, path, replace(SHAPE, one_stream=True)) as trace:
            assert trace.experts[:, 0].tolist() == [[0, 1], [1, 2], [2, 3]]

    def test_nothing_but_profiling(self, tmp_path):
        lines = self.records(tmp_path)[: 1 + 128 + 2]
        assert "no routing left" in refused(tmp_path, put(tmp_path / "t.jsonl", jsonl(*lines)), Options())


class TestSglang:
    def record(self, own, mode, lengths=None):
        ids = [[[position % 4] for position in own]]
        return {
            "forward_mode": mode,
            "input_ids": own,
            "positions": own,
            "extend_seq_lens": lengths,
            "topk_ids_of_layer": ids,
        }

    def test_batched_decode_follows_positions(self, tmp_path):
        lines = [self.record([0, 1, 2], 1, [3]), self.record([0], 1, [1]), self.record([3, 1], 2), self.record([2], 2)]
        with converted(tmp_path, put(tmp_path / "t.jsonl", jsonl(*lines))) as trace:
            assert [(r.prompt_len, r.n_rows) for r in trace.requests] == [(3, 4), (1, 3)]
            assert trace.token_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
            assert trace.iterations.tolist() == [0, 0, 0, 2, 1, 2, 3]

    def test_chunked_prefill_goes_on(self, tmp_path):
        lines = [self.record([0, 1], 1, [2]), self.record([2, 3], 1, [2]), self.record([4], 2)]
        with converted(tmp_path, put(tmp_path / "t.jsonl", jsonl(*lines))) as trace:
            assert [(r.prompt_len, r.n_rows) for r in trace.requests] == [(4, 5)]

    @pytest.mark.parametrize(
        ("lines", "said"),
        [
            ([([0, 1, 0, 1], 1, [2, 2]), ([2], 2)], "different requests of one length"),
            ([([5, 6], 1, [2])], "--disable-radix-cache"),
            ([([4], 2)], "continues no running request"),
            ([([0, 1], 3)], "forward_mode, got 3"),
            ([([0, 2], 1, [2])], "gaps within a sequence"),
            ([([0, 1], 1, [3])], "sum of 3"),
        ],
    )
    def test_refused(self, tmp_path, lines, said):
        path = put(tmp_path / "t.jsonl", jsonl(*(self.record(*line) for line in lines)))
        assert said in refused(tmp_path, path)

    def test_counts_only(self, tmp_path):
        path = put(tmp_path / "t.jsonl", jsonl({"rank": 0, "logical_count": [[1, 2]]}))
        assert "per_token" in refused(tmp_path, path)

    def test_physical_experts_become_logical(self, tmp_path):
        lines = [{"last_physical_to_logical_map": [[2, 0, 1, 2]]}, self.record([0, 1, 2, 3], 1, [4])]
        with converted(tmp_path, put(tmp_path / "t.jsonl", jsonl(*lines)), Options(model="m")) as trace:
            assert trace.experts[:, 0, 0].tolist() == [2, 0, 1, 2]
            assert trace.n_experts == 3


class TestHf:
    def test_scores_are_the_softmax_in_fixed_point(self, tmp_path):
        with converted(tmp_path, SAMPLES["hf_npz"][0](tmp_path), HF) as trace:
            e = np.exp([2.0, 1.0, -2.0, -2.0])
            expected = e / e.sum()
            assert trace.scores(0, 1)[0, 0, [3, 1, 0, 2]].tolist() == [round(p * 4095) for p in expected]
            assert trace.header.weights_kind == "raw"
            assert trace.weights(0, 1)[0, 0].tolist() == pytest.approx(
                (expected[:2] / expected[:2].sum()).tolist(), abs=1e-3
            )

    def test_sigmoid(self, tmp_path):
        with converted(
            tmp_path, SAMPLES["hf_npz"][0](tmp_path), replace(HF, gate="sigmoid", renormalised=False)
        ) as trace:
            assert check_trace(trace) == []
            assert trace.stored("weights")[0, 0].tolist() == pytest.approx(
                [1 / (1 + np.exp(-2)), 1 / (1 + np.exp(-1))], abs=1e-3
            )

    def test_batches_lose_their_padding(self, tmp_path):
        path = tmp_path / "b.npz"
        mask = np.array([[0, 1], [1, 1]])
        np.savez(path, **{f"router_logits_{i}": logits()[:, i].reshape(2, 2, 4) for i in range(2)}, attention_mask=mask)
        with converted(tmp_path, path, HF) as trace:
            assert [r.n_rows for r in trace.requests] == [1, 2]
            assert trace.experts.tolist() == EXPERTS[1:]

    def test_bfloat16(self, tmp_path):
        torch = pytest.importorskip("torch")
        from safetensors.torch import save_file

        path = tmp_path / "b.safetensors"
        save_file({"router_logits": torch.from_numpy(logits()).to(torch.bfloat16)}, path)
        with converted(tmp_path, path, HF) as trace:
            assert trace.experts.tolist() == EXPERTS

    def test_pickles_are_never_opened(self, tmp_path):
        torch = pytest.importorskip("torch")
        for legacy in (False, True):
            path = tmp_path / "dump.pt"
            torch.save({"router_logits": torch.zeros(3)}, path, _use_new_zipfile_serialization=not legacy)
            message = refused(tmp_path, path, HF)
            assert "a pickle" in message
            assert "docs/convert.md" in message

    @pytest.mark.parametrize(
        ("arrays", "said"),
        [
            ({"x": np.zeros(3)}, "one array router_logits"),
            ({"experts": np.zeros((3, 4, 2), int)}, "ids of experts go into JSONL or CSV"),
            ({"router_logits": np.zeros((3, 4, 2), int)}, "got whole numbers: logits are none"),
            ({"router_logits": np.zeros((3, 4))}, "[T, L, E]"),
            (
                {"router_logits": np.zeros((2, 3, 4)), "input_ids": np.zeros((1, 3), int)},
                "stack the layers on dimension 1",
            ),
            ({"router_logits": np.full((1, 1, 4), np.nan)}, "row 0: router_logits, got NaN"),
            ({"router_logits": np.zeros((2, 1, 4)), "prompt_len": np.array([3])}, "prompt_len, got 3"),
            ({"router_logits": np.array([["a"]])}, "got type <U1"),
            ({"router_logits": np.asfortranarray(np.ones((2, 3, 4)))}, "Fortran"),
        ],
    )
    def test_refused(self, tmp_path, arrays, said):
        path = tmp_path / "x.npz"
        np.savez(path, **arrays)
        assert said in refused(tmp_path, path, HF, source="hf")
