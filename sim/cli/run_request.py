"""What `simulate` was asked for, as one object: the run, where it is carried out, and where it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import msgspec

from sim.base.errors import BadInput
from sim.cli.output_place import OutputFile, OutputFolder
from sim.options import OUTPUTS, Output
from sim.results.keep import Keep, timeline_start

ANYWHERE = "where it is quickest"
"""What `--real` stands for without a device."""


class RunRequest(msgspec.Struct, frozen=True):
    """One call of `simulate`.

    Attributes:
        given: the options that make a run (`sim.cli.spec_options`), None where one was not given.
        settings: of `--set`. config: a saved configuration that they stand over. keep: where the run is kept.
        real, device, checkpoint: carry it out, where, and with which weights. expected: of `--expect`.
    """

    given: dict[str, Any]
    settings: tuple[str, ...] = ()
    config: Path | None = None
    keep: Keep = msgspec.field(default_factory=Keep)
    as_json: bool = False
    expected: tuple[str, ...] = ()
    real: bool = False
    device: str | None = None
    checkpoint: str | None = None

    @classmethod
    def of(cls, options: dict[str, Any]) -> Self:
        """The request of a command's options. Raises BadInput for options that contradict one another."""
        settings, output = [], {row.field: options.pop(row.field) for row in OUTPUTS.rows if row.flags}
        for text in options.pop("settings"):
            key = text.partition("=")[0].strip()
            if key.partition(".")[0] in OUTPUTS.prefixes - {"run"} and OUTPUTS.names(key):
                output |= {"set": {**output.get("set", {}), **OUTPUTS.settings([text])}}
            else:
                settings.append(text)
        output = {name: value for name, value in output.items() if value is not None}
        where: Output = OUTPUTS.spec(output)
        for row in OUTPUTS.rows:
            row.check(getattr(where, row.field))
        places = (("--out", where.out, OutputFolder()), ("--timeline", where.timeline, OutputFile()))
        out, timeline = (None if place is None else kind.checked(place, name) for name, place, kind in places)
        terms = OUTPUTS.terms_of(OUTPUTS.by_field["timeline"]).values()
        if timeline is None and any(getattr(where, row.field) != row.default for row in terms):
            raise BadInput("--set timeline.*, got it without --timeline: which file? add --timeline FILE")
        keep = Keep(
            out=out,
            with_spans=where.out_spans,
            overwrite=options.pop("overwrite"),
            timeline=timeline,
            timeline_iterations=where.timeline_iterations,
            timeline_from=timeline_start(where.timeline_from),
        )
        own = {name: options.pop(name) for name in ("config", "as_json", "expected", "checkpoint")}
        device = options.pop("real")
        own |= {"real": device is not None, "device": None if device == ANYWHERE else device}
        request = cls(given=options, settings=tuple(settings), keep=keep, **own)
        request.check()
        return request

    def check(self) -> None:
        """Raises BadInput for options that contradict one another."""
        if self.keep.with_spans and self.keep.out is None:
            raise BadInput("--set out.spans, got it without --out: it adds a table to that folder; add --out DIR")
        router = self.given.get("router")
        if router is not None and self.config is None and self.given.get("replicas") in (None, 1):
            raise BadInput(f"--router, got {router!r} with one replica: there is nobody to choose; add --replicas N")
        if self.real:
            if self.expected:
                raise BadInput(
                    "--expect, got it with --real: measured figures differ from run to run; hold a simulation to it, "
                    "or see moesim validate --tolerance"
                )
            return
        if self.checkpoint is not None:
            raise BadInput(
                f"--checkpoint, got {self.checkpoint!r}: weights are what --real computes with; add --real, or leave "
                "it out"
            )

    def of_model(self, folder: Path) -> RunRequest:
        """The same run with the checkpoint in `folder` as its model. Raises BadInput where another one is named."""
        if self.given.get("model") is not None:
            raise BadInput(
                f"--model, got {self.given['model']!r} beside --checkpoint: a checkpoint is its own model; leave one "
                "out"
            )
        return msgspec.structs.replace(self, given={**self.given, "model": str(folder)})
