"""One plot of a page as SVG or PNG, drawn by Chrome or Chromium through kaleido (the extra `images`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput, did_you_mean
from sim.base.extras import need
from sim.base.files import replacing
from sim.base.json import finite

if TYPE_CHECKING:
    from sim.pages.page import Page, Plot

WIDTH = 860
FONT = {"family": "Helvetica, Arial, sans-serif", "size": 13, "color": "#1c2126"}


def write_image(page: Page, name: str | None, out: Path) -> None:
    """Write it. Raises BadInput where no plot of that name is on the page, or what draws it is missing."""
    plots = {plot.name: plot for plot in page.plots()}
    if name is None and len(plots) == 1:
        name = next(iter(plots))
    if name not in plots:
        hint = f"name one of {', '.join(plots)}" if name is None else did_you_mean(name, plots)
        if not plots:
            hint = "this page has none that is drawn without choosing; save it from the page"
        raise BadInput(f"--plot, got {name or 'none'}: an image shows one plot of the page; {hint}")
    data = _drawn(plots[name], out)
    with replacing(out) as part:
        part.write_bytes(data)


def _drawn(plot: Plot, out: Path) -> bytes:
    form = out.suffix.lower().removeprefix(".")
    need(f"-o {out}", "kaleido")
    import kaleido

    figure = figure_of(plot)
    options = {"format": form, "width": WIDTH, "height": plot.height, "scale": 2 if form == "png" else 1}
    try:
        data: bytes = kaleido.calc_fig_sync(figure, opts=options)
    except Exception as error:
        if "chrome" in f"{type(error).__name__} {error}".lower() or isinstance(error, FileNotFoundError):
            raise BadInput(
                f"-o, got {str(out)!r}: images are drawn by Chrome or Chromium, and none was found; write "
                f"{out.with_suffix('.html')}, where the camera above each plot saves it as SVG, or "
                "install one (BROWSER_PATH names it)"
            ) from None
        raise
    return _settled(data) if form == "svg" else data


def figure_of(plot: Plot) -> dict[str, Any]:
    """The plot as plotly takes it, on white."""
    layout = {
        "template": {},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "font": FONT,
        "margin": {"l": 70, "r": 24, "t": 36, "b": 52},
        "legend": {"orientation": "h", "traceorder": "normal", "x": 0, "y": 1.02, "yanchor": "bottom"},
        **plot.layout,
    }
    for name in ("xaxis", "yaxis"):
        lines = {"gridcolor": "#dfe4e8", "zerolinecolor": "#dfe4e8", "linecolor": "#1c2126", "automargin": True}
        layout[name] = {**lines, **layout.get(name, {})}
    found: dict[str, Any] = finite({"data": [dict(trace) for trace in plot.traces], "layout": layout})
    drawn: dict[str, Any] = _as_text(found)
    return drawn


def _as_text(value: Any) -> Any:
    """Plotly reads a little HTML in names; ours are text, but for templates, which are ours."""
    if isinstance(value, dict):
        return {key: child if key == "hovertemplate" else _as_text(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_as_text(child) for child in value]
    return value.replace("&", "&amp;").replace("<", "&lt;") if isinstance(value, str) else value


def _settled(svg: bytes) -> bytes:
    """Without the random part of ids, so that equal plots are equal bytes."""
    text = svg.decode("utf-8")
    seen: dict[str, str] = {}
    for uid in re.findall(r'id="(?:clip|defs-|topdefs-|legend)([0-9a-f]{6})|-legend-([0-9a-f]{6})"', text):
        seen.setdefault("".join(uid), f"{len(seen):06d}")
    for uid, plain in seen.items():
        text = text.replace(uid, plain)
    return text.encode("utf-8")
