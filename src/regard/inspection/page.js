"use strict";
// The report's views, drawn from the record in #data and nothing else. Text from the record only ever becomes text
// nodes and attributes, never markup. One state, changed by the functions under "state"; each view has a draw function.
(() => {
  const {
    show, signed, plural, known, mean, html, svg, option, VIRIDIS, VIK, BERLIN, dark, colour, widthOf, ticks, tickText,
    drawLegend, drawLines,
  } = plots;
  const { record, other, other_verdict, obstacle } = JSON.parse(document.getElementById("data").textContent);
  const comparing = other !== null && obstacle === null;
  const $ = (id) => document.getElementById(id);

  // --- words and numbers ---------------------------------------------------------------------------------------------

  // What tells most comes first, here and in the table. share: from 0 to 1; zero: from 0 up; neither: the range found.
  const METRICS = {
    entropy: { label: "entropy", unit: "nats", range: "zero", about: "−Σ p log p: 0 when a query reads one key, log n when it reads all n alike." },
    normalized_entropy: { label: "entropy / log n", range: "share", about: "Entropy as a share of its maximum over the keys a query may read." },
    score_variance: { label: "score variance", range: "zero", about: "Variance of the scores under the weights: how much the entropy answers to the temperature." },
    first_key_mass: { label: "weight on the first key", range: "share", about: "The attention sink: weight parked on the first key." },
    max_weight: { label: "largest weight", range: "share", about: "Weight of the key that a query reads most." },
    max_scores: { label: "largest score", about: "Largest score a query gives to a key. Above 100 training is in danger." },
    relative_norm: { label: "output norm / layer", range: "zero", about: "Norm of the head's output relative to the mean of its layer." },
    previous_token: { label: "previous-token score", range: "share", about: "Weight on the token before the query's own." },
    self_token: { label: "own-token score", range: "share", about: "Weight on the query's own token." },
    induction: { label: "induction score", range: "share", about: "Weight on what followed earlier copies of the query's token." },
    first_token: { label: "first-token score", range: "share", about: "Mean weight on the first token." },
    key_mass: { label: "most-read key", range: "share", about: "Largest mean weight on a key, by its position, over the queries that see it." },
    kl: { label: "KL to the prior", unit: "nats", range: "zero", about: "How far the weights are from “no key is special”." },
    collision: { label: "Σ p²", range: "share", about: "Chance that two draws hit the same key; 1 / Σ p² is the number of keys in use." },
    support: { label: "keys in use", unit: "keys", range: "zero", about: "Keys with a weight above zero." },
    mass: { label: "mass", range: "zero", about: "Σ p over real keys; less than 1 where a learned sink takes part." },
    value_spread: { label: "value spread", range: "zero", about: "Spread of the values that are averaged: Σ p ‖v‖² − ‖o‖²." },
    output_norm: { label: "output norm", range: "zero", about: "Norm of what the head gives a query." },
    cost: { label: "transport cost", about: "−Σ p s." },
    lse: { label: "log-sum-exp", about: "Log of the softmax denominator: the soft maximum of the scores." },
    dual: { label: "dual", about: "λ, the threshold that makes the weights of a row sum to its mass; for softmax the log-sum-exp." },
    value: { label: "optimal value", about: "What the row's problem achieves: expected score less the price of the divergence." },
    log_keys: { label: "log n", unit: "nats", range: "zero", about: "Log of the keys that a query may read: what the entropy would be if it read all alike." },
  };
  const metric = (name) => METRICS[name] ?? { label: name.replaceAll("_", " "), about: "" };
  const withUnit = (name) => metric(name).label + (metric(name).unit ? ` (${metric(name).unit})` : "");

  // A token with its white space made visible.
  function visible(token) {
    if (token === undefined || token === null) return "·";
    const text = token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍").replace(/^ | $/g, "␣");
    return text === "" ? "∅" : text;
  }

  // --- elements ------------------------------------------------------------------------------------------------------

  const tokenText = (token) => html("bdi", { class: "token", title: visible(token) }, visible(token));

  // --- the heads and their values ------------------------------------------------------------------------------------

  const heads = record.heads;
  const layers = [...new Set(heads.map((h) => h.layer))].sort((a, b) => a - b);
  const columns = [...new Set(heads.map((h) => h.head))].sort((a, b) => a - b);
  const place = (h) => `L${h.layer}H${h.head}`;
  const indexOf = new Map(heads.map((h, i) => [place(h), i]));
  const placed = new Map((comparing ? other.heads : []).map((h, i) => [place(h), i]));
  const twinIndex = heads.map((h) => placed.get(place(h))); // the same head in the other record
  const twin = twinIndex.map((i) => other?.heads[i]);
  const known_names = Object.keys(METRICS);
  const rank = (name) => (known_names.indexOf(name) + 1 || known_names.length + 1);
  const statistics = record.statistics
    .filter((name) => heads.some((h) => h.mean[name] !== null && h.mean[name] !== undefined))
    .sort((a, b) => rank(a) - rank(b));
  const findingsOf = heads.map(() => []);
  for (const f of record.findings) findingsOf[indexOf.get(place(f))]?.push(f);
  const grave = ["alarm", "warning", "note"];
  const names = comparing ? distinctNames() : [];

  function distinctNames() {
    const [a, b] = [record, other].map((r) => String(r.provenance?.model ?? "model"));
    return a === b ? [`${a} (first)`, `${b} (second)`] : [a, b];
  }

  const inFirst = (i, name, kind) => heads[i][kind]?.[name] ?? null;
  const inSecond = (i, name, kind) => twin[i]?.[kind]?.[name] ?? null;
  function difference(i, name, kind) {
    const [a, b] = [inFirst(i, name, kind), inSecond(i, name, kind)];
    return a === null || b === null ? null : b - a;
  }
  const reader = { first: inFirst, second: inSecond, difference };
  const valueOf = (i) => reader[state.view](i, state.metric, state.kind);

  // How the values of the chosen metric become colours: {low, high, table, share(value)}.
  function scaleOf(name, kind, view) {
    const all = heads.map((_, i) => i);
    if (view === "difference") {
      const most = Math.max(...known(all.map((i) => difference(i, name, kind))).map(Math.abs), 0) || 1;
      return { low: -most, high: most, table: dark.matches ? BERLIN : VIK, share: (v) => (v + most) / (2 * most) };
    }
    const found = known(all.flatMap((i) => (comparing ? [inFirst(i, name, kind), inSecond(i, name, kind)] : [inFirst(i, name, kind)])));
    let [low, high] = found.length ? [Math.min(...found), Math.max(...found)] : [0, 1];
    const range = state.stretch ? null : metric(name).range;
    if (range === "share") [low, high] = [0, 1];
    if (range === "zero") low = Math.min(0, low);
    if (low === high) high = low + 1;
    return { low, high, table: VIRIDIS, share: (v) => (v - low) / (high - low) };
  }

  // --- state ---------------------------------------------------------------------------------------------------------

  const state = {
    metric: statistics.includes("normalized_entropy") ? "normalized_entropy" : statistics[0],
    kind: "mean",
    view: "first",
    stretch: false, // colours over the values found, not over all that are possible
    selected: 0,
    cursor: null, // the head under the pointer or the arrow keys, in every view
    reading: 0, // the query shown in the window
    sort: { column: "place", down: false },
    rule: "",
    all: false,
  };

  function setCursor(i) {
    state.cursor = i;
    markCursor();
  }

  function select(i, { reveal = false } = {}) {
    state.selected = i;
    history.replaceState(null, "", `#${place(heads[i])}`);
    drawPanel();
    setCursor(i);
    if (reveal) $("panel").scrollIntoView({ block: "nearest", behavior: "auto" });
  }

  function fromAddress() {
    const i = indexOf.get(location.hash.slice(1));
    if (i !== undefined) select(i, { reveal: true });
    return i !== undefined;
  }

  function repaint() {
    drawMap();
    drawScatter();
    drawTable();
    markCursor();
  }

  // --- the map: layer by head ----------------------------------------------------------------------------------------

  let cells = [];
  let mapMarks = null;

  function drawMap() {
    const host = $("map");
    const scale = scaleOf(state.metric, state.kind, state.view);
    const [left, top] = [30, 18];
    const gap = columns.length > 40 ? 0 : 1;
    const cellWidth = Math.max(4, Math.min(56, Math.floor((widthOf(host) - left - 2) / columns.length)));
    const cellHeight = Math.max(7, Math.min(30, Math.max(cellWidth, 12), Math.floor(540 / layers.length)));
    const [width, height] = [left + cellWidth * columns.length + 2, top + cellHeight * layers.length + 2];
    cells = heads.map((h, i) => {
      const value = valueOf(i);
      return svg("rect", {
        class: value === null ? "cell missing" : "cell", "data-head": place(h), fill: value === null ? null : colour(scale.table, scale.share(value)),
        x: left + columns.indexOf(h.head) * cellWidth, y: top + layers.indexOf(h.layer) * cellHeight, width: cellWidth - gap, height: cellHeight - gap,
        onpointerenter: () => setCursor(i), onclick: () => select(i),
      });
    });
    const every = (size, room) => [1, 2, 5, 10].find((step) => step * size >= room) ?? 20;
    const [skipX, skipY] = [every(cellWidth, 18), every(cellHeight, 13)];
    const labels = [
      columns.map((c, j) => (j % skipX ? null : svg("text", { x: left + (j + 0.5) * cellWidth, y: top - 5, "text-anchor": "middle" }, c))),
      layers.map((l, i) => (i % skipY ? null : svg("text", { x: left - 6, y: top + (i + 0.5) * cellHeight + 4, "text-anchor": "end" }, l))),
    ];
    mapMarks = ["halo", "edge"].map((style) => svg("rect", { class: `mark ${style}`, width: cellWidth - gap, height: cellHeight - gap }));
    const chosen = svg("rect", { class: "mark edge chosen", width: cellWidth - gap, height: cellHeight - gap, "stroke-dasharray": "3 2" });
    mapMarks.chosen = chosen;
    host.replaceChildren(svg("svg", {
      width, height, tabindex: 0, role: "img", onkeydown: mapKey,
      "aria-label": `${withUnit(state.metric)} of every head: ${plural(layers.length, "layer")} down, ${plural(columns.length, "head")} across`,
    }, labels, cells, chosen, mapMarks), html("p", { class: "hint" }, "layer ↓, head →"));
    const title = `${withUnit(state.metric)}, ${$("kind").selectedOptions[0].text} over queries${state.view === "difference" ? `: ${names[1]} minus ${names[0]}` : ""}`;
    const middle = (scale.low + scale.high) / 2;
    const text = (v) => (state.view === "difference" && v > 0 ? "+" : "") + tickText(Number(v.toPrecision(3)));
    drawLegend($("map-legend"), scale.table, title, [0, 0.5, 1].map((share, k) => [share, text([scale.low, middle, scale.high][k])]));
    $("about").textContent = metric(state.metric).about;
  }

  function mapKey(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const from = heads[state.cursor ?? state.selected];
    if (event.key in moves) {
      const [down, across] = moves[event.key];
      const layer = layers[layers.indexOf(from.layer) + down];
      const head = columns[columns.indexOf(from.head) + across];
      const i = indexOf.get(`L${layer}H${head}`);
      if (i !== undefined) setCursor(i);
    } else if (event.key === "Enter" || event.key === " ") select(state.cursor ?? state.selected);
    else return;
    event.preventDefault();
  }

  // The cursor is one head, shown in the map, the scatter, the table and in words.
  function markCursor() {
    const i = state.cursor;
    const put = (mark, target, names_) => {
      if (!target) mark.style.visibility = "hidden";
      else {
        for (const name of names_) mark.setAttribute(name, target.getAttribute(name));
        mark.style.visibility = "visible";
      }
    };
    for (const mark of mapMarks) put(mark, cells[i], ["x", "y"]);
    put(mapMarks.chosen, cells[state.selected], ["x", "y"]);
    for (const mark of pointMarks) put(mark, points[i], ["cx", "cy"]);
    for (const row of $("table").querySelectorAll("tr.cursor, tr.selected")) row.classList.remove("cursor", "selected");
    tableRows.get(i)?.classList.add("cursor");
    tableRows.get(state.selected)?.classList.add("selected");
    if (i === null) return;
    const h = heads[i];
    const tags = findingsOf[i].map((f) => f.rule).join(", ");
    const text = state.view === "difference" ? signed(valueOf(i)) : show(valueOf(i));
    const sides = comparing ? ` (${show(inFirst(i, state.metric, state.kind))} → ${show(inSecond(i, state.metric, state.kind))})` : "";
    $("readout").textContent = `Layer ${h.layer}, head ${h.head}: ${metric(state.metric).label} ${text}${metric(state.metric).unit ? ` ${metric(state.metric).unit}` : ""}${sides}${tags ? ` · ${tags}` : ""}`;
  }

  // --- the scatter ---------------------------------------------------------------------------------------------------

  let points = [];
  let pointMarks = [];

  function drawScatter() {
    const host = $("scatter");
    const read = state.view === "second" ? inSecond : inFirst;
    const needed = ["normalized_entropy", "score_variance"];
    $("scatter-section").hidden = !needed.every((name) => statistics.includes(name));
    if ($("scatter-section").hidden) return;
    const [width, height, left, right, top, bottom] = [Math.min(widthOf(host), 560), 300, 54, 12, 10, 38];
    const both = heads.map((_, i) => needed.map((name) => read(i, name, "mean")));
    const most = Math.max(...known(both.map((p) => p[1])), 0.1);
    const high = ticks(0, most, 4).at(-1) < most ? most * 1.05 : most;
    const X = (v) => left + v * (width - left - right);
    const Y = (v) => top + (1 - Math.sqrt(Math.max(v, 0) / high)) * (height - top - bottom); // roots spread the many small ones
    const marks = ticks(0, Math.sqrt(high), 4).map((r) => Number((r * r).toPrecision(2)));
    points = heads.map((h, i) => {
      const [x, y] = both[i];
      if (x === null || y === null) return null;
      const sink = read(i, "first_key_mass", "mean");
      return svg("circle", {
        class: "point", "data-head": place(h), cx: X(x), cy: Y(y), r: heads.length > 600 ? 3 : 4.5, fill: sink === null ? "var(--muted)" : colour(VIRIDIS, sink),
        onpointerenter: () => setCursor(i), onclick: () => select(i),
      });
    });
    pointMarks = ["halo", "edge"].map((style) => svg("circle", { class: `mark ${style}`, r: 7 }));
    const order = heads.map((_, i) => i).filter((i) => points[i]).sort((a, b) => both[a][0] - both[b][0]);
    const key = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step !== undefined) setCursor(order[Math.min(Math.max(order.indexOf(state.cursor) + step, 0), order.length - 1)]);
      else if (event.key === "Enter") select(state.cursor ?? state.selected);
      else return;
      event.preventDefault();
    };
    host.replaceChildren(svg("svg", { width, height, tabindex: 0, role: "img", onkeydown: key, "aria-label": "Score variance against entropy / log n; left and right move by entropy, Enter opens" },
      [0, 0.25, 0.5, 0.75, 1].map((v) => [
        svg("line", { class: "axis", x1: X(v), x2: X(v), y1: top, y2: height - bottom }),
        svg("text", { x: X(v), y: height - bottom + 15, "text-anchor": "middle" }, v),
      ]),
      [...new Set(marks)].map((v) => [
        svg("line", { class: "axis", x1: left, x2: width - right, y1: Y(v), y2: Y(v) }),
        svg("text", { x: left - 6, y: Y(v) + 4, "text-anchor": "end" }, tickText(v)),
      ]),
      svg("text", { x: X(0.5), y: height - 4, "text-anchor": "middle" }, "mean entropy / log n"),
      svg("text", { x: 12, y: top + (height - top - bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${top + (height - top - bottom) / 2})` }, "mean score variance (root scale)"),
      points, pointMarks));
    if (statistics.includes("first_key_mass")) drawLegend($("scatter-legend"), VIRIDIS, "mean weight on the first key (sink)", [[0, "0"], [0.5, "0.5"], [1, "1"]]);
  }

  // --- one head ------------------------------------------------------------------------------------------------------

  const inView = () => (state.view === "second" ? other : record);
  const seat = () => (state.view === "second" ? twinIndex[state.selected] : state.selected);

  function drawPanel() {
    const i = state.selected;
    const h = heads[i];
    $("panel-title").textContent = `Layer ${h.layer}, head ${h.head}${comparing ? ` · ${state.view === "second" ? names[1] : names[0]}` : ""}`;
    const main = ["entropy", "normalized_entropy", "score_variance", "first_key_mass", "max_scores", "relative_norm"].filter((name) => statistics.includes(name));
    const read = state.view === "second" ? inSecond : inFirst;
    $("numbers").replaceChildren(...main.map((name) => html("div", {}, html("b", {}, show(read(i, name, "mean"))), html("span", {}, withUnit(name)))));
    const found = inView().findings.filter((f) => f.layer === h.layer && f.head === h.head);
    $("panel-findings").replaceChildren(...found.map((f) => html("li", {}, tag(f), ` ${f.message}`)));
    drawPosition();
    drawPath();
    drawWindow();
    drawTop();
    drawStatistics();
  }

  const tag = (f) => html("span", { class: `tag ${f.severity}` }, f.rule);

  function drawPosition() {
    const positions = record.positions;
    $("position-figure").hidden = !positions || !Object.keys(positions.values ?? {}).length;
    if ($("position-figure").hidden) return;
    const name = $("position-statistic").value;
    const bins = positions.rows.map((_, i) => i);
    // The last bin may reach beyond the longest sequence.
    const longest = record.provenance?.longest ?? Infinity;
    const end = (i) => Math.max(positions.edges[i] + 1, Math.min(positions.edges[i + 1] ?? 0, longest));
    const span = (i) => {
      const [from, to] = [positions.edges[i], end(i)];
      return positions.edges[i + 1] === undefined ? `${from}+` : to - from <= 1 ? `${from}` : `${from}–${to - 1}`;
    };
    // Logarithmic in the number of keys so far: the null of a causal model is a straight line.
    const middle = bins.map((i) => (positions.edges[i] + end(i) - 1) / 2);
    const along = (v) => (middle.at(-1) > 0 ? Math.log1p(v) / Math.log1p(middle.at(-1)) : 0.5);
    const x = middle.map(along);
    const marks = [0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144].filter((v) => v <= middle.at(-1));
    const series = [{ name: comparing ? names[0] : "this head", style: "first", values: positions.values[name][state.selected] }];
    if (comparing && sameBins()) series.push({ name: names[1], style: "second", values: (other.positions.values[name]?.[twinIndex[state.selected]] ?? []).slice(0, bins.length) });
    if (name === "entropy") series.push({ name: "null: all keys alike", style: "null", dashed: true, values: positions.null_entropy[state.selected] });
    drawLines($("position"), {
      x, series, start: bins.length - 1, at: (i) => `position ${span(i)}`, xTitle: "position of the query (log scale)", yTitle: withUnit(name),
      marks: marks.filter((_, k) => marks.length < 7 || k % 2 === 0).map((v) => [along(v), String(v)]),
    });
  }
  // One text may be longer than the other; bins that both have must be the same.
  const sameBins = () => {
    const [a, b] = [record, other].map((r) => r.positions?.edges ?? []);
    const both = Math.min(a.length, b.length);
    return both > 1 && a.slice(0, both - 1).every((edge, i) => edge === b[i]);
  };

  const PATHS = { entropy: "entropy (nats)", expected_score: "expected score" };
  function drawPath() {
    const paths = record.paths;
    $("path-figure").hidden = !paths;
    if (!paths) return;
    const name = $("path-statistic").value;
    const logs = paths.temperature.map(Math.log);
    const x = logs.map((v) => (v - logs[0]) / (logs.at(-1) - logs[0] || 1));
    const series = [{ name: comparing ? names[0] : "this head", style: "first", values: paths[name][state.selected] }];
    const same = comparing && JSON.stringify(other.paths?.temperature) === JSON.stringify(paths.temperature);
    if (same) series.push({ name: names[1], style: "second", values: other.paths[name]?.[twinIndex[state.selected]] ?? [] });
    drawLines($("path"), {
      x, series, start: logs.reduce((best, v, i) => (Math.abs(v) < Math.abs(logs[best]) ? i : best), 0), at: (i) => `τ = ${paths.temperature[i]}`, xTitle: `temperature τ (1: the model's own)${paths.rows ? `, ${plural(paths.rows, "sampled row")}` : ""}`, yTitle: PATHS[name] ?? name,
      fromZero: name === "entropy", marks: x.map((share, i) => [share, String(paths.temperature[i])]),
    });
  }

  function drawTop() {
    const top = inView().top_keys;
    $("top-figure").hidden = !top || !top.queries.length;
    if ($("top-figure").hidden) return;
    const kept = Math.max(top.queries.indexOf(Number($("query").value)), 0);
    const at = $("query").options.length ? kept : top.queries.length - 1;
    $("query").replaceChildren(...top.queries.map((q, k) => option(q, `${q} ${visible(top.tokens[q])}`, k === at)));
    const [keys, weights] = [top.keys[seat()][at], top.weights[seat()][at]];
    const rows = keys.map((key, k) => [key, weights[k]]).filter(([, weight]) => weight >= 5e-4);
    $("top").replaceChildren(...rows.map(([key, weight]) => {
      const bar = html("span", { class: "bar" });
      bar.style.width = `${Math.max(100 * weight, 0.5)}%`;
      return html("li", {}, html("span", { class: "place" }, key), tokenText(top.tokens[key]), html("span", {}, bar), html("span", { class: "number" }, show(weight)));
    }), rows.length < keys.length ? html("li", { class: "hint rest" }, rows.length ? "The others get less than 0.0005 each." : "No key gets 0.0005 or more.") : "");
  }

  function windowWeights() {
    const bytes = atob(inView().window.weights[seat()]);
    return (q, k, size) => (bytes.charCodeAt(q * size + k) / 255) ** 2; // stored as round(255 * sqrt(p))
  }

  const MARGIN = 10; // right of the matrix, where a triangle points at the query that is read

  function drawWindow() {
    const view = inView().window;
    $("window-figure").hidden = $("strip-figure").hidden = !view || !view.tokens.length;
    if ($("window-figure").hidden) return;
    const size = view.tokens.length;
    const weight = windowWeights();
    const canvas = $("window");
    const cell = Math.max(3, Math.floor((Math.min(widthOf(canvas.parentElement), 420) - MARGIN) / size));
    const ratio = window.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [cell * size + MARGIN, cell * size].map((length) => Math.round(length * ratio));
    canvas.style.width = `${cell * size + MARGIN}px`;
    canvas.style.height = `${cell * size}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const css = getComputedStyle(document.documentElement);
    const all = view.tokens.map((_, i) => i);
    const causal = all.every((q) => all.every((k) => k <= q || weight(q, k, size) === 0));
    for (const q of all) {
      for (const k of causal ? all.slice(0, q + 1) : all) {
        pen.fillStyle = colour(VIRIDIS, Math.sqrt(weight(q, k, size)));
        pen.fillRect(k * cell, q * cell, cell, cell);
      }
    }
    state.reading = Math.min(state.reading || size - 1, size - 1);
    const tip = [(causal ? state.reading + 1 : size) * cell + 1, (state.reading + 0.5) * cell];
    pen.fillStyle = css.getPropertyValue("--ink");
    pen.beginPath();
    pen.moveTo(...tip);
    pen.lineTo(tip[0] + 8, tip[1] - 5);
    pen.lineTo(tip[0] + 8, tip[1] + 5);
    pen.fill();
    drawLegend($("window-legend"), VIRIDIS, "weight (root scale); queries ↓ read keys →", [0, 0.25, 0.5, 0.75, 1].map((r) => [r, tickText(Number((r * r).toPrecision(2)))]));
    const strip = view.tokens.map((token, k) => {
      const button = html("button", { type: "button", "aria-pressed": k === state.reading, tabindex: k === state.reading ? 0 : -1, title: `position ${view.start + k}: ${show(weight(state.reading, k, size))}`, onclick: () => pick(k), onkeydown: stripKey }, tokenText(token));
      const share = Math.sqrt(weight(state.reading, k, size));
      button.style.backgroundColor = share > 0 ? `color-mix(in srgb, var(--first) ${Math.round(70 * share)}%, transparent)` : "";
      return button;
    });
    $("strip").replaceChildren(...strip);
    readWindow(state.reading, null);
  }

  function readWindow(q, k) {
    const view = inView().window;
    const size = view.tokens.length;
    const name = (i) => `${view.start + i} “${visible(view.tokens[i])}”`;
    const weight = windowWeights();
    if (k === null) {
      for (let j = 0, most = -1; j < size; j++) if (weight(q, j, size) > most) [k, most] = [j, weight(q, j, size)];
      $("window-readout").textContent = `${name(q)} reads ${name(k)} most: ${show(weight(q, k, size))}`;
    } else $("window-readout").textContent = `${name(q)} reads ${name(k)}: ${show(weight(q, k, size))}`;
  }

  function pick(q, { focus = true } = {}) {
    state.reading = q;
    drawWindow();
    if (focus) $("strip").children[q]?.focus();
  }

  function stripKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    pick(Math.min(Math.max(state.reading + step, 0), inView().window.tokens.length - 1));
  }

  function windowAt(event) {
    const box = $("window").getBoundingClientRect();
    const size = inView().window.tokens.length;
    const index = (offset, length) => Math.min(Math.max(Math.floor((offset / length) * size), 0), size - 1);
    return [index(event.clientY - box.top, box.height), index(event.clientX - box.left, box.width - MARGIN)];
  }

  function windowKey(event) {
    const move = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    pick(Math.min(Math.max(state.reading + move, 0), inView().window.tokens.length - 1), { focus: false });
  }

  function drawStatistics() {
    const i = state.selected;
    const kinds = [...$("kind").options].map((choice) => [choice.value, choice.text]);
    const sides = comparing ? [[inFirst, names[0]], [inSecond, names[1]]] : [[inFirst, ""]];
    const title = sides.flatMap(([, name]) => kinds.map(([, word]) => html("th", { scope: "col" }, name ? `${word}, ${name}` : word)));
    $("statistics").replaceChildren(
      html("thead", {}, html("tr", {}, html("th", { scope: "col" }, "statistic"), title)),
      html("tbody", {}, statistics.map((name) => html("tr", {}, html("th", { scope: "row" }, withUnit(name)),
        sides.flatMap(([read]) => kinds.map(([kind]) => html("td", {}, show(read(i, name, kind)))))))));
  }

  // --- findings ------------------------------------------------------------------------------------------------------

  const linkTo = (i, text) => html("a", { href: `#${place(heads[i])}`, onpointerenter: () => setCursor(i), onclick: (event) => { event.preventDefault(); select(i, { reveal: true }); } }, text);

  function drawFindings() {
    const groups = new Map();
    for (const f of record.findings) {
      const key = `${f.severity} ${f.rule}`;
      groups.set(key, [...(groups.get(key) ?? []), f]);
    }
    if (!groups.size) $("findings-list").replaceChildren(html("p", {}, "No rule applies to any head."));
    else $("findings-list").replaceChildren(...[...groups.values()].map((group) => {
      const [f] = group;
      const single = group.filter((g) => indexOf.has(place(g)));
      const general = group.filter((g) => g.layer === null);
      const links = single.map((g) => html("li", {}, linkTo(indexOf.get(place(g)), `L${g.layer} H${g.head}`), ` ${show(g.value)}`));
      return html("details", { class: "group", open: f.severity !== "note" },
        html("summary", {}, tag(f), " ", html("b", {}, single.length ? plural(single.length, "head") : general.every((g) => g.value === null) ? "not checked" : "the model")),
        general.map((g) => html("p", {}, g.message)),
        links.length ? html("ul", { class: "links" }, links) : null,
        html("p", {}, f.why), html("p", {}, html("b", {}, "What people do: "), f.remedy), html("p", { class: "source" }, `Rule: ${f.source}`));
    }));
  }

  // --- the table -----------------------------------------------------------------------------------------------------

  let tableRows = new Map();

  function tableColumns() {
    const compared = comparing ? [
      ["first", `${metric(state.metric).label}, ${names[0]}`, (i) => inFirst(i, state.metric, state.kind), show],
      ["second", `${metric(state.metric).label}, ${names[1]}`, (i) => inSecond(i, state.metric, state.kind), show],
      ["difference", "difference", (i) => difference(i, state.metric, state.kind), signed],
    ] : [];
    return [...compared, ...statistics.map((name) => [name, withUnit(name), (i) => inFirst(i, name, "mean"), show])];
  }

  function drawTable() {
    const shown = tableColumns();
    const { column, down } = state.sort;
    const read = shown.find(([id]) => id === column)?.[2] ?? ((i) => (column === "findings" ? findingsOf[i].length : i));
    const order = heads.map((_, i) => i).filter((i) => !state.rule || findingsOf[i].some((f) => f.rule === state.rule));
    order.sort((a, b) => {
      const [x, y] = [read(a), read(b)];
      if (x === null || y === null) return (x === null) - (y === null) || a - b; // unknown values last, either way
      return (down ? y - x : x - y) || a - b;
    });
    const limit = state.all ? order.length : Math.min(order.length, 200);
    const head = (id, text, style, about) => html("th", { scope: "col", class: style, title: about, "aria-sort": column === id ? (down ? "descending" : "ascending") : null },
      html("button", { type: "button", "data-column": id, onclick: () => sortBy(id) }, text));
    tableRows = new Map(order.slice(0, limit).map((i) => {
      const row = html("tr", { "data-head": place(heads[i]), onpointerenter: () => setCursor(i) },
        html("th", { scope: "row" }, linkTo(i, `L${heads[i].layer} H${heads[i].head}`)),
        shown.map(([, , value, text]) => html("td", {}, text(value(i)))),
        html("td", { class: "text" }, findingsOf[i].map((f) => [tag(f), " "])));
      return [i, row];
    }));
    $("table").replaceChildren(
      html("thead", {}, html("tr", {}, head("place", "head"), shown.map(([id, text]) => head(id, text, null, metric(id).about)), head("findings", "findings", "text"))),
      html("tbody", {}, [...tableRows.values()]));
    $("count").textContent = `${plural(order.length, "head")}${column === "place" && !down ? "" : ", sorted"}`;
    $("more").hidden = limit === order.length;
    $("more").textContent = `Show all ${order.length.toLocaleString("en")}`;
  }

  function sortBy(column) {
    // Numbers are first asked for with the largest on top.
    const down = state.sort.column === column ? !state.sort.down : column !== "place";
    state.sort = { column, down };
    drawTable();
    markCursor();
    $("table").querySelector(`[data-column="${CSS.escape(column)}"]`).focus();
  }

  // --- the comparison and where it all comes from --------------------------------------------------------------------

  function drawComparison() {
    if (other === null) return;
    $("comparison").hidden = false;
    $("compared").hidden = false;
    $("compared").dataset.severity = grave.find((s) => other.findings.some((f) => f.severity === s)) ?? "note";
    $("compared").textContent = `Compared with ${other.provenance?.model ?? "another model"}. ${other_verdict}`;
    if (!comparing) {
      $("comparison-message").hidden = false;
      $("comparison-message").textContent = obstacle;
      return;
    }
    const rows = statistics.map((name) => {
      const changes = heads.map((_, i) => [i, difference(i, name, "mean")]).filter(([, d]) => d !== null);
      const most = changes.reduce((best, c) => (best === null || Math.abs(c[1]) > Math.abs(best[1]) ? c : best), null);
      const look = html("button", { type: "button", onclick: () => showDifference(name) }, "map");
      return html("tr", {}, html("th", { scope: "row" }, withUnit(name)),
        html("td", {}, show(mean(known(heads.map((_, i) => inFirst(i, name, "mean")))))),
        html("td", {}, show(mean(known(heads.map((_, i) => inSecond(i, name, "mean")))))),
        html("td", {}, show(mean(changes.map(([, d]) => Math.abs(d))))),
        html("td", { class: "text" }, most === null ? "–" : [`${signed(most[1])} at `, linkTo(most[0], `L${heads[most[0]].layer} H${heads[most[0]].head}`)]),
        html("td", {}, most === null ? "" : look));
    });
    const titles = ["statistic", `mean, ${names[0]}`, `mean, ${names[1]}`, "mean |difference|"].map((t) => html("th", { scope: "col" }, t));
    $("comparison-table").replaceChildren(
      html("thead", {}, html("tr", {}, titles, html("th", { scope: "col", class: "text" }, "largest change"), html("th", { scope: "col" }, "difference"))),
      html("tbody", {}, rows));
  }

  function showDifference(name) {
    state.metric = $("metric").value = name;
    state.kind = $("kind").value = "mean";
    state.view = $("view").value = "difference";
    repaint();
    drawPanel();
    $("heads").scrollIntoView({ block: "start" });
  }

  function drawProvenance() {
    const sides = other === null ? [record] : [record, other];
    const fields = [...new Set(sides.flatMap((r) => Object.keys(r.provenance ?? {})))];
    const text = (value) => (value === null || value === undefined ? "–" : typeof value === "number" ? value.toLocaleString("en") : typeof value === "object" ? JSON.stringify(value) : String(value));
    $("provenance").replaceChildren(html("tbody", {}, fields.map((name) => html("tr", {},
      html("th", { scope: "row" }, name.replaceAll("_", " ")), sides.map((r) => html("td", {}, html("bdi", {}, text(r.provenance?.[name]))))))));
    const p = record.provenance ?? {};
    $("facts").textContent = [plural(layers.length, "layer"), `${plural(columns.length, "head")} each`, p.tokens ? `${p.tokens.toLocaleString("en")} tokens of ${p.text ?? "text"}` : null, p.problem, p.date ? String(p.date).slice(0, 10) : null].filter(Boolean).join(" · ");
  }

  // --- begin ---------------------------------------------------------------------------------------------------------

  $("metric").append(...statistics.map((name) => option(name, metric(name).label, name === state.metric)));
  $("rule").append(option("", "any or none"), ...[...new Set(record.findings.filter((f) => f.layer !== null).map((f) => f.rule))].map((rule) => option(rule, rule)));
  $("position-statistic").append(...Object.keys(record.positions?.values ?? {}).map((name) => option(name, withUnit(name), name === "entropy")));
  $("path-statistic").append(...Object.keys(PATHS).filter((name) => record.paths?.[name]).map((name) => option(name, PATHS[name])));
  for (const choice of [...$("kind").options]) if (!heads.some((h) => h[choice.value])) choice.remove();
  if (comparing) {
    $("view-label").hidden = false;
    $("view").append(option("first", names[0]), option("second", names[1]), option("difference", "difference"));
  }
  for (const name of ["metric", "kind", "view"]) {
    $(name).addEventListener("change", () => {
      state[name] = $(name).value;
      drawMap();
      if (comparing && name !== "view") drawTable();
      if (name === "view") { drawScatter(); drawPanel(); }
      markCursor();
    });
  }
  $("stretch").addEventListener("change", () => { state.stretch = $("stretch").checked; drawMap(); markCursor(); });
  $("rule").addEventListener("change", () => { state.rule = $("rule").value; drawTable(); markCursor(); });
  $("more").addEventListener("click", () => { state.all = true; drawTable(); markCursor(); });
  $("position-statistic").addEventListener("change", drawPosition);
  $("path-statistic").addEventListener("change", drawPath);
  $("query").addEventListener("change", drawTop);
  $("window").addEventListener("pointermove", (event) => readWindow(...windowAt(event)));
  $("window").addEventListener("pointerleave", () => readWindow(state.reading, null));
  $("window").addEventListener("click", (event) => pick(windowAt(event)[0], { focus: false }));
  $("window").addEventListener("keydown", windowKey);
  addEventListener("hashchange", fromAddress);
  const redraw = () => { repaint(); drawPanel(); };
  dark.addEventListener("change", redraw);
  let width = innerWidth;
  let pending = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar coming and going
    width = innerWidth;
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(redraw);
  });

  drawComparison();
  drawProvenance();
  drawFindings();
  repaint();
  const gravest = grave.flatMap((s) => record.findings.filter((f) => f.severity === s && indexOf.has(place(f))))[0];
  if (!fromAddress()) {
    state.selected = gravest ? indexOf.get(place(gravest)) : 0;
    drawPanel();
    setCursor(state.selected);
  }
})();
