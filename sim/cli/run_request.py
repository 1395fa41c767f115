"""What `simulate` was asked for, as one object: the run, where it is carried out, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from sim.base.errors import BadInput
from sim.results.keep import FIRST, TIMELINE_ITERATIONS, Keep

KEPT = ("out", "with_spans", "force", "timeline", "timeline_iterations", "timeline_from")


@dataclass(frozen=True)
class RunRequest:
    """One call of `simulate`.

    Attributes:
        given: the options that make a run (`sim.cli.spec_options`), None where one was not given.
        settings: of `--set`. config: a saved configuration that they stand over. keep: where the run is kept.
        real, device, checkpoint: carry it out, where, and with which weights. expected: of `--expect`.
    """

    given: dict[str, Any]
    settings: tuple[str, ...] = ()
    config: Path | None = None
    keep: Keep = field(default_factory=Keep)
    as_json: bool = False
    expected: tuple[str, ...] = ()
    real: bool = False
    device: str | None = None
    checkpoint: str | None = None

    @classmethod
    def of(cls, options: dict[str, Any]) -> Self:
        """The request of a command's options. Raises BadInput for options that contradict one another."""
        keep = Keep(**{name: options[name] for name in KEPT})
        own = {name: options[name] for name in cls.__dataclass_fields__ if name in options}
        given = {name: value for name, value in options.items() if name not in own and name not in KEPT}
        request = cls(given=given, keep=keep, **own)
        request.check()
        return request

    def check(self) -> None:
        """Raises BadInput for options that contradict one another."""
        if self.keep.with_spans and self.keep.out is None:
            raise BadInput("--spans, got it without --out: it adds a table to the folder of --out; add --out DIR")
        router = self.given.get("router")
        if router is not None and self.config is None and self.given.get("replicas") in (None, 1):
            raise BadInput(f"--router, got {router!r} with one replica: there is nobody to choose; add --replicas N")
        if self.keep.timeline is None:
            moved = self.keep.timeline_from[1:] != FIRST[1:]
            if moved or self.keep.timeline_iterations != TIMELINE_ITERATIONS:
                name = "from" if moved else "iterations"
                raise BadInput(f"--timeline-{name}, got it without --timeline: which file? add --timeline FILE")
        if self.real:
            if self.given.get("energy") is not None:
                raise BadInput(
                    f"--energy, got {self.given['energy']!r} with --real: joules come of a profile's watts, and a real "
                    "run measures none; simulate it"
                )
            if self.expected:
                raise BadInput(
                    "--expect, got it with --real: measured figures differ from run to run; hold a simulation to it, "
                    "or see moesim validate --tolerance"
                )
            return
        if self.device is not None:
            raise BadInput(f"--device, got {self.device!r}: it says where --real runs; add --real, or leave it out")
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
        return replace(self, given={**self.given, "model": str(folder)})
