// A time axis that wheel, drag and keys move; charts of lanes of bars below it.

const LEFT = 112, RULER = 24;

class TimeAxis {
  // `surface`: what is drawn on; `whole`: where time ends; `click`, `hover`: called with an event.
  constructor(surface, whole, {click = () => {}, hover = () => {}, keys = {}} = {}) {
    Object.assign(this, {surface, whole, from: 0, to: whole, drag: null});
    const canvas = surface.element;
    canvas.addEventListener("wheel", event => {
      event.preventDefault();
      const {deltaX, deltaY, shiftKey} = event, sideways = shiftKey ? deltaY : deltaX;
      if (shiftKey || Math.abs(deltaX) > Math.abs(deltaY)) this.move(sideways / 1000);
      else this.zoom(Math.exp(deltaY * 0.0016), this.time(event.clientX - canvas.getBoundingClientRect().left));
    }, {passive: false});
    canvas.addEventListener("pointerdown", event => { this.drag = {x: event.clientX, from: this.from, to: this.to, moved: false}; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", event => {
      const {drag} = this;
      if (!drag) { hover(event); return; }
      const by = (event.clientX - drag.x) * (drag.to - drag.from) / (surface.width - LEFT);
      drag.moved ||= Math.abs(event.clientX - drag.x) > 3;
      if (drag.moved) { this.show(drag.from - by, drag.to - by); tip.hide(); }
    });
    canvas.addEventListener("pointerup", event => { const isClick = this.drag && !this.drag.moved; this.drag = null; if (isClick) click(event); });
    canvas.addEventListener("pointercancel", () => { this.drag = null; });
    canvas.addEventListener("pointerleave", () => tip.hide());
    canvas.addEventListener("dblclick", () => this.all());
    canvas.addEventListener("keydown", event => {
      const act = {ArrowLeft: () => this.move(-0.125), ArrowRight: () => this.move(0.125), "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1.4), 0: () => this.all(), Home: () => this.show(0, this.span), ...keys}[event.key];
      if (act) { event.preventDefault(); act(); }
    });
  }

  get span() { return this.to - this.from; }
  x(time) { return LEFT + (time - this.from) / this.span * (this.surface.width - LEFT); }
  time(x) { return this.from + (x - LEFT) / (this.surface.width - LEFT) * this.span; }
  all() { this.show(0, this.whole); }
  move(part) { this.show(this.from + part * this.span, this.to + part * this.span); }

  zoom(factor, around = (this.from + this.to) / 2) { this.show(around - (around - this.from) * factor, around + (this.to - around) * factor); }

  show(begin, end) {
    const length = Math.min(Math.max(end - begin, this.whole / 5e6), this.whole * 1.02);
    this.from = Math.min(Math.max(begin, -0.01 * this.whole), this.whole * 1.01 - length);
    this.to = this.from + length;
    this.surface.soon();
  }

  // Ticks with their times at the top, and lines down from them.
  rule(context, height, text = timeText) {
    const most = Math.max(Math.min((this.surface.width - LEFT) / 76, 9), 2), unit = 10 ** Math.floor(Math.log10(this.span / most));
    const tick = [1, 2, 5, 10].map(n => n * unit).find(each => this.span / each <= most);
    context.strokeStyle = cssColor("--line");
    context.fillStyle = cssColor("--quiet");
    context.textAlign = "left";
    for (let at = Math.ceil(this.from / tick) * tick; at <= this.to; at += tick) {
      const left = Math.round(this.x(at)) + 0.5;
      context.beginPath();
      context.moveTo(left, 4);
      context.lineTo(left, height);
      context.stroke();
      context.fillText(text(at), left + 4, 10);
    }
  }

  buttons() {
    const button = (text, label, act) => make("button", {class: "plain", "aria-label": label, onclick: act}, text);
    return [button("+", "Zoom in", () => this.zoom(0.6)), button("−", "Zoom out", () => this.zoom(1.7)), button("all", "Show everything", () => this.all())];
  }
}

// Rows of bars that say what they are: {title, height, bars: [{start, end, shade, title, tip, hatched}]}.
function laneChart(rows, whole, label, text = timeText) {
  const gap = 5, height = RULER + rows.reduce((sum, row) => sum + row.height + gap, 0);
  const surface = new Surface(height, context => {
    axis.rule(context, height, text);
    let y = RULER;
    for (const row of rows) {
      context.fillStyle = cssColor("--quiet");
      context.fillText(clipped(context, row.title, LEFT - 10), 4, y + row.height / 2);
      context.save();
      context.beginPath();
      context.rect(LEFT, y, surface.width - LEFT, row.height);
      context.clip();
      for (const bar of row.bars) {
        const left = axis.x(bar.start), wide = Math.max(axis.x(bar.end) - left - 0.6, 0.7);
        if (left > surface.width || left + wide < LEFT) continue;
        if (bar.hatched) { hatch(context, left, y, wide, row.height); continue; }
        context.fillStyle = bar.shade;
        context.fillRect(left, y, wide, row.height);
        if (wide < 12 || !bar.title) continue;
        context.fillStyle = inkOn(bar.shade);
        context.fillText(clipped(context, bar.title, wide - 6), Math.max(left, LEFT) + 3, y + row.height / 2 + 0.5);
      }
      context.restore();
      row.y = y;
      y += row.height + gap;
    }
  }, label);
  const axis = new TimeAxis(surface, whole, {hover: event => {
    const box = surface.element.getBoundingClientRect(), when = axis.time(event.clientX - box.left), y = event.clientY - box.top;
    const row = rows.find(each => y >= each.y && y < each.y + each.height), bar = row?.bars.find(each => each.start <= when && when < each.end);
    bar && event.clientX - box.left > LEFT ? tip.show(bar.tip, event.clientX, event.clientY) : tip.hide();
  }});
  return {surface, axis};
}
