"""A page's data as one HTML file: no other file, no network, no script that is not named by its digest.

Names come from files of anybody: text is escaped, and in the block of data `<` is written as an escape, so that no name
ends it. The content security policy forbids everything else, were either ever wrong.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from sim.base.errors import BadInput
from sim.base.json import finite
from sim.base.units import show_bytes
from sim.pages.page import Page, show

MOST_BYTES = 2_000_000
PLOTLY = "plotly-cartesian.min.js.gz"
NUMERIC = {"s", "bytes", "frac", "n", "x"}


def html_of(page: Page) -> str:
    """The file. Raises BadInput where the page would be too large to be passed around."""
    data = finite(page.to_dict())
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    block = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    block = block.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    packed, ours = resources.files("sim.pages.plotly").joinpath(PLOTLY).read_bytes(), _asset("page.js")
    plotly = gzip.decompress(packed).decode("utf-8")
    policy = (
        f"default-src 'none'; script-src {_digest(plotly)} {_digest(ours)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    nav = "".join(f'<li><a href="#{_id(s["name"])}">{_text(s["title"])}</a></li>' for s in data["sections"])
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{_text(data['title'])}</title>",
        f"<style>{_asset('page.css')}</style>\n</head>\n<body>",
        '<a class="skip" href="#main">Skip to the figures</a>',
        f'<header>\n<h1 id="verdict">{_text(data["verdict"])}</h1>',
        *(f"<p>{_prose(line)}</p>" for line in data["lines"]),
        "</header>",
        f'<nav aria-label="Sections"><ul>{nav}</ul></nav>' if nav else "",
        '<main id="main">',
        *(_section(section) for section in data["sections"]),
        "</main>",
        f"<footer><p>Made by <code>moesim report</code>, version <span>{_text(data['version'])}</span>. Every figure "
        'on this page is in its data: <button type="button" id="save">save them as JSON</button></p></footer>',
        "<noscript><p>Plots need JavaScript; every table is here without it.</p></noscript>",
        f'<script type="application/json" id="data">{block}</script>',
        f'<script type="application/gzip" id="plotly">{base64.b64encode(packed).decode()}</script>',
        f"<script>{ours}</script>\n</body>\n</html>\n",
    ]
    found = "\n".join(part for part in parts if part)
    if (n_bytes := len(found.encode("utf-8"))) > MOST_BYTES:
        raise BadInput(
            f"report, got a page of {show_bytes(n_bytes)}: at most {show_bytes(MOST_BYTES)}, so that it can be sent "
            "and opens at once; report fewer runs, or sweep fewer points"
        )
    return found


def _asset(name: str) -> str:
    return resources.files("sim.pages").joinpath(name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode()}'"


def _text(text: object) -> str:
    return html.escape(str(text), quote=True)


def _prose(text: object) -> str:
    """A sentence; what stands between backticks is what people type."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(text))


def _id(name: str) -> str:
    """An id from a name of ours."""
    return "".join(c if c.isalnum() or c == "-" else "-" for c in name)


def _section(section: Mapping[str, Any]) -> str:
    name = _id(section["name"])
    blocks = "\n".join(_block(block) for block in section["blocks"])
    sentence = f"<p>{_prose(section['sentence'])}</p>" if section["sentence"] else ""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{_text(section["title"])}</h2>\n'
        f"{sentence}\n{blocks}\n</section>"
    )


def _block(block: Mapping[str, Any]) -> str:
    if block["kind"] == "note":
        return "".join(f'<p class="note">{_prose(line)}</p>' for line in block["lines"])
    return {"table": _table, "plot": _plot, "facts": _facts, "explorer": _explorer}[block["kind"]](block)


def _plot(block: Mapping[str, Any]) -> str:
    name = _id(block["name"])
    return (
        f'<figure><div class="plot" id="plot-{name}" data-plot="{name}" tabindex="0" role="group" '
        f'aria-label="{_text(block["says"])} Arrow keys move, plus and minus zoom, 0 shows all." '
        f'style="height:{int(block["height"])}px"></div>'
        f"<figcaption>{_text(block['says'])}</figcaption></figure>"
    )


def _facts(block: Mapping[str, Any]) -> str:
    items = (
        f"<div><dt>{_text(one['title'])}</dt><dd>{_text(show(one['value'], one['unit']))}"
        + (f"<small>{_text(one['note'])}</small>" if one["note"] else "")
        + "</dd></div>"
        for one in block["items"]
    )
    return f'<dl class="facts">{"".join(items)}</dl>'


def _table(block: Mapping[str, Any]) -> str:
    columns = block["columns"]
    head = "".join(f'<th scope="col"{_align(c["unit"])}>{_text(c["title"])}</th>' for c in columns)
    rows = []
    for row in block["rows"]:
        cells = [_text(show(cell, c["unit"])) for cell, c in zip(row, columns, strict=True)]
        first = f'<th scope="row"{_align(columns[0]["unit"])}>{cells[0]}</th>' if cells else ""
        rest = "".join(f"<td{_align(c['unit'])}>{text}</td>" for text, c in zip(cells[1:], columns[1:], strict=True))
        rows.append(f"<tr>{first}{rest}</tr>")
    caption = _text(block["caption"])
    table = (
        f'<div class="wide" tabindex="0" role="region" aria-label="{caption}"><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    return f"<details><summary>{caption}</summary>{table}</details>" if block["folded"] else table


def _align(unit: str) -> str:
    return ' class="number"' if unit in NUMERIC else ""


def _explorer(block: Mapping[str, Any]) -> str:
    """Filled in by the page's script, from the same data."""
    name = _id(block["name"])
    return (
        f'<div class="explorer" id="explorer-{name}" data-explorer="{name}"><form class="choose"></form>'
        f'<p class="found" role="status" aria-live="polite"></p>'
        f'<figure><div class="plot" id="plot-{name}" tabindex="0" role="group" aria-label="The chosen points. '
        f'Arrow keys move, plus and minus zoom, 0 shows all." style="height:460px"></div></figure>'
        f'<div class="rows"></div></div>'
    )
