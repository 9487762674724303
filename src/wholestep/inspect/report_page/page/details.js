// The panel beside every view: one node with its line, shapes, costs, reasons, inputs and readers.

const MOST_LINKS = 24;

function nodeLink(step, i) {
  return make("button", {class: "link mono", onclick: event => { event.preventDefault(); app.select(i); }}, step.name(i));
}

function links(step, nodes) {
  const shown = nodes.slice(0, MOST_LINKS).map(i => make("div", {}, nodeLink(step, i), " ", make("span", {class: "quiet mono"}, step.value(i))));
  return nodes.length > MOST_LINKS ? [...shown, make("div", {class: "quiet"}, `and ${nodes.length - MOST_LINKS} more`)] : shown;
}

function callLine(step, i) {
  const sources = step.sources(i), text = step.nodes.calls[step.nodes.call[i]];
  const parts = text.split(/(\$\d+)/).map(part => {
    const number = /^\$(\d+)$/.exec(part);
    return number && sources[number[1]] !== undefined ? nodeLink(step, sources[number[1]]) : part;
  });
  return make("div", {class: "mono", style: "overflow-wrap:anywhere"}, `${step.op(i)}(`, ...parts, ")");
}

function sourceLines(step, place, around = 2) {
  const rows = [];
  for (let line = place.line - around; line <= place.line + around; line++) {
    const text = step.lineText(place.file, line);
    if (line < 1 || (text === "" && line !== place.line)) continue;
    rows.push(make("div", {class: `src${line === place.line ? " here" : ""}`, "data-line": line}, make("span", {class: "no"}, line), make("span", {}, text)));
  }
  return make("div", {style: "overflow-x:auto"}, rows);
}

function why(step, i) {
  const found = [], run = step.run(i), exposed = step.exposed.get(run === WAIT ? step.nodes.issued[i] : i);
  if (exposed) found.push(make("div", {class: "why"}, make("b", {}, `Exposed for ${timeText(exposed.us)}. `), `${exposed.text}.`, ...exposed.nodes.map(n => make("div", {}, nodeLink(step, n)))));
  else if (run === ISSUE) found.push(make("div", {class: "note"}, "Hidden: computation runs all the while."));
  if (run === WAIT && step.nodes.issued[i] >= 0) found.push(make("div", {class: "note"}, "Waits for ", nodeLink(step, step.nodes.issued[i]), "."));
  if (step.outside.has(i)) found.push(make("div", {class: "note"}, `In no compiled region: ${step.outside.get(i)}.`));
  if (step.recomputed.has(i)) found.push(make("div", {class: "note"}, "Recomputed: the forward's value was not kept."));
  if (step.critical.has(i) && (run === COMPUTE || run === ISSUE || run === READ)) found.push(make("div", {class: "note"}, "On the critical path: a shorter one makes the step shorter."));
  return found;
}

function fact(name, value) { return value == null || value === "" || value === false ? [] : [make("dt", {}, name), make("dd", {}, value)]; }

function nodeDetails(step, i) {
  const place = step.place(i), us = step.us(i), {flops, moved} = step.nodes, memory = step.data.memory;
  const measured = step.measured.get(i), path = memory.paths[i];
  const storages = step.storages(i);
  const held = storages.map(s => `${bytesText(memory.bytes[s])} (${MEMORY_NAMES[memory.kinds[memory.kind[s]]] ?? memory.kinds[memory.kind[s]]})`).join(", ");
  const until = storages.length && step.run(i) !== INPUT ? memory.node[Math.max(...storages.map(s => memory.last[s]))] : -1;
  return [
    make("button", {class: "plain close", "aria-label": "Close", onclick: () => app.select(-1)}, "×"),
    make("h2", {}, step.name(i)),
    make("div", {class: "chips"},
      make("span", {class: "chip"}, swatch(kindColor(step.kind(i))), " ", step.kind(i)),
      make("span", {class: "chip"}, step.part(i)),
      step.exposed.has(i) && make("span", {class: "chip warn"}, "exposed"),
      step.recomputed.has(i) && make("span", {class: "chip"}, "recomputed")),
    place && [make("div", {class: "quiet", id: "node-line"}, make("a", {onclick: () => app.go("graph")}, `${baseName(place.path)}:${place.line}`), place.inside ? ` in ${place.inside}` : ""), sourceLines(step, place)],
    make("h3", {}, "What"),
    callLine(step, i),
    make("dl", {class: "facts"},
      fact("value", make("span", {class: "mono"}, step.value(i))),
      fact("module", step.module(i) && make("button", {class: "link mono", onclick: () => app.openModule(step.module(i))}, step.module(i))),
      fact("region", step.regionOf.get(i)),
      fact("path", path && make("span", {class: "mono"}, path)),
      fact("group", step.nodes.group[i] >= 0 && `${step.data.groups[step.nodes.group[i]].name} (${plural(step.data.groups[step.nodes.group[i]].ranks, "rank")})`),
      fact("predicted", us > 0 && `${timeText(us)}, ${share(us, step.total)} of the step, at ${timeText(step.start[i])}`),
      fact("measured", measured && `${step.measuredText(i)}, at ${timeText(measured.start)}`),
      fact("flops", flops[i] > 0 && `${countText(flops[i])}${us > 0 ? ` (${countText(flops[i] / us * 1e6)}/s)` : ""}`),
      fact(step.run(i) === ISSUE ? "sent" : "moved", moved[i] > 0 && `${bytesText(moved[i])}${us > 0 ? ` (${bytesText(moved[i] / us * 1e6)}/s)` : ""}`),
      fact("allocates", held),
      fact("alive until", until >= 0 && until !== i && nodeLink(step, until))),
    why(step, i),
    make("div", {class: "chips"}, ["timeline", "memory", "graph"].map(tab => make("button", {class: "plain", onclick: () => app.go(tab)}, `in ${tab}`))),
    make("h3", {}, `Reads ${step.sources(i).length}`), links(step, step.sources(i)),
    make("h3", {}, `Read by ${step.users(i).length}`), links(step, step.users(i)),
  ].flat(3).filter(each => each);
}
