// The program as a graph whose nodes open: passes, layers, lines, operations.

function programSection() {
  const root = DATA.graph;
  if (!root) return DATA.schedule ? undefined : section("program", "Program", missing("the graph of the program"));
  const opened = [], axesInside = innerAxes();
  const inside = children(root);
  // Opens all boxes of some kinds, those that appear by that included, and closes all others.
  function all(kinds) {
    opened.forEach((set) => set(false));
    for (let closed; (closed = [...inside.querySelectorAll(".node:not(.is-open)")].filter((node) => node.open && kinds.includes(node.kind))).length;) {
      closed.forEach((node) => node.open(true));
    }
    arrange();
  }
  section("program", "Program",
    make("p", {}, "The step from top to bottom, folded: layers that differ by a number only are one box, and × says how many. " +
      "The stripe of a box shows over which axes its values are split: the higher the colour, the more bytes. Grey values are whole on each device."),
    legend([...axesInside.map((axis) => [axisColour(axis), `split over ${axis}`]), ["var(--line)", "whole"]]),
    make("div", { class: "tools" },
      make("button", { type: "button", onclick: () => all(["pass"]) }, "Layers"),
      make("button", { type: "button", onclick: () => all(["pass", "layer"]) }, "Lines"),
      make("button", { type: "button", onclick: () => all(["pass", "layer", "line"]) }, "Operations"),
      make("button", { type: "button", onclick: () => all([]) }, "Close all")),
    make("div", { class: "graph" }, inside));
  all(["pass"]);
  onChange(arrange);

  function arrange() {
    inside.parentElement.querySelectorAll(".inside").forEach((box) => box.connect?.());
  }

  function children(node) {
    const inner = node.i ?? [], found = inner.map(box), rows = [];
    inner.forEach((child, k) => (rows[child.r ?? 0] ??= make("div", { class: "row" })).append(found[k]));
    const lines = draw("svg", { "aria-hidden": true });
    const whole = make("div", { class: "inside" }, lines, rows.filter(Boolean));
    whole.connect = () => {
      const frame = whole.getBoundingClientRect();
      if (!frame.width) return;
      const boxes = found.map((each) => each.getBoundingClientRect()), most = Math.max(...(node.e ?? []).map(([, , n]) => n), 1);
      lines.replaceChildren(...(node.e ?? []).map(([a, b, n]) => {
        const [from, to] = [boxes[a], boxes[b]], down = from.bottom <= to.top + 1;
        const ax = from.left + from.width / 2 - frame.left, bx = to.left + to.width / 2 - frame.left;
        const [ay, by] = down ? [from.bottom - frame.top, to.top - frame.top] : [from.top - frame.top + 12, to.top - frame.top + 12];
        const bend = down ? (by - ay) / 2 : 26;
        const d = down ? `M${ax} ${ay}C${ax} ${ay + bend} ${bx} ${by - bend} ${bx} ${by}` : `M${ax} ${ay - 12}C${ax} ${ay - bend} ${bx} ${by - bend} ${bx} ${by - 12}`;
        return draw("path", { d, style: `stroke-width:${0.8 + 3.2 * Math.sqrt(n / most)}` });
      }));
    };
    return whole;
  }

  function box(node) {
    const name = TEXT[node.n], shares = node.a ?? [], axes = axesInside.filter((_, k) => (shares[k] ?? 0) > 0.005);
    const facts = [node.c ? `${seconds(node.c)} compute` : "", node.s ? `${seconds(node.s)} sent` : ""].filter(Boolean).join(", ");
    const head = [
      make("span", { class: "stripe", style: `background:${stripe(shares)}` }),
      make("span", { class: "text" },
        make("span", { class: "name" }, make("strong", {}, name), node.x > 1 ? ` × ${count(node.x)}` : ""),
        make("span", { class: "small" }, facts, facts ? " · " : "", axes.length ? axes.map((axis) => `${axis} ${percent(shares[axesInside.indexOf(axis)])}`).join(", ") : "whole"),
        node.v ? make("span", { class: "small mono" }, node.v) : ""),
    ];
    if (!node.i) return kinded(make("div", { class: "node" }, make("div", { class: "head" }, head)), node);
    const button = make("button", { type: "button", class: "head", "aria-expanded": "false", onclick: () => { set(!element.classList.contains("is-open")); arrange(); } }, head);
    const element = kinded(make("div", { class: "node" }, button), node);
    let content;
    function set(open) {
      if (open && !content) element.append(content = children(node));
      if (content) content.hidden = !open;
      element.classList.toggle("is-open", open);
      button.setAttribute("aria-expanded", open);
    }
    element.open = set;
    opened.push(set);
    return element;
  }
  function kinded(element, node) {
    return Object.assign(element, { kind: node.k });
  }

  // Segments from the bottom up, a share of the height for each axis side by side.
  function stripe(shares) {
    const found = shares.map((share, k) => [share, k]).filter(([share]) => share > 0.005);
    if (!found.length) return "var(--line)";
    return found.map(([share, k], n) => `linear-gradient(to top, ${axisColour(axesInside[k])} ${share * 100}%, var(--line) 0) ${n * 10 / found.length}px 0 / ${10 / found.length}px 100% no-repeat`).join(", ");
  }
}
