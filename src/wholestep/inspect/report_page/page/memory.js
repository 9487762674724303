// Bytes over the step, by kind or by module, and what is alive at any moment.

// Bytes alive at each place of the memory's order.
function liveBytes(step) {
  if (!step.live) {
    const {bytes, first, last, node} = step.data.memory, live = new Float64Array(node.length + 1);
    bytes.forEach((size, s) => { live[first[s]] += size; live[last[s] + 1] -= size; });
    for (let k = 1; k < live.length; k++) live[k] += live[k - 1];
    step.live = live.subarray(0, node.length);
  }
  return step.live;
}

function memoryView(step) {
  const memory = step.data.memory, places = memory.node.length, live = liveBytes(step);
  let by = "kind", along = "time", pinned = memory.peak_place, layers = [];
  const [left, top, bottom] = [76, 10, 26];
  const surface = new Surface(310, paint, "Live bytes over the step. Arrow keys move the marked moment.");
  const canvas = surface.element, legend = make("div", {class: "legend"}), said = make("div", {});
  const ends = step.placeTimes[places] || 1, {budget} = step.data.summary;
  const levels = budget ? [[budget.budget, "budget"], [budget.without, "without recomputation"]].filter(each => each[0] < 3 * memory.peak) : [];
  const highest = Math.max(memory.peak, ...levels.map(each => each[0])) || 1;

  const x = k => left + (along === "time" ? step.placeTimes[k] / ends : k / places) * (surface.width - left - 8);
  const placeAt = px => {
    const part = Math.min(Math.max((px - left) / (surface.width - left - 8), 0), 1);
    return along === "time" ? Math.min(Math.max(upperBound(step.placeTimes, part * ends) - 1, 0), places - 1) : Math.min(Math.floor(part * places), places - 1);
  };

  function regroup() {
    const titles = by === "kind" ? memory.kinds : topModules(step), of = by === "kind" ? memory.kind : modulesOfStorages(step, titles);
    layers = titles.map((name, n) => ({name: by === "kind" ? MEMORY_NAMES[name] ?? name : name, shade: by === "kind" ? memoryColor(name) : color(ROTATION[n % ROTATION.length]), rank: n, change: new Float64Array(places + 1)}));
    memory.bytes.forEach((size, s) => { const {change} = layers[of[s]]; change[memory.first[s]] += size; change[memory.last[s] + 1] -= size; });
    for (const layer of layers) {
      for (let k = 1; k <= places; k++) layer.change[k] += layer.change[k - 1];
      layer.most = layer.change.reduce((most, each) => Math.max(most, each), 0);
    }
    const order = ["parameter", "optimizer_state", "buffer", "batch", "gradient", "communicated", "saved", "temporary"].map(kind => MEMORY_NAMES[kind]);
    layers = layers.filter(layer => layer.most > 0);
    if (by === "kind") layers.sort((a, b) => (order.indexOf(a.name) + 100) % 100 - (order.indexOf(b.name) + 100) % 100);
    surface.soon();
    say();
  }

  function paint(context, width, height) {
    const quiet = cssColor("--quiet"), most = highest, high = height - top - bottom;
    const y = bytes => top + high - bytes / (most * 1.04) * high;
    context.textAlign = "right";
    for (let n = 0; n <= 4; n++) {
      context.fillStyle = quiet;
      context.fillText(bytesText(most * n / 4), left - 8, y(most * n / 4));
      context.fillStyle = cssColor("--line");
      context.fillRect(left, y(most * n / 4), width - left - 8, 1);
    }
    const wide = Math.max(Math.floor(width - left - 8), 1), chosen = new Int32Array(wide);
    for (let px = 0; px < wide; px++) {
      let best = placeAt(left + px), last = placeAt(left + px + 1);
      for (let k = best; k <= last; k++) if (live[k] > live[best]) best = k;
      chosen[px] = best;
    }
    const base = new Float64Array(wide);
    for (const layer of layers) {
      context.beginPath();
      for (let px = 0; px < wide; px++) context.lineTo(left + px, y(base[px]));
      for (let px = wide - 1; px >= 0; px--) { base[px] += layer.change[chosen[px]]; context.lineTo(left + px, y(base[px])); }
      context.fillStyle = layer.shade;
      context.fill();
    }
    context.textAlign = "left";
    context.fillStyle = quiet;
    phaseMarks(context, y(0), height, quiet);
    for (const [bytes, name] of levels) {
      context.strokeStyle = context.fillStyle = cssColor("--warn");
      context.setLineDash([6, 4]);
      context.beginPath();
      context.moveTo(left, y(bytes));
      context.lineTo(width - 8, y(bytes));
      context.stroke();
      context.setLineDash([]);
      context.textAlign = "right";
      context.fillText(`${name} ${bytesText(bytes)}`, width - 12, y(bytes) + 9);
      context.textAlign = "left";
    }
    marker(context, memory.peak_place, `peak ${bytesText(memory.peak)}`, height, true);
    if (pinned !== memory.peak_place) marker(context, pinned, bytesText(live[pinned]), height, false);
  }

  function phaseMarks(context, y, height, quiet) {
    let last = "", shown = -1e9;
    for (let k = 0; k < places; k++) {
      const i = memory.node[k], name = step.run(i) === INPUT || step.run(i) === OUTPUT ? last : step.phase(i);
      if (name === last) continue;
      last = name;
      const at = x(k);
      context.fillStyle = phaseColor(name);
      context.fillRect(at, y, Math.max(surface.width - 8 - at, 0), 4);
      if (at - shown > 58 && at + context.measureText(name).width < surface.width) { context.fillStyle = quiet; context.fillText(name, at, height - 10); shown = at; }
    }
  }

  function marker(context, k, text, height, dashed) {
    const at = Math.round(x(k)) + 0.5, ink = cssColor("--ink");
    context.strokeStyle = ink;
    context.setLineDash(dashed ? [4, 3] : []);
    context.lineWidth = 1.3;
    context.beginPath();
    context.moveTo(at, top - 4);
    context.lineTo(at, height - bottom);
    context.stroke();
    context.setLineDash([]);
    const wide = context.measureText(text).width + 10, box = at + wide + 6 > surface.width ? at - wide - 4 : at + 4;
    context.fillStyle = cssColor("--card");
    context.globalAlpha = 0.88;
    context.fillRect(box, top - 2, wide, 17);
    context.globalAlpha = 1;
    context.fillStyle = ink;
    context.fillText(text, box + 5, top + 7);
  }

  const list = new LongList({
    label: "What is alive",
    choose: row => { if (row.maker >= 0) app.select(row.maker); },
    render: row => make("div", {},
      swatch(memoryColor(row.kind)), make("span", {class: "cell"}, bytesText(row.bytes)), make("div", {class: "meter"}, make("i", {style: `width:${100 * row.bytes / (alive[0]?.bytes || 1)}%;background:${memoryColor(row.kind)}`})),
      make("span", {class: "grow mono"}, memory.paths[row.maker] ?? (row.maker >= 0 ? step.name(row.maker) : "")),
      make("span", {class: "wide optional quiet"}, row.maker >= 0 ? step.module(row.maker) : ""),
      make("span", {class: "wide optional mono quiet"}, row.maker >= 0 ? step.value(row.maker) : "")),
  });
  let alive = [];

  function say() {
    const k = pinned, i = memory.node[k] ?? 0;
    alive = [];
    memory.bytes.forEach((bytes, s) => { if (memory.first[s] <= k && k <= memory.last[s]) alive.push({bytes, maker: memory.maker[s], kind: memory.kinds[memory.kind[s]]}); });
    alive.sort((a, b) => b.bytes - a.bytes);
    const total = live[k] ?? 0, sums = new Map();
    for (const each of alive) sums.set(each.kind, (sums.get(each.kind) ?? 0) + each.bytes);
    const parts = [...sums].sort((a, b) => b[1] - a[1]), place = step.place(i);
    const largest = alive.find(each => each.kind === parts[0]?.[0]);
    said.replaceChildren(
      make("b", {}, k === memory.peak_place ? `The peak, ${bytesText(total)}, ` : `${bytesText(total)} (${share(total, memory.peak)} of the peak) `), "while ", nodeLink(step, i), " runs",
      place ? ` (${baseName(place.path)}:${place.line}, ${step.phase(i)})` : ` (${step.part(i)})`, ": ",
      parts.slice(0, 4).map(([kind, bytes]) => `${bytesText(bytes)} ${MEMORY_NAMES[kind] ?? kind}`).join(", "), ". ",
      ...(largest && largest.maker >= 0 ? [`Most are ${MEMORY_NAMES[parts[0][0]] ?? parts[0][0]}, the largest of them `, memory.paths[largest.maker] ?? nodeLink(step, largest.maker), ` with ${bytesText(largest.bytes)}.`] : []));
    legend.replaceChildren(...layers.map(layer => make("span", {}, swatch(layer.shade), `${layer.name} ${bytesText(layer.change[k])}`)));
    list.set(alive);
  }

  function pin(k) { pinned = Math.min(Math.max(k, 0), places - 1); surface.soon(); say(); }
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect(), k = placeAt(event.clientX - box.left);
    if (event.buttons & 1) pin(k);
    tip.show([`${bytesText(live[k])} while ${step.name(memory.node[k])}`, ...layers.filter(layer => layer.change[k] > 0).map(layer => `${layer.name}  ${bytesText(layer.change[k])}`)].join("\n"), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => tip.hide());
  canvas.addEventListener("pointerdown", event => pin(placeAt(event.clientX - canvas.getBoundingClientRect().left)));
  canvas.addEventListener("keydown", event => {
    const move = {ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50}[event.key];
    if (move) { event.preventDefault(); pin(pinned + move); }
  });
  regroup();

  return {
    element: make("div", {class: "fill", style: "gap:14px;min-height:640px"},
      make("div", {class: "card", style: "display:grid;gap:10px"},
        make("div", {class: "tools"}, choice("Colour by", [["kind", "kind"], ["module", "module"]], by, value => { by = value; regroup(); }),
          choice("Along", [["time", "predicted time"], ["order", "order of nodes"]], along, value => { along = value; surface.now(); }),
          make("button", {class: "plain", onclick: () => pin(memory.peak_place)}, "go to the peak"), make("span", {class: "grow"}), make("span", {}, "click: what is alive there")),
        canvas, legend),
      make("div", {class: "card fill"}, make("p", {style: "margin:0 0 8px", id: "memory-said"}, said),
        make("div", {class: "head"}, make("span", {style: "width:10px"}), make("span", {class: "cell"}, "bytes"), make("span", {style: "width:90px"}), make("span", {class: "grow"}, "tensor"), make("span", {class: "wide optional"}, "module"), make("span", {class: "wide optional"}, "value")),
        list.element)),
    refresh() { surface.now(); say(); },
    show(i) {
      const found = step.storages(i), k = found.length && step.run(i) !== INPUT ? memory.first[found[0]] : memory.node.indexOf(i);
      if (k >= 0) pin(k);
    },
  };
}

// The modules that hold most bytes at the peak, down to two names below what all have in common, and the rest.
function topModules(step) {
  const memory = step.data.memory, sums = new Map();
  memory.bytes.forEach((bytes, s) => {
    if (memory.first[s] > memory.peak_place || memory.last[s] < memory.peak_place) return;
    const name = moduleOfStorage(step, s);
    if (name) sums.set(name, (sums.get(name) ?? 0) + bytes);
  });
  return [...[...sums].sort((a, b) => b[1] - a[1]).slice(0, 8).map(each => each[0]).sort(), "elsewhere"];
}

function moduleOfStorage(step, s) {
  const maker = step.data.memory.maker[s];
  if (maker < 0) return "";
  const path = step.data.memory.paths[maker], inside = step.module(maker) || (path ? (/\[(.*?)\]/.exec(path)?.[1] ?? path).replace(/\.[^.]*$/, "") : "");
  step.common ??= commonPrefix(step.nodes.modules.filter(Boolean));
  return inside.startsWith(step.common) ? inside.slice(step.common.length).split(".").slice(0, 2).join(".") : inside.split(".").slice(0, 2).join(".");
}

function modulesOfStorages(step, titles) {
  const at = new Map(titles.map((title, n) => [title, n]));
  return step.data.memory.bytes.map((_, s) => at.get(moduleOfStorage(step, s)) ?? titles.length - 1);
}
