// The graph, folded by part and module and opened down to operators, beside the lines that it came from.

const PARTS = ["inputs", "forward", "backward", "communication", "update", "optimizer", "epilogue", "output"];

function graphView(step) {
  const root = graphTree(step);
  let rows = [], file = mainFile(step), line = 0;
  const list = new LongList({
    label: "Graph", rowHeight: 25,
    choose: row => { if (row.node >= 0) { app.select(row.node); } },
    render: row => {
      const indent = `padding-left:${8 + row.depth * 16}px`;
      if (row.node >= 0) {
        const i = row.node;
        return make("div", {style: indent}, make("span", {class: "caret"}), swatch(kindColor(step.kind(i))),
          make("span", {class: "grow mono"}, step.data.memory.paths[i] ?? step.name(i), make("span", {class: "quiet"}, `  ${step.shortOp(i)}  ${step.value(i)}`)),
          step.exposed.has(i) && make("span", {class: "chip warn"}, `exposed ${timeText(step.exposed.get(i).us)}`),
          make("span", {class: "cell quiet"}, step.us(i) > 0 ? timeText(step.us(i)) : ""));
      }
      const group = row.group;
      return make("div", {style: indent, title: group.path || group.name, "aria-expanded": group.open}, make("span", {class: `caret${group.open ? " open" : ""}`}, "▸"),
        make("span", {class: "grow"}, make("b", {}, group.name), make("span", {class: "quiet"}, `  ${group.count.toLocaleString("en")}`)),
        make("div", {class: "meter", title: share(group.us, step.total)}, make("i", {style: `width:${Math.min(100 * group.us / step.total, 100)}%;background:${phaseColor(group.part)}`})),
        make("span", {class: "cell"}, group.us ? timeText(group.us) : ""));
    },
  });
  const plainPick = list.pick.bind(list);
  list.pick = i => { const row = list.rows[i]; if (row?.group && i === list.at) toggle(row.group); else if (row?.group && list.element !== document.activeElement?.closest?.(".list")) toggle(row.group); plainPick(Math.min(i, list.rows.length - 1)); };
  list.inner.addEventListener("click", event => {
    const caret = event.target.closest(".row");
    if (!caret || event.defaultPrevented) return;
    const i = Math.round(parseFloat(caret.style.top) / list.rowHeight), row = list.rows[i];
    if (row?.group) { event.preventDefault(); event.stopPropagation(); toggle(row.group); list.at = i; list.drawn = null; list.draw(); }
  }, true);
  list.onkey = event => {
    const row = list.rows[list.at];
    if (!row?.group) return;
    if ((event.key === "ArrowRight" && !row.group.open) || (event.key === "ArrowLeft" && row.group.open) || event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(row.group); }
  };

  function toggle(group) { group.open = !group.open; flatten(); }
  function flatten() {
    rows = [];
    const walk = (group, depth) => {
      for (const each of group.groups.values()) { rows.push({group: each, node: -1, depth}); if (each.open) walk(each, depth + 1); }
      for (const node of group.nodes) rows.push({node, depth});
    };
    walk(root, 0);
    list.set(rows, Math.min(list.at, rows.length - 1));
  }

  const source = new LongList({label: "Source", rowHeight: 19, choose: row => openLine(row.line), render: row => sourceRow(step, row, file, line)});
  source.inner.style.minWidth = "max-content";
  const files = make("select", {"aria-label": "File", onchange: event => { file = Number(event.target.value); openFile(); }}, step.nodes.files.map((path, n) => make("option", {value: n}, shortPath(path))));
  const lineNodes = make("div", {class: "tools", id: "line-nodes"});
  const edges = make("div", {style: "overflow:auto;flex:none;max-height:250px"});

  function openFile(at = 0) {
    files.value = String(file);
    source.set(fileRows(step, file));
    const k = source.rows.findIndex(row => row.line === at);
    line = at;
    if (k >= 0) { source.at = k; source.reveal(k); }
    source.drawn = null;
    source.draw();
  }

  function openLine(at) {
    line = at;
    const nodes = nodesOfLines(step).get(`${file}:${at}`) ?? [], us = nodes.reduce((sum, i) => sum + step.us(i), 0);
    lineNodes.replaceChildren(make("span", {}, nodes.length ? `Line ${at}: ${plural(nodes.length, "node")}, ${timeText(us)}:` : `Line ${at} left no node in the graph.`), ...nodes.slice(0, 14).map(i => nodeLink(step, i)), nodes.length > 14 ? `and ${nodes.length - 14} more` : "");
  }

  for (const part of root.groups.values()) if (part.part === "forward" || part.part === "backward") openSingle(part);
  flatten();
  if (file >= 0) openFile(hottestLine(step, file));
  return {
    element: make("div", {class: "fill"}, make("div", {class: "split"},
      make("div", {class: "card fill"},
        make("div", {class: "tools", style: "margin-bottom:6px"}, make("button", {class: "plain", onclick: () => { fold(root, false); flatten(); }}, "fold all"), make("button", {class: "plain", onclick: () => { root.groups.forEach(each => { each.open = true; }); flatten(); }}, "open parts"), make("span", {class: "grow"}), make("span", {}, "arrow keys move and open")),
        list.element, edges),
      make("div", {class: "card fill"}, file >= 0 ? [make("div", {class: "tools", style: "margin-bottom:6px"}, files), source.element, lineNodes] : make("p", {class: "quiet"}, "The nodes of this graph do not say which line they came from.")))),
    refresh() { list.draw(); source.draw(); },
    show(i) {
      let group = root;
      for (const key of groupPath(step, i)) { group = group.groups.get(key); if (!group) return; group.open = true; }
      flatten();
      list.at = rows.findIndex(row => row.node === i);
      list.drawn = null;
      if (list.at >= 0) list.reveal(list.at);
      list.draw();
      const place = step.place(i);
      if (place) { file = place.file; openFile(place.line); openLine(place.line); }
      edges.replaceChildren(neighbours(step, i));
    },
    openModule(path) {
      fold(root, false);
      for (const part of root.groups.values()) {
        let group = part;
        for (const key of path.split(".")) { group.open = true; group = group.groups.get(key); if (!group) break; }
        if (group) group.open = true; else part.open = false;
      }
      flatten();
      const k = rows.findIndex(row => row.group?.path === path);
      if (k >= 0) { list.at = k; list.reveal(k); list.drawn = null; list.draw(); }
    },
  };
}

function groupPath(step, i) {
  const part = step.part(i), path = part === "inputs" || part === "output" ? "" : step.module(i);
  return path ? [part, ...path.split(".")] : [part];
}

function graphTree(step) {
  const made = (name, part, path) => ({name, part, path, groups: new Map(), nodes: [], count: 0, us: 0, open: false});
  const root = made("", "", "");
  for (const part of PARTS) root.groups.set(part, made(part, part, ""));
  for (let i = 0; i < step.count; i++) {
    const keys = groupPath(step, i), us = step.us(i);
    let group = root, path = "";
    keys.forEach((key, depth) => {
      path = depth > 1 ? `${path}.${key}` : depth ? key : "";
      if (!group.groups.has(key)) group.groups.set(key, made(key, keys[0], path));
      group = group.groups.get(key);
      group.count++;
      group.us += us;
    });
    group.nodes.push(i);
  }
  for (const [key, group] of root.groups) if (!group.count) root.groups.delete(key);
  return root;
}

function fold(group, open) { group.groups.forEach(each => { each.open = open; fold(each, open); }); }

// Open a group, and on down while there is nothing to choose.
function openSingle(group) {
  group.open = true;
  if (group.groups.size === 1 && group.nodes.length < 12) openSingle([...group.groups.values()][0]);
}

function hottestLine(step, file) {
  return fileRows(step, file).reduce((best, row) => row.us > best.us ? row : best, {us: -1, line: 0}).line;
}

const shortPath = path => path.split("/").slice(-3).join("/");

// The file whose lines take most time.
function mainFile(step) {
  const count = new Map();
  step.nodes.place.forEach((number, i) => { if (number >= 0) { const file = step.nodes.places[number][0]; count.set(file, (count.get(file) ?? 0) + step.us(i) + 1e-6); } });
  return [...count].sort((a, b) => b[1] - a[1])[0]?.[0] ?? -1;
}

function nodesOfLines(step) {
  if (!step.ofLines) {
    step.ofLines = new Map();
    step.nodes.place.forEach((number, i) => {
      if (number < 0) return;
      const [file, line] = step.nodes.places[number], key = `${file}:${line}`;
      (step.ofLines.get(key) ?? step.ofLines.set(key, []).get(key)).push(i);
    });
  }
  return step.ofLines;
}

function fileRows(step, file) {
  const source = step.nodes.sources[file], nodes = nodesOfLines(step);
  const texts = typeof source === "string" ? step.lines(file).map((text, n) => [n + 1, text]) : Object.entries(source).map(([line, text]) => [Number(line), text]);
  const rows = texts.map(([line, text]) => { const found = nodes.get(`${file}:${line}`) ?? []; return {line, text, count: found.length, us: found.reduce((sum, i) => sum + step.us(i), 0)}; });
  const most = Math.max(...rows.map(row => row.us), 1e-9);
  for (const row of rows) row.heat = row.us / most;
  return rows;
}

function sourceRow(step, row, file, line) {
  const made = make("div", {class: `src${row.line === line ? " here" : ""}${row.count ? " has" : ""}`, "data-line": row.line, title: row.count ? plural(row.count, "node") : ""},
    make("span", {class: "no"}, row.line), make("span", {class: "us"}, row.us > 0 ? timeText(row.us) : row.count ? "·" : ""),
    make("span", {class: "heat", style: row.us > 0 ? `background:${color("red")};opacity:${0.15 + 0.85 * row.heat}` : ""}), make("span", {}, row.text || " "));
  return made;
}

// A node between what it reads and what reads it.
function neighbours(step, i) {
  const above = step.sources(i).slice(0, 6), below = step.users(i).slice(0, 6), wide = 150, gap = 12;
  const across = Math.max(above.length, below.length, 1), width = across * (wide + gap) + gap;
  const svg = makeSvg("svg", {width, height: 172, viewBox: `0 0 ${width} 172`, role: "img", "aria-label": `Edges of ${step.name(i)}`});
  const spread = (nodes, y) => nodes.map((n, k) => ({n, x: (width - nodes.length * (wide + gap) + gap) / 2 + k * (wide + gap), y}));
  const here = {n: i, x: (width - wide) / 2, y: 66}, tops = spread(above, 6), ends = spread(below, 126);
  const edge = (from, to) => makeSvg("path", {class: "edge", d: `M${from.x + wide / 2} ${from.y + 40} C${from.x + wide / 2} ${from.y + 56} ${to.x + wide / 2} ${to.y - 16} ${to.x + wide / 2} ${to.y}`});
  svg.append(...tops.map(each => edge(each, here)), ...ends.map(each => edge(here, each)));
  const cut = text => text.length > 21 ? text.slice(0, 20) + "…" : text;
  for (const each of [...tops, here, ...ends]) {
    svg.append(makeSvg("g", {onclick: () => app.select(each.n)},
      makeSvg("rect", {class: `box${each.n === i ? " here" : ""}`, x: each.x, y: each.y, width: wide, height: 40, rx: 7}),
      makeSvg("rect", {x: each.x, y: each.y, width: 5, height: 40, rx: 2, fill: kindColor(step.kind(each.n))}),
      makeSvg("text", {x: each.x + 12, y: each.y + 16}, cut(step.name(each.n))),
      makeSvg("text", {x: each.x + 12, y: each.y + 31, style: "opacity:.65"}, cut(step.value(each.n)))));
  }
  return svg;
}
