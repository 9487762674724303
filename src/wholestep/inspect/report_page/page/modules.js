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
      MODULE_COLUMNS.map(([key, , text], n) => make("span", {class: `cell${n > 2 ? " optional" : ""}`}, row[key] ? text(row[key]) : ""))),
  });
  const head = make("div", {class: "head"});

  function draw() {
    head.replaceChildren(make("button", {class: "grow", onclick: () => sort("path")}, "module"), make("span", {class: "optional", style: "width:90px"}),
      ...MODULE_COLUMNS.map(([key, title], n) => make("button", {class: `cell${n > 2 ? " optional" : ""}`, "aria-sort": key === by && (down ? "descending" : "ascending"), onclick: () => sort(key)}, title, key === by ? (down ? " ↓" : " ↑") : "")));
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

function moduleCosts(step) {
  const rows = new Map(), again = step.recomputed;
  const row = path => {
    if (!rows.has(path)) rows.set(path, {path, depth: path ? path.split(".").length : 0, us: 0, self: 0, forward: 0, backward: 0, again: 0, flops: 0, moved: 0, nodes: 0, peak: 0, changes: []});
    return rows.get(path);
  };
  const prefixes = step.nodes.modules.map(path => path ? path.split(".").map((_, n, parts) => parts.slice(0, n + 1).join(".")) : [""]);
  for (let i = 0; i < step.count; i++) {
    if (step.run(i) === INPUT || step.run(i) === OUTPUT) continue;
    const above = prefixes[step.nodes.module[i]], us = step.us(i), phase = step.phase(i);
    row(above[above.length - 1]).self += us;
    for (const path of above) {
      const each = row(path);
      each.us += us;
      each.nodes++;
      each.flops += step.nodes.flops[i];
      each.moved += step.nodes.moved[i];
      if (again.has(i)) each.again += us;
      else if (phase === "forward" || phase === "backward") each[phase] += us;
    }
  }
  const memory = step.data.memory;
  memory.maker.forEach((maker, s) => {
    if (maker < 0 || step.run(maker) === INPUT) return;
    for (const path of prefixes[step.nodes.module[maker]]) row(path).changes.push([memory.first[s], memory.bytes[s]], [memory.last[s] + 1, -memory.bytes[s]]);
  });
  for (const each of rows.values()) {
    each.changes.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    let live = 0;
    for (const [, bytes] of each.changes) { live += bytes; if (live > each.peak) each.peak = live; }
    delete each.changes;
  }
  return [...rows.values()];
}
