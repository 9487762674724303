"use strict";
// The step: columns as they came, decoded, with what several views need of them.

const [INPUT, FREE, COMPUTE, ISSUE, WAIT, READ, OUTPUT] = [0, 1, 2, 3, 4, 5, 6];

async function readData() {
  const text = atob(document.getElementById("data").textContent.trim());
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

class Step {
  constructor(data) {
    this.data = data;
    const nodes = this.nodes = data.nodes;
    this.count = nodes.name.length;
    this.start = Float64Array.from(nodes.start, each => each / 1000);
    this.end = Float64Array.from(nodes.end, each => each / 1000);
    this.total = Math.max(data.summary.step_us, 1e-6);
    this.outside = new Map(data.outside.node.map((node, i) => [node, data.outside.reasons[data.outside.reason[i]]]));
    const {nodes: measured, region, start, end} = data.measured;
    this.spans = measured.map((members, k) => ({members, region: region[k], start: start[k] / 1000, end: end[k] / 1000}));
    this.measured = new Map(this.spans.flatMap(span => span.members.map(node => [node, span])));
    this.regionOf = new Map(data.regions.flatMap(region => region.nodes.map(node => [node, region.name])));
    this.exposed = new Map(data.exposed.map(each => [each.node, each]));
    this.recomputed = new Set(nodes.recomputed);
    this.critical = new Set(data.critical);
    this.isSearched = null;
  }

  name(i) { return this.nodes.name[i]; }
  op(i) { return this.nodes.ops[this.nodes.op[i]]; }
  shortOp(i) { return this.op(i).replace(/^(aten|prims|_c10d_functional)\./, "").replace(/\.default$/, ""); }
  module(i) { return this.nodes.modules[this.nodes.module[i]]; }
  phase(i) { return this.nodes.phases[this.nodes.phase[i]]; }
  kind(i) { return this.nodes.kinds[this.nodes.kind[i]]; }
  value(i) { return this.nodes.values[this.nodes.value[i]]; }
  run(i) { return this.nodes.run[i]; }
  us(i) { return this.run(i) === COMPUTE || this.run(i) === READ || this.run(i) === ISSUE ? this.end[i] - this.start[i] : 0; }
  sources(i) { return this.nodes.source.slice(this.nodes.begin[i], this.nodes.begin[i + 1]); }

  place(i) {
    const number = this.nodes.place[i];
    if (number < 0) return null;
    const [file, line, inside] = this.nodes.places[number];
    return {file, line, inside, path: this.nodes.files[file]};
  }

  lineText(file, line) {
    const source = this.nodes.sources[file];
    return (typeof source === "string" ? this.lines(file)[line - 1] : source[line]) ?? "";
  }

  lines(file) {
    this.fileLines ??= new Map();
    if (!this.fileLines.has(file)) this.fileLines.set(file, this.nodes.sources[file].split("\n"));
    return this.fileLines.get(file);
  }

  // The measured time of a node, as text.
  measuredText(i) {
    const span = this.measured.get(i);
    if (!span) return "";
    return span.region ? `in ${span.region} with ${span.members.length - 1} others: ${timeText(span.end - span.start)}` : timeText(span.end - span.start);
  }

  // The readers of a node, made when first asked for.
  users(i) {
    if (!this.userBegin) {
      const {begin, source} = this.nodes, count = new Int32Array(this.count + 1);
      for (const each of source) count[each + 1]++;
      for (let n = 0; n < this.count; n++) count[n + 1] += count[n];
      this.userBegin = count.slice();
      this.userOf = new Int32Array(source.length);
      for (let n = 0; n < this.count; n++) for (let k = begin[n]; k < begin[n + 1]; k++) this.userOf[count[source[k]]++] = n;
    }
    return Array.from(this.userOf.subarray(this.userBegin[i], this.userBegin[i + 1]));
  }

  // Where in the work a node belongs: communication is a part of its own.
  part(i) {
    const run = this.run(i);
    if (run === INPUT) return "inputs";
    if (run === OUTPUT) return "output";
    if (run === ISSUE || run === WAIT) return "communication";
    return this.phase(i);
  }

  // Nodes whose name, operator or module contains every word of a query.
  search(query, most = Infinity) {
    if (!this.texts) {
      const {name, op, ops, module, modules} = this.nodes;
      this.texts = name.map((each, i) => `${each} ${ops[op[i]]} ${modules[module[i]]}`.toLowerCase());
    }
    const words = query.toLowerCase().split(/\s+/).filter(Boolean), found = [];
    if (!words.length) return found;
    for (let i = 0; i < this.count && found.length < most; i++) {
      const text = this.texts[i];
      if (words.every(word => text.includes(word))) found.push(i);
    }
    return found;
  }

  // What a node allocates, and for how long: {bytes, first, last, kind} by storage.
  storages(i) {
    if (!this.madeBy) {
      this.madeBy = new Map();
      this.data.memory.maker.forEach((maker, s) => { if (maker >= 0) (this.madeBy.get(maker) ?? this.madeBy.set(maker, []).get(maker)).push(s); });
    }
    return this.madeBy.get(i) ?? [];
  }

  // The time at which each place of the memory's order runs, never going back.
  get placeTimes() {
    if (!this.times) {
      const {node} = this.data.memory;
      this.times = new Float64Array(node.length + 1);
      let latest = 0;
      for (let k = 0; k < node.length; k++) this.times[k] = latest = Math.max(latest, this.run(node[k]) === WAIT ? this.end[node[k]] : this.start[node[k]]);
      this.times[node.length] = Math.max(latest, this.total);
    }
    return this.times;
  }
}

// Amounts as people read them.
const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
function bytesText(count) {
  for (const [unit, size] of UNITS) if (Math.abs(count) >= size) return `${digits(count / size)} ${unit}`;
  return `${Math.round(count)} B`;
}
function digits(value) { return Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2); }
function timeText(us) {
  if (us === 0) return "0";
  if (Math.abs(us) >= 1e6) return `${digits(us / 1e6)} s`;
  if (Math.abs(us) >= 1e3) return `${digits(us / 1e3)} ms`;
  return Math.abs(us) >= 0.01 ? `${digits(us)} µs` : `${(us * 1e3).toFixed(1)} ns`;
}
function countText(count) {
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (count >= size) return `${digits(count / size)} ${unit}`;
  return `${Math.round(count)}`;
}
const share = (part, whole) => whole ? `${(100 * part / whole).toFixed(part / whole < 0.0995 ? 1 : 0)}%` : "0%";
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const baseName = path => path.split("/").pop();
