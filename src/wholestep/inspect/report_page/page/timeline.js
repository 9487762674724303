// When everything runs: phases, modules, computation, host, communication; predicted, and measured below it.

const LANE = 30, BAND = 18, GAP = 6, STRIP = 54;

function timelineView(step) {
  const lanes = timelineLanes(step);
  let by = "kind", hits = new Set(), byModule = null;
  const height = RULER + lanes.rows.reduce((sum, row) => sum + row.height + GAP, 0) + STRIP;
  const surface = new Surface(height, paint, "Timeline of the step. Arrow keys move, plus and minus zoom, 0 shows everything.");
  const canvas = surface.element, legend = make("div", {class: "legend"});

  const axis = new TimeAxis(surface, lanes.end * 1.01, {click, hover, keys: {n: () => neighbour(1), p: () => neighbour(-1)}});
  const x = time => axis.x(time);

  function shade(i) {
    if (by === "kind") return kindColor(step.kind(i));
    if (by === "phase") return phaseColor(step.part(i));
    byModule ??= moduleColors(step);
    return color(byModule[step.nodes.module[i]]);
  }

  function paint(context, width) {
    const ink = cssColor("--ink"), quiet = cssColor("--quiet");
    axis.rule(context, height);
    let y = RULER;
    for (const row of lanes.rows) {
      context.fillStyle = quiet;
      context.textAlign = "left";
      context.fillText(clipped(context, row.title, LEFT - 10), 4, y + row.height / 2);
      context.save();
      context.beginPath();
      context.rect(LEFT, y, width - LEFT, row.height);
      context.clip();
      row.runs ? paintRuns(context, row, y, ink) : paintBars(context, row, y, ink);
      context.restore();
      row.y = y;
      y += row.height + GAP;
    }
    memoryStrip(context, y, width, quiet);
  }

  function paintRuns(context, row, y, ink) {
    let last = -1;
    for (const run of row.runs) {
      if (run.end < axis.from || run.start > axis.to) continue;
      const left = x(run.start), right = x(run.end);
      if (right - left < 1 && Math.floor(left) === last) continue;
      last = Math.floor(left);
      const fill = row.color(run);
      context.globalAlpha = row.faint ? 0.55 : 1;
      context.fillStyle = fill;
      context.fillRect(left, y, Math.max(right - left - 0.5, 0.7), row.height);
      context.globalAlpha = 1;
      if (right - left > 12) {
        context.fillStyle = row.faint ? ink : inkOn(fill);
        const shown = Math.max(left, LEFT), room = Math.min(right, surface.width) - shown - 6, labels = row.labels?.(run) ?? [run.title];
        const text = labels.find(each => context.measureText(each).width <= room) ?? clipped(context, labels[0], room);
        if (text.length > 2 || labels.includes(text)) context.fillText(text, shown + 3, y + row.height / 2 + 0.5);
      }
    }
  }

  function paintBars(context, row, y, ink) {
    const first = firstEnding(row, axis.from);
    let last = -1;
    for (let k = first; k < row.bars.length && row.start[k] <= axis.to; k++) {
      const i = row.bars[k], left = x(row.start[k]), right = x(row.end[k]);
      if (right - left < 1 && Math.floor(left) === last && !hits.has(i) && i !== app.selected) continue;
      last = Math.floor(left);
      const fill = row.shade?.(i) ?? shade(i), wide = Math.max(right - left - (right - left > 3 ? 0.6 : 0), 0.7);
      context.globalAlpha = hits.size && !hits.has(i) ? 0.18 : 1;
      context.fillStyle = fill;
      context.fillRect(left, y, wide, row.height);
      if (right - left > 24) {
        const shown = Math.max(left, LEFT);
        context.fillStyle = inkOn(fill);
        context.fillText(clipped(context, row.label?.(i) ?? step.shortOp(i), Math.min(right, surface.width) - shown - 8), shown + 4, y + row.height / 2 + 0.5);
      }
      context.globalAlpha = 1;
      if (i === app.selected) outline(context, left, y, wide, row.height, ink);
    }
    last = -1;
    for (const stall of row.stalls ?? []) {
      const left = x(stall.start), right = x(stall.end);
      if (right < LEFT || left > surface.width) continue;
      if (right - left < 5) {
        if (Math.floor(right) === last) continue;
        last = Math.floor(right);
        context.fillStyle = cssColor("--warn-soft");
        context.fillRect(left, y, Math.max(right - left, 0.7), row.height);
        context.fillStyle = color("red");
        context.fillRect(left, y, Math.max(right - left, 0.7), 4);
        if (stall.node === app.selected) outline(context, left, y, right - left, row.height, ink);
        continue;
      }
      hatch(context, left, y, Math.max(right - left, 1), row.height);
      if (right - left > 60) {
        context.fillStyle = cssColor("--warn");
        context.fillText(clipped(context, `exposed ${timeText(stall.end - stall.start)}: ${stall.reason}`, right - left - 8), left + 4, y + row.height / 2 + 0.5);
      }
      if (stall.node === app.selected) outline(context, left, y, right - left, row.height, ink);
    }
  }

  function memoryStrip(context, y, width, quiet) {
    const live = liveBytes(step), times = step.placeTimes, most = step.data.memory.peak || 1;
    context.fillStyle = quiet;
    context.fillText("live bytes", 4, y + 10);
    context.fillText(bytesText(most), 4, y + 26);
    context.beginPath();
    context.moveTo(LEFT, y + STRIP);
    let k = Math.max(upperBound(times, axis.from) - 1, 0);
    for (let at = LEFT; at < width; at++) {
      const until = axis.time(at + 1);
      let most_here = live[Math.min(k, live.length - 1)];
      while (k + 1 < live.length && times[k + 1] <= until) most_here = Math.max(most_here, live[++k]);
      context.lineTo(at, y + STRIP - (STRIP - 4) * most_here / most);
    }
    context.lineTo(width, y + STRIP);
    context.fillStyle = color("sky");
    context.globalAlpha = 0.5;
    context.fill();
    context.globalAlpha = 1;
  }

  function at(event) {
    const box = canvas.getBoundingClientRect(), when = axis.time(event.clientX - box.left), y = event.clientY - box.top;
    const row = lanes.rows.find(each => y >= each.y && y < each.y + each.height);
    if (!row || event.clientX - box.left < LEFT) return {when};
    if (row.runs) return {when, row, run: row.runs.find(each => each.start <= when && when < each.end)};
    const slack = 3 * axis.span / (surface.width - LEFT);
    const stall = row.stalls?.find(each => each.start <= when && when < each.end);
    if (stall) return {when, row, node: stall.node, stall};
    let best = -1, gap = slack;
    for (let k = firstEnding(row, when - slack); k < row.bars.length && row.start[k] <= when + slack; k++) {
      const away = Math.max(row.start[k] - when, when - row.end[k], 0);
      if (away < gap || (away === 0 && gap === 0)) { best = row.bars[k]; gap = away; }
    }
    return {when, row, node: best};
  }

  function hover(event) {
    const found = at(event);
    canvas.style.cursor = found.node >= 0 ? "pointer" : "grab";
    if (found.stall) tip.show(`exposed for ${timeText(found.stall.end - found.stall.start)}\n${found.stall.text}`, event.clientX, event.clientY);
    else if (found.node >= 0) tip.show(barText(step, found.node), event.clientX, event.clientY);
    else if (found.run) tip.show(`${found.run.title}\n${timeText(found.run.end - found.run.start)}`, event.clientX, event.clientY);
    else tip.hide();
  }

  function click(event) {
    const {node, run} = at(event);
    if (node >= 0) app.select(node);
    else if (run) axis.show(run.start - (run.end - run.start) * 0.05, run.end + (run.end - run.start) * 0.05);
  }

  function neighbour(step_by) {
    const row = lanes.rows.find(each => each.bars?.includes(app.selected)) ?? lanes.rows.find(each => each.bars);
    const k = row.bars.indexOf(app.selected) + step_by;
    if (row.bars[k] !== undefined) app.select(row.bars[k]);
  }

  function drawLegend() {
    const seen = new Set();
    for (let i = 0; i < step.count; i++) if (step.us(i) > 0) seen.add(by === "kind" ? step.kind(i) : step.part(i));
    const parts = by === "module" ? [] : [...seen].map(name => make("span", {}, swatch((by === "kind" ? kindColor : phaseColor)(name)), name));
    legend.replaceChildren(...parts, ...(step.data.exposed.length ? [make("span", {}, make("i", {class: "swatch hatched", style: `background-color:${color("red")}`}), "exposed communication")] : []));
  }
  drawLegend();

  const longestList = nodeTable(step, [...Array(step.count).keys()].filter(i => step.us(i) > 0 && step.run(i) !== ISSUE).sort((a, b) => step.us(b) - step.us(a)).slice(0, 500), "Longest operators", step.data.exposed.length > 0);
  const stallList = step.data.exposed.length ? exposedTable(step) : null;

  return {
    element: make("div", {class: "fill", style: "gap:14px;min-height:620px"}, make("div", {class: "card", style: "display:grid;gap:10px"},
      make("div", {class: "tools"}, choice("Colour by", [["kind", "kind of operator"], ["phase", "phase"], ["module", "module"]], by, value => { by = value; drawLegend(); surface.now(); }),
        axis.buttons(),
        make("span", {class: "grow"}), make("span", {}, "wheel zooms · drag moves · click selects · n, p: next, previous")),
      canvas, legend),
      make("div", {class: stallList ? "split" : "split one"}, stallList && make("div", {class: "card fill"}, make("h2", {style: "margin-bottom:6px"}, "Exposed communication"), stallList.element), make("div", {class: "card fill"}, make("h2", {style: "margin-bottom:6px"}, "Longest operators"), longestList.element))),
    refresh() { surface.now(); longestList.draw(); },
    search(found) { hits = new Set(found); surface.soon(); },
    show(i) {
      const begin = step.start[i], length = Math.max(step.us(i), axis.whole / 1e6);
      if (begin < axis.from || step.end[i] > axis.to || length < axis.span / 400) axis.show(begin - length * 12, begin + length * 13);
      surface.soon();
    },
  };
}

function nodeTable(step, nodes, label, isNarrow) {
  const list = new LongList({label, choose: i => app.select(i), render: i => {
    const place = step.place(i);
    return make("div", {}, swatch(kindColor(step.kind(i))), make("span", {class: "cell"}, timeText(step.us(i))), make("span", {class: "cell quiet", style: "width:52px"}, share(step.us(i), step.total)),
      make("span", {class: "grow mono"}, step.name(i), make("span", {class: "quiet"}, `  ${step.shortOp(i)} ${step.value(i)}`)), !isNarrow && make("span", {class: "wide optional quiet"}, step.module(i)), make("span", {class: "wide optional quiet mono", style: isNarrow && "width:110px"}, place ? `${baseName(place.path)}:${place.line}` : ""));
  }});
  list.set(nodes);
  return list;
}

function exposedTable(step) {
  const list = new LongList({label: "Exposed communication", rowHeight: 42, choose: each => app.select(each.node), render: each => make("div", {title: each.text}, make("span", {class: "cell warn"}, timeText(each.us)),
    make("span", {class: "grow"}, make("b", {class: "mono"}, step.name(each.node)), make("span", {class: "chip", style: "margin-left:8px"}, each.reason), make("div", {class: "quiet grow"}, each.text.replace(/^.*?exposed: /, ""))))});
  list.set([...step.data.exposed].sort((a, b) => b.us - a.us));
  return list;
}

function barText(step, i) {
  const place = step.place(i), measured = step.measured.get(i);
  return [step.name(i), `${step.shortOp(i)}  ${step.value(i)}`, step.module(i), place && `${baseName(place.path)}:${place.line}  ${step.lineText(place.file, place.line).trim()}`, `predicted ${timeText(step.us(i))}${measured ? `, measured ${step.measuredText(i)}` : ""}`].filter(Boolean).join("\n");
}

function timelineLanes(step) {
  const {nodes, data} = step, computed = [], host = [], groups = data.groups.map(() => []);
  for (const i of nodes.order) {
    if (step.run(i) === COMPUTE && step.us(i) > 0) computed.push(i);
    else if (step.run(i) === READ) host.push(i);
    else if (step.run(i) === ISSUE) groups[nodes.group[i]].push(i);
  }
  const stalls = data.exposed.flatMap(each => each.stalls.map(([start, end]) => ({node: each.node, start: start / 1000, end: end / 1000, reason: each.reason, text: each.text})));
  const compute = {...barsOf(step, "computation", computed), stalls};
  const rows = [
    {title: "phase", height: BAND, runs: runsOf(step, compute, i => step.phase(i)), color: run => phaseColor(run.title)},
    ...[1, 2, 3].map(depth => moduleRow(step, compute, depth)).filter(Boolean),
    ...regionRow(step, compute),
    compute,
    ...(host.length ? [barsOf(step, "host", host)] : []),
    ...groups.map((bars, g) => barsOf(step, `group ${data.groups[g].name} · ${data.groups[g].ranks}`, bars)),
  ];
  let end = step.total;
  const streams = [["measured", i => step.run(i) !== ISSUE], ...data.groups.map((group, g) => [`measured ${group.name}`, i => step.run(i) === ISSUE && nodes.group[i] === g])];
  for (const [title, belongs] of streams) {
    const spans = new Map(step.spans.filter(span => belongs(span.members[0])).map(span => [span.members[0], span]));
    if (!spans.size) continue;
    const row = barsOf(step, title, [...spans.keys()], i => [spans.get(i).start, spans.get(i).end]);
    rows.push({...row, label: i => spans.get(i).region || step.shortOp(i), shade: i => spans.get(i).region ? kindColor("module") : null});
    for (const span of spans.values()) end = Math.max(end, span.end);
  }
  return {rows, end};
}

function barsOf(step, title, bars, times = i => [step.start[i], step.end[i]]) {
  const all = bars.map(i => [i, ...times(i)]).sort((a, b) => a[1] - b[1]);
  const row = {title, height: LANE, bars: all.map(each => each[0]), start: Float64Array.from(all, each => each[1]), end: Float64Array.from(all, each => each[2])};
  row.reach = row.end.slice();
  for (let k = 1; k < row.reach.length; k++) row.reach[k] = Math.max(row.reach[k], row.reach[k - 1]);
  return row;
}

// The first bar that ends after a time: ends, made to grow, are searched by halving.
const firstEnding = (row, time) => upperBound(row.reach, time - 1e-9);

function upperBound(values, wanted) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle + 1; else high = middle;
  }
  return low;
}

// Bars of one lane that follow each other with the same title, as one.
function runsOf(step, row, title) {
  const runs = [];
  row.bars.forEach((i, k) => {
    const text = title(i), last = runs[runs.length - 1];
    if (last && last.title === text) last.end = row.end[k];
    else runs.push({title: text, start: row.start[k], end: row.end[k]});
  });
  return runs.filter(run => run.title);
}

// Compiled regions, where some are: what is not in one is a gap.
function regionRow(step, compute) {
  const names = step.data.regions.map(region => region.name);
  if (!names.length) return [];
  return [{title: "compiled region", height: BAND, faint: true, runs: runsOf(step, compute, i => step.regionOf.get(i) ?? ""), color: run => color(names.indexOf(run.title) % 2 ? "grey" : "dark")}];
}

function moduleRow(step, compute, depth) {
  const common = commonPrefix(step.nodes.modules.filter(Boolean)), names = step.nodes.modules.map(path => {
    const parts = path ? path.slice(common.length).split(".") : [];
    return parts.length >= depth && parts[0] ? parts.slice(0, depth).join(".") : "";
  });
  const known = [...new Set(names)].filter(Boolean);
  if (!known.length) return null;
  const shades = new Map(known.map((name, n) => [name, ROTATION[n % ROTATION.length]]));
  return {title: depth === 1 ? "module" : "", height: BAND, faint: true, runs: runsOf(step, compute, i => names[step.nodes.module[i]]), labels: run => [/\.?([^.]*[^.\d][^.]*(?:\.\d+)?)$/.exec(run.title)?.[1] ?? run.title, run.title.split(".").pop()], color: run => color(shades.get(run.title))};
}

function commonPrefix(paths) {
  const deepest = paths.map(path => path.split(".")).reduce((most, each) => each.length > most.length ? each : most, []);
  let length = deepest.length;
  const holds = path => { const start = deepest.slice(0, length).join("."); return start === path || start.startsWith(path + ".") || path.startsWith(start + "."); };
  while (length && (length === deepest.length || !paths.every(holds))) length--;
  return length ? deepest.slice(0, length).join(".") + "." : "";
}

function moduleColors(step) {
  const common = commonPrefix(step.nodes.modules.filter(Boolean)), seen = new Map();
  return step.nodes.modules.map(path => {
    if (!path) return "grey";
    const key = path.slice(common.length).split(".").slice(0, 2).join(".");
    if (!seen.has(key)) seen.set(key, ROTATION[seen.size % (ROTATION.length - 1)]);
    return seen.get(key);
  });
}

function hatch(context, left, y, wide, high) {
  context.save();
  context.beginPath();
  context.rect(left, y, wide, high);
  context.clip();
  context.fillStyle = cssColor("--warn-soft");
  context.fillRect(left, y, wide, high);
  context.strokeStyle = color("red");
  context.lineWidth = 1;
  const first = Math.max(left, 0) - high, last = Math.min(left + wide, 6000);
  for (let at = Math.floor(first / 6) * 6; at < last; at += 6) {
    context.beginPath();
    context.moveTo(at, y + high);
    context.lineTo(at + high, y);
    context.stroke();
  }
  context.strokeRect(left + 0.5, y + 0.5, wide - 1, high - 1);
  context.restore();
}

function outline(context, left, y, wide, high, ink) {
  context.strokeStyle = ink;
  context.lineWidth = 2;
  context.strokeRect(left - 1, y + 1, Math.max(wide, 3) + 2, high - 2);
}
