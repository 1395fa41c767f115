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
from sim.base.extras import need
from sim.base.files import replacing
from sim.results.by_layer import expert_table, layer_table
from sim.results.outcome import Watched
from sim.results.run_folder import CONFIG, FILES, RESULT, TABLES, check_apart, check_place, new_folder
from sim.results.timeline.document import Document
from sim.results.timeline.run import Timeline
from sim.results.timeline.window import Present, Window
from sim.setup.config_file import dump_spec
from sim.setup.naming import title_of

if TYPE_CHECKING:
    from sim.engine.run_loop import Step
    from sim.results.keep import Keep
    from sim.results.outcome import Outcome, Progress
    from sim.results.tables import TableWriter
    from sim.setup.setup import Setup

__all__ = ["FILES", "Keeper", "new_folder", "recorded"]


class Keeping:
    """Takes iterations, decisions and spans of a run, or of one of its replicas, to their tables."""

    def __init__(self, tables: dict[str, TableWriter], *replica: int) -> None:
        self._tables, self._replica = tables, replica
        self._iteration = self._decision = 0

    def span(
        self, lane: str, op: str, layer: int, expert: int, n_tokens: int, n_bytes: int, start_s: float, end_s: float
    ) -> None:
        where = None if layer < 0 else layer, None if expert < 0 else expert
        self._tables["spans"].add(lane, op, *where, n_tokens, n_bytes, start_s, end_s, *self._replica)

    def log(self, kind: str, layer: int, expert: int) -> None:
        self._tables["decisions"].add(self._decision, self._iteration, layer, expert, kind, *self._replica)
        self._decision += 1

    def step(self, step: Step) -> None:
        it = step.iteration
        what = it.index, it.counted, it.n_requests, it.n_tokens
        self._tables["iterations"].add(*what, step.start_s, step.end_s, *self._replica)
        self._iteration = it.index + 1


class Keeper:
    """Writes every iteration, decision and, if they are wanted, span of a run to its tables; `of` each replica."""

    def __init__(self, folder: Path, run_id: str, with_spans: bool = False, n_replicas: int = 1) -> None:
        from sim.results.tables import TableWriter

        self.with_spans = with_spans
        names = [name for name in TABLES if with_spans or name != "spans"]
        several = n_replicas > 1
        with ExitStack() as stack:
            writers = {name: TableWriter(folder, name, run_id, replicas=several) for name in names}
            self._tables = {name: stack.enter_context(writer) for name, writer in writers.items()}
            self._stack = stack.pop_all()
        self.of = [Keeping(self._tables, *([number] if several else [])) for number in range(n_replicas)]

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)

    def finish(self, outcome: Outcome) -> None:
        """Write what is known only at the end, and close the tables."""
        from sim.results.tables import request_rows, run_row

        self._tables["requests"].extend(request_rows(outcome.report))
        self._tables["runs"].add(*run_row(outcome.result)[1:])
        self._tables["layers"].extend(layer_table(outcome.result.by_layer))
        self._tables["experts"].extend(expert_table(outcome.report))
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
        beside: called with the outcome, and what a run is told to be drawn below this one (`told`); before it is kept.

    Raises:
        BadInput: a place that cannot be written, a folder that holds something else, or a timeline that is there and
            that `overwrite` does not say to replace.
    """
    out, timeline = keep.out, keep.timeline
    try:
        with ExitStack() as stack:
            keeper = document = drawing = None
            if out is not None:
                folder = stack.enter_context(new_folder(out, keep.overwrite))
                keeper = stack.enter_context(Keeper(folder, setup.run_id, keep.with_spans, setup.spec.replicas))
            if timeline is not None:
                document = stack.enter_context(new_timeline(timeline, keep.overwrite))
                title = title_of(setup) if beside is None else f"measured: {title_of(setup)}"
                drawing = Drawing(document, title, keep, setup)
            outcome = run(setup, progress=progress, **told(keeper, drawing))
            if beside is not None:
                below = None if document is None else Drawing(document, f"predicted: {title_of(setup)}", keep, setup)
                beside(outcome, {} if below is None else told(None, below))
                if below is not None:
                    below.close()
            if keeper is not None:
                keeper.finish(outcome)
                (folder / CONFIG).write_text(dump_spec(setup.explicit(), setup.resolved()), encoding="utf-8")
                (folder / RESULT).write_text(outcome.result.to_json(indent=2) + "\n", encoding="utf-8")
            if drawing is not None and document is not None:
                drawing.close()
                document.close()
            return outcome  # whole files everywhere: what is left is to rename them
    except OSError as error:
        where = error.filename or out or timeline
        raise BadInput(f"{where}: {error.strerror or error}; choose another place") from None


def check_places(keep: Keep) -> None:
    """Find out before a run is set up whether it can be kept. Raises BadInput as `recorded` does; changes nothing."""
    if keep.out is not None and keep.timeline is not None:
        check_apart(keep.out, keep.timeline)
    if keep.out is not None:
        need(f"--out {str(keep.out)!r}", "pyarrow")
        check_place(keep.out, keep.overwrite)
    if keep.timeline is not None:
        _check_timeline(keep.timeline, keep.overwrite)


def _check_timeline(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise BadInput(f"timeline, got {str(path)!r}: it is a folder; name a file in it")
    if path.exists() and not overwrite:
        raise BadInput(f"timeline, got {str(path)!r}: it exists; replace it with --overwrite, or name another file")


@contextmanager
def new_timeline(path: Path, overwrite: bool) -> Iterator[Document]:
    """A document that takes its place when all went well. Raises BadInput where it may not."""
    _check_timeline(path, overwrite)
    with replacing(path) as part, Document(part) as document:
        yield document


class Drawing:
    """The timelines of a run: one process, or one for each replica, in which its own window opens and closes."""

    def __init__(self, document: Document, title: str, keep: Keep, setup: Setup) -> None:
        def timeline(title: str, present: Present | None) -> Timeline:
            return Timeline(document.process(title), Window(keep.timeline_from, keep.timeline_iterations), present)

        n = setup.spec.replicas
        if n > 1:
            self.of = [timeline(f"replica {number}: {title}", None) for number in range(n)]
        else:
            self.of = [timeline(title, Present(setup.requests, setup.clients) if setup.open_loop else None)]

    def close(self) -> None:
        """The run is over. Raises BadInput where no window has opened."""
        wrong = []
        for one in self.of:
            try:
                one.close()
            except BadInput as error:
                wrong.append(error)
        if len(wrong) == len(self.of):
            raise wrong[0]


def told(keeper: Keeper | None, drawing: Drawing | None = None) -> dict[str, Any]:
    """What a run is told for the sake of its tables and its timeline."""

    def of(number: int) -> dict[str, Any]:
        kept = None if keeper is None else keeper.of[number]
        drawn = None if drawing is None else drawing.of[number]
        sinks: list[Keeping | Timeline] = [one for one in (kept, drawn) if one is not None]
        found: dict[str, Any] = {name: _all([getattr(one, name) for one in sinks]) for name in ("log", "step", "span")}
        found["on_step"], spans = found.pop("step"), found.pop("span")
        if drawn is not None:
            found["begun"] = drawn.begun
        if keeper is not None and not keeper.with_spans:
            spans = None if drawn is None else drawn.span
        return found | ({} if spans is None else {"spans": spans})

    n_replicas = len(keeper.of if keeper is not None else drawing.of if drawing is not None else [])
    return {"watched": lambda number: Watched(**of(number))} if n_replicas > 1 else of(0)


def _all(takers: list[Callable[..., None]]) -> Callable[..., None]:
    """One that tells each of them."""

    def tell(*fact: Any) -> None:
        for take in takers:
            take(*fact)

    return takers[0] if len(takers) == 1 else tell
