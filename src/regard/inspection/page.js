// The page of an inspection: the map of all heads, the scatter plot, the findings, the table and the comparison. Each view
// has a draw function; the functions under "state" change the state and update the views.
(() => {
  const {
    $, data, onLayoutChange, show, signed, plural, plain, known, mean, html, svg, option, VIRIDIS, colour, widthOf, ticks, tickText, drawLegend,
  } = plots;
  const {
    comparing, metric, withUnit, heads, layers, columns, place, indexOf, statistics, findingsOf, names, inFirst, inSecond, difference,
    valueOf, scaleOf, state,
  } = model;
  const { drawPanel, tag } = panel;
  const { record, other, other_verdict, obstacle } = data;
  const severities = ["alarm", "warning", "note"];

  // --- state ---------------------------------------------------------------------------------------------------------

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

  // Show the head at the cursor in the map, the scatter plot, the table and as text.
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
    const Y = (v) => top + (1 - Math.sqrt(Math.max(v, 0) / high)) * (height - top - bottom); // the root scale spreads small values
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
      if (x === null || y === null) return (x === null) - (y === null) || a - b; // unknown values last in both directions
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
      html("thead", {}, html("tr", {}, head("place", "head"), shown.map(([id, text]) => head(id, text, comparing && (id === "first" || id === "second") ? "named" : null, metric(id).about)), head("findings", "findings", "text"))),
      html("tbody", {}, [...tableRows.values()]));
    $("count").textContent = `${plural(order.length, "head")}${column === "place" && !down ? "" : ", sorted"}`;
    $("more").hidden = limit === order.length;
    $("more").textContent = `Show all ${order.length.toLocaleString("en")}`;
  }

  function sortBy(column) {
    // The first click on a column of numbers puts the largest on top.
    const down = state.sort.column === column ? !state.sort.down : column !== "place";
    state.sort = { column, down };
    drawTable();
    markCursor();
    $("table").querySelector(`[data-column="${CSS.escape(column)}"]`).focus();
  }

  // --- the comparison and the provenance ------------------------------------------------------------------------------

  function drawComparison() {
    if (other === null) return;
    $("comparison").hidden = false;
    $("compared").hidden = false;
    $("compared").dataset.severity = severities.find((s) => other.findings.some((f) => f.severity === s)) ?? "note";
    $("compared").textContent = `Compared with ${data.names[1]}. ${other_verdict}`;
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
    // Without "declared", the JSON of the problems: `problems` has them as Python writes them.
    const fields = [...new Set(sides.flatMap((r) => Object.keys(r.provenance ?? {})))].filter((name) => name !== "declared");
    $("provenance").replaceChildren(html("tbody", {}, fields.map((name) => html("tr", {},
      html("th", { scope: "row" }, name.replaceAll("_", " ")), sides.map((r) => html("td", {}, html("bdi", {}, plain(r.provenance?.[name]))))))));
    const p = record.provenance ?? {};
    $("facts").textContent = [plural(layers.length, "layer"), `${plural(columns.length, "head")} each`, p.tokens ? `${p.tokens.toLocaleString("en")} tokens of ${p.text ?? "text"}` : null, p.problem, p.date ? String(p.date).slice(0, 10) : null].filter(Boolean).join(" · ");
  }

  // --- start ---------------------------------------------------------------------------------------------------------

  $("metric").append(...statistics.map((name) => option(name, metric(name).label, name === state.metric)));
  $("rule").append(option("", "any or none"), ...[...new Set(record.findings.filter((f) => f.layer !== null).map((f) => f.rule))].map((rule) => option(rule, rule)));
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
  addEventListener("hashchange", fromAddress);
  onLayoutChange(() => { repaint(); drawPanel(); });

  drawComparison();
  drawProvenance();
  drawFindings();
  repaint();
  const worst = severities.flatMap((s) => record.findings.filter((f) => f.severity === s && indexOf.has(place(f))))[0];
  if (!fromAddress()) {
    state.selected = worst ? indexOf.get(place(worst)) : 0;
    drawPanel();
    setCursor(state.selected);
  }
})();