// A table with search and sort. Columns: {name, value: row => text or number, show: row => node, number, rises, long}.

const MOST_ROWS = 100;

function table(caption, columns, rows, sorted) {
  let by = sorted, descending = fallsAtFirst(sorted), whole = false;
  const words = rows.map((row) => columns.map((column) => `${column.value(row)} ${column.words?.(row) ?? ""}`).join(" ").toLowerCase());
  const search = make("input", { type: "search", placeholder: "name, kind, axis, line …", "aria-label": `Search ${caption}`, oninput: fill });
  const found = make("output", {});
  const more = make("button", { type: "button", onclick: () => { whole = true; fill(); } });
  const order = make("select", { class: "order", "aria-label": `Sort ${caption} by`, onchange: () => { by = -1; sortBy(Number(order.value)); } },
    columns.map((column, k) => make("option", { value: k }, `by ${column.name}`))); // where the screen is too narrow for a head
  const heads = columns.map((column, k) => make("th", { scope: "col", class: column.number ? "number" : undefined },
    make("button", { type: "button", onclick: () => sortBy(k) }, column.name)));
  const body = make("tbody");

  function fallsAtFirst(k) { return Boolean(columns[k].number) && !columns[k].rises; }

  function sortBy(k) {
    descending = k === by ? !descending : fallsAtFirst(k);
    by = k;
    order.value = k;
    fill();
  }

  function fill() {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const value = columns[by].value, sign = descending ? -1 : 1;
    const shown = rows.map((row, k) => [row, k]).filter(([, k]) => wanted.every((word) => words[k].includes(word)));
    shown.sort(([a, i], [b, j]) => {
      const [x, y] = [value(a), value(b)];
      return sign * (typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true })) || i - j;
    });
    heads.forEach((head, k) => k === by ? head.setAttribute("aria-sort", descending ? "descending" : "ascending") : head.removeAttribute("aria-sort"));
    const cut = whole ? shown : shown.slice(0, MOST_ROWS);
    body.replaceChildren(...cut.map(([row]) => make("tr", {}, columns.map((column) =>
      make("td", { class: column.number ? "number" : column.long ? "long" : undefined, "data-name": column.name }, column.show ? column.show(row) : String(column.value(row)))))));
    found.textContent = shown.length === rows.length ? `${count(rows.length)} rows` : `${count(shown.length)} of ${count(rows.length)} rows`;
    more.hidden = cut.length === shown.length;
    more.textContent = `Show all ${count(shown.length)}`;
  }

  order.value = by;
  fill();
  return make("div", {},
    make("div", { class: "tools" }, search, order, found),
    make("div", { class: "wide tall", tabindex: 0, role: "region", "aria-label": caption },
      make("table", {}, make("caption", { hidden: true }, caption), make("thead", {}, make("tr", {}, heads)), body)),
    make("div", { class: "tools" }, more));
}
