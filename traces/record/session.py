"""A recording on disk: one small trace per finished request, joined at the end; it can be cut off and continued.

`FILE.recording/` holds `plan.json`, `manifest.json` and `request-000000.safetensors` ..., each a sound trace that
appears whole or not at all. A batch is the unit of progress: it is run again unless all of its requests are there.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.base import digests
from sim.base.errors import BadInput
from sim.base.files import is_hidden, write_json
from traces.format.header import Header
from traces.format.layout import Array
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import Layout, TraceWriter

if TYPE_CHECKING:
    from traces.record.probe import Rows
    from traces.record.prompts import Prompt

BUFFER_BYTES = 16 * 1024 * 1024  # rows of a batch that wait in memory before they go to disk
_JOIN_ROWS = 4096
DIGEST, CONFIG = "recording", "config_sha256"
"""Keys of the header's free facts: digests of the plan, and of the model's configuration beside the trace."""
_OWN = re.compile(r"plan\.json|manifest\.json|whole\.safetensors|request-[0-9]{6,}\.safetensors")


def digest_of(plan: dict[str, Any]) -> str:
    """What decides the recorded rows, as one hash."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


class Session:
    """The folder of one recording that will become the trace `out`, with `config` as `NAME.config.json` beside it."""

    def __init__(self, out: Path, plan: dict[str, Any], config: dict[str, Any], prompts: Sequence[Prompt] = ()) -> None:
        self.out, self.plan, self.config, self.prompts = out, plan, config, prompts
        self.folder = out.with_name(out.name + ".recording")
        self.copy = out.with_name(out.name.removesuffix(".safetensors") + ".config.json")
        self.facts = {DIGEST: digest_of(plan), CONFIG: digests.of_text(json.dumps(config, indent=1) + "\n")}

    def open(self, resume: bool, force: bool) -> bool:
        """Prepare the folder. Returns False when `out` is the finished result of the very same plan (with `resume`).

        The folder's manifest lists what the recording replaces and what it has written, so that one that was begun with
        `force` goes on after a kill, and nobody else's file is replaced.

        Raises:
            BadInput: `out` or a begun recording exists and neither flag says what to do; a plan that differs; a
                configuration beside `out` that no recording has written.
        """
        there = self._facts_of_out()
        begun = (self.folder / "plan.json").exists()
        listed = self._manifest() if begun else {}
        if force:
            replaces = digests.of_file(self.out) if self.out.exists() else None
        else:
            replaces = listed.get("replaces")
            if self.out.exists():
                if not resume:
                    raise BadInput(f"{self.out}: it exists; give --overwrite to replace it, or another --out")
                if there.get(DIGEST) == self.facts[DIGEST]:
                    self._clear()  # cut off between the last two steps
                    return False
                if not begun or replaces != digests.of_file(self.out):
                    raise BadInput(f"{self.out}: it exists and holds another recording; give --overwrite to replace it")
            if begun:
                if not resume:
                    way = "give --resume to continue it, or --overwrite to begin anew"
                    raise BadInput(f"{self.folder}: a recording was begun and not finished; {way}")
                self._require_same_plan()
        ours = (self.facts[CONFIG], there.get(CONFIG), listed.get(CONFIG))
        if self.copy.exists() and digests.of_file(self.copy) not in ours:
            what = "the model's configuration goes there, and what is there no recording has left so"
            raise BadInput(f"{self.copy}: {what}; move it away, or name another --out")
        if force:
            self._clear()
        self.folder.mkdir(parents=True, exist_ok=True)
        for entry in self.folder.iterdir():  # what was being written when it was cut off
            if is_hidden(entry.name):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        write_json(self.folder / "manifest.json", {"replaces": replaces, CONFIG: self.facts[CONFIG]})
        write_json(self.folder / "plan.json", self.plan)
        write_json(self.copy, self.config)
        return True

    def _facts_of_out(self) -> dict[str, Any]:
        """What the header of the trace at `out` says of its recording; nothing where there is no such trace."""
        with suppress(BadInput), Trace(self.out) as trace:
            return dict(trace.header.extra)
        return {}

    def _manifest(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, TypeError):
            return dict(json.loads((self.folder / "manifest.json").read_text(encoding="utf-8")))
        return {}

    def _clear(self) -> None:
        """Remove what a recording keeps in the folder, and the folder where it holds nothing else."""
        for entry in self.folder.iterdir() if self.folder.is_dir() else ():
            if is_hidden(entry.name):
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()
            elif _OWN.fullmatch(entry.name):
                entry.unlink()
        with suppress(OSError):
            self.folder.rmdir()

    def _require_same_plan(self) -> None:
        path = self.folder / "plan.json"
        try:
            begun = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise BadInput(f"{path}: not readable; give --overwrite to begin anew") from None
        for key in sorted({*begun, *self.plan}):
            if begun.get(key) != self.plan.get(key):
                rule = f"the recording was begun with {begun.get(key)!r}"
                got = f"{key} {self.plan.get(key)!r}"
                raise BadInput(f"--resume, got {got}: {rule}; repeat that, or give --overwrite to begin anew")

    def part(self, index: int) -> Path:
        """Where the trace of one request lies once it is finished."""
        return self.folder / f"request-{index:06d}.safetensors"

    def finished(self, first: int, stop: int) -> bool:
        """Whether all requests of a batch are there."""
        return all(self.part(i).exists() for i in range(first, stop))

    def join(self, header: Header, layout: Layout, n_requests: int, table: Array | None = None) -> Path:
        """Make the trace of all requests, put it in place and remove the folder."""
        whole = self.folder / "whole.safetensors"
        with TraceWriter(whole, header, layout, table) as writer:
            for index in range(n_requests):
                with Trace(self.part(index)) as part:
                    _append_part(writer, part)
        whole.replace(self.out)
        self._clear()
        return self.out


def _append_part(writer: TraceWriter, part: Trace) -> None:
    """Copy the one request of a part as it is stored, some rows at a time."""
    (request,) = part.requests
    writer.start_request(request.prompt_len, request.task, request.split, request.arrival_s)
    names = [name for name in part.entries if not name.startswith("req_") and name != "embedding_table"]
    for a in range(0, part.n_tokens, _JOIN_ROWS):
        b = min(part.n_tokens, a + _JOIN_ROWS)
        rows = {}
        for name in names:
            before = request.prompt_len if part.decode_only(name) else 0
            rows[name] = part.stored(name)[max(0, a - before) : max(0, b - before)]
        writer.append(**rows)


class BatchWriter:
    """The writers of one batch's requests. Rows wait until there are enough of them; use as a context manager."""

    def __init__(
        self, session: Session, header: Header, layout: Layout, first: int, requests: Sequence[Request]
    ) -> None:
        self._writers = [TraceWriter(session.part(first + i), header, layout) for i in range(len(requests))]
        for writer, request in zip(self._writers, requests, strict=True):
            writer.start_request(request.prompt_len, request.task, request.split, request.arrival_s)
        self._waiting: list[list[Rows]] = [[] for _ in requests]
        self._waiting_bytes = 0

    def __enter__(self) -> BatchWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if kind is None:
            self._flush()
        for writer in self._writers:
            (writer.close if kind is None else writer.abort)()

    def add(self, slot: int, rows: Rows) -> None:
        """Take rows of one request, all tensors together."""
        self._waiting[slot].append(rows)
        self._waiting_bytes += sum(values.nbytes for values in rows.values())
        if self._waiting_bytes >= BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        for writer, waiting in zip(self._writers, self._waiting, strict=True):
            if waiting:
                writer.append(**{name: np.concatenate([rows[name] for rows in waiting]) for name in waiting[0]})
                waiting.clear()
        self._waiting_bytes = 0
