"use strict";
// What both pages use: the embedded data, numbers as text, elements, colours, line charts, and redrawing. Text becomes
// text nodes and attributes only, never markup.
const plots = (() => {
  // --- the page ------------------------------------------------------------------------------------------------------

  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent); // all that is drawn
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // Calls redraw when the width of the window or the colour scheme changes.
  function onLayoutChange(redraw) {
    let width = innerWidth;
    let pending = 0;
    addEventListener("resize", () => {
      if (innerWidth === width) return; // only the height changes when a phone's address bar appears
      width = innerWidth;
      cancelAnimationFrame(pending);
      pending = requestAnimationFrame(redraw);
    });
    dark.addEventListener("change", redraw);
  }

  // The label, range and description of a statistic; an unknown one is labelled by its name.
  const metricOf = (table) => (name) => table[name] ?? { label: name.replaceAll("_", " "), about: "" };

  // --- words and numbers ---------------------------------------------------------------------------------------------

  function show(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-3 || size >= 1e6) return value.toExponential(1).replace("-", "−").replace("e+", "e");
    const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3;
    return value.toFixed(digits).replace("-", "−");
  }
  const signed = (value) => (value > 0 ? "+" : "") + show(value);
  const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
  // A value of the provenance: text, a number, or an object of such.
  function plain(value) {
    if (value === null || value === undefined || value === "") return "–";
    if (typeof value === "number") return value.toLocaleString("en");
    if (typeof value !== "object") return String(value);
    const text = Object.entries(value).map(([name, each]) => `${name}: ${plain(each)}`).join("; ") || "–";
    return text.length > 500 ? `${text.slice(0, 500)}…` : text;
  }
  const known = (values) => values.filter((v) => v !== null && v !== undefined && Number.isFinite(v));
  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

  // --- elements ------------------------------------------------------------------------------------------------------

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name.startsWith("aria-") && typeof value === "boolean") node.setAttribute(name, String(value));
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null));
    return node;
  }
  const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const option = (value, text, chosen = false) => html("option", { value, selected: chosen }, text);

  // --- colours -------------------------------------------------------------------------------------------------------

  // viridis, and vik / berlin (F. Crameri) for differences on a light / dark background: all perceptually uniform.
  const VIRIDIS = ["440154", "481a6c", "472f7d", "414487", "39568c", "31688e", "2a788e", "23888e", "1f988b", "22a884", "35b779", "54c568", "7ad151", "a5db36", "d2e21b", "fde725"];
  const VIK = ["001261", "033e7d", "1e6f9d", "71a8c4", "c9dde7", "ebe5e0", "eacebd", "d39774", "be6533", "8b2706", "590008"];
  const BERLIN = ["9eb0ff", "5ba4db", "2d75a0", "1a4256", "12202a", "191716", "2c1108", "501803", "8a3f2a", "c4756a", "ffacac"];

  function colour(table, share) {
    const at = Math.min(Math.max(share, 0), 1) * (table.length - 1);
    const i = Math.min(Math.floor(at), table.length - 2);
    const channel = (hex, c) => parseInt(hex.slice(2 * c, 2 * c + 2), 16);
    const mix = [0, 1, 2].map((c) => Math.round(channel(table[i], c) + (at - i) * (channel(table[i + 1], c) - channel(table[i], c))));
    return `rgb(${mix.join(",")})`;
  }

  // --- pieces of plots -----------------------------------------------------------------------------------------------

  const widthOf = (node) => Math.max(220, node.clientWidth);

  function ticks(low, high, wanted) {
    const rough = (high - low) / Math.max(wanted, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(Number((k * step).toPrecision(12)));
    return found;
  }
  const tickText = (value) => (Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? show(value) : String(value).replace("-", "−"));

  let gradients = 0;
  function drawLegend(host, table, title, marks) {
    const width = Math.min(widthOf(host), 320);
    const id = `gradient-${gradients++}`;
    const stops = table.map((hex, i) => svg("stop", { offset: i / (table.length - 1), "stop-color": `#${hex}` }));
    const labels = marks.map(([share, text]) =>
      svg("text", { x: share * width, y: 22, "text-anchor": share < 0.1 ? "start" : share > 0.9 ? "end" : "middle" }, text));
    host.replaceChildren(html("p", {}, title), svg("svg", { width, height: 26, role: "img", "aria-label": `Colours: ${title}` },
      svg("defs", {}, svg("linearGradient", { id }, stops)),
      svg("rect", { x: 0, y: 0, width, height: 9, rx: 2, fill: `url(#${id})` }), labels));
  }

  // A line chart. x: places from 0 to 1; marks: [[place, text]]; series: [{name, style, dashed, values}]; bands: [{name,
  // style, low, high}] are areas; levels: [[value, text]] are horizontal lines and events: [[place, style]] vertical
  // ones. The pointer and the arrow keys move the crosshair, or call onread instead. The function that is returned moves
  // the crosshair to a point.
  function drawLines(host, { x, at, marks, xTitle, yTitle, series, start, fromZero = true, ceiling = null, height = 200, log = false, bands = [], levels = [], events = [], onread = null }) {
    const [width, left, right, top, bottom] = [widthOf(host), 44, 12, 22, 36];
    const values = known([...series.flatMap((s) => s.values), ...bands.flatMap((b) => [...b.low, ...b.high]), ...levels.map(([v]) => v)]);
    let [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
    if (fromZero && !log) low = Math.min(0, low);
    if (ceiling !== null) high = Math.max(high, ceiling);
    if (low === high) high = low + 1;
    let steps = ticks(low, high, 4);
    if (log) {
      const powers = [];
      for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k++) powers.push(10 ** k);
      [low, high] = [powers[0], powers.at(-1)];
      steps = powers.filter((_, k) => k % Math.ceil(powers.length / 6) === 0);
    } else high = Math.max(high, steps.at(-1));
    const along = log ? (v) => Math.log10(v / low) / Math.log10(high / low) : (v) => (v - low) / (high - low);
    const X = (share) => left + share * (width - left - right);
    const Y = (value) => top + (1 - along(value)) * (height - top - bottom);
    const present = (v) => Number.isFinite(v) && v !== null;
    const lines = series.map((s) => {
      const points = s.values.map((v, i) => (present(v) ? [X(x[i]), Y(v)] : null));
      const path = points.map((p, i) => (p === null ? "" : `${points[i - 1] ? "L" : "M"}${p[0].toFixed(1)},${p[1].toFixed(1)}`)).join("");
      const dots = s.dashed || points.length > 24 ? [] : points.filter((p) => p).map(([cx, cy]) => svg("circle", { class: `dot ${s.style}`, cx, cy, r: 2.5 }));
      return [svg("path", { class: `line ${s.style}${s.dashed ? " dashed" : ""}`, d: path }), dots];
    });
    const areas = bands.map((b) => {
      const found = x.map((share, i) => [share, b.low[i], b.high[i]]).filter(([, l, h]) => present(l) && present(h));
      const edge = [...found.map(([share, , h]) => [share, h]), ...found.toReversed().map(([share, l]) => [share, l])];
      return svg("path", { class: `band ${b.style}`, d: edge.length ? `M${edge.map(([share, v]) => `${X(share).toFixed(1)},${Y(v).toFixed(1)}`).join("L")}Z` : "" });
    });
    const crosshair = svg("line", { class: "crosshair", y1: top, y2: height - bottom });
    const plot = svg("svg", { width, height, tabindex: 0, role: "img", "aria-label": `${yTitle} against ${xTitle}; arrow keys read values` },
      steps.map((v) => [
        svg("line", { class: "axis", x1: left, x2: width - right, y1: Y(v), y2: Y(v) }),
        svg("text", { x: left - 6, y: Y(v) + 4, "text-anchor": "end" }, tickText(v)),
      ]),
      marks.map(([share, text]) => svg("text", { x: X(share), y: height - bottom + 15, "text-anchor": "middle" }, text)),
      svg("text", { x: 0, y: 10 }, yTitle), svg("text", { x: X(0.5), y: height - 4, "text-anchor": "middle" }, xTitle),
      areas, events.map(([share, style]) => svg("line", { class: `event ${style}`, x1: X(share), x2: X(share), y1: top, y2: height - bottom })),
      levels.map(([v, text]) => [
        svg("line", { class: "line null dashed", x1: left, x2: width - right, y1: Y(v), y2: Y(v) }),
        svg("text", { x: left + 4, y: Y(v) - 4 }, text),
      ]), crosshair, lines);
    const out = html("output", { class: "readout" });
    const keys = html("div", { class: "keys" }, [...bands, ...series].map((s) => html("span", {},
      svg("svg", { width: 22, height: 8 }, s.low ? svg("rect", { class: `band ${s.style}`, width: 22, height: 8 }) : svg("line", { class: `line ${s.style}${s.dashed ? " dashed" : ""}`, x1: 0, x2: 22, y1: 4, y2: 4 })), s.name)));
    let current = start;
    function read(i) {
      current = i;
      crosshair.setAttribute("x1", X(x[i]));
      crosshair.setAttribute("x2", X(x[i]));
      const shown = [...series.map((s) => `${s.name} ${show(s.values[i])}`), ...bands.map((b) => `${b.name} ${show(b.low[i])} to ${show(b.high[i])}`)];
      out.textContent = `${at(i)}: ${shown.join(", ")}`;
    }
    const move = (i) => (onread === null ? read(i) : onread(i));
    plot.addEventListener("pointermove", (event) => {
      const share = (event.clientX - plot.getBoundingClientRect().left - left) / (width - left - right);
      move(x.reduce((best, v, i) => (Math.abs(v - share) < Math.abs(x[best] - share) ? i : best), 0));
    });
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      move(Math.min(Math.max(current + step, 0), x.length - 1));
    });
    host.replaceChildren(keys, plot, out);
    read(start);
    return read;
  }

  return {
    $, data, onLayoutChange, metricOf, show, signed, plural, plain, known, mean, html, svg, option, VIRIDIS, VIK, BERLIN, dark, colour, widthOf, ticks, tickText,
    drawLegend, drawLines,
  };
})();
