"""Train the byte-level BPE tokenizer and encode the corpus, one token file per task and split.

    python -m tools.train.tokens --corpus .traindata/corpus --out .traindata/tokens

A token file is xz-compressed little-endian uint16: documents in hash order, each followed by `END_OF_TEXT`. Tasks
are capped so that no kind of text drowns the others and the whole travels in one bundle. `tokens.json` states the
counts. `WindowSampler` and `heldout_windows` cut them into windows.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sim.base.errors import BadInput
from sim.base.files import replacing, write_json

VOCAB = 4096
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
TRAINER_BYTES_PER_TASK = 8_000_000
HELDOUT_TOKENS_PER_TASK = 150_000
SPLITS = ("train", "heldout")

Tokens = npt.NDArray[np.uint16]


def read_documents(path: Path) -> list[str]:
    """Texts of one JSON-lines file in the order of their hashes, so that a cut is a fair sample of all sources."""
    with path.open(encoding="utf-8") as lines:
        texts = [str(json.loads(line)["text"]) for line in lines]
    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())


def train_tokenizer(texts: Iterator[str], vocab: int = VOCAB) -> Tokenizer:
    """Byte-level BPE with `END_OF_TEXT` as id 0; every byte string has an encoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], limit: int) -> Tokens:
    """Ids of the documents, each closed by `END_OF_TEXT_ID`, until at least `limit` ids are there."""
    pieces: list[Tokens] = []
    total = 0
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch(texts[start : start + 256]):
            pieces.append(np.array([*encoding.ids, END_OF_TEXT_ID], np.uint16))
            total += len(pieces[-1])
        if total >= limit:
            break
    return np.concatenate(pieces)[:limit]


def save_tokens(path: Path, ids: Tokens) -> None:
    """Write one token file."""
    with replacing(path) as part:
        part.write_bytes(lzma.compress(ids.astype("<u2").tobytes(), preset=6))


def load_tokens(path: Path) -> Tokens:
    """Read one token file. Raises BadInput when it is missing or damaged."""
    try:
        return np.frombuffer(lzma.decompress(path.read_bytes()), "<u2").astype(np.uint16)
    except (OSError, lzma.LZMAError, ValueError) as error:
        raise BadInput(f"{path}: {error}; build it with python -m tools.train.tokens") from None


def load_split(folder: Path, split: str) -> dict[str, Tokens]:
    """All tasks of one split, by task name. Raises BadInput for a folder without token files."""
    found = {path.name.split(".")[0]: load_tokens(path) for path in sorted(folder.glob(f"*.{split}.u16.xz"))}
    if not found:
        raise BadInput(f"{folder}: no *.{split}.u16.xz in it; build them with python -m tools.train.tokens")
    return found


def split_documents(ids: Tokens) -> list[Tokens]:
    """Cut a token file at `END_OF_TEXT_ID`; the separators are dropped."""
    cuts = np.flatnonzero(ids == END_OF_TEXT_ID)
    return [piece for piece in (p[p != END_OF_TEXT_ID] for p in np.split(ids, cuts)) if len(piece)]


class WindowSampler:
    """Random windows of `length + 1` tokens from the tasks' token streams.

    A task's share of the batches is the square root of its share of the tokens: small tasks are seen more often than
    their size says, yet not so often that they are learnt by heart.
    """

    def __init__(self, tokens: dict[str, Tokens], length: int, seed: int) -> None:
        self.length = length
        sizes = np.array([len(ids) for ids in tokens.values()], np.int64)
        self.sizes = torch.from_numpy(sizes)
        self.starts = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)[:-1]]))
        self.share = torch.from_numpy(np.sqrt(sizes / sizes.sum()))
        joined = np.concatenate(list(tokens.values())).astype(np.int32)
        self.data = torch.from_numpy(joined)
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, windows: int, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, next ids), both [windows, length] int64; another length than usual may be asked for."""
        length = length or self.length
        task = torch.multinomial(self.share, windows, replacement=True, generator=self.generator)
        usable = (self.sizes - length)[task]
        offset = (torch.rand(windows, generator=self.generator, dtype=torch.float64) * usable).long()
        start = self.starts[task] + offset
        block = self.data[start[:, None] + torch.arange(length + 1)].long()
        return block[:, :-1], block[:, 1:]


def heldout_windows(ids: Tokens, length: int, limit: int) -> torch.Tensor:
    """Consecutive windows [n, length + 1] from the start of a token stream, at most `limit` predicted tokens."""
    count = min((len(ids) - 1) // length, max(1, limit // length))
    rows = [ids[i * length : i * length + length + 1] for i in range(count)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def _tokenizer_sample(corpus: Path, tasks: list[str]) -> Iterator[str]:
    for task in tasks:
        used_bytes = 0
        for text in read_documents(corpus / f"{task}.train.jsonl"):
            used_bytes += len(text.encode())
            if used_bytes > TRAINER_BYTES_PER_TASK:
                break
            yield text


@click.command()
@click.option("--corpus", type=click.Path(path_type=Path, exists=True), required=True, help="folder of corpus.py")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--cap", default=6_500_000, show_default=True, help="training tokens per task")
@click.option(
    "--tokenizer",
    "trained",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="tokenizer.json of a checkpoint, in place of a new one: for a model that is trained further",
)
def main(corpus: Path, out: Path, cap: int, trained: Path | None) -> None:
    """Train the tokenizer on the training split and encode both splits."""
    tasks = sorted(path.name.split(".")[0] for path in corpus.glob("*.train.jsonl"))
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(trained)) if trained else train_tokenizer(_tokenizer_sample(corpus, tasks))
    tokenizer.save(str(out / "tokenizer.json"))
    counts: dict[str, Any] = {"schema": "moe-train-tokens/1", "vocab": tokenizer.get_vocab_size(), "tasks": {}}
    for task in tasks:
        row: dict[str, Any] = {}
        for split, limit in zip(SPLITS, (cap, HELDOUT_TOKENS_PER_TASK), strict=True):
            ids = encode(tokenizer, read_documents(corpus / f"{task}.{split}.jsonl"), limit)
            save_tokens(out / f"{task}.{split}.u16.xz", ids)
            row[split] = {"tokens": len(ids), "text_bytes": len(tokenizer.decode(ids.tolist()).encode())}
            row[split]["file_bytes"] = (out / f"{task}.{split}.u16.xz").stat().st_size
        counts["tasks"][task] = row
        click.echo(f"{task:11s} {row}")
    (out / "corpus_built.json").write_bytes((corpus / "corpus_built.json").read_bytes())
    write_json(out / "tokens.json", counts)


if __name__ == "__main__":
    main()
