"""Which requests are recorded: prompt files, drawn lengths, splits. Needs no torch."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sim.base.errors import BadInput
from traces.record.prompts import Lengths, Prompt, random_prompts, read_prompts, splits, with_output_lengths


def encode(text):
    return [len(word) for word in text.split()]


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_text_is_a_prompt_per_line(tmp_path):
    path = written(tmp_path, "p.txt", "one two three\n\n  \nfour\u2028five\r\n")
    assert read_prompts(path, encode, 7) == [Prompt((3, 3, 5), 7), Prompt((4, 4), 7)]
    assert read_prompts(path, encode, 7, max_prompt=1) == [Prompt((3,), 7), Prompt((4,), 7)]


def test_json_lines_carry_labels_and_lengths(tmp_path):
    lines = [
        {"prompt": "one two", "task": "chat", "split": "store", "id": 5},
        {"text": "three", "task": "code", "max_new_tokens": 3},
        {"token_ids": [4, 0], "task": "chat"},
    ]
    path = written(tmp_path, "p.jsonl", "\n".join(map(json.dumps, lines)))
    assert read_prompts(path, encode, 9) == [
        Prompt((3, 3), 9, "chat", "store"),
        Prompt((5,), 3, "code"),
        Prompt((4, 0), 9, "chat"),
    ]


def test_token_ids_need_no_tokenizer(tmp_path):
    path = written(tmp_path, "p.jsonl", '{"token_ids": [1, 2]}')
    assert read_prompts(path, None, 1) == [Prompt((1, 2), 1)]


def test_a_line_may_say_when_it_arrives_and_how_much_it_is_answered(tmp_path):
    lines = '{"token_ids": [1], "output_tokens": 3, "arrival_s": 0}\n{"token_ids": [2], "arrival_s": 1.5}'
    first, second = read_prompts(written(tmp_path, "p.jsonl", lines), None, 7)
    assert first == Prompt((1,), 3, fixed_length=True, arrival_s=0.0)
    assert second == Prompt((2,), 7, arrival_s=1.5)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"prompt": "a", "output_tokens": true}', r"output_tokens, got True: a whole number"),
        ("p.jsonl", '{"prompt": "a", "arrival_s": -1}', r"line 1: arrival_s, got -1: seconds from 0"),
        ("p.jsonl", '{"prompt": "a", "arrival_s": 2}\n{"prompt": "b", "arrival_s": 1}', r"line 2: arrival_s, got 1"),
        ("p.jsonl", '{"prompt": "a", "arrival_s": 2}\n{"prompt": "b"}', r"some prompts have arrival_s and some"),
        ("p.txt", "\n \n", r"p.txt: no prompt in it: one per line"),
        ("p.jsonl", "", r"p.jsonl: no prompt in it"),
        ("p.jsonl", "[1]", r"p.jsonl line 1, got '\[1\]': not a JSON object"),
        ("p.jsonl", "{", r"line 1, got '{': not a JSON object"),
        ("p.jsonl", "\n" + "[" * 100_000, r"line 2, got '\[+': not a JSON object"),
        ("p.jsonl", '{"task": "x"}', r"line 1: prompt, got None: text"),
        ("p.jsonl", '{"prompt": ""}', r"line 1, got no token"),
        ("p.jsonl", '{"token_ids": [1, -2]}', r"line 1: token_ids, got something else"),
        ("p.jsonl", '{"token_ids": [1, true]}', r"line 1: token_ids, got something else"),
        ("p.jsonl", '{"prompt": "a", "max_new_tokens": 0}', r"max_new_tokens, got 0: a whole number of at least 1"),
        ("p.jsonl", '{"prompt": "a", "split": "train"}', r"got task '', split 'train': a task is text"),
        ("p.jsonl", '{"prompt": "a", "task": "x"}\n{"prompt": "b"}', r"some prompts have a task and some have none"),
    ],
)
def test_bad_files_are_told_by_line(tmp_path, name, text, message):
    with pytest.raises(BadInput, match=message):
        read_prompts(written(tmp_path, name, text), encode, 5)


def test_text_without_a_tokenizer_tells_the_ways_out(tmp_path):
    with pytest.raises(BadInput, match=r"line 1: text, but the model has no tokenizer; give .* --prompt-tokens"):
        read_prompts(written(tmp_path, "p.txt", "hello"), None, 5)


def test_a_missing_file(tmp_path):
    with pytest.raises(BadInput, match="No such file"):
        read_prompts(tmp_path / "none.txt", encode, 5)


def test_lengths_have_three_forms():
    rng = np.random.default_rng(0)
    assert Lengths("37").draw(rng, 3) == [37, 37, 37]
    drawn = Lengths("20-22").draw(rng, 400)
    assert set(drawn) == {20, 21, 22}
    drawn = Lengths("lognormal:40:0.5").draw(rng, 2000)
    assert 37 < np.median(drawn) < 43
    assert np.std(np.log(drawn)) == pytest.approx(0.5, abs=0.05)
    assert min(Lengths("lognormal:1:3").draw(rng, 500)) == 1
    assert max(Lengths("lognormal:1:9999").draw(rng, 500)) == 1 << 30


@pytest.mark.parametrize(
    "text", ["", "0", "5-3", "0-3", "-4", "normal:3:1", "lognormal:3", "lognormal:1.2.3:1", "1e3", "9" * 5000]
)
def test_other_lengths_are_refused(text):
    with pytest.raises(BadInput, match="lengths, got"):
        Lengths(text).draw(np.random.default_rng(0), 2)


def test_random_prompts_follow_the_seed_and_leave_out_the_end_of_text():
    made = random_prompts(50, Lengths("3-6"), Lengths("2"), 5, [0, 3], seed=4)
    assert {len(prompt.token_ids) for prompt in made} == {3, 4, 5, 6}
    assert {token for prompt in made for token in prompt.token_ids} == {1, 2, 4}
    assert all(prompt.fixed_length and prompt.max_outputs == 2 for prompt in made)
    assert made == random_prompts(50, Lengths("3-6"), Lengths("2"), 5, [0, 3], seed=4)
    assert made != random_prompts(50, Lengths("3-6"), Lengths("2"), 5, [0, 3], seed=5)


def test_drawn_output_lengths_replace_the_others():
    (changed,) = with_output_lengths([Prompt((1,), 50, "chat", "store")], Lengths("9"), 0)
    assert changed == Prompt((1,), 9, "chat", "store", True)


def test_splits_are_per_task_and_leave_something_to_score():
    prompts = [Prompt((1,), 1, task) for task in "ab" * 10]
    chosen = splits(prompts, 0.7, seed=1)
    assert chosen[::2].count("store") == chosen[1::2].count("store") == 7
    assert chosen == splits(prompts, 0.7, seed=1)
    assert chosen != splits(prompts, 0.7, seed=2)
    assert splits(prompts[:1], 0.7, 0) == ["test"]
    assert sorted(splits([Prompt((1,), 1)] * 2, 0.99, 0)) == ["store", "test"]
    assert splits([Prompt((1,), 1)] * 2, 1.0, 0) == ["store", "store"]
    own = [Prompt((1,), 1, "", "store"), Prompt((1,), 1, "", "test"), Prompt((1,), 1)]
    assert splits(own, 0.7, 0) == ["store", "test", "test"]
