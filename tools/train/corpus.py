"""Build the training corpus from packages of Debian main and the running Python's standard library.

    python -m tools.train.corpus --out .traindata/corpus [--debs FOLDER]

`traces/train/corpus.yaml` lists the sources. Needs Debian's `apt-get` and `dpkg`. Writes one JSON-lines file per task
and split (`manual.train.jsonl`, one `{"text", "source"}` per document) and `corpus_built.json` with package versions
and sizes. Documents equal but for white space are kept once; a document is held out when a hash of its text says so, so
a rebuild from other package versions never moves a document between the splits.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import platform
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click

import traces
from sim.base.errors import BadInput
from sim.base.files import read_yaml, replacing, to_struct, write_json
from tools.train.extract import READERS

MANIFEST = Path(traces.__file__).with_name("train") / "corpus.yaml"  # its licences ship with the traces
HELD_OUT_PER_MILLE = 25
MIN_DOC_BYTES = 400
MAX_DOC_BYTES = 400_000  # machine-made tables (Unicode, CLDR) are larger than anything a person wrote
STDLIB = "cpython-stdlib"


@dataclass(frozen=True)
class Source:
    """One package's contribution to one task; `include` and `exclude` are globs relative to the unpacked package."""

    package: str
    task: str
    format: str
    include: list[str]
    licence: str
    exclude: list[str] | None = None


@dataclass(frozen=True)
class Manifest:
    """The whole of `corpus.yaml`."""

    schema: str
    sources: list[Source]


def load_manifest(path: Path = MANIFEST) -> Manifest:
    """Read the source list. Raises BadInput for an unknown format."""
    manifest = to_struct(read_yaml(path), Manifest, str(path))
    for source in manifest.sources:
        if source.format not in READERS:
            raise BadInput(f"{path}: format {source.format!r} of {source.package}: known are {', '.join(READERS)}")
    return manifest


def fetch(packages: list[str], debs: Path) -> dict[str, str]:
    """Download and unpack what `debs` lacks; return the version of every package."""
    debs.mkdir(parents=True, exist_ok=True)
    missing = [name for name in packages if not list(debs.glob(f"{name}_*.deb"))]
    if missing:
        _run(["apt-get", "-q", "download", *missing], debs)
    versions = {}
    for name in packages:
        deb = next(iter(debs.glob(f"{name}_*.deb")), None)
        if deb is None:
            raise BadInput(f"package {name}: not downloaded to {debs}; run apt-get update as root and try again")
        versions[name] = deb.name.split("_")[1].replace("%3a", ":")
        if not (debs / "x" / name).exists():
            (debs / "x" / name).mkdir(parents=True)
            _run(["dpkg", "-x", str(deb.resolve()), str((debs / "x" / name).resolve())], debs)
    return versions


def _run(command: list[str], cwd: Path) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, check=True, capture_output=True)  # noqa: S603 - fixed programs
        return done.stdout.decode("utf-8", "replace")
    except (OSError, subprocess.CalledProcessError) as error:
        raise BadInput(f"{command[0]}: {error}; this step needs Debian's package tools") from None


def documents(source: Source, debs: Path) -> list[str]:
    """All documents of one source, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"]) if source.package == STDLIB else debs / "x" / source.package
    if source.format == "bible":  # the text is packed; its own program unpacks it
        program = debs / "x" / "bible-kjv" / "usr/bin/bible"
        data = (debs / "x" / source.package / "usr/lib").resolve()
        return READERS["bible"](_run([str(program.resolve()), "-f", "-p", str(data), "Ge1:1-Re22:21"], debs))
    found = sorted({path for pattern in source.include for path in root.glob(pattern)})
    texts: list[str] = []
    for path in found:
        name = str(path.relative_to(root))
        if not path.is_file() or path.is_symlink() or any(fnmatch("/" + name, p) for p in source.exclude or ()):
            continue
        packed = path.suffix if path.suffix in {".gz", ".dz"} else ""
        data_bytes = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
        try:  # gcide.dict alone has a few stray bytes in 40 MB
            texts += READERS[source.format](data_bytes.decode("utf-8", "ignore" if packed == ".dz" else "strict"))
        except UnicodeDecodeError:
            continue  # a page in an older encoding: rare, and guessing would put noise into the corpus
    return texts


def fingerprint(text: str) -> str:
    """Hash of a document, blind to white space."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()


def is_held_out(digest: str) -> bool:
    """Whether the document of this fingerprint is kept from training."""
    return int(digest[:8], 16) % 1000 < HELD_OUT_PER_MILLE


def build(out: Path, debs: Path) -> dict[str, Any]:
    """Write the corpus and return its description (also written as `corpus_built.json`)."""
    manifest = load_manifest()
    names = sorted({s.package for s in manifest.sources if s.package != STDLIB} | {"bible-kjv"})
    versions = {**fetch(names, debs), STDLIB: platform.python_version()}
    out.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    rows: list[dict[str, Any]] = []
    lines: dict[str, list[str]] = {}
    for source in manifest.sources:
        kept_bytes = kept = dropped = 0
        for text in documents(source, debs):
            size_bytes = len(text.encode())
            digest = fingerprint(text)
            if size_bytes < MIN_DOC_BYTES or size_bytes > MAX_DOC_BYTES or digest in seen:
                dropped += 1
                continue
            seen.add(digest)
            kept, kept_bytes = kept + 1, kept_bytes + size_bytes
            split = "heldout" if is_held_out(digest) else "train"
            line = json.dumps({"text": text, "source": source.package}, ensure_ascii=False)
            lines.setdefault(f"{source.task}.{split}", []).append(line)
        told = {"package": source.package, "version": versions[source.package], "task": source.task}
        counts = {"documents": kept, "dropped": dropped, "bytes": kept_bytes}
        rows.append({**told, "licence": source.licence, **counts})
    for name, content in lines.items():
        with replacing(out / f"{name}.jsonl") as part:
            part.write_text("\n".join(content) + "\n", encoding="utf-8")
    built = {"schema": "moe-train-corpus-built/1", "bytes": sum(r["bytes"] for r in rows), "sources": rows}
    write_json(out / "corpus_built.json", built)
    return built


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="folder for the JSON-lines files")
@click.option("--debs", type=click.Path(path_type=Path), help="folder to keep downloads in (default: temporary)")
def main(out: Path, debs: Path | None) -> None:
    """Fetch the packages of corpus.yaml and write their text, one file per task and split."""
    with tempfile.TemporaryDirectory() as scratch:
        built = build(out, debs or Path(scratch))
    for row in built["sources"]:
        size = f"{row['documents']:7d} documents {row['bytes'] / 1e6:8.2f} MB"
        click.echo(f"{row['task']:11s} {row['package']:26s} {size}")
    click.echo(f"{built['bytes'] / 1e6:.1f} MB in all")


if __name__ == "__main__":
    main()
