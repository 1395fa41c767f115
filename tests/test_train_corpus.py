"""Readers of documentation formats, token files, n-gram baselines against hand-made counts, and bundles."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch (pip install 'moe-offload-sim[torch]')")
pytest.importorskip("tokenizers", reason="needs tokenizers (comes with transformers)")

from sim.base.errors import BadInput
from tools.train import tokens
from tools.train.corpus import fingerprint, is_held_out, load_manifest
from tools.train.evaluate import NGram


def test_every_source_states_its_licence_and_a_known_format():
    manifest = load_manifest()
    assert {s.task for s in manifest.sources} == {"manual", "code", "dictionary", "prose", "german", "french"}
    assert all(s.licence and s.include for s in manifest.sources)


def test_split_is_blind_to_white_space_and_about_as_large_as_asked():
    assert fingerprint("a  b\n") == fingerprint("a b")
    share = sum(is_held_out(fingerprint(str(i))) for i in range(20_000)) / 20_000
    assert share == pytest.approx(0.025, abs=0.005)


def test_tokenizer_encodes_any_text_and_files_come_back(tmp_path):
    tokenizer = tokens.train_tokenizer(iter(["the cat sat on the mat " * 50]), vocab=300)
    text = "the cät\x00 sat 漢"
    ids = tokens.encode(tokenizer, [text, "the"], 10_000)
    assert ids[-1] == tokens.END_OF_TEXT_ID
    first, second = tokens.split_documents(ids)
    assert (tokenizer.decode(first.tolist()), tokenizer.decode(second.tolist())) == (text, "the")
    tokens.save_tokens(tmp_path / "x.train.u16.xz", ids)
    np.testing.assert_array_equal(tokens.load_split(tmp_path, "train")["x"], ids)
    with pytest.raises(BadInput, match="heldout"):
        tokens.load_split(tmp_path, "heldout")


def test_ngram_counts_by_hand():
    """Stream 0 1 0 1 0 2: after 0 come 1, 1, 2; after (0,1) comes 0, twice."""
    stream = np.array([0, 1, 0, 1, 0, 2], np.uint16)
    model = NGram(3, 4, [stream], [stream])
    model.weights[:] = [0.2, 0.3, 0.5]
    # positions 2..5; unigram (count + 1) / (6 + 4): 0 -> 0.4, 1 -> 0.3, 2 -> 0.2
    expected = [
        0.2 * 0.4 + 0.3 * 1 + 0.5 * 1,  # 0 after 0 1
        0.2 * 0.3 + 0.3 * 2 / 3 + 0.5 * 1 / 2,  # 1 after 1 0: followed by 1 and by 2
        0.2 * 0.4 + 0.3 * 1 + 0.5 * 1,
        0.2 * 0.2 + 0.3 * 1 / 3 + 0.5 * 1 / 2,
    ]
    np.testing.assert_allclose(np.exp(model.log_probabilities(stream)), expected)
    bigram = NGram(2, 4, [stream], [stream])
    bigram.weights[:] = [0.0, 1.0]
    assert math.exp(bigram.log_probabilities(np.array([0, 2], np.uint16))[0]) == pytest.approx(1 / 3)


def test_ngram_is_a_distribution_and_fitting_helps():
    rng = np.random.default_rng(0)
    chain = np.cumsum(rng.integers(0, 2, 4000)) % 8  # next = same or plus one
    stream = chain.astype(np.uint16)
    model = NGram(3, 8, [stream[:3000]], [stream[3000:3500]])
    total = sum(math.exp(model.log_probabilities(np.array([3, 4, w], np.uint16))[0]) for w in range(8))
    assert total == pytest.approx(1.0)
    loss = -model.log_probabilities(stream[3500:]).mean()
    assert math.log(2) - 0.02 < loss < math.log(2) + 0.05
