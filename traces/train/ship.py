"""Pack result files into a few parts of bounded size, and unpack them.

    python -m traces.train.ship unpack FOLDER_WITH_PARTS DESTINATION

A GPU machine hands back few files of limited size. Files are xz-compressed one by one into a tar, most important first,
and the tar is cut into `bundle.tar.0`, `.1`, ...; what no longer fits is left out and named.
"""

from __future__ import annotations

import io
import lzma
import tarfile
from pathlib import Path

import click

from sim.errors import BadInput
from traces.train.files import replacing

PART_BYTES = 15_900_000
MAX_PARTS = 4
NAME = "bundle.tar"


def pack(files: list[tuple[str, Path]], out: Path) -> list[str]:
    """Write the parts for (name in the bundle, file) pairs and return the names that did not fit."""
    out.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    left_out = []
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, path in files:
            data = lzma.compress(path.read_bytes(), preset=1)
            if buffer.tell() + len(data) + 20_480 > PART_BYTES * MAX_PARTS:  # header, padding and the end-of-tar blocks
                left_out.append(name)
                continue
            info = tarfile.TarInfo(name + ".xz")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    content = buffer.getvalue()
    parts = [content[i : i + PART_BYTES] for i in range(0, len(content), PART_BYTES)]
    for i, part in enumerate(parts):
        with replacing(out / f"{NAME}.{i}") as temporary:
            temporary.write_bytes(part)
    for i in range(len(parts), MAX_PARTS):
        (out / f"{NAME}.{i}").unlink(missing_ok=True)
    return left_out


def unpack(folder: Path, destination: Path) -> list[Path]:
    """Restore the files of `pack` below `destination`. Raises BadInput for missing or unsafe content."""
    parts = [folder / f"{NAME}.{i}" for i in range(MAX_PARTS) if (folder / f"{NAME}.{i}").exists()]
    if not parts:
        raise BadInput(f"{folder}: no {NAME}.0 in it; is it the output folder of gpu_job?")
    written = []
    try:
        with tarfile.open(fileobj=io.BytesIO(b"".join(p.read_bytes() for p in parts)), mode="r") as tar:
            for member in tar:
                target = (destination / member.name.removesuffix(".xz")).resolve()
                stored = tar.extractfile(member)
                if stored is None or not target.is_relative_to(destination.resolve()):
                    raise BadInput(f"{folder}: member {member.name!r} is not a plain file inside the bundle")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(lzma.decompress(stored.read()))
                written.append(target)
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise BadInput(f"{folder}: damaged bundle ({error}); are all parts of one run?") from None
    return written


@click.group()
def main() -> None:
    """Bundles of training results."""


@main.command("unpack")
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.argument("destination", type=click.Path(path_type=Path))
def unpack_command(folder: Path, destination: Path) -> None:
    """Restore all files of the bundle in FOLDER below DESTINATION."""
    for path in unpack(folder, destination):
        click.echo(str(path))


if __name__ == "__main__":
    main()
