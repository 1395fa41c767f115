"""Where spans and decisions go beside the counters that every result is folded from: tidy tables and a timeline.

A run always folds (constant memory); keeping is what `--out` and `--timeline` ask for. Both see the same spans, so
every metric can be recomputed from the kept tables; a test does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from sim.base.files import replacing
from sim.results.by_layer import expert_table, layer_table
from sim.results.metrics import request_row
from sim.results.run_folder import CONFIG, FILES, RESULT, check_apart, new_folder
from sim.results.tables import TABLES, TableWriter, run_row
from sim.results.timeline.document import Document
from sim.results.timeline.requests import Present
from sim.results.timeline.run import Timeline
from sim.results.timeline.window import Window
from sim.setup.naming import title_of
from sim.setup.spec import dump_spec

if TYPE_CHECKING:
    from sim.engine.drive import Step
    from sim.results.keep import Keep
    from sim.run import Outcome, Progress, Setup

__all__ = ["FILES", "Keeper", "new_folder", "recorded"]


class Keeper:
    """Writes every iteration, decision and, if they are wanted, span of a run to its tables."""

    def __init__(self, folder: Path, run_id: str, with_spans: bool = False) -> None:
        self.with_spans = with_spans
        names = [name for name in TABLES if with_spans or name != "spans"]
        self._iteration = 0
        self._decision = 0
        with ExitStack() as stack:
            self._tables = {name: stack.enter_context(TableWriter(folder, name, run_id)) for name in names}
            self._stack = stack.pop_all()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)

    def span(
        self, lane: str, op: str, layer: int, expert: int, n_tokens: int, n_bytes: int, start_s: float, end_s: float
    ) -> None:
        self._tables["spans"].add(
            lane, op, None if layer < 0 else layer, None if expert < 0 else expert, n_tokens, n_bytes, start_s, end_s
        )

    def log(self, kind: str, layer: int, expert: int) -> None:
        self._tables["decisions"].add(self._decision, self._iteration, layer, expert, kind)
        self._decision += 1

    def step(self, step: Step) -> None:
        it = step.iteration
        self._tables["iterations"].add(it.index, it.counted, len(it.ranges), it.n_tokens, step.start_s, step.end_s)
        self._iteration = it.index + 1

    def finish(self, outcome: Outcome) -> None:
        """Write what is known only at the end, and close the tables."""
        self._tables["requests"].extend(request_row(times) for times in outcome.clockwork.requests)
        self._tables["runs"].add(*run_row(outcome.result)[1:])
        self._tables["layers"].extend(layer_table(outcome.result.by_layer))
        counts = outcome.engine.tally.by_expert
        self._tables["experts"].extend(expert_table(counts, outcome.clockwork, outcome.result.expert_bytes))
        self._stack.close()


def recorded(
    run: Callable[..., Any],
    setup: Setup,
    progress: Progress | None,
    keep: Keep,
    beside: Callable[..., Any] | None = None,
) -> Any:
    """Execute by `run` (a simulation, or a real run) and keep it.

    Args:
        beside: called with the outcome, and what a run takes to be drawn below this one (`drawn`); before it is kept.

    Raises:
        BadInput: a place that cannot be written, a folder that holds something else, or a timeline that is there and
            that `force` does not say to replace.
    """
    out, timeline = keep.out, keep.timeline
    if out is not None and timeline is not None:
        check_apart(out, timeline)
    try:
        with ExitStack() as stack:
            keeper = document = events = None
            if out is not None:
                folder = stack.enter_context(new_folder(out, keep.force))
                keeper = stack.enter_context(Keeper(folder, setup.run_id, keep.with_spans))
            if timeline is not None:
                document = stack.enter_context(new_timeline(timeline, keep.force))
                title = title_of(setup) if beside is None else f"measured: {title_of(setup)}"
                events = events_of(document, title, keep, setup)
            outcome = _execute(setup, progress, [sink for sink in (keeper, events) if sink is not None], run)
            if beside is not None:
                below = None if document is None else events_of(document, f"predicted: {title_of(setup)}", keep, setup)
                beside(outcome, {} if below is None else drawn(below))
                if below is not None:
                    below.close()
            if keeper is not None:
                keeper.finish(outcome)
                (folder / CONFIG).write_text(dump_spec(setup.explicit(), setup.resolved()), encoding="utf-8")
                (folder / RESULT).write_text(outcome.result.to_json(indent=2) + "\n", encoding="utf-8")
            if events is not None and document is not None:
                events.close()
                document.close()
            return outcome  # whole files everywhere: what is left is to rename them
    except OSError as error:
        where = error.filename or out or timeline
        raise BadInput(f"{where}: {error.strerror or error}; choose another place") from None


@contextmanager
def new_timeline(path: Path, force: bool) -> Iterator[Document]:
    """A document that takes its place when all went well. Raises BadInput where it may not."""
    if path.is_dir():
        raise BadInput(f"--timeline, got {str(path)!r}: it is a folder; name a file in it")
    if path.exists() and not force:
        raise BadInput(f"--timeline, got {str(path)!r}: it exists; replace it with --force, or name another file")
    with replacing(path) as part, Document(part) as document:
        yield document


def drawn(events: Timeline) -> dict[str, Any]:
    """What a run is told for the sake of its timeline."""
    return {"spans": events.span, "log": events.log, "on_step": events.step, "begun": events.begun}


def events_of(document: Document, title: str, keep: Keep, setup: Setup) -> Timeline:
    """The sink that draws one more run."""
    present = Present(setup.requests, setup.clients) if setup.open_loop else None
    return Timeline(document.process(title), Window(keep.timeline_from, keep.timeline_iterations), present)


def _execute(setup: Setup, progress: Progress | None, sinks: list[Keeper | Timeline], run: Callable[..., Any]) -> Any:
    step, log = [s.step for s in sinks], [s.log for s in sinks]
    span = [s.span for s in sinks if not isinstance(s, Keeper) or s.with_spans]
    more = {"begun": one.begun for one in sinks if isinstance(one, Timeline)}  # noqa: B035 - there is one at most

    def spans(*fact: Any) -> None:
        for take in span:
            take(*fact)

    def decisions(*fact: Any) -> None:
        for take in log:
            take(*fact)

    def on_step(done: Step) -> None:
        for take in step:
            take(done)

    only = span[0] if len(span) == 1 else spans if span else None
    told = log[0] if len(log) == 1 else decisions
    return run(setup, spans=only, log=told, progress=progress, on_step=on_step, **more)
