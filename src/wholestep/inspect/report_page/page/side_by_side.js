// Several ranks of a step, and the schedules of a pipeline: side by side, with who waits for whom.

function ranksView(step) {
  const {ranks} = step.data, of = rank => rank.measured_us ?? rank.step_us, slowest = Math.max(...ranks.map(of)), fastest = Math.min(...ranks.map(of));
  const isUneven = slowest > fastest * 1.02, whole = Math.max(...ranks.map(rank => rank.step_us)) * 1.01;
  const rows = ranks.flatMap(rank => [
    {title: rank.name, height: 22, bars: [...bars(rank.phases, ([name, start, end]) => ({start, end, shade: phaseColor(name), title: name, tip: `${rank.name}: ${name}, ${timeText((end - start) / 1000)}`})),
      ...bars(rank.stalls, ([node, start, end]) => ({start, end, hatched: true, tip: `${rank.name} stands still for ${node}, ${timeText((end - start) / 1000)}`}))]},
    ...(rank.collectives.length ? [{title: "", height: 12, bars: bars(rank.collectives, ([node, start, end]) => ({start, end, shade: color("red"), title: "", tip: `${rank.name}: ${node}, ${timeText((end - start) / 1000)}`}))}] : []),
  ]);
  const {surface, axis} = laneChart(rows, whole, "Ranks side by side");
  const first = ranks[0];
  const table = make("table", {class: "small"},
    make("tr", {}, make("th", {}, "rank"), ["predicted", "measured", "computing", "exposed", "peak", "nodes", "collectives"].map(title => make("th", {class: "num"}, title)), make("th", {}, `beside ${first.name}`)),
    ranks.map(rank => make("tr", {}, make("td", {style: "white-space:nowrap"}, make("b", {}, rank.name), isUneven && of(rank) === slowest && make("span", {class: "chip warn", style: "margin-left:8px"}, `slowest, by ${timeText(slowest - fastest)}`)),
      [timeText(rank.step_us), rank.measured_us == null ? "" : timeText(rank.measured_us), timeText(rank.compute_us), timeText(rank.exposed_us), bytesText(rank.peak), rank.nodes.toLocaleString("en"), rank.collectives.length].map(text => make("td", {class: "num"}, text)),
      make("td", {class: rank.difference || rank.order ? "warn" : "quiet"}, rank === first ? "" : rank.order || (rank.difference ? "differs, see below" : "the same")))));
  const differing = ranks.filter(rank => rank.difference || rank.order);
  return {
    element: make("div", {style: "display:grid;gap:14px"},
      make("div", {class: "card", style: "overflow-x:auto"}, make("h2", {}, plural(ranks.length, "rank")), table),
      make("div", {class: "card", style: "display:grid;gap:10px"}, make("div", {class: "tools"}, axis.buttons(), make("span", {class: "grow"}), make("span", {}, "predicted; hatched: computation stands still")), surface.element),
      differing.map(rank => make("div", {class: "card"}, make("h2", {}, `${first.name} and ${rank.name}`), rank.order && make("p", {class: "why"}, rank.order), rank.difference && make("pre", {class: "mono", style: "white-space:pre-wrap;margin:8px 0 0"}, rank.difference)))),
    refresh() { surface.now(); },
  };
}

const bars = (list, make_bar) => list.map(each => { const bar = make_bar(each); return {...bar, start: bar.start / 1000, end: bar.end / 1000}; });

const ACTION_COLORS = {F: "blue", B: "orange", I: "sky", W: "green"};
const ACTION_NAMES = {F: "forward", B: "backward", I: "backward for the input", W: "backward for the weights"};

function pipelineView(step) {
  const {pipeline} = step.data, surfaces = [];
  const whole = Math.max(...pipeline.map(each => each.makespan)), plain = value => digits(value).replace(/\.?0+$/, "");
  const cards = pipeline.map(each => {
    const rows = each.ranks.map((spans, rank) => ({title: `rank ${rank}`, height: 24, bars: spans.map(([text, kind, stage, microbatch, start, end]) => ({start, end, shade: color(ACTION_COLORS[kind] ?? "grey"), title: microbatch === null ? text : String(microbatch), tip: `${text}: ${ACTION_NAMES[kind] ?? kind} of stage ${stage}${microbatch === null ? "" : `, microbatch ${microbatch}`}\n${plain(start)} to ${plain(end)}`}))}));
    const {surface, axis} = laneChart(rows, whole * 1.01, each.title, plain);
    surfaces.push(surface);
    return make("div", {class: "card", style: "display:grid;gap:10px"},
      make("div", {class: "tools"}, make("h2", {style: "color:var(--ink)"}, each.title), make("span", {}, `${plain(each.makespan)} in all, bubble ${(100 * each.bubble).toFixed(1)}%`), make("span", {class: "grow"}), axis.buttons()), surface.element,
      each.deadlock && make("p", {class: "why"}, each.deadlock),
      make("table", {class: "small", style: "width:auto"}, make("tr", {}, make("th", {}, "rank"), ["busy", "bubble", "stall", "activations"].map(title => make("th", {class: "num"}, title))),
        each.ranks.map((_, rank) => make("tr", {}, make("td", {}, rank), [each.work[rank], each.idle[rank], each.stall[rank]].map(value => make("td", {class: "num"}, plain(value))), make("td", {class: "num"}, each.activations[rank] ?? "")))));
  });
  const kinds = [...new Set(pipeline.flatMap(each => each.ranks.flat().map(span => span[1])))];
  return {
    element: make("div", {style: "display:grid;gap:14px"}, cards, make("div", {class: "legend"}, kinds.map(kind => make("span", {}, swatch(color(ACTION_COLORS[kind] ?? "grey")), ACTION_NAMES[kind] ?? kind)))),
    refresh() { surfaces.forEach(each => each.now()); },
  };
}
