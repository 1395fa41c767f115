"""The pages in headless Chromium: plots are drawn, nothing is logged, narrow windows and keys work."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from cli_help import mixtral_shaped, moesim
from test_report import HOSTILE

from sim.pages.plots import COLOURS, DASHES, SYMBOLS

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), "")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium or Chrome to look at the pages with")

PROBE = """
document.addEventListener("drawn", () => {
  const boxes = [...document.querySelectorAll(".plot")];
  const press = (box, key) => box.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  const box = boxes.find((one) => one.layout.xaxis.range && !one.layout.xaxis.type?.startsWith("cat"));
  const range = () => JSON.stringify(box.layout.xaxis.range);
  const seen = [range()];
  for (const key of ["ArrowRight", "+", "0"]) { press(box, key); seen.push(range()); }
  const told = {
    plots: boxes.length, drawn: boxes.filter((one) => one.querySelector(".plot path, .plot image")).length,
    wide: document.documentElement.scrollWidth, window: innerWidth, title: document.title, ranges: seen,
    imgs: document.images.length, focusable: boxes.every((one) => one.tabIndex === 0),
    unnamed: boxes.filter((one) => !one.getAttribute("aria-label")).length,
    heads: [...document.querySelectorAll("th")].filter((one) => !one.scope).length,
    choices: [...document.querySelectorAll("select")].map((one) => one.name),
  };
  const form = document.querySelector(".choose");
  if (form) {
    const found = document.querySelector(".found");
    told.before = found.textContent;
    const hw = form.elements["axis hw"];
    hw.value = '"a6000"';
    form.elements.goal.value = "100000";
    form.dispatchEvent(new Event("input"));
    told.after = found.textContent;
    const cells = (row) => [...row.children].map((cell) => cell.textContent);
    told.rows = [...document.querySelectorAll(".rows tbody tr")].map(cells);
    told.heads += [...document.querySelectorAll(".rows th")].filter((one) => !one.scope).length;
  }
  (parent === window ? window : parent).postMessage(JSON.stringify(told), "*");
});
window.addEventListener("message", (event) => { document.body.dataset.told = event.data; });
"""

CAMERA = """
const blobs = {}, saved = [], made = URL.createObjectURL;
URL.createObjectURL = (blob) => { const url = made.call(URL, blob); blobs[url] = blob; return url; };
HTMLAnchorElement.prototype.click = function () {
  const one = [this.download, ""];
  saved.push(one);
  blobs[this.href].text().then((svg) => { one[1] = svg; document.body.dataset.told = JSON.stringify(saved); });
};
document.addEventListener("drawn", () => {
  for (const one of document.querySelectorAll('.plot [data-title^="Download"]')) one.click();
});
"""


def dumped(path: Path, profile: Path) -> tuple[str, list[str]]:
    """The page after its scripts have run, and what it logged."""
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--virtual-time-budget=8000", "--window-size=1100,900", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def probed(page: Path, folder: Path, width: int = 0) -> Any:
    """What a script finds in the page, which has to be let in past the page's own policy; in a frame `width` wide."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    inside = folder / "inside.html"
    inside.write_text(text.replace("</body>", f"<script>{PROBE}</script></body>"), encoding="utf-8")
    if width:
        frame = folder / "frame.html"
        listen = "addEventListener('message', (event) => { document.body.dataset.told = event.data; })"
        sized = f'style="width:{width}px;height:800px"'
        frame.write_text(
            f'<body><script>{listen}</script><iframe src="inside.html" {sized}></iframe>', encoding="utf-8"
        )
        inside = frame
    dom, _ = dumped(inside, folder / "profile")
    (told,) = re.findall(r'data-told="([^"]*)"', dom)
    return json.loads(html.unescape(told))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run, whose trace has a hostile name, and a sweep."""
    from sim.cli import main, simulate

    folder = tmp_path_factory.mktemp("pages")
    trace = mixtral_shaped(folder).rename(folder / f"{HOSTILE}.safetensors")

    def do(entry: Any, *args: object) -> None:
        with pytest.raises(SystemExit) as stop:
            entry([str(arg) for arg in args])
        assert stop.value.code in (0, None)

    shared = ("--hw", "rtx3090", "--trace", trace)
    do(
        simulate,
        "--policy",
        "fine_moe",
        *shared,
        "--cache",
        "60experts",
        "--set",
        "out.spans=on",
        "--out",
        folder / "r",
    )
    axes = ("--hw", "rtx3090,a6000", "--cache", "40experts,50experts,60experts", "--workers", 1)
    do(main, "sweep", "--policy", "lru", "--policy", "lfu", *axes, "--trace", trace, "--out", folder / "s")
    for name in ("r", "s"):
        do(main, "report", folder / name, "-o", folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in ("r", "s")}


@pytest.mark.parametrize("name", ["r", "s"])
def test_plots_are_there_and_nothing_is_logged(name: str, pages: dict[str, Path], tmp_path: Path) -> None:
    """With the page's own policy in force, under which no other script runs."""
    dom, logged = dumped(pages[name], tmp_path / "profile")
    assert logged == []
    n_plots = dom.count('class="plot js-plotly-plot"')
    assert n_plots == dom.count('id="plot-') >= 1
    assert f'data-drawn="{n_plots}"' in dom
    assert "could not be drawn" not in dom.split("<script>")[0]
    assert "<title>hacked" not in dom


@pytest.mark.parametrize(("name", "width"), [("r", 0), ("r", 400), ("s", 400)])
def test_narrow_windows_keys_and_names(name: str, width: int, pages: dict[str, Path], tmp_path: Path) -> None:
    told = probed(pages[name], tmp_path, width)
    assert told["drawn"] == told["plots"] > 0
    assert told["wide"] <= told["window"] == (width or told["window"])
    assert told["title"] != "hacked"
    assert (told["imgs"], told["unnamed"], told["heads"], told["focusable"]) == (0, 0, 0, True)
    first, moved, zoomed, back = map(json.loads, told["ranges"])
    assert moved[0] > first[0]
    assert zoomed[1] - zoomed[0] < moved[1] - moved[0]
    assert back != zoomed


def test_the_camera_saves_each_plot_as_svg(pages: dict[str, Path], tmp_path: Path) -> None:
    """Under the page's own policy, which here lets in one more script by its digest."""
    text = pages["r"].read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(CAMERA.encode()).digest()).decode()
    text = text.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    inside = tmp_path / "camera.html"
    inside.write_text(text.replace("</body>", f"<script>{CAMERA}</script></body>"), encoding="utf-8")
    dom, logged = dumped(inside, tmp_path / "profile")
    assert logged == []
    (told,) = re.findall(r'data-told="([^"]*)"', dom)
    saved = json.loads(html.unescape(told))
    names = re.findall(r'id="plot-([^"]*)"', dom)
    assert sorted(name for name, _ in saved) == sorted(f"{name}.svg" for name in names)
    for _, svg in saved:
        assert svg.startswith("<svg")
        assert svg.count("<path") > 1


def test_a_sweep_is_asked_in_the_page(
    pages: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its selectors narrow what the sentence, the plot and the rows say; figures are written as the command does."""
    told = probed(pages["s"], tmp_path)
    assert {"axis hw", "axis label", "axis experts", "across", "up"} <= set(told["choices"])
    data = moesim(capsys, "report", pages["s"].with_suffix(""), "--json").json
    (explorer,) = [b for s in data["sections"] for b in s["blocks"] if b["kind"] == "explorer"]
    names = [column["name"] for column in explorer["columns"]]
    rows = [dict(zip(names, row, strict=True)) for row in explorer["rows"]]
    left = [row for row in rows if row["hw"] == "a6000"]
    from sim.base.units import show_bytes, show_seconds

    assert told["before"].startswith(f"Of {len(rows)} points the fastest lossless one: ")
    best = min(left, key=lambda row: row["tpot_s.mean"])
    cheapest = min(left, key=lambda row: (row["peak_vram_bytes"], row["tpot_s.mean"]))
    first, second = told["after"].split("\n")[:2]
    assert first.startswith(f"Of {len(left)} points the fastest lossless one: {best['label']}")
    assert f"TPOT {show_seconds(best['tpot_s.mean'])}, peak VRAM {show_bytes(best['peak_vram_bytes'])}" in first
    assert second.startswith(f"{len(left)} reach 100 s; with the least peak VRAM: {cheapest['label']}")
    assert len(told["rows"]) == len(left)
    cells = {cell for row in told["rows"] for cell in row}
    assert {show_seconds(row["tpot_s.mean"]) for row in left} <= cells


def test_colours_are_told_apart_without_red_or_green() -> None:
    """In simulated protanopia and deuteranopia (Vienot, Brettel and Mollon 1999) every two of them stay apart."""
    from itertools import combinations

    def linear(colour: str) -> list[float]:
        return [(int(colour[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)]

    def seen(colour: str, kind: str) -> list[float]:
        r, g, b = linear(colour)
        weights = {"protan": (0.11238, 0.88762, 0.00401), "deutan": (0.29275, 0.70725, -0.02234)}[kind]
        same = weights[0] * r + weights[1] * g
        blue = weights[2] * r - weights[2] * g + b
        return [max(0.0, x) ** (1 / 2.2) for x in (same, same, blue)]

    for kind in ("protan", "deutan"):
        for one, other in combinations(COLOURS, 2):
            apart = sum((x - y) ** 2 for x, y in zip(seen(one, kind), seen(other, kind), strict=True)) ** 0.5
            assert apart > 0.1, (kind, one, other)


def test_the_script_draws_with_the_same_colours() -> None:
    script = resources.files("sim.pages").joinpath("page.js").read_text(encoding="utf-8")
    for name, values in (("COLOURS", COLOURS), ("SYMBOLS", SYMBOLS), ("DASHES", DASHES)):
        (found,) = re.findall(rf"const {name} = (\[[^\]]*\])", script)
        assert tuple(json.loads(found)) == values
