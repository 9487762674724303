// What each pass did: counts before and after, and a readable difference; step through them.

const NUMERICS = {exact: "exact: the same bits", reassociates: "reassociates: the same sums in another order", changes: "changes: results may differ"};
const numericsText = (numerics) => NUMERICS[numerics] ?? `${numerics}: at most ${numerics.slice(13, -1)} times as far from float64 as before`;

function passesView(step) {
  const passes = step.data.passes;
  if (!passes.length) return {element: make("div", {class: "card"}, make("h2", {}, "No pass ran on this graph"), make("p", {class: "quiet"}, "Passes rewrite a graph: communication in buckets, waits moved, optimizers split."), copyable('ws.compile(train_step, passes=["merge_common_subexpressions"])'))};
  let at = passes.findIndex(each => each.changed);
  at = Math.max(at, 0);
  const shown = make("div", {class: "card fill"});
  const diff = new LongList({label: "Difference", rowHeight: 18, render: text => make("div", {class: `diff ${{"+": "add", "-": "gone", "@": "at", "<": "move", ">": "move"}[text[0]] ?? ""}`}, text), choose: text => chooseLine(step, text)});
  diff.inner.style.minWidth = "max-content";
  const list = new LongList({
    label: "Passes", rowHeight: 44, choose: (_, i) => open(i),
    render: (each, i) => make("div", {}, make("span", {class: "quiet num", style: "width:22px"}, i + 1), make("span", {class: "grow"}, make("b", {class: "mono"}, each.name), make("div", {class: "quiet"}, each.changed ? `${each.nodes[0]} → ${each.nodes[1]} nodes, ${timeText(each.seconds * 1e6)}` : "changed nothing"))),
  });

  function open(i) {
    at = i;
    const each = passes[i];
    shown.replaceChildren(
      make("div", {class: "tools"}, make("h2", {class: "mono"}, each.name), make("span", {class: "grow"}), make("button", {class: "plain", disabled: i === 0, onclick: () => list.pick(i - 1)}, "← before"), make("button", {class: "plain", disabled: i === passes.length - 1, onclick: () => list.pick(i + 1)}, "next →")),
      make("div", {class: "chips"}, make("span", {class: "chip"}, numericsText(each.numerics)), make("span", {class: "chip"}, each.level ? `verified at level ${each.level}` : "not verified"), make("span", {class: "chip"}, timeText(each.seconds * 1e6)), each.displaced > 0 && make("span", {class: "chip"}, `${plural(each.displaced, "node")} moved`)),
      each.changed ? make("div", {style: "max-height:34%;overflow:auto;flex:none"}, make("table", {class: "small"}, make("tr", {}, make("th", {}, "operator"), make("th", {class: "num"}, "before"), make("th", {class: "num"}, "after"), make("th", {class: "num"}, "difference")),
        [["all nodes", ...each.nodes], ...each.operators].map(([name, before, after]) => make("tr", {}, make("td", {class: "mono"}, name), make("td", {class: "num"}, before), make("td", {class: "num"}, after), make("td", {class: "num"}, after > before ? `+${after - before}` : after - before))))) : make("p", {class: "quiet"}, "The graph is what it was before this pass."),
      each.changed && make("h3", {style: "margin:10px 0 4px"}, "Difference", make("span", {class: "quiet"}, each.left_out ? `  the first ${each.diff.length} lines; ${each.left_out} more` : "")),
      ...(each.changed ? [diff.element] : []));
    diff.set(each.diff);
  }
  list.set(passes, at);
  open(at);
  return {
    element: make("div", {class: "split side"}, make("div", {class: "card fill"}, make("h2", {style: "margin-bottom:8px"}, plural(passes.length, "pass").replace("passs", "passes")), list.element), shown),
    refresh() { list.draw(); diff.draw(); },
  };
}

function chooseLine(step, text) {
  const name = /^(?:[-+<>~] |@ after )(\w+)/.exec(text)?.[1], i = name ? step.nodes.name.indexOf(name) : -1;
  if (i >= 0) app.select(i);
}
