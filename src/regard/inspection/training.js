// The page of a training run. One state: the sample at the cursor, the layer, the metric. setCursor moves the cursor in
// every view.
(() => {
  const {
    $, data: record, onLayoutChange, metricOf, show, plural, plain, known, html, svg, option, VIRIDIS, colour, widthOf, ticks, tickText, drawLegend, drawLines,
  } = plots;

  // range: "share" is 0 to 1, "zero" is from 0 up, none is the range of the values.
  const METRICS = {
    entropy_norm: { label: "entropy / log n", range: "share", about: "Entropy as a share of its maximum over the keys a query may read, mean over queries." },
    entropy: { label: "entropy (nats)", range: "zero", about: "−Σ p log p: 0 if a query reads one key, log n if it reads all n keys equally." },
    max_score: { label: "largest score", about: "Largest score that any query of the layer gives to a key. Above 100 the training may diverge." },
    max_weight: { label: "largest weight", range: "share", about: "Weight of the key that a query reads most, mean over queries." },
    score_variance: { label: "score variance", range: "zero", about: "Variance of the scores under the weights: how strongly the entropy changes with the temperature." },
    first_key_mass: { label: "weight on the first key", range: "share", about: "The attention sink: the weight on the first key." },
    output_norm: { label: "output norm", range: "zero", about: "Norm of a head's output, mean over queries." },
  };
  const KINDS = { p10: "10 % quantile", p50: "median", p90: "90 % quantile", min: "lowest head", max: "highest head", all: "largest" };
  const metric = metricOf(METRICS);
  const kindName = (kind) => KINDS[kind] ?? kind;

  const { steps, layers, values, metrics, events } = record;
  const names = Object.keys(metrics);
  const order = ["entropy_norm", "max_score", "first_key_mass", "score_variance", "max_weight", "output_norm", "entropy"];
  names.sort((a, b) => ((order.indexOf(a) + 99) % 99) - ((order.indexOf(b) + 99) % 99));
  const kindsOf = (name) => Object.keys(KINDS).filter((kind) => kind in metrics[name]).concat(Object.keys(metrics[name]).filter((kind) => !(kind in KINDS)));
  const state = { cursor: steps.length - 1, layer: 0, metric: names[0], kind: kindsOf(names[0])[0], stretch: false };

  // Places along the axis of steps, for the charts and the map.
  const [first, last] = [steps[0], steps.at(-1)];
  const place = (step) => (last > first ? (step - first) / (last - first) : 0.5);
  const x = steps.map(place);
  const near = (step) => steps.reduce((best, s, i) => (Math.abs(s - step) < Math.abs(steps[best] - step) ? i : best), 0);
  const stepMarks = (width) => (last > first ? ticks(first, last, Math.max(2, Math.floor(width / 110))).map((s) => [place(s), tickText(s)]) : [[0.5, tickText(first)]]);
  const title = (event) => `${event.rule}${event.layer === null ? "" : ` in layer ${event.layer}`}`;

  // --- state ---------------------------------------------------------------------------------------------------------

  let readings = []; // functions that move the crosshairs of the charts
  let mapReading = () => {};
  let rows = [];
  function setCursor(i) {
    state.cursor = i;
    for (const read of readings) read(i);
    mapReading();
    rows.forEach((row, n) => row.classList.toggle("near", near(events[n].step) === i));
  }

  function setLayer(n) {
    state.layer = n;
    $("layer").value = String(n);
    drawLayer();
    mapReading();
  }

  // --- charts --------------------------------------------------------------------------------------------------------

  function chart(host, { yTitle, series, bands = [], levels = [], fromZero = false, ceiling = null, only = events }) {
    const all = known([...series.flatMap((s) => s.values), ...bands.flatMap((b) => [...b.low, ...b.high])]);
    const log = ceiling === null && all.length > 0 && Math.min(...all) > 0 && Math.max(...all) > 50 * Math.min(...all);
    const marked = only.map((event) => [Math.min(Math.max(place(event.step), 0), 1), event.severity]);
    return drawLines(host, {
      x, at: (i) => `step ${steps[i].toLocaleString("en")}`, marks: stepMarks(widthOf(host)), xTitle: "step",
      yTitle: log ? `${yTitle} (log scale)` : yTitle, series, bands, levels: log || levels.length === 0 || Math.max(...all) > levels[0][0] / 2 ? levels : [],
      start: state.cursor, fromZero, ceiling, log, height: 220, events: marked, onread: setCursor,
    });
  }

  function drawRun() {
    const some = (name) => name in values && known(values[name]).length > 0;
    readings = [];
    const charts = [["loss", "loss", "loss"], ["norm", "grad_norm", "gradient norm"], ["logit", "max_attention_logit", "largest score"]];
    for (const [id, name] of charts) $(`${id}-figure`).hidden = !some(name); // before the first is drawn, because they share the width
    for (const [id, name, yTitle] of charts.filter(([, name]) => some(name))) {
      const bands = id === "loss" && some("loss_min") ? [{ name: "since the last sample", style: "first", low: values.loss_min, high: values.loss_max }] : [];
      const levels = id === "logit" ? [[100, "alarm: 100"]] : [];
      readings.push(chart($(id), { yTitle, series: [{ name: yTitle, style: "first", values: values[name] }], bands, levels }));
    }
    readings.push((i) => drawnLayer(i));
  }

  let drawnLayer = () => {};
  function drawLayer() {
    const of = (kind) => metrics[state.metric][kind]?.[state.layer];
    const series = [];
    const bands = [];
    if (of("p10") && of("p90")) bands.push({ name: "10 to 90 %", style: "first", low: of("p10"), high: of("p90") });
    if (of("p50")) series.push({ name: "median", style: "first", values: of("p50") });
    for (const kind of ["min", "max", "all"]) if (of(kind)) series.push({ name: kindName(kind), style: kind === "all" ? "first" : "second", dashed: kind !== "all", values: of(kind) });
    const index = layers[state.layer][0];
    const levels = state.metric === "max_score" ? [[100, "alarm: 100"]] : [];
    const only = events.filter((event) => event.layer === index || event.layer === null);
    drawnLayer = chart($("lines"), { yTitle: metric(state.metric).label, series, bands, levels, only, fromZero: metric(state.metric).range !== undefined, ceiling: metric(state.metric).range === "share" ? 1 : null });
  }

  // --- the map: layer by step ----------------------------------------------------------------------------------------

  function drawMap() {
    const host = $("map");
    const table = metrics[state.metric][state.kind];
    const all = known(table.flat());
    let [low, high] = all.length ? [Math.min(...all), Math.max(...all)] : [0, 1];
    const range = state.stretch ? undefined : metric(state.metric).range;
    if (range === "share") [low, high] = [0, Math.max(1, high)];
    if (range === "zero") low = Math.min(0, low);
    const log = range === undefined && low > 0 && high > 50 * low;
    if (low === high) high = low + 1;
    const share = log ? (v) => Math.log(v / low) / Math.log(high / low) : (v) => (v - low) / (high - low);
    const [left, right, top] = [44, 12, 14];
    const width = widthOf(host);
    const cellHeight = Math.max(6, Math.min(26, Math.floor(460 / layers.length)));
    const height = top + cellHeight * layers.length + 18;
    const inner = width - left - right;
    // At most as many columns as can be told apart; each shows one sample.
    const stride = Math.ceil(steps.length / Math.max(1, Math.min(Math.floor(inner / 3), Math.floor(9000 / layers.length))));
    const shown = steps.map((_, i) => i).filter((i) => i % stride === 0);
    const edges = shown.map((i, k) => (k === 0 ? 0 : (x[shown[k - 1]] + x[i]) / 2)).concat(1);
    if (shown.length === 1) edges[1] = 1;
    const cells = layers.flatMap(([index], n) => shown.map((i, k) => {
      const value = table[n][i];
      const fine = value !== null && Number.isFinite(value);
      return svg("rect", {
        class: fine ? "cell" : "cell missing", "shape-rendering": "crispEdges", "data-layer": index, "data-step": steps[i], fill: fine ? colour(VIRIDIS, share(value)) : null,
        x: left + edges[k] * inner, y: top + n * cellHeight, width: Math.max(0.5, (edges[k + 1] - edges[k]) * inner + 0.4), height: cellHeight - (cellHeight > 9 ? 1 : 0),
        onpointerenter: () => setCursor(i), onclick: () => { setLayer(n); setCursor(i); },
      });
    }));
    const skip = [1, 2, 5, 10, 20].find((s) => s * cellHeight >= 13) ?? 20;
    const labels = layers.map(([index], n) => (n % skip ? null : svg("text", { x: left - 6, y: top + (n + 0.5) * cellHeight + 4, "text-anchor": "end" }, index)));
    const marks = stepMarks(inner).map(([at, text]) => svg("text", { x: left + at * inner, y: height - 3, "text-anchor": "middle" }, text));
    const flags = events.map((event) => {
      const at = left + Math.min(Math.max(place(event.step), 0), 1) * inner;
      return svg("path", { class: `flag ${event.severity}`, fill: "currentColor", d: `M${at},${top - 2}l-4,-8h8z` }, svg("title", {}, `step ${event.step}: ${title(event)}`));
    });
    const crosshair = svg("line", { class: "crosshair", y1: top, y2: top + cellHeight * layers.length });
    const chosen = svg("rect", { class: "mark edge", x: left, width: inner, height: cellHeight - (cellHeight > 9 ? 1 : 0), visibility: "visible" });
    chosen.style.visibility = "visible";
    host.replaceChildren(svg("svg", {
      width, height, tabindex: 0, role: "img", onkeydown: mapKey,
      "aria-label": `${metric(state.metric).label}, ${kindName(state.kind)}: ${plural(layers.length, "layer")} down, ${plural(steps.length, "sampled step")} across`,
    }, cells, labels, marks, flags, crosshair, chosen));
    mapReading = () => {
      const at = left + x[state.cursor] * inner;
      crosshair.setAttribute("x1", at);
      crosshair.setAttribute("x2", at);
      chosen.setAttribute("y", top + state.layer * cellHeight);
      const [index, name] = layers[state.layer];
      $("readout").textContent = `Step ${steps[state.cursor].toLocaleString("en")}, layer ${index}${name ? ` (${name})` : ""}: ${metric(state.metric).label}, ${kindName(state.kind)} ${show(table[state.layer][state.cursor])}`;
    };
    const text = (v) => tickText(Number(v.toPrecision(3)));
    const middle = log ? Math.sqrt(low * high) : (low + high) / 2;
    drawLegend($("map-legend"), VIRIDIS, `${metric(state.metric).label}, ${kindName(state.kind)}${log ? " (log scale)" : ""}`, [[0, text(low)], [0.5, text(middle)], [1, text(high)]]);
    $("about").textContent = metric(state.metric).about;
    mapReading();
  }

  function mapKey(event) {
    const [across, down] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [];
    if (across === undefined) return;
    event.preventDefault();
    if (across) setCursor(Math.min(Math.max(state.cursor + across, 0), steps.length - 1));
    else if (layers[state.layer + down]) setLayer(state.layer + down);
  }

  function drawKinds() {
    const kinds = kindsOf(state.metric);
    if (!kinds.includes(state.kind)) state.kind = kinds[0];
    $("kind-label").hidden = kinds.length < 2;
    $("kind").replaceChildren(...kinds.map((kind) => option(kind, kindName(kind), kind === state.kind)));
  }

  // --- events and provenance -----------------------------------------------------------------------------------------

  function goTo(event) {
    const n = layers.findIndex(([index]) => index === event.layer);
    if (n >= 0) {
      if (names.includes(event.metric) && state.metric !== event.metric) {
        state.metric = event.metric;
        $("metric").value = event.metric;
        drawKinds();
        drawMap();
      }
      setLayer(n);
    }
    setCursor(near(event.step));
  }

  function drawEvents() {
    const where = (event) => (event.layer === null ? "" : ` · layer ${event.layer}${event.head === null ? "" : `, head ${event.head}`}`);
    rows = events.map((event) => html("li", { "data-step": event.step, "data-rule": event.rule },
      html("div", { class: "controls" },
        html("button", { type: "button", class: "step", onclick: () => goTo(event) }, `step ${event.step.toLocaleString("en")}`),
        html("span", { class: `tag ${event.severity}` }, event.rule), html("span", { class: "hint" }, where(event))),
      html("p", {}, event.message),
      html("details", {}, html("summary", {}, "why it matters, and what people do"),
        html("p", {}, event.why), html("p", {}, event.remedy), html("p", { class: "source" }, `Rule: ${event.source}`))));
    $("events-list").replaceChildren(...(rows.length ? rows : [html("li", {}, "No events.")]));
  }

  function drawProvenance() {
    const about = { ...record.about, samples: record.samples };
    $("provenance").replaceChildren(html("tbody", {}, Object.entries(about).filter(([, value]) => plain(value) !== "–").map(([name, value]) =>
      html("tr", {}, html("th", { scope: "row" }, name), html("td", {}, plain(value))))));
    const heads = layers.reduce((sum, layer) => sum + layer[2], 0);
    const thinned = record.samples > steps.length ? `, ${steps.length} of them shown` : "";
    $("facts").textContent = `steps ${first.toLocaleString("en")} to ${last.toLocaleString("en")}, ${plural(record.samples, "sample")}${thinned}, ${plural(layers.length, "layer")}, ${plural(heads, "head")}`;
  }

  // --- start ---------------------------------------------------------------------------------------------------------

  $("metric").replaceChildren(...names.map((name) => option(name, metric(name).label, name === state.metric)));
  $("layer").replaceChildren(...layers.map(([index, name], n) => option(n, name ? `${index}: ${name}` : String(index), n === 0)));
  $("metric").addEventListener("change", () => { state.metric = $("metric").value; drawKinds(); drawMap(); drawLayer(); });
  $("kind").addEventListener("change", () => { state.kind = $("kind").value; drawMap(); });
  $("stretch").addEventListener("change", () => { state.stretch = $("stretch").checked; drawMap(); });
  $("layer").addEventListener("change", () => setLayer(Number($("layer").value)));
  function redraw() {
    drawRun();
    drawMap();
    drawLayer();
  }
  onLayoutChange(redraw);
  drawKinds();
  drawProvenance();
  drawEvents();
  redraw();
  const worst = events.find((event) => event.severity === "alarm") ?? events[0];
  if (worst) {
    setLayer(Math.max(0, layers.findIndex(([index]) => index === worst.layer)));
    setCursor(near(worst.step));
  } else setCursor(state.cursor);
})();
