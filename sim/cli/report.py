"""`moesim report`: a run, comparison, sweep, validation, plan, rates or a calibration as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.base.errors import BadInput
from sim.cli.output_place import OutputFile
from sim.cli.say import say
from sim.cli.unique_options import UniqueOptions

if TYPE_CHECKING:
    from sim.pages.lanes import Window
    from sim.pages.page import Page

CACHES = ("lru scope=global", "lru")
"""Plain caches that a run is held against: their hits of every size take one pass."""
PROFILES = (".yaml", ".yml")
IMAGES = (".svg", ".png")


@click.command(
    cls=UniqueOptions,
    epilog="Example: simulate --policy fine_moe --hw rtx3090 --requests 4 --out runs/a --set out.spans=on; "
    "moesim report runs/a -o a.html. Several runs make a comparison: moesim report runs/a runs/b -o ab.html",
)
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH...")
@click.option(
    "-o",
    "--out",
    type=OutputFile(),
    metavar="FILE.html",
    help="Where to; default: beside the first PATH. FILE.svg or FILE.png: one plot as an image (extra `images`).",
)
@click.option("--plot", metavar="NAME", help="Which plot becomes the image; without it the names are listed.")
@click.option("--from", "first", type=click.IntRange(min=0), metavar="N", help="First iteration whose lanes are shown.")
@click.option(
    "--iterations",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="How many of them; fewer where they would be too much for a browser, and the page says so.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the page's data as one JSON object and write nothing.")
def command(
    paths: tuple[Path, ...], out: Path | None, plot: str | None, first: int | None, iterations: int, as_json: bool
) -> None:
    """Write PATHs as one page that opens in any browser, offline, and needs no other file; figures for a paper are
    saved from it, or written with -o FILE.svg.

    PATH is a run's folder (`simulate --out`), several of them, the folder of a sweep, comparison or plan (`--out`),
    what `--json` of run, compare, sweep, plan, saturate or validate printed, or the NAME.yaml that `calibrate` wrote.
    """
    from sim.base.files import must_be_writable, replacing
    from sim.pages.lanes import Window

    if out is None and not as_json:
        out = _beside(paths[0])
        must_be_writable(out)
    page = _page(paths, Window(first, iterations))
    if as_json:
        from sim.base.json import to_json

        click.echo(to_json(page.to_dict()))
        return
    assert out is not None
    if out.suffix.lower() in IMAGES:
        from sim.pages.image import write_image

        write_image(page, plot, out)
    elif plot is not None:
        raise BadInput(f"--plot, got it with {str(out)!r}: it is of an image; write to FILE.svg or FILE.png")
    else:
        from sim.pages.html import html_of

        text = html_of(page)
        with replacing(out) as part:
            part.write_text(text, encoding="utf-8", newline="\n")
    how = "" if out.suffix.lower() in IMAGES else "; the camera above each of its plots saves that as SVG"
    say(f"written: {out}{how}")
    say(page.verdict)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.resolve().name}.html") if path.is_dir() else path.with_suffix(".html")


def _page(paths: tuple[Path, ...], window: Window) -> Page:
    """The page of what lies there. Raises BadInput."""
    try:
        return _drawn(paths, window)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError) as error:
        # A kept file may hold anything where a figure was, and a page reads hundreds of them.
        raise BadInput(
            f"{', '.join(map(str, paths))}: it does not hold what its page shows ({type(error).__name__}: {error}); "
            "let the command write it again, or report this if nobody changed the file"
        ) from None


def _drawn(paths: tuple[Path, ...], window: Window) -> Page:
    from sim.pages.inputs import Comparison, Grid, Run, read

    if any(path.suffix in PROFILES for path in paths):
        from calibrate.report import page_of

        if len(paths) > 1:
            raise BadInput(f"PATH, got {len(paths)} with a profile among them: a calibration has a page of its own")
        return page_of(paths[0])
    found = [read(path) for path in paths]
    runs, one = [one for one in found if isinstance(one, Run)], found[0]
    if len(found) > 1:
        if len(runs) < len(found):
            kinds = f"PATH, got {len(paths)} of several kinds"
            raise BadInput(f"{kinds}: only runs make one page together; report one of them")
        from sim.pages.comparison import of_runs

        return of_runs(runs)
    if isinstance(one, Run):
        from sim.pages.curves import caches_of
        from sim.pages.run import run_page

        return run_page(one, window, caches_of(one, CACHES))
    if isinstance(one, Comparison):
        from sim.pages.comparison import of_comparison

        return of_comparison(one)
    if isinstance(one, Grid):
        from sim.pages.sweep import of_grid

        return of_grid(one)
    if one.kind == "validation":
        from sim.pages.validation import of_validation

        return of_validation(one.data)
    if one.kind == "saturation":
        from sim.pages.saturation import of_rates

        return of_rates(one.data)
    from sim.pages.plan import of_plan

    return of_plan(one.data)
