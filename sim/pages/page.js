"use strict";
// Draws the plots of this page from the block of data in it, and fills in its explorers. Nothing is fetched.
(async () => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const wantsDark = window.matchMedia("(prefers-color-scheme: dark)");
  const drawn = [];
  let printing = false;

  // Plotly reads a little HTML in names; ours are text.
  const text = (value) => {
    if (typeof value === "string") return value.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
    return Array.isArray(value) ? value.map(text) : value;
  };
  const TEXTS = ["name", "text", "hovertext", "x", "y", "customdata", "legendgroup"];
  const shownTrace = (trace) => {
    const found = { ...trace };
    for (const key of TEXTS) if (key in found) found[key] = text(found[key]);
    return found;
  };

  const theme = () => {
    const dark = wantsDark.matches && !printing;
    return { soft: dark ? "#a2adb8" : "#5a646e", ink: dark ? "#e4e8ec" : "#1c2126", rule: dark ? "#333c45" : "#dfe4e8", ground: dark ? "#1c2228" : "#ffffff" };
  };
  const shownLayout = (layout, width) => {
    const { ink, soft, rule, ground } = theme();
    const narrow = width < 520;
    const found = {
      autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      font: { color: ink, size: narrow ? 11 : 13, family: "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif" },
      margin: { l: narrow ? 44 : 64, r: narrow ? 8 : 20, t: 28, b: 48 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
      legend: { orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom", font: { size: narrow ? 10 : 12 } },
      hoverlabel: { bgcolor: ground, bordercolor: ink, font: { color: ink }, align: "left", namelength: -1 },
      ...JSON.parse(JSON.stringify(layout)),
    };
    for (const key of ["xaxis", "yaxis", ...Object.keys(found).filter((name) => /^[xy]axis\d+$/.test(name))]) {
      const axis = found[key] || {};
      for (const name of ["ticktext", "categoryarray"]) if (axis[name]) axis[name] = text(axis[name]);
      found[key] = { gridcolor: rule, zerolinecolor: rule, linecolor: ink, automargin: true, ...axis };
    }
    for (const one of found.annotations || []) one.text = text(one.text);
    return found;
  };

  // plotly.js lies in the page compressed, at a third of its size; run, it defines `Plotly`.
  const unpack = async () => {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (byte) => byte.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script);
  };

  const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
  const draw = (box, traces, layout) => {
    const image = { format: "svg", filename: box.id.replace(/^plot-/, "") };
    try {
      const width = box.clientWidth;
      Plotly.react(box, traces.map(shownTrace), shownLayout(layout, width), { ...CONFIG, toImageButtonOptions: image, displayModeBar: width < 520 ? false : "hover" });
    } catch (error) {
      box.textContent = "This plot could not be drawn.";
      console.error(error);
    }
  };

  // The same with keys: a plot that has the focus moves and zooms.
  const byKey = (box) => {
    box.addEventListener("keydown", (event) => {
      if (event.target !== box || event.ctrlKey || event.metaKey || event.altKey) return;
      const change = {};
      const move = (name, share) => {
        const axis = box.layout[name];
        if (!axis || !axis.range || axis.fixedrange) return;
        const span = axis.range[1] - axis.range[0];
        change[`${name}.range`] = [axis.range[0] + share * span, axis.range[1] + share * span];
      };
      const zoom = (share) => {
        const axis = box.layout.xaxis;
        if (!axis || !axis.range) return;
        const span = axis.range[1] - axis.range[0];
        change["xaxis.range"] = [axis.range[0] + share * span, axis.range[1] - share * span];
      };
      if (event.key === "ArrowLeft") move("xaxis", -0.1);
      else if (event.key === "ArrowRight") move("xaxis", 0.1);
      else if (event.key === "ArrowUp") move("yaxis", 0.1);
      else if (event.key === "ArrowDown") move("yaxis", -0.1);
      else if (event.key === "+" || event.key === "=") zoom(0.2);
      else if (event.key === "-") zoom(-0.3);
      else if (event.key === "0") { change["xaxis.autorange"] = true; if (!(box.layout.yaxis || {}).fixedrange) change["yaxis.autorange"] = true; }
      else return;
      event.preventDefault();
      if (Object.keys(change).length) Plotly.relayout(box, change);
    });
  };

  // Units as the command line prints them (sim/base/units.py).
  const three = (value) => value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2);
  const scaled = (value, units, last) => {
    const sign = value < 0 ? "-" : "";
    const size = Math.abs(value);
    for (const [unit, scale] of units) if (size >= scale * 0.9995) return `${sign}${three(size / scale)} ${unit}`;
    return sign + last(size);
  };
  const show = (value, unit) => {
    if (value === null || value === undefined) return "–";
    if (typeof value === "boolean") return value ? "yes" : "no";
    if (typeof value === "string") return value;
    if (unit === "s") return scaled(value, [["s", 1], ["ms", 1e-3], ["us", 1e-6]], (size) => `${(size * 1e9).toFixed(0)} ns`);
    if (unit === "bytes") return scaled(value, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]], (size) => `${size.toFixed(0)} B`);
    if (unit === "frac") return `${(100 * value).toFixed(1)} %`;
    return Number.isInteger(value) ? value.toLocaleString("en-US") : Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 12 });
  };
  const axisOf = (column) => {
    const ticks = { s: ["~s", "s"], bytes: ["~s", "B"], frac: [".0%", ""] }[column.unit];
    return { title: { text: text(column.title) }, ...(ticks ? { tickformat: ticks[0], ticksuffix: ticks[1] } : {}) };
  };

  const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666"];
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x", "star", "cross", "hexagon"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
  const MOST_LINES = 28, MOST_ROWS = 40;
  const node = (tag, parts = {}, ...children) => {
    const found = document.createElement(tag);
    for (const [key, value] of Object.entries(parts)) found.setAttribute(key, value);
    found.append(...children);
    return found;
  };

  const explore = (box, data) => {
    const at = Object.fromEntries(data.columns.map((column, index) => [column.name, index]));
    const column = (name) => data.columns[at[name]];
    const cell = (row, name) => row[at[name]];
    const form = box.querySelector("form"), found = box.querySelector(".found"), plot = box.querySelector(".plot"), rowsBox = box.querySelector(".rows");
    const values = (name) => [...new Map(data.rows.map((row) => [JSON.stringify(cell(row, name)), cell(row, name)])).values()];
    const choosers = {};
    const chooser = (key, title, options, chosen) => {
      const select = node("select", { name: key });
      for (const [value, shown] of options) select.append(node("option", { value, ...(value === chosen ? { selected: "" } : {}) }, shown));
      form.append(node("label", {}, title, select));
      choosers[key] = select;
    };
    for (const name of data.axes) {
      const all = values(name);
      if (all.every((value) => value === null || typeof value === "number")) all.sort((a, b) => (a === null) - (b === null) || a - b);
      chooser(`axis ${name}`, column(name).title, [["*", `all ${all.length}`], ...all.map((value) => [JSON.stringify(value), value === null ? "default" : show(value, column(name).unit)])], "*");
    }
    const measures = data.measures.map((name) => [name, column(name).title]);
    chooser("across", "across", measures, data.x);
    chooser("up", "upwards", measures, data.y);
    const [aim, cost] = data.goal;
    const scale = column(aim).unit === "s" ? 1e-3 : 1;
    const goal = node("input", { type: "number", min: "0", step: "any", name: "goal" });
    form.append(node("label", {}, `goal: ${column(aim).title} at most${scale === 1 ? "" : " (ms)"}`, goal));
    form.addEventListener("submit", (event) => event.preventDefault());

    const where = (row, names) => names.map((name) => `${column(name).title} ${cell(row, name) === null ? "default" : show(cell(row, name), column(name).unit)}`).join(", ");
    const least = (rows, ...names) => rows.filter((row) => names.every((name) => cell(row, name) !== null))
      .reduce((best, row) => { if (!best) return row; for (const name of names) { const d = cell(row, name) - cell(best, name); if (d) return d < 0 ? row : best; } return best; }, null);
    const told = (row, open) => {
      const rest = where(row, open);
      return `${cell(row, data.label)}${rest ? ` (${rest})` : ""}: ${column(aim).title} ${show(cell(row, aim), column(aim).unit)}, ${column(cost).title} ${show(cell(row, cost), column(cost).unit)}`;
    };

    const update = () => {
      const rows = data.rows.filter((row) => data.axes.every((name) => { const value = choosers[`axis ${name}`].value; return value === "*" || value === JSON.stringify(cell(row, name)); }));
      const x = choosers.across.value, y = choosers.up.value;
      const open = data.axes.filter((name) => name !== data.label && new Set(rows.map((row) => JSON.stringify(cell(row, name)))).size > 1);
      const systems = rows.filter((row) => cell(row, "kind") === "system");
      const best = least(systems, aim, cost);
      const lines = [best ? `Of ${rows.length.toLocaleString("en-US")} points the fastest lossless one: ${told(best, open)}.` : `${rows.length.toLocaleString("en-US")} points, none of them a lossless system.`];
      const limit = goal.value === "" ? NaN : Number(goal.value) * scale;
      if (limit >= 0) {
        const reach = systems.filter((row) => cell(row, aim) !== null && cell(row, aim) <= limit);
        const cheapest = least(reach, cost, aim);
        lines.push(cheapest ? `${reach.length.toLocaleString("en-US")} reach ${show(limit, column(aim).unit)}; with the least ${column(cost).title}: ${told(cheapest, open)}.`
          : `No lossless one reaches ${show(limit, column(aim).unit)}.`);
      }
      const series = new Map();
      for (const row of rows) {
        if (cell(row, x) === null || cell(row, y) === null) continue;
        const rest = where(row, open.filter((name) => name !== x && !(x === cost && data.capacities.includes(name))));
        const key = cell(row, data.label) + (rest ? `, ${rest}` : "");
        if (!series.has(key)) series.set(key, []);
        series.get(key).push(row);
      }
      const shown = [...series].slice(0, MOST_LINES);
      if (series.size > MOST_LINES) lines.push(`${MOST_LINES} of ${series.size} lines are drawn: choose above to see the others.`);
      found.textContent = lines.join("\n");
      const traces = shown.map(([name, points], index) => {
        points.sort((a, b) => cell(a, x) - cell(b, x));
        const colour = COLOURS[index % COLOURS.length];
        const bound = points.every((row) => cell(row, "kind") === "bound");
        return {
          type: "scatter", mode: "lines+markers", name, x: points.map((row) => cell(row, x)), y: points.map((row) => cell(row, y)),
          line: { color: colour, width: 1.5, dash: DASHES[Math.floor(index / COLOURS.length + index) % DASHES.length] },
          marker: { color: colour, size: 8, symbol: SYMBOLS[index % SYMBOLS.length] + (bound ? "-open" : "") },
          hovertext: points.map((row) => `${told(row, open)}${cell(row, "note") ? `; ${cell(row, "note")}` : ""}`), hoverinfo: "text",
        };
      });
      if (x === cost && y === aim) {
        const front = [];
        for (const row of [...systems].filter((one) => cell(one, x) !== null && cell(one, y) !== null).sort((a, b) => cell(a, x) - cell(b, x) || cell(a, y) - cell(b, y)))
          if (!front.length || cell(row, y) < cell(front[front.length - 1], y)) front.push(row);
        if (front.length > 1) traces.unshift({ type: "scatter", mode: "lines", name: "Pareto front", x: front.map((row) => cell(row, x)), y: front.map((row) => cell(row, y)), line: { shape: "hv", color: "#7F7F7F", width: 7 }, opacity: 0.35, hoverinfo: "skip" });
      }
      const shapes = limit >= 0 && y === aim ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: limit, y1: limit, line: { color: "#7F7F7F", width: 1.5, dash: "dash" } }] : [];
      box.traces = traces;
      box.axes = { xaxis: axisOf(column(x)), yaxis: { ...axisOf(column(y)), rangemode: "tozero" }, shapes };
      draw(plot, traces, box.axes);

      const listed = [...rows].sort((a, b) => (cell(a, y) === null) - (cell(b, y) === null) || cell(a, y) - cell(b, y));
      const names = [data.label, ...open, ...new Set([y, x, ...data.measures]), "kind", "note"].filter((name, index, all) => name in at && all.indexOf(name) === index);
      const head = node("tr", {}, ...names.map((name) => node("th", { scope: "col", ...(isNumber(column(name)) ? { class: "number" } : {}) }, column(name).title)));
      const body = node("tbody", {}, ...listed.slice(0, MOST_ROWS).map((row) => node("tr", {}, ...names.map((name, index) =>
        node(index ? "td" : "th", { ...(index ? {} : { scope: "row" }), ...(isNumber(column(name)) ? { class: "number" } : {}) }, cell(row, name) === null && data.axes.includes(name) ? "default" : show(cell(row, name), column(name).unit))))));
      const of = listed.length > MOST_ROWS ? `The first ${MOST_ROWS} of ${listed.length.toLocaleString("en-US")} points` : "The points";
      const caption = `${of}, by ${column(y).title}.`;
      rowsBox.replaceChildren(node("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption }, node("table", {}, node("caption", {}, caption), node("thead", {}, head), body)));
    };
    form.addEventListener("input", update);
    byKey(plot);
    update();
    drawn.push(() => draw(plot, box.traces, box.axes));
  };
  const isNumber = (column) => ["s", "bytes", "frac", "n", "x"].includes(column.unit);

  document.getElementById("save").addEventListener("click", () => {
    const link = node("a", { download: `moesim-${page.kind}.json`, href: URL.createObjectURL(new Blob([`${JSON.stringify(page)}\n`], { type: "application/json" })) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  try {
    await unpack();
  } catch (error) {
    console.error("DecompressionStream: needs a browser of 2023 or newer", error);
  }
  for (const section of page.sections) {
    for (const block of section.blocks) {
      if (block.kind === "plot") {
        const box = document.getElementById(`plot-${block.name.replace(/[^\p{L}\p{N}-]/gu, "-")}`);
        draw(box, block.traces, block.layout);
        byKey(box);
        drawn.push(() => draw(box, block.traces, block.layout));
      } else if (block.kind === "explorer") {
        explore(document.getElementById(`explorer-${block.name.replace(/[^\p{L}\p{N}-]/gu, "-")}`), block);
      }
    }
  }
  const again = () => drawn.forEach((one) => one());
  wantsDark.addEventListener("change", again);
  window.addEventListener("beforeprint", () => { printing = true; again(); });
  window.addEventListener("afterprint", () => { printing = false; again(); });
  document.documentElement.dataset.drawn = String(drawn.length);
  document.dispatchEvent(new Event("drawn"));
})();
