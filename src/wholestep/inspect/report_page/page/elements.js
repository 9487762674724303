// Small parts that the views are built of: elements, colours, long lists, canvases.

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else if (key === "style") made.style.cssText = value || "";
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter(each => each != null && each !== false).map(each => each instanceof Node ? each : String(each)));
  return made;
}

function makeSvg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) key.startsWith("on") ? made.addEventListener(key.slice(2), value) : made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
const cssColor = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Okabe and Ito's palette, which the colour-blind can tell apart; lighter on dark paper.
const OKABE = {
  blue: ["#0072b2", "#3d9bdc"], sky: ["#56b4e9", "#7cc7f2"], green: ["#009e73", "#2bb98f"], yellow: ["#cdb60a", "#f0e442"],
  orange: ["#e69f00", "#f0b33c"], red: ["#d55e00", "#f07f33"], pink: ["#cc79a7", "#dd9cc0"], grey: ["#8a94a1", "#8a96a5"],
  dark: ["#4b5563", "#b5bfcb"], pale: ["#c3cad3", "#4d5866"],
};
const color = name => OKABE[name][isDark() ? 1 : 0];
const KIND_COLORS = {
  matmul: "blue", pointwise: "green", reduction: "pink", communication: "red", write: "orange", random: "yellow", view: "pale",
  input: "sky", constant: "grey", module: "dark", other: "grey", output: "dark",
};
const PHASE_COLORS = {forward: "blue", backward: "orange", update: "pink", optimizer: "green", epilogue: "grey", communication: "red", inputs: "sky", output: "dark"};
const MEMORY_COLORS = {
  parameter: "blue", buffer: "sky", gradient: "red", optimizer_state: "orange", saved: "green", temporary: "pink", communicated: "yellow",
  batch: "grey", scaler_state: "dark", captured: "dark", constant: "dark", input: "sky", hyper_parameter: "pale", rng_state: "pale",
};
const MEMORY_NAMES = {
  parameter: "parameters", buffer: "buffers", gradient: "gradients", optimizer_state: "optimizer state", saved: "saved activations",
  temporary: "temporaries", communicated: "communicated", batch: "batch", captured: "captured tensors", constant: "constants", input: "inputs",
};
const ROTATION = ["blue", "orange", "green", "pink", "sky", "red", "yellow", "dark", "grey"];
const kindColor = kind => color(KIND_COLORS[kind] ?? "grey");
const phaseColor = phase => color(PHASE_COLORS[phase] ?? "grey");
const memoryColor = kind => color(MEMORY_COLORS[kind] ?? "grey");
const swatch = shade => make("i", {class: "swatch", style: `background:${shade}`});

function inkOn(shade) {
  const [r, g, b] = [1, 3, 5].map(at => parseInt(shade.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 150 ? "#10161d" : "#ffffff";
}

// A list of any length: only the rows in sight are elements.
class LongList {
  constructor({rowHeight = 24, render, choose = () => {}, label = ""}) {
    this.rowHeight = rowHeight;
    this.render = render;
    this.choose = choose;
    this.inner = make("div", {class: "inner"});
    this.element = make("div", {class: "list", tabindex: "0", role: "listbox", "aria-label": label}, this.inner);
    this.rows = [];
    this.at = -1;
    this.element.addEventListener("scroll", () => this.draw());
    this.element.addEventListener("keydown", event => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  set(rows, at = -1) {
    this.rows = rows;
    this.at = at;
    this.inner.style.height = `${rows.length * this.rowHeight}px`;
    this.drawn = null;
    this.draw();
  }

  draw() {
    const {scrollTop, clientHeight} = this.element;
    if (clientHeight && this.waiting !== undefined) {
      const at = this.waiting;
      delete this.waiting;
      this.reveal(at);
      this.draw();
      return;
    }
    const first = Math.max(Math.floor(scrollTop / this.rowHeight) - 4, 0);
    const last = Math.min(Math.ceil((scrollTop + clientHeight) / this.rowHeight) + 4, this.rows.length);
    const key = `${first} ${last} ${this.at}`;
    if (key === this.drawn) return;
    this.drawn = key;
    const made = [];
    for (let i = first; i < last; i++) {
      const row = this.render(this.rows[i], i);
      row.classList.add("row");
      row.setAttribute("role", "option");
      row.setAttribute("aria-selected", i === this.at);
      row.style.top = `${i * this.rowHeight}px`;
      row.style.height = `${this.rowHeight}px`;
      row.addEventListener("click", event => { if (!event.defaultPrevented) this.pick(i); });
      made.push(row);
    }
    this.inner.replaceChildren(...made);
  }

  pick(i, event = null) {
    this.at = i;
    this.reveal(i);
    this.drawn = null;
    this.draw();
    this.choose(this.rows[i], i, event);
  }

  reveal(i) {
    const top = i * this.rowHeight, {scrollTop, clientHeight} = this.element;
    if (!clientHeight) { this.waiting = i; return; }
    if (top < scrollTop || top + this.rowHeight > scrollTop + clientHeight) this.element.scrollTop = Math.max(top - clientHeight / 2, 0);
  }

  key(event) {
    const step = {ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20, Home: -1e9, End: 1e9}[event.key];
    if (step === undefined || !this.rows.length) { this.onkey?.(event); return; }
    event.preventDefault();
    this.pick(Math.min(Math.max(this.at + step, 0), this.rows.length - 1));
  }
}

// A canvas as large as its place, in device pixels, which draws itself again when that changes.
class Surface {
  constructor(height, draw, label) {
    this.height = height;
    this.paint = draw;
    this.element = make("canvas", {tabindex: "0", role: "img", "aria-label": label});
    this.element.style.height = `${height}px`;
    this.width = 0;
    new ResizeObserver(() => this.fit()).observe(this.element);
  }

  fit() {
    const width = this.element.clientWidth, scale = devicePixelRatio || 1;
    if (!width) return;
    this.width = width;
    this.element.width = Math.round(width * scale);
    this.element.height = Math.round(this.height * scale);
    this.now();
  }

  resize(height) {
    this.height = height;
    this.element.style.height = `${height}px`;
    this.fit();
  }

  now() {
    if (!this.width) return;
    const context = this.element.getContext("2d"), scale = devicePixelRatio || 1;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = `11px ${cssColor("--sans")}`;
    context.textBaseline = "middle";
    this.paint(context, this.width, this.height);
  }

  soon() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.now(); });
  }
}

function clipped(context, text, width) {
  if (width < 14) return "";
  if (context.measureText(text).width <= width) return text;
  let length = Math.floor(text.length * width / context.measureText(text).width) - 1;
  while (length > 1 && context.measureText(text.slice(0, length) + "…").width > width) length--;
  return length > 1 ? text.slice(0, length) + "…" : "";
}

const tip = {
  show(text, x, y) {
    const box = document.getElementById("tip");
    box.textContent = text;
    box.hidden = false;
    const {width, height} = box.getBoundingClientRect();
    box.style.left = `${Math.min(x + 14, innerWidth - width - 8)}px`;
    box.style.top = `${y + 18 + height > innerHeight ? y - height - 10 : y + 18}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
};

function copyable(code) {
  const button = make("button", {class: "plain", onclick: () => {
    const done = () => { button.textContent = "copied"; setTimeout(() => { button.textContent = "copy"; }, 1200); };
    const select = () => getSelection().selectAllChildren(text);
    navigator.clipboard ? navigator.clipboard.writeText(code).then(done, select) : select();
  }}, "copy");
  const text = make("span", {}, code);
  return make("pre", {class: "code"}, text, button);
}

function barOf(parts, whole) {
  const shown = parts.filter(each => each.amount > 0), total = whole ?? shown.reduce((sum, each) => sum + each.amount, 0);
  return [
    make("div", {class: "bar"}, shown.map(each => make("span", {title: `${each.name}: ${each.text}`, class: each.hatched ? "hatched" : "", style: `width:${100 * each.amount / (total || 1)}%;background-color:${each.shade}`}))),
    make("div", {class: "legend"}, shown.map(each => make("span", {}, swatch(each.shade), `${each.name} ${each.text}`))),
  ];
}

function choice(label, options, value, change) {
  const box = make("select", {onchange: event => change(event.target.value)}, options.map(([key, text]) => make("option", {value: key, selected: key === value}, text)));
  return make("label", {}, label, box);
}
