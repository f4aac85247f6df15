// The heads of an inspection and their values: what all views of the page read. One state, which page.js changes.
const model = (() => {
  const { data, metricOf, known, html, VIRIDIS, VIK, BERLIN, dark } = plots;
  const { record, other, obstacle } = data;
  const comparing = other !== null && obstacle === null;

  // --- words and numbers ---------------------------------------------------------------------------------------------

  // In the order of the table, the most informative first. range: "share" is 0 to 1, "zero" is from 0 up, none is the
  // range of the values.
  const METRICS = {
    entropy: { label: "entropy", unit: "nats", range: "zero", about: "−Σ p log p: 0 if a query reads one key, log n if it reads all n keys equally." },
    normalized_entropy: { label: "entropy / log n", range: "share", about: "Entropy as a share of its maximum over the keys a query may read." },
    score_variance: { label: "score variance", range: "zero", about: "Variance of the scores under the weights: how strongly the entropy changes with the temperature." },
    first_key_mass: { label: "weight on the first key", range: "share", about: "The attention sink: the weight on the first key." },
    max_weight: { label: "largest weight", range: "share", about: "Weight of the key that a query reads most." },
    max_scores: { label: "largest score", about: "Largest score a query gives to a key. Above 100 the training may diverge." },
    relative_norm: { label: "output norm / layer", range: "zero", about: "Norm of the head's output relative to the mean of its layer." },
    previous_token: { label: "previous-token score", range: "share", about: "Weight on the token before the query's own." },
    self_token: { label: "own-token score", range: "share", about: "Weight on the query's own token." },
    induction: { label: "induction score", range: "share", about: "Weight on the tokens that followed earlier copies of the query's token." },
    first_token: { label: "first-token score", range: "share", about: "Mean weight on the first token." },
    key_mass: { label: "most-read key", range: "share", about: "Largest mean weight on a key, by its position, over the queries that see it." },
    kl: { label: "KL to the prior", unit: "nats", range: "zero", about: "Divergence of the weights from the prior." },
    collision: { label: "Σ p²", range: "share", about: "Probability that two draws give the same key; 1 / Σ p² is the effective number of keys." },
    support: { label: "keys in use", unit: "keys", range: "zero", about: "Keys with a weight above zero." },
    mass: { label: "mass", range: "zero", about: "Σ p over real keys; less than 1 if a learned sink takes some." },
    value_spread: { label: "value spread", range: "zero", about: "Spread of the values that are averaged: Σ p ‖v‖² − ‖o‖²." },
    output_norm: { label: "output norm", range: "zero", about: "Norm of the head's output for a query." },
    cost: { label: "transport cost", about: "−Σ p s." },
    lse: { label: "log-sum-exp", about: "Log of the softmax denominator: the soft maximum of the scores." },
    dual: { label: "dual", about: "λ, the threshold that makes the weights of a row sum to its mass; for softmax the log-sum-exp." },
    value: { label: "optimal value", about: "The optimal value of the row's problem: expected score minus temperature times divergence." },
    log_keys: { label: "log n", unit: "nats", range: "zero", about: "Log of the number of keys that a query may read: the entropy if it read all of them equally." },
  };
  const metric = metricOf(METRICS);
  const withUnit = (name) => metric(name).label + (metric(name).unit ? ` (${metric(name).unit})` : "");

  // A token with visible white space.
  function visible(token) {
    if (token === undefined || token === null) return "·";
    const text = token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍").replace(/^ | $/g, "␣");
    return text === "" ? "∅" : text;
  }

  // The text of a token of a view; a part of a character is named by the whole character and its number.
  function tokenName({ tokens, parts }, i) {
    const [part, of] = parts?.[i] ?? [1, 1];
    return of > 1 ? `${visible(tokens[i])} (${part} of ${of})` : visible(tokens[i]);
  }

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
  const ordered = Object.keys(METRICS);
  const rank = (name) => (ordered.indexOf(name) + 1 || ordered.length + 1);
  const statistics = record.statistics
    .filter((name) => heads.some((h) => h.mean[name] !== null && h.mean[name] !== undefined))
    .sort((a, b) => rank(a) - rank(b));
  const findingsOf = heads.map(() => []);
  for (const f of record.findings) findingsOf[indexOf.get(place(f))]?.push(f);
  const names = comparing ? data.names : [];

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
    stretch: false, // colours over the range of the values, not over the possible range
    selected: 0,
    cursor: null, // the head under the pointer or the arrow keys, in every view
    reading: 0, // the query shown in the window
    sort: { column: "place", down: false },
    rule: "",
    all: false,
  };

  return {
    comparing, metric, withUnit, visible, tokenName, tokenText, heads, layers, columns, place, indexOf, twinIndex, statistics,
    findingsOf, names, inFirst, inSecond, difference, valueOf, scaleOf, state,
  };
})();
