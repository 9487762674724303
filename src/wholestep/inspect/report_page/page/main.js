// The page: tabs, search, the selected node, and the address (`#graph?node=mm_3`) that brings a reader back.

const app = {
  step: null, selected: -1, tab: "", views: new Map(),

  tabs: [["summary", "Summary", summaryView], ["timeline", "Timeline", timelineView], ["memory", "Memory", memoryView], ["graph", "Graph", graphView], ["passes", "Passes", passesView], ["modules", "Modules", modulesView]],

  async start() {
    this.step = new Step(await readData());
    const {summary, title, ranks, pipeline} = this.step.data;
    if (ranks.length > 1) this.tabs.push(["ranks", "Ranks", ranksView]);
    if (pipeline.length) this.tabs.push(["pipeline", "Pipeline", pipelineView]);
    document.getElementById("gist").textContent = `${timeText(summary.step_us)} predicted${summary.machine ? ` on ${summary.machine}` : ""} · peak ${bytesText(summary.peak)} · ${plural(this.step.count, "node")}`;
    document.getElementById("name").title = title;
    document.getElementById("tabs").append(...this.tabs.map(([key, text]) => make("button", {role: "tab", id: `tab-${key}`, "aria-controls": "view", onclick: () => this.go(key)}, text)));
    this.listen();
    const [tab, query] = location.hash.slice(1).split("?"), name = new URLSearchParams(query).get("node");
    this.go(this.tabs.some(each => each[0] === tab) ? tab : "summary");
    if (name) this.select(this.step.nodes.name.indexOf(name));
    requestAnimationFrame(() => setTimeout(() => { performance.mark("painted"); document.documentElement.dataset.ready = "yes"; }));
  },

  view(tab) {
    if (!this.views.has(tab)) this.views.set(tab, this.tabs.find(each => each[0] === tab)[2](this.step));
    return this.views.get(tab);
  },

  go(tab) {
    this.tab = tab;
    for (const [key] of this.tabs) {
      const button = document.getElementById(`tab-${key}`);
      button.setAttribute("aria-selected", key === tab);
      button.tabIndex = key === tab ? 0 : -1;
    }
    const view = this.view(tab);
    document.getElementById("view").replaceChildren(view.element);
    tip.hide();
    view.refresh?.();
    if (this.selected >= 0) view.show?.(this.selected);
    this.remember();
  },

  select(i) {
    this.selected = i;
    const panel = document.getElementById("details");
    panel.hidden = i < 0;
    if (i >= 0) { panel.replaceChildren(...nodeDetails(this.step, i)); panel.scrollTop = 0; }
    const view = this.view(this.tab);
    if (i >= 0) view.show?.(i); else view.refresh?.();
    this.remember();
  },

  openModule(path) { this.selected = -1; document.getElementById("details").hidden = true; this.go("graph"); this.view("graph").openModule(path); },

  remember() { history.replaceState(null, "", `#${this.tab}${this.selected >= 0 ? `?node=${encodeURIComponent(this.step.name(this.selected))}` : ""}`); },

  listen() {
    const input = document.getElementById("search"), box = document.getElementById("found");
    let found = [], at = 0;
    const close = () => { box.hidden = true; input.setAttribute("aria-expanded", "false"); };
    const draw = () => {
      box.replaceChildren(...found.slice(0, 40).map((i, n) => make("div", {role: "option", "aria-selected": n === at, onpointerdown: event => { event.preventDefault(); choose(n); }},
        swatch(kindColor(this.step.kind(i))), make("span", {class: "mono"}, this.step.name(i)), make("span", {class: "quiet"}, `${this.step.shortOp(i)} ${this.step.value(i)} ${this.step.module(i)}`))),
      make("div", {class: "quiet", style: "padding:5px 9px"}, found.length > 40 ? `${found.length.toLocaleString("en")} found; Enter goes to the next` : found.length ? `${found.length} found` : "nothing found"));
      box.hidden = !input.value.trim();
      input.setAttribute("aria-expanded", String(!box.hidden));
      box.children[at]?.scrollIntoView?.({block: "nearest"});
    };
    const choose = n => { at = n; draw(); if (found[n] !== undefined) this.select(found[n]); };
    input.addEventListener("input", () => { found = this.step.search(input.value); at = 0; draw(); this.view(this.tab).search?.(found); });
    input.addEventListener("keydown", event => {
      if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); at = Math.min(Math.max(at + (event.key === "ArrowDown" ? 1 : -1), 0), Math.min(found.length, 40) - 1); draw(); }
      else if (event.key === "Enter" && found.length) { event.preventDefault(); if (this.selected === found[at]) at = (at + (event.shiftKey ? found.length - 1 : 1)) % found.length; choose(at); }
      else if (event.key === "Escape") { input.value = ""; found = []; close(); this.view(this.tab).search?.([]); input.blur(); }
    });
    input.addEventListener("blur", close);
    input.addEventListener("focus", () => { if (input.value.trim()) draw(); });
    document.addEventListener("keydown", event => {
      if (event.target.closest?.("input, select") || event.metaKey || event.ctrlKey || event.altKey) return;
      const number = Number(event.key);
      if (event.key === "/") { event.preventDefault(); input.focus(); input.select(); }
      else if (event.key === "Escape") this.select(-1);
      else if (number >= 1 && number <= this.tabs.length && event.target.tagName !== "CANVAS") this.go(this.tabs[number - 1][0]);
    });
    document.getElementById("tabs").addEventListener("keydown", event => {
      const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (!by) return;
      const keys = this.tabs.map(each => each[0]), next = keys[(keys.indexOf(this.tab) + by + keys.length) % keys.length];
      this.go(next);
      document.getElementById(`tab-${next}`).focus();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.views.clear(); this.go(this.tab); });
  },
};

app.start();
