// The panel of one head: its numbers, curves, window of the plan, top keys and statistics.
const panel = (() => {
  const { $, data, show, plural, html, option, VIRIDIS, colour, widthOf, tickText, drawLegend, drawLines } = plots;
  const {
    comparing, withUnit, tokenName, tokenText, heads, twinIndex, statistics, names, inFirst, inSecond, state,
  } = model;
  const { record, other } = data;

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
    sequence.draw(inView().map, seat());
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
    // The last bin may be longer than the longest sequence.
    const longest = record.provenance?.longest ?? Infinity;
    const end = (i) => Math.max(positions.edges[i] + 1, Math.min(positions.edges[i + 1] ?? 0, longest));
    const span = (i) => {
      const [from, to] = [positions.edges[i], end(i) - 1].map((position) => position.toLocaleString("en"));
      return positions.edges[i + 1] === undefined ? `${from}+` : to === from ? from : `${from}–${to}`;
    };
    // Logarithmic in the number of keys: the entropy of a causal model with equal weights is a straight line.
    const middle = bins.map((i) => (positions.edges[i] + end(i) - 1) / 2);
    const along = (v) => (middle.at(-1) > 0 ? Math.log1p(v) / Math.log1p(middle.at(-1)) : 0.5);
    const x = middle.map(along);
    const marks = [0, 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144].filter((v) => v <= middle.at(-1));
    const series = [{ name: comparing ? names[0] : "this head", style: "first", values: positions.values[name][state.selected] }];
    if (comparing && sameBins()) series.push({ name: names[1], style: "second", values: (other.positions.values[name]?.[twinIndex[state.selected]] ?? []).slice(0, bins.length) });
    if (name === "entropy") series.push({ name: "all keys equal", style: "null", dashed: true, values: positions.null_entropy[state.selected] });
    drawLines($("position"), {
      x, series, start: bins.length - 1, at: (i) => `position ${span(i)}`, xTitle: "position of the query (log scale)", yTitle: withUnit(name),
      marks: marks.filter((_, k) => marks.length < 7 || k % 2 === 0).map((v) => [along(v), v.toLocaleString("en")]),
    });
  }
  // One text may be longer than the other; the bins that both have must be equal.
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
    $("query").replaceChildren(...top.queries.map((q, k) => option(q, `${q} ${tokenName(top, q)}`, k === at)));
    const [keys, weights] = [top.keys[seat()][at], top.weights[seat()][at]];
    const rows = keys.map((key, k) => [key, weights[k]]).filter(([, weight]) => weight >= 5e-4);
    $("top").replaceChildren(...rows.map(([key, weight]) => {
      const bar = html("span", { class: "bar" });
      bar.style.width = `${Math.max(100 * weight, 0.5)}%`;
      return html("li", {}, html("span", { class: "place" }, key), tokenText(tokenName(top, key)), html("span", {}, bar), html("span", { class: "number" }, show(weight)));
    }), rows.length < keys.length ? html("li", { class: "hint rest" }, rows.length ? "The others get less than 0.0005 each." : "No key gets 0.0005 or more.") : "");
  }

  function windowWeights() {
    const bytes = atob(inView().window.weights[seat()]);
    return (q, k, size) => (bytes.charCodeAt(q * size + k) / 255) ** 2; // stored as round(255 * sqrt(p))
  }

  const MARGIN = 10; // right of the matrix: a triangle points at the chosen query

  function drawWindow() {
    const view = inView().window;
    $("window-figure").hidden = $("strip-figure").hidden = !view || !view.tokens.length;
    if ($("window-figure").hidden) return;
    const size = view.tokens.length;
    $("window-title").textContent = `Weights between the ${inView().map ? "first " : ""}${plural(size, "token")}`;
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
    $("strip").replaceChildren(...joined(view, view.tokens.map((token, k) => {
      // A character of several tokens is shown once, by the first of them.
      const text = k > 0 && (view.parts?.[k]?.[0] ?? 1) > 1 ? "·" : token;
      const title = `position ${view.start + k}, ${tokenName(view, k)}: ${show(weight(state.reading, k, size))}`;
      const button = html("button", { type: "button", "aria-pressed": k === state.reading, tabindex: k === state.reading ? 0 : -1, title, "aria-label": title, onclick: () => pick(k), onkeydown: stripKey }, tokenText(text));
      const share = Math.sqrt(weight(state.reading, k, size));
      button.style.backgroundColor = share > 0 ? `color-mix(in srgb, var(--first) ${Math.round(70 * share)}%, transparent)` : "";
      return button;
    })));
    readWindow(state.reading, null);
  }

  // The buttons of the strip, those of one character in one element.
  function joined(view, buttons) {
    const found = [];
    buttons.forEach((button, k) => {
      const [part] = view.parts?.[k] ?? [1];
      if (part > 1 && found.at(-1)?.className === "joined") found.at(-1).append(button);
      else found.push(view.parts?.[k] ? html("span", { class: "joined" }, button) : button);
    });
    return found;
  }

  function readWindow(q, k) {
    const view = inView().window;
    const size = view.tokens.length;
    const name = (i) => `${view.start + i} “${tokenName(view, i)}”`;
    const weight = windowWeights();
    if (k === null) {
      for (let j = 0, most = -1; j < size; j++) if (weight(q, j, size) > most) [k, most] = [j, weight(q, j, size)];
      $("window-readout").textContent = `${name(q)} reads ${name(k)} most: ${show(weight(q, k, size))}`;
    } else $("window-readout").textContent = `${name(q)} reads ${name(k)}: ${show(weight(q, k, size))}`;
  }

  function pick(q, { focus = true } = {}) {
    state.reading = q;
    drawWindow();
    if (focus) $("strip").querySelectorAll("button")[q]?.focus();
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

  // --- controls ------------------------------------------------------------------------------------------------------

  $("position-statistic").append(...Object.keys(record.positions?.values ?? {}).map((name) => option(name, withUnit(name), name === "entropy")));
  $("path-statistic").append(...Object.keys(PATHS).filter((name) => record.paths?.[name]).map((name) => option(name, PATHS[name])));
  $("position-statistic").addEventListener("change", drawPosition);
  $("path-statistic").addEventListener("change", drawPath);
  $("query").addEventListener("change", drawTop);
  $("window").addEventListener("pointermove", (event) => readWindow(...windowAt(event)));
  $("window").addEventListener("pointerleave", () => readWindow(state.reading, null));
  $("window").addEventListener("click", (event) => pick(windowAt(event)[0], { focus: false }));
  $("window").addEventListener("keydown", windowKey);

  return { drawPanel, tag };
})();
