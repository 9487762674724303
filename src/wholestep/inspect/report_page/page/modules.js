// Every module with what it costs, sortable.

const MODULE_COLUMNS = [
  ["us", "time", timeText], ["self", "own", timeText], ["forward", "forward", timeText], ["backward", "backward", timeText], ["again", "recomputed", timeText],
  ["flops", "flops", countText], ["moved", "moved", bytesText], ["peak", "peak bytes", bytesText], ["nodes", "nodes", each => each.toLocaleString("en")],
];

function modulesView(step) {
  const all = moduleCosts(step);
  let by = "us", down = true, depth = 99, query = "";
  const list = new LongList({
    label: "Modules", rowHeight: 25, choose: row => { if (row.path) app.openModule(row.path); },
    render: row => make("div", {title: row.path || "nodes without a module"}, make("span", {class: "grow mono", style: "min-width:180px"}, row.path || "(no module)"),
      make("div", {class: "meter optional"}, make("i", {style: `width:${Math.min(100 * row.us / step.total, 100)}%`})),
      MODULE_COLUMNS.map(([key, , text], n) => make("span", {class: `cell${n > 0 ? " optional" : ""}`}, row[key] ? text(row[key]) : ""))),
  });
  const head = make("div", {class: "head"});

  function draw() {
    head.replaceChildren(make("button", {class: "grow", onclick: () => sort("path")}, "module"), make("span", {class: "optional", style: "width:90px"}),
      ...MODULE_COLUMNS.map(([key, title], n) => make("button", {class: `cell${n > 0 ? " optional" : ""}`, "aria-sort": key === by && (down ? "descending" : "ascending"), onclick: () => sort(key)}, title, key === by ? (down ? " ↓" : " ↑") : "")));
    const rows = all.filter(row => row.depth <= depth && row.path.toLowerCase().includes(query));
    rows.sort((a, b) => (by === "path" ? a.path.localeCompare(b.path, "en", {numeric: true}) * -1 : a[by] - b[by]) * (down ? -1 : 1));
    list.set(rows);
  }
  function sort(key) { down = key === by ? !down : true; by = key; draw(); }
  draw();
  const depths = [...new Set(all.map(row => row.depth))].sort((a, b) => a - b);
  return {
    element: make("div", {class: "card fill", style: "min-height:360px"}, make("div", {class: "tools", style: "margin-bottom:6px"},
      choice("Depth", [["99", "all"], ...depths.filter(each => each).map(each => [String(each), `up to ${each}`])], "99", value => { depth = Number(value); draw(); }),
      make("input", {type: "search", placeholder: "Filter modules", "aria-label": "Filter modules", style: "width:200px", oninput: event => { query = event.target.value.toLowerCase(); draw(); }}),
      make("span", {class: "grow"}), make("span", {}, "times are those of a module with all inside of it; own: without them")), head, list.element),
    refresh() { list.draw(); },
  };
}

// Costs of every module with all inside of it. Nodes are added up by module first: there are fewer modules than nodes.
function moduleCosts(step) {
  const {module, modules, flops, moved} = step.nodes, number = new Map(), rows = [];
  const row = path => {
    if (!number.has(path)) {
      number.set(path, rows.length);
      rows.push({path, depth: path ? path.split(".").length : 0, us: 0, self: 0, forward: 0, backward: 0, again: 0, flops: 0, moved: 0, nodes: 0, peak: 0});
    }
    return number.get(path);
  };
  const above = modules.map(path => path ? path.split(".").map((_, n, parts) => row(parts.slice(0, n + 1).join("."))) : [row("")]);
  const own = modules.map(() => ({us: 0, forward: 0, backward: 0, again: 0, flops: 0, moved: 0, nodes: 0}));
  for (let i = 0; i < step.count; i++) {
    if (step.run(i) === INPUT || step.run(i) === OUTPUT) continue;
    const each = own[module[i]], us = step.us(i), phase = step.phase(i);
    each.us += us;
    each.nodes++;
    each.flops += flops[i];
    each.moved += moved[i];
    if (step.recomputed.has(i)) each.again += us;
    else if (phase === "forward" || phase === "backward") each[phase] += us;
  }
  own.forEach((each, m) => {
    rows[above[m][above[m].length - 1]].self += each.us;
    for (const r of above[m]) for (const key in each) rows[r][key] += each[key];
  });
  peaksOfModules(step, rows, above);
  return rows.filter(each => each.nodes);
}

// The most bytes that each module has alive: all that is allocated and freed, in order, what is freed first.
function peaksOfModules(step, rows, above) {
  const {first, last, maker, bytes} = step.data.memory, keys = [], size = bytes.length;
  maker.forEach((node, s) => { if (node >= 0 && step.run(node) !== INPUT) keys.push((first[s] * 2 + 1) * size + s, (last[s] + 1) * 2 * size + s); });
  const live = new Float64Array(rows.length);
  for (const key of Float64Array.from(keys).sort()) {
    const s = key % size, change = Math.floor(key / size) % 2 ? bytes[s] : -bytes[s];
    for (const r of above[step.nodes.module[maker[s]]]) {
      live[r] += change;
      if (live[r] > rows[r].peak) rows[r].peak = live[r];
    }
  }
}
