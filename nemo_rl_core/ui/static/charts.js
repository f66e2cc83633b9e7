// Draws the curves of a run with uPlot in place of the page's SVG charts: a crosshair over all charts
// of a stage, zoom, full size, smoothing, logarithmic axis, export. Its state is in the address.
"use strict";
(() => {
  const host = document.querySelector("[data-charts]");
  const form = document.getElementById("choice");
  if (!host || !form || !window.uPlot) return;
  const page = document.documentElement;
  const shared = document.getElementById("charts-data"); // the curves of a page that is one file
  const DASHES = [[], [7, 4], [2, 4], [10, 3, 2, 3]];
  const TIMES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 18000, 43200, 86400, 172800, 432000, 864000];
  const COUNTS = Array.from({ length: 39 }, (_, n) => [1, 2, 5][n % 3] * 10 ** Math.floor(n / 3));
  const address = new URLSearchParams(location.search);
  const zoomed = (address.get("zoom") ?? "").split(":");
  let zoom = zoomed.length === 3 && zoomed.slice(1).every((end) => end && Number.isFinite(Number(end)))
    ? { stage: zoomed[0], from: Number(zoomed[1]), to: Number(zoomed[2]) } : null;
  let full = address.get("full") ?? "";
  const plots = new Map(); // by stage and metric
  let latest = null;
  let request = 0;

  const control = (name) => form.elements.namedItem(name);
  const number = (value) => value == null ? "–" : String(Number(value.toPrecision(4)));
  const style = (name) => getComputedStyle(page).getPropertyValue(name).trim();
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };

  function position(value, axis) {
    if (axis !== "time") return number(value);
    if (value < 60) return `${number(value)} s`;
    const minutes = Math.floor(value / 60);
    return minutes < 60 ? `${minutes} min ${Math.round(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }

  // ---- State in the address

  function choice() {
    const chosen = new URLSearchParams();
    if (control("metric").value) chosen.set("metric", control("metric").value);
    if (control("x").value !== "step") chosen.set("x", control("x").value);
    if (form.dataset.chosen) for (const box of form.querySelectorAll("[name=show]:checked")) chosen.append("show", box.value);
    return chosen;
  }

  function remember() {
    form.querySelector("[data-do=reset]").hidden = !zoom;
    if (shared) return; // a file has no address to keep state in
    const state = choice();
    if (Number(control("smooth").value)) state.set("smooth", control("smooth").value);
    if (control("log").checked) state.set("log", "1");
    if (zoom) state.set("zoom", `${zoom.stage}:${zoom.from}:${zoom.to}`);
    if (full) state.set("full", full);
    history.replaceState(null, "", state.size ? `?${state}` : location.pathname);
  }

  // ---- Data

  // The exponential mean as TensorBoard has it; of a thinned curve, over the means of its buckets.
  function smoothed(line, weight) {
    const { x, y, n } = line.means ?? line;
    let sum = 0;
    let norm = 0;
    return [x, y.map((value, index) => {
      if (value == null) return null;
      const kept = weight ** (n ? n[index] : 1);
      sum = kept * sum + (1 - kept) * value;
      norm = kept * norm + (1 - kept);
      return sum / norm;
    })];
  }

  function tables(chart) {
    const weight = Number(control("smooth").value);
    const values = [...chart.lines, ...chart.validation].flatMap((line) => line.y);
    const isLog = control("log").checked && values.some((value) => value > 0) && !values.some((value) => value < 0);
    const series = [];
    const joined = [];
    const add = (line, [x, y], kind) => {
      series.push({ line, kind });
      joined.push([x, isLog ? y.map((value) => value > 0 ? value : null) : y]);
    };
    for (const line of chart.lines) add(line, [line.x, line.y], weight ? "raw" : "line");
    if (weight) for (const line of chart.lines) add(line, smoothed(line, weight), "mean");
    for (const line of chart.validation) add(line, [line.x, line.y], "validation");
    return { series, isLog, data: joined.length ? uPlot.join(joined) : [[]] };
  }

  // ---- One chart

  function options(plot, { series, isLog }, width, height) {
    const quiet = style("--quiet");
    const grid = { stroke: style("--line"), width: 1 };
    const axis = { stroke: quiet, font: "12px system-ui, sans-serif", grid, ticks: { ...grid, size: 4 } };
    return {
      width, height,
      legend: { show: false },
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
      axes: [
        plot.axis === "time"
          ? { ...axis, size: 30, space: 50, incrs: TIMES, values: (_, all) => all.map(clock) }
          : { ...axis, size: 30, space: 50, incrs: COUNTS, values: (_, all) => all.map((value) => value == null ? "" : compact(value)) },
        { ...axis, size: 56, values: (_, all) => all.map((value) => value == null ? "" : compact(value)) },
      ],
      cursor: {
        sync: { key: plot.stage, scales: ["x", null] },
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
        dataIdx: nearest,
        bind: { dblclick: () => () => { reset(); } },
      },
      series: [{}, ...series.map(({ line, kind }) => {
        const color = style(`--s${line.color % 4}`);
        const isDot = kind === "validation";
        return {
          stroke: kind === "raw" ? `${color}59` : color,
          width: kind === "raw" ? 1 : line.color > 3 && line.color < 8 ? 1.2 : 2,
          dash: isDot ? [] : DASHES[line.color % 4],
          paths: isDot ? () => null : undefined,
          points: isDot ? { show: true, size: 9, width: 2, fill: style("--raised") }
            : { show: kind !== "mean" && line.x.length < 2 },
        };
      })],
      hooks: {
        setCursor: [() => showValues(plot)],
        setSelect: [(u) => select(plot, u)],
        draw: [(u) => draw(plot, u)],
      },
    };
  }

  // Seconds as 5 s, 2:30 or 1:05 h.
  function clock(seconds) {
    const two = (part) => String(part).padStart(2, "0");
    const minutes = Math.floor(seconds / 60);
    if (minutes < 1) return `${number(seconds)} s`;
    return minutes < 60 ? `${minutes}:${two(Math.round(seconds % 60))}` : `${Math.floor(minutes / 60)}:${two(minutes % 60)} h`;
  }

  function compact(value) {
    const size = Math.abs(value);
    if (size >= 1e4) return `${number(value / (size >= 1e9 ? 1e9 : size >= 1e6 ? 1e6 : 1e3))}${size >= 1e9 ? "G" : size >= 1e6 ? "M" : "k"}`;
    return size && size < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(5)));
  }

  // The nearest step with a value: lines of one chart have values at different steps.
  function nearest(u, index, hovered) {
    const values = u.data[index];
    if (index === 0 || values[hovered] != null) return hovered;
    for (let away = 1; away < values.length; away += 1) {
      for (const at of [hovered - away, hovered + away]) if (values[at] != null) return at;
    }
    return hovered;
  }

  function draw(plot, u) {
    const { ctx } = u;
    const { left, top, width, height } = u.bbox;
    const ratio = devicePixelRatio;
    const across = (x) => u.valToPos(x, "x", true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    ctx.strokeStyle = style("--line-strong");
    ctx.lineWidth = ratio;
    ctx.setLineDash([2 * ratio, 4 * ratio]);
    for (const { x } of plot.borders) {
      ctx.beginPath();
      ctx.moveTo(across(x), top);
      ctx.lineTo(across(x), top + height);
      ctx.stroke();
    }
    ctx.fillStyle = style("--bad");
    for (const alarm of plot.chart.alarms) {
      const from = across(alarm.from);
      ctx.globalAlpha = 0.1;
      ctx.fillRect(from, top, Math.max(across(alarm.to) - from, 2 * ratio), height);
      ctx.globalAlpha = 1;
      ctx.beginPath();
      ctx.moveTo(from - 6 * ratio, top);
      ctx.lineTo(from + 6 * ratio, top);
      ctx.lineTo(from, top + 9 * ratio);
      ctx.fill();
    }
    ctx.restore();
  }

  function swatch(line) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 22 8");
    svg.setAttribute("aria-hidden", "true");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", `curve s${line.color % 4}`);
    path.setAttribute("d", "M1 4H21");
    svg.append(path);
    return svg;
  }

  function showValues(plot) {
    const { u, built } = plot;
    const isHovered = u && u.cursor.left >= 0 && u.cursor.idx != null;
    const items = [];
    if (isHovered) items.push(make("li", { class: "quiet" }, plot.axis === "step" ? `step ${number(u.data[0][u.cursor.idx])}` : position(u.data[0][u.cursor.idx], plot.axis)));
    built.series.forEach(({ line, kind }, index) => {
      if (kind === "mean" && !isHovered) return;
      const y = isHovered ? u.data[index + 1][u.cursor.idxs[index + 1]] : line.y.findLast((value) => value != null);
      const name = [line.label, kind === "mean" ? "smoothed" : kind === "validation" ? "validation" : ""].filter(Boolean).join(" ");
      const text = `${name ? `${name} ` : ""}${isHovered ? "" : "last "}${number(y)}`;
      items.push(make("li", {}, ...(plot.chart.lines.length > 1 ? [swatch(line)] : []), text));
    });
    plot.values.replaceChildren(...items);
  }

  function select(plot, u) {
    const { left, width } = u.select;
    if (width < 5) return;
    const from = u.posToVal(left, "x");
    const to = u.posToVal(left + width, "x");
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    zoomTo(plot, from, to);
  }

  function zoomTo({ stage, axis }, from, to) {
    const isStep = axis === "step";
    const ends = isStep ? [Math.floor(from), Math.ceil(to)] : [from, to].map((end) => Number(end.toPrecision(6)));
    if (ends[1] <= ends[0]) return;
    if (zoom?.stage === stage && zoom.from === ends[0] && zoom.to === ends[1]) return;
    zoom = { stage, from: Math.max(0, ends[0]), to: ends[1] };
    remember();
    for (const plot of plots.values()) fit(plot);
    if (isStep) refresh();
  }

  function reset() {
    zoom = null;
    remember();
    refresh();
  }

  function fit(plot) {
    if (zoom?.stage === plot.stage) plot.u.setScale("x", { min: zoom.from, max: zoom.to });
    else plot.u.setData(plot.u.data, true);
  }

  function keys(plot, event) {
    const { u } = plot;
    const xs = u.data[0];
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -Math.ceil(xs.length / 20), PageDown: Math.ceil(xs.length / 20) }[event.key];
    if (move) {
      const at = Math.min(xs.length - 1, Math.max(0, (u.cursor.idx ?? xs.length) + move));
      u.setCursor({ left: u.valToPos(xs[at], "x"), top: u.over.clientHeight / 2 });
    } else if (event.key === "+" || event.key === "-") {
      const { min, max } = u.scales.x;
      const middle = u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : (min + max) / 2;
      const half = (max - min) * (event.key === "+" ? 0.25 : 1);
      zoomTo(plot, Math.max(xs[0] < min ? -Infinity : xs[0], middle - half), middle + half);
    } else if (event.key === "0") {
      reset();
    } else {
      return;
    }
    event.preventDefault();
  }

  // ---- Figures

  function newPlot(stage, chart) {
    const plot = { stage, chart, borders: [] };
    const button = (text, act) => {
      const one = make("button", { type: "button" }, text);
      one.addEventListener("click", act);
      return one;
    };
    plot.values = make("ul", { class: "values" });
    plot.area = make("div", { class: "plot", role: "img", tabindex: "0" });
    plot.alarm = make("div");
    plot.large = button("Enlarge", () => open(plot));
    const csv = make("a", { href: `${host.dataset.csv}?show=${encodeURIComponent(chart.name)}`, download: "" }, "CSV");
    const tools = make("div", { class: "tools", role: "group", "aria-label": `Tools for ${chart.title}` }, plot.large, ...(shared ? [] : [csv]),
      button("PNG", () => chartExport.png(plot.u, chart.title)), button("SVG", () => chartExport.svg(plot.u, chart.title)));
    plot.figure = make("figure", { class: "chart" }, make("figcaption", {}, make("span", {}, chart.title), tools), plot.values, plot.area, plot.alarm);
    plot.area.addEventListener("keydown", (event) => keys(plot, event));
    plot.area.addEventListener("focus", () => plot.values.setAttribute("aria-live", "polite"));
    plot.area.addEventListener("blur", () => plot.values.removeAttribute("aria-live"));
    new ResizeObserver(() => {
      if (plot.u && plot.area.clientWidth && plot.u.width !== plot.area.clientWidth) plot.u.setSize({ width: plot.area.clientWidth, height: plot.u.height });
    }).observe(plot.area);
    return plot;
  }

  function update(plot, chart, { axis, label, borders }, height = plot.u?.height ?? 200) {
    Object.assign(plot, { chart, axis, label, borders });
    const built = tables(chart);
    const shape = JSON.stringify([built.isLog, axis, built.series.map(({ line, kind }) => [line.label, line.color, kind, line.x.length < 2])]);
    plot.built = built;
    if (plot.u && plot.shape === shape && plot.u.height === height) {
      const { left, top } = plot.u.cursor;
      plot.u.setData(built.data, zoom?.stage !== plot.stage);
      if (zoom?.stage === plot.stage) fit(plot);
      if (left >= 0) plot.u.setCursor({ left, top }, false);
    } else {
      plot.u?.destroy();
      plot.shape = shape;
      plot.u = new uPlot(options(plot, built, plot.area.clientWidth || 320, height), built.data, plot.area);
      if (zoom?.stage === plot.stage) fit(plot);
    }
    const xs = built.data[0];
    const ends = xs.length ? `${position(xs[0], axis)} to ${position(xs.at(-1), axis)}` : "no values";
    const last = chart.lines.map((line) => `${line.label || "last value"} ${number(line.y.findLast((value) => value != null))}`).join("; ");
    plot.area.setAttribute("aria-label", `${chart.title} over ${label} ${ends}: ${last}. Arrow keys read values, + and − zoom.`);
    plot.alarm.replaceChildren(...chart.alarms.map((alarm) => make("p", { class: "alarm" },
      `▼ ${alarm.name}: ${alarm.condition}, ${alarm.isOver ? `until ${position(alarm.to, axis)}` : `since ${position(alarm.from, axis)}`}`)));
    showValues(plot);
  }

  function open(plot) {
    const place = make("div");
    plot.figure.replaceWith(place);
    const close = make("button", { type: "button" }, "Close");
    const dialog = make("dialog", { class: "full", "aria-label": plot.chart.title }, close, plot.figure);
    close.addEventListener("click", () => dialog.close());
    document.body.append(dialog);
    dialog.addEventListener("close", () => {
      full = "";
      remember();
      place.replaceWith(plot.figure);
      dialog.remove();
      plot.large.hidden = false;
      update(plot, plot.chart, plot, 200);
      plot.large.focus();
    });
    plot.large.hidden = true;
    dialog.showModal();
    full = plot.chart.name;
    remember();
    update(plot, plot.chart, plot, Math.max(240, Math.round(innerHeight * 0.66)));
  }

  // ---- The page

  async function read(extra = {}) {
    if (shared) return JSON.parse(shared.textContent);
    const chosen = choice();
    for (const [name, value] of Object.entries(extra)) chosen.set(name, value);
    const answer = await fetch(`${host.dataset.charts}?${chosen}`);
    if (!answer.ok) throw new Error(`${answer.status}`);
    return answer.json();
  }

  async function refresh() {
    request += 1;
    const mine = request;
    let data;
    try {
      data = await read();
      if (zoom && !shared && data.stages.some((stage) => stage.task === zoom.stage && stage.axis === "step")) {
        const detail = await read({ from: zoom.from, to: zoom.to });
        data.stages = data.stages.map((stage, index) => stage.task === zoom?.stage && detail.stages[index] ? detail.stages[index] : stage);
      }
    } catch {
      return; // the server is unreachable: the charts stay as they are
    }
    if (mine !== request) return;
    latest = data;
    if (data.stages.some((stage) => stage.charts.length && !place(stage))) await renewSections();
    const seen = new Set();
    for (const stage of data.stages) {
      const grid = place(stage);
      if (!grid) continue;
      const figures = stage.charts.map((chart) => {
        const key = `${stage.task} ${chart.name}`;
        seen.add(key);
        if (!plots.has(key)) plots.set(key, newPlot(stage.task, chart));
        return plots.get(key);
      });
      const inPlace = figures.filter((plot) => !plot.figure.closest("dialog"));
      if (inPlace.length === figures.length && (grid.children.length !== figures.length || figures.some((plot, index) => grid.children[index] !== plot.figure))) {
        grid.replaceChildren(...figures.map((plot) => plot.figure));
      }
      figures.forEach((plot, index) => update(plot, stage.charts[index], stage));
    }
    for (const [key, plot] of plots) {
      if (seen.has(key)) continue;
      plot.u?.destroy();
      plot.figure.remove();
      plots.delete(key);
    }
    host.dataset.drawn = String(Number(host.dataset.drawn ?? 0) + 1);
    const opened = [...plots.values()].find((plot) => plot.chart.name === full);
    if (opened && !document.querySelector("dialog.full")) open(opened);
  }

  function place(stage) {
    return host.querySelector(`[data-stage="${CSS.escape(stage.task)}"]`);
  }

  // A stage that has begun since: takes the sections of the page again.
  async function renewSections() {
    const answer = await fetch(location.href);
    if (!answer.ok) return;
    const newer = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("[data-charts]");
    if (newer) host.replaceChildren(...newer.childNodes);
  }

  function redraw() {
    if (!latest) return;
    for (const plot of plots.values()) {
      plot.shape = "";
      update(plot, plot.chart, plot);
    }
  }

  for (const hidden of form.querySelectorAll("[data-script]")) hidden.hidden = false;
  control("smooth").value = address.get("smooth") ?? "0";
  control("log").checked = address.get("log") === "1";
  if (address.has("show")) form.dataset.chosen = "yes";
  form.addEventListener("change", (event) => {
    if (event.target.name === "show") form.dataset.chosen = "yes";
    if (event.target.name === "x") zoom = null;
    remember();
    if (event.target.name === "log") redraw();
    else if (event.target.name === "show" || event.target.name === "x") refresh();
  });
  control("smooth").addEventListener("input", () => { remember(); redraw(); });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const before = new URLSearchParams(location.search).get("metric") ?? "";
    if (before === control("metric").value) return;
    delete form.dataset.chosen; // other metrics: the page has to offer them
    remember();
    location.reload();
  });
  form.querySelector("[data-do=reset]").addEventListener("click", reset);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  // live.js renews the other parts, from the light overview while the machine's curves are closed.
  delete host.dataset.live;
  page.dataset.liveFrom = host.dataset.overview;
  document.querySelector("[data-live=machine]")?.addEventListener("toggle", (event) => {
    if (event.target.open) delete page.dataset.liveFrom;
    else page.dataset.liveFrom = host.dataset.overview;
  }, true);
  document.addEventListener("renewed", refresh);
  form.querySelector("[data-do=reset]").hidden = !zoom;
  refresh();
})();
