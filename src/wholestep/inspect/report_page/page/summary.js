// What the step costs, in numbers, and what to try next.

function summaryView(step) {
  const {summary, advice, versions} = step.data;
  const tile = (label, big, sub) => make("div", {class: "card"}, make("div", {class: "label"}, label), make("div", {class: "big"}, big), sub && make("div", {class: "sub"}, sub));
  const parameters = summary.inputs.find(each => each.kind === "parameter");
  const state = summary.inputs.find(each => each.kind === "optimizer_state");
  const bound = Object.entries(summary.bounds).reduce((best, each) => each[1] > best[1] ? each : best, ["", 0]);
  const calls = summary.collectives.reduce((sum, each) => sum + each.count, 0);
  const batch = summary.largest_batch, per = summary.measured_us ?? summary.step_us, how = summary.measured_us == null ? "predicted" : "measured";
  const amount = batch && (batch.tokens ?? batch.rows), what = batch && (batch.tokens == null ? "row" : "token");
  const tiles = make("div", {class: "cards"},
    tile("predicted step", timeText(summary.step_us), `on ${summary.machine || "the given costs"}`),
    summary.measured_us != null && tile("measured step", timeText(summary.measured_us), `predicted ${share(summary.step_us, summary.measured_us)} of it`),
    tile("peak memory", bytesText(summary.peak), summary.budget ? `budget ${bytesText(summary.budget.budget)}, measured ${summary.budget.measured == null ? "not yet" : bytesText(summary.budget.measured)}` : `inputs ${bytesText(summary.input_bytes)}`),
    parameters && tile("parameters", countText(parameters.elements), `${plural(parameters.tensors, "tensor")}, ${bytesText(parameters.bytes)}${state ? `; state ${bytesText(state.bytes)}` : ""}`),
    batch && tile("largest batch tensor", plural(amount, what), `${batch.tokens == null ? "" : `${plural(batch.rows, "row")}, `}${countText(amount / per * 1e6)} ${what}s/s ${how}`),
    tile("arithmetic", `${countText(summary.flops)}flop`, `${countText(summary.flops / summary.step_us * 1e6)}flop/s predicted`),
    tile("bytes moved", bytesText(summary.moved), `${bytesText(summary.moved / summary.step_us * 1e6)}/s predicted`),
    tile("communication", calls ? bytesText(summary.sent) : "none", calls ? `${plural(calls, "collective")}, ${timeText(summary.exposed_us)} exposed` : "no collective in the graph"),
    tile("operators", summary.operators.toLocaleString("en"), `${plural(summary.nodes, "node")}${summary.regions == null ? "" : `, ${plural(summary.regions, "compiled region")}`}`));
  return {element: make("div", {class: "columns", style: "display:block"}, tiles,
    make("div", {class: "columns", style: "margin-top:14px"},
      make("div", {style: "display:grid;gap:14px"}, adviceCard(advice), timeCard(step), outsideCard(summary)),
      make("div", {style: "display:grid;gap:14px"}, memoryCard(step), captureCard(step, bound), collectivesCard(step))),
    make("p", {class: "quiet", style: "font-size:12px"}, `wholestep ${versions.wholestep}, torch ${versions.torch}. Times are predicted by simulation unless they are called measured.`))};
}

function adviceCard(advice) {
  return make("div", {class: "card"}, make("h2", {}, "What to try next"),
    make("div", {class: "advice"}, advice.map(each => make("div", {}, make("b", {}, each.title), make("div", {}, each.text), copyable(each.code)))));
}

function timeCard(step) {
  const byKind = new Map(), byPhase = new Map();
  for (let i = 0; i < step.count; i++) {
    if (step.run(i) !== COMPUTE && step.run(i) !== READ) continue;
    byKind.set(step.kind(i), (byKind.get(step.kind(i)) ?? 0) + step.us(i));
    byPhase.set(step.phase(i), (byPhase.get(step.phase(i)) ?? 0) + step.us(i));
  }
  const {exposed_us, step_us} = step.data.summary;
  const parts = (map, shade) => [...map].sort((a, b) => b[1] - a[1]).map(([name, amount]) => ({name, amount, text: `${timeText(amount)} (${share(amount, step_us)})`, shade: shade(name)}));
  const exposed = {name: "exposed communication", amount: exposed_us, text: `${timeText(exposed_us)} (${share(exposed_us, step_us)})`, shade: color("red"), hatched: true};
  return make("div", {class: "card"}, make("h2", {}, "Where the time goes"),
    make("div", {class: "label", style: "margin-top:8px"}, "by phase"), barOf([...parts(byPhase, phaseColor).sort((a, b) => PARTS.indexOf(a.name) - PARTS.indexOf(b.name)), exposed]),
    make("div", {class: "label", style: "margin-top:8px"}, "by kind of operator"), barOf([...parts(byKind, kindColor), exposed]));
}

function memoryCard(step) {
  const {summary} = step.data, peak = step.data.memory.node[step.data.memory.peak_place];
  const parts = Object.entries(summary.peak_by_kind).map(([kind, amount]) => ({name: MEMORY_NAMES[kind] ?? kind, amount, text: `${bytesText(amount)} (${share(amount, summary.peak)})`, shade: memoryColor(kind)}));
  const budget = summary.budget;
  return make("div", {class: "card"}, make("h2", {}, "What is in memory at the peak"), barOf(parts, summary.peak),
    peak !== undefined && make("p", {style: "margin:8px 0 0"}, `${bytesText(summary.peak)} while `, nodeLink(step, peak), ` runs${step.place(peak) ? ` (${baseName(step.place(peak).path)}:${step.place(peak).line})` : ""}.`),
    budget && make("p", {style: "margin:6px 0 0"}, `Budget ${bytesText(budget.budget)}: planned ${bytesText(budget.planned)}, measured ${budget.measured == null ? "not yet" : bytesText(budget.measured)}; ${bytesText(budget.without)} without recomputation, ${plural(budget.recomputed, "node")} recomputed.`),
    make("p", {class: "sub"}, "Operator by operator, with updates in place. Compiled regions need less: they do not write what they fuse."));
}

function captureCard(step, bound) {
  const {summary} = step.data;
  const rows = [
    ["graphs", summary.graphs.length ? `${summary.graphs.length}, ${timeText(summary.capture_seconds * 1e6)} of capturing` : "one graph"],
    ...summary.recompiles.map((reason, i) => [i ? "" : "captured again", reason]),
    ["runs as", {inductor: "compiled regions (inductor)", eager: "operator by operator (eager)", debug: "operator by operator, checked (debug)"}[summary.lower] ?? "a graph as it was given; nothing ran"],
    ["passes", summary.passes.join(", ") || "none"],
    ["batch", summary.batch.join(", ") || "none"],
    ["guards", summary.guards.length ? `${summary.guards.length}: ${summary.guards.slice(0, 4).join("; ")}${summary.guards.length > 4 ? "; …" : ""}` : "on shapes, types and objects only"],
    ["host calls", summary.host_calls.join(", ")],
    ["lower bound", `${timeText(bound[1])} (${bound[0]}): the step is ${share(summary.step_us - bound[1], bound[1])} above it`],
  ].filter(([, text]) => text);
  return make("div", {class: "card"}, make("h2", {}, "What was captured"),
    make("table", {class: "small"}, rows.map(([name, text]) => make("tr", {}, make("td", {class: "quiet", style: "white-space:nowrap"}, name), make("td", {style: "overflow-wrap:anywhere"}, text)))));
}

function collectivesCard(step) {
  const {summary, groups, exposed} = step.data;
  if (!summary.collectives.length) return null;
  const worst = [...exposed].sort((a, b) => b.us - a.us).slice(0, 8);
  return make("div", {class: "card"}, make("h2", {}, "Communication"),
    make("table", {class: "small"}, make("tr", {}, make("th", {}, "collective"), make("th", {class: "num"}, "count"), make("th", {class: "num"}, "time")),
      summary.collectives.map(each => make("tr", {}, make("td", {class: "mono"}, each.op), make("td", {class: "num"}, each.count), make("td", {class: "num"}, timeText(each.us)))),
      groups.map(each => make("tr", {}, make("td", {class: "quiet"}, `group ${each.name}, ${plural(each.ranks, "rank")}`), make("td", {}), make("td", {class: "num quiet"}, timeText(each.us))))),
    worst.length > 0 && make("h3", {style: "margin-top:10px"}, "Longest exposed"),
    worst.map(each => make("p", {style: "margin:5px 0"}, nodeLink(step, each.node), ` ${timeText(each.us)}: `, make("span", {class: "quiet"}, each.text))));
}

function outsideCard(summary) {
  if (!summary.outside.length) return null;
  return make("div", {class: "card"}, make("h2", {}, "Outside of compiled regions"), make("p", {class: "quiet", style: "margin:4px 0"}, `${summary.in_regions.toLocaleString("en")} operators are in ${plural(summary.regions, "region")}. These nodes are in none:`),
    make("table", {class: "small"}, summary.outside.map(each => make("tr", {}, make("td", {class: "num"}, each.count), make("td", {}, each.reason, make("div", {class: "quiet mono"}, each.example))))));
}
