// The map of the whole sequence: the weight between blocks of queries and of keys, for one head. The pointer, the wheel
// and the keys zoom; the part that is shown stays when another head is chosen.
const sequence = (() => {
  const { $, show, VIRIDIS, colour, widthOf, ticks, tickText, drawLegend } = plots;
  const { visible } = model;

  const [LEFT, RIGHT, BOTTOM] = [44, 2, 20]; // around the map: positions of queries and of keys
  const LEAST = 8; // cells across, at the highest zoom
  const WINDOW = 48; // the first tokens, which the other figure shows

  let shown = null; // {map, cells, at(query, key)} of the head that is drawn
  let view = null; // the part that is shown, in cells: {query, key, span}
  let cursor = null; // [query, key] of the cell that is read
  let drag = null; // where a drag began and where it is: {from, to} in cells

  // --- the numbers ---------------------------------------------------------------------------------------------------

  // Bytes are round(255 * sqrt(mass)), by row. A causal map has only the keys up to the query. null: not a possible key.
  function decoded(map, head) {
    const bytes = atob(map.weights[head]);
    const cells = map.texts.length;
    const square = bytes.length === cells * cells;
    const at = (q, k) => (square ? bytes.charCodeAt(q * cells + k) : k > q ? null : bytes.charCodeAt((q * (q + 1)) / 2 + k));
    return { map, cells, at };
  }

  const whole = () => ({ query: 0, key: 0, span: shown.cells });

  // The strongest root among the cells that are shown.
  function strongest() {
    let most = 1;
    for (let q = Math.floor(view.query); q < Math.min(view.query + view.span, shown.cells); q++) {
      for (let k = Math.floor(view.key); k < Math.min(view.key + view.span, shown.cells); k++) most = Math.max(most, shown.at(q, k) ?? 0);
    }
    return most;
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  function draw(map, head) {
    $("sequence-figure").hidden = !map;
    if (!map) return;
    const before = shown?.map;
    shown = decoded(map, head);
    if (view === null || before.length !== map.length || before.block !== map.block) {
      view = whole();
      cursor = null;
    }
    const size = map.block > 1 ? `, cells of ${map.block}\u00a0×\u00a0${map.block}` : "";
    $("sequence-title").textContent = `Whole sequence: ${map.length.toLocaleString("en")} tokens${size}`;
    paint();
    read();
  }

  function paint() {
    const canvas = $("sequence");
    const side = Math.max(120, Math.min(widthOf(canvas.parentElement), 420 + LEFT) - LEFT - RIGHT);
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [side + LEFT + RIGHT, side + BOTTOM + 1];
    [canvas.width, canvas.height] = [width, height].map((length) => Math.round(length * ratio));
    [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
    const pen = canvas.getContext("2d");
    const css = getComputedStyle(document.documentElement);
    pen.scale(ratio, ratio);
    pen.imageSmoothingEnabled = false;
    const top = $("sequence-stretch").checked ? strongest() / 255 : 1;
    pen.drawImage(picture(top), view.key, view.query, view.span, view.span, LEFT, 0, side, side);
    pen.strokeStyle = css.getPropertyValue("--line");
    pen.strokeRect(LEFT + 0.5, 0.5, side - 1, side - 1);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, side, side);
    pen.clip();
    const scale = side / view.span;
    const box = (query, key, rows, columns) => [LEFT + (key - view.key) * scale, (query - view.query) * scale, columns * scale, rows * scale];
    pen.lineWidth = 1.5;
    pen.strokeStyle = css.getPropertyValue("--muted");
    pen.setLineDash([4, 3]);
    const first = WINDOW / shown.map.block;
    if (first < shown.cells) pen.strokeRect(...box(0, 0, first, first)); // what the other figure shows
    pen.strokeStyle = css.getPropertyValue("--ink");
    if (drag !== null) pen.strokeRect(...box(...dragged()));
    pen.setLineDash([]);
    if (cursor !== null) {
      pen.lineWidth = 4;
      pen.strokeStyle = css.getPropertyValue("--panel");
      pen.strokeRect(...box(cursor[0], cursor[1], 1, 1));
      pen.lineWidth = 2;
      pen.strokeStyle = css.getPropertyValue("--ink");
      pen.strokeRect(...box(cursor[0], cursor[1], 1, 1));
    }
    pen.restore();
    axes(pen, css, side);
    drawLegend($("sequence-legend"), VIRIDIS, "weight on a cell's keys (root scale); queries ↓ keys →",
      [0, 0.25, 0.5, 0.75, 1].map((r) => [r, tickText(Number(((r * top) ** 2).toPrecision(2)))]));
    $("sequence-in").disabled = view.span <= Math.min(LEAST, shown.cells);
    $("sequence-out").disabled = $("sequence-reset").disabled = view.span >= shown.cells;
  }

  // One pixel per cell.
  function picture(top) {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = shown.cells;
    const pen = canvas.getContext("2d");
    const image = pen.createImageData(shown.cells, shown.cells);
    const table = Array.from({ length: 256 }, (_, byte) => colour(VIRIDIS, Math.min(byte / 255 / top, 1)).match(/\d+/g).map(Number));
    for (let q = 0; q < shown.cells; q++) {
      for (let k = 0; k < shown.cells; k++) {
        const byte = shown.at(q, k);
        if (byte !== null) image.data.set([...table[byte], 255], 4 * (q * shown.cells + k));
      }
    }
    pen.putImageData(image, 0, 0);
    return canvas;
  }

  function axes(pen, css, side) {
    const { block } = shown.map;
    pen.fillStyle = css.getPropertyValue("--muted");
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    for (const [start, horizontal] of [[view.query, false], [view.key, true]]) {
      for (const position of ticks(start * block, (start + view.span) * block, 6)) {
        if (position > shown.map.length || !Number.isInteger(position)) continue;
        const place = ((position / block - start) / view.span) * side;
        pen.textAlign = !horizontal ? "right" : place > side - 20 ? "right" : place < 12 ? "left" : "center";
        pen.textBaseline = horizontal ? "top" : "middle";
        const text = position.toLocaleString("en");
        if (horizontal) pen.fillText(text, LEFT + place, side + 5);
        else pen.fillText(text, LEFT - 5, Math.min(Math.max(place, 6), side - 6));
      }
    }
  }

  // --- reading -------------------------------------------------------------------------------------------------------

  function described(cell, noun) {
    const { map } = shown;
    const [start, stop] = [cell * map.block, Math.min((cell + 1) * map.block, map.length) - 1];
    const letters = [...visible(map.texts[cell])];
    const text = letters.length > 40 ? `${letters.slice(0, 40).join("")}…` : letters.join("");
    const places = start === stop ? `${noun === "query" ? "query" : "key"} ${start.toLocaleString("en")}` : `${noun === "query" ? "queries" : "keys"} ${start.toLocaleString("en")}–${stop.toLocaleString("en")}`;
    return `${places} “${text}”`;
  }

  function read(cell = cursor) {
    if (cell === null) {
      $("sequence-readout").textContent = "Point at a cell to read it.";
      return;
    }
    const byte = shown.at(...cell);
    const query = described(cell[0], "query");
    const text = `${query[0].toUpperCase()}${query.slice(1)} → ${described(cell[1], "key")}`;
    $("sequence-readout").textContent = byte === null ? `${text}: later, not read` : `${text}: ${byte === 0 ? "less than 0.00001" : show((byte / 255) ** 2)}`;
  }

  // --- zooming -------------------------------------------------------------------------------------------------------

  const inside = (value, least, most) => Math.min(Math.max(value, least), most);

  function setView(query, key, span) {
    const size = inside(span, Math.min(LEAST, shown.cells), shown.cells);
    view = { query: inside(query, 0, shown.cells - size), key: inside(key, 0, shown.cells - size), span: size };
    paint();
  }

  // The factor is of the span: less than 1 zooms in. The point, in cells, stays where it is.
  function zoom(factor, [query, key] = centre()) {
    const span = inside(view.span * factor, Math.min(LEAST, shown.cells), shown.cells);
    const share = span / view.span;
    setView(query - (query - view.query) * share, key - (key - view.key) * share, span);
  }

  const centre = () => (cursor === null ? [view.query + view.span / 2, view.key + view.span / 2] : [cursor[0] + 0.5, cursor[1] + 0.5]);

  function reset() {
    view = whole();
    paint();
  }

  // The square around a drag: [query, key, rows, columns].
  function dragged() {
    const [[q0, k0], [q1, k1]] = [drag.from, drag.to];
    const span = Math.max(Math.abs(q1 - q0), Math.abs(k1 - k0));
    return [q1 < q0 ? q0 - span : q0, k1 < k0 ? k0 - span : k0, span, span];
  }

  function moveCursor(query, key) {
    cursor = [inside(query, 0, shown.cells - 1), inside(key, 0, shown.cells - 1)];
    const follow = (start, cell) => Math.min(Math.max(start, cell + 1 - view.span), cell);
    setView(follow(view.query, cursor[0]), follow(view.key, cursor[1]), view.span);
    read();
  }

  // The place of the pointer in cells, inside the part that is shown.
  function pointAt(event) {
    const box = $("sequence").getBoundingClientRect();
    const side = box.width - LEFT - RIGHT;
    const along = (offset) => inside(offset / side, 0, 1 - 1e-6) * view.span;
    return [view.query + along(event.clientY - box.top), view.key + along(event.clientX - box.left - LEFT)];
  }
  const cellAt = (event) => pointAt(event).map(Math.floor);

  function pressKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = event.shiftKey ? 8 : 1;
    const moves = { ArrowUp: [-step, 0], ArrowDown: [step, 0], ArrowLeft: [0, -step], ArrowRight: [0, step] };
    if (event.key in moves) {
      const [query, key] = cursor ?? centre().map(Math.floor);
      const [down, across] = cursor === null ? [0, 0] : moves[event.key];
      moveCursor(query + down, key + across);
    } else if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0" || event.key === "Escape") reset();
    else return;
    event.preventDefault();
  }

  // --- controls ------------------------------------------------------------------------------------------------------

  const canvas = $("sequence");
  canvas.addEventListener("keydown", pressKey);
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { from: pointAt(event), to: pointAt(event), at: [event.clientX, event.clientY] };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    read(cellAt(event));
    if (drag === null) return;
    drag.to = pointAt(event);
    paint();
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag === null) return;
    const far = Math.max(Math.abs(event.clientX - drag.at[0]), Math.abs(event.clientY - drag.at[1])) > 6;
    const [query, key, span] = dragged();
    drag = null;
    if (far) setView(query, key, span);
    else moveCursor(...cellAt(event));
  });
  canvas.addEventListener("pointercancel", () => { drag = null; paint(); });
  canvas.addEventListener("pointerleave", () => read());
  canvas.addEventListener("dblclick", (event) => zoom(0.5, pointAt(event)));
  canvas.addEventListener("wheel", (event) => {
    // Only in focus or with Ctrl: the wheel over the page scrolls the page.
    if (document.activeElement !== canvas && !event.ctrlKey) return;
    event.preventDefault();
    zoom(1.25 ** Math.sign(event.deltaY), pointAt(event));
    read(cellAt(event));
  }, { passive: false });
  $("sequence-in").addEventListener("click", () => zoom(0.5));
  $("sequence-out").addEventListener("click", () => zoom(2));
  $("sequence-reset").addEventListener("click", reset);
  $("sequence-stretch").addEventListener("change", paint);

  return { draw };
})();
