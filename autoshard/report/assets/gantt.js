// Rows of bars over time on a canvas, with zoom by buttons, keys, wheel and drag.
// rows: names; total: nanoseconds; visible(from, to, least, draw): calls draw(item) for each bar that is at least so long;
// an item is {row, start, duration, colour, alpha, label, told}.

const ROW = 34, GUTTER = 22, NARROW_GUTTER = 0;

function gantt(name, rows, total, visible, onView = () => {}) {
  let from = 0, to = total, chosen = null, items = [], dragged = null;
  const canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": `${name}. Arrow keys move, plus and minus zoom, 0 shows everything, ` +
    "comma and full stop choose the bar before and after." });
  const told = make("div", { class: "chosen", "aria-live": "polite" }, make("span", { class: "hint" }, "Point at a bar, or choose it with a click, to see what it is."));
  const range = make("output", {});
  const tool = (text, label, run) => make("button", { type: "button", "aria-label": label, title: label, onclick: run }, text);
  const tools = make("div", { class: "tools" },
    tool("+", "Zoom in", () => zoom(0.5)), tool("−", "Zoom out", () => zoom(2)),
    tool("←", "Earlier", () => pan(-0.25)), tool("→", "Later", () => pan(0.25)),
    tool("Whole step", "Show everything", () => view(0, total)), range);

  const labels = () => Math.min(150, Math.max(...rows.map((row) => row.length)) * 7.6 + 16);
  const left = () => canvas.clientWidth < 560 ? NARROW_GUTTER : labels();
  const at = (x) => from + (x - left()) / (canvas.clientWidth - left()) * (to - from);

  function view(a, b) {
    const width = Math.min(Math.max(b - a, Math.min(total, 20)), total);
    from = Math.min(Math.max(a, 0), total - width);
    to = from + width;
    paint();
    onView(from, to);
  }
  const zoom = (by, around = (from + to) / 2) => view(around - (around - from) * by, around + (to - around) * by);
  const pan = (by) => view(from + by * (to - from), to + by * (to - from));

  function paint() {
    const width = canvas.clientWidth, narrow = left() === 0, pitch = ROW + (narrow ? 18 : 0), height = rows.length * pitch + GUTTER + 6;
    const scale = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d"), x0 = left(), perNs = (width - x0) / (to - from);
    context.scale(scale, scale);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    const ink = { fg: css("--fg"), muted: css("--muted"), line: css("--line"), bg: css("--bg") };
    const y = (row) => row * pitch + (narrow ? 20 : 4);
    context.strokeStyle = ink.line;
    context.fillStyle = ink.muted;
    const tick = niceTick((to - from) / Math.max(2, (width - x0) / 110));
    for (let t = Math.ceil(from / tick) * tick; t <= to; t += tick) {
      const x = x0 + (t - from) * perNs;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height - GUTTER + 4);
      context.stroke();
      const text = seconds(t / 1e9), wide = context.measureText(text).width;
      context.fillText(text, Math.min(Math.max(x - wide / 2, x0 + 2), width - wide - 2), height - GUTTER / 2 + 2);
    }
    rows.forEach((row, k) => {
      context.fillStyle = ink.fg;
      context.fillText(row, 8, narrow ? y(k) - 10 : y(k) + ROW / 2 - 4, narrow ? width : x0 - 12);
    });
    context.save();
    context.beginPath();
    context.rect(x0, 0, width - x0, height);
    context.clip();
    items = [];
    const last = new Map(); // per row and colour the pixel up to which bars are drawn: what is thinner than a pixel is drawn once
    visible(from, to, 0.35 / perNs, (item) => {
      const x = x0 + (item.start - from) * perNs, w = item.duration * perNs, key = `${item.row} ${item.colour}`;
      items.push(item);
      if (w < 0.7 && x + w < (last.get(key) ?? -1)) return;
      const drawn = Math.max(w - (w > 4 ? 0.8 : 0), 0.8);
      last.set(key, x + drawn);
      context.globalAlpha = item.alpha ?? 1;
      context.fillStyle = css(item.colour);
      context.fillRect(x, y(item.row), drawn, ROW - 8);
      if (item.exposed) {
        context.globalAlpha = 1;
        context.fillStyle = ink.fg;
        context.fillRect(x, y(item.row) + ROW - 11, drawn, 3);
      }
      context.globalAlpha = 1;
      if (w > 14) {
        const seen = Math.max(x, x0), room = Math.min(x + w, width) - seen - 8;
        if (room > 44 || context.measureText(item.label).width <= room) {
          context.fillStyle = inkOn(css(item.colour), item.alpha ?? 1, ink.bg);
          context.fillText(cut(context, item.label, room), seen + 4, y(item.row) + ROW / 2 - 4);
        }
      }
    });
    if (chosen && chosen.start < to && chosen.start + chosen.duration > from) {
      context.strokeStyle = ink.fg;
      context.lineWidth = 2;
      context.strokeRect(x0 + (chosen.start - from) * perNs, y(chosen.row) - 1, Math.max(chosen.duration * perNs, 3), ROW - 6);
    }
    context.restore();
    range.textContent = to - from >= total ? `whole step, ${seconds(total / 1e9)}` : `${seconds(from / 1e9)} to ${seconds(to / 1e9)}`;
  }

  function cut(context, text, room) {
    if (context.measureText(text).width <= room) return text;
    let n = Math.max(1, Math.floor(text.length * room / context.measureText(text).width) - 1);
    while (n > 1 && context.measureText(`${text.slice(0, n)}…`).width > room) n--;
    return `${text.slice(0, n)}…`;
  }

  function choose(item, keep) {
    if (!item) return;
    if (keep) chosen = item;
    told.replaceChildren(...item.told());
    if (keep) paint();
  }
  function under(event) {
    const box = canvas.getBoundingClientRect(), narrow = left() === 0, pitch = ROW + (narrow ? 18 : 0);
    const time = at(event.clientX - box.left), row = Math.floor((event.clientY - box.top - (narrow ? 16 : 0)) / pitch), slack = 3 / (canvas.clientWidth - left()) * (to - from);
    let best = null;
    for (const item of items) {
      if (item.row === row && time >= item.start - slack && time <= item.start + item.duration + slack && (!best || item.duration < best.duration || best.isLoop)) best = item;
    }
    return best;
  }
  function step(by) {
    const row = chosen?.row ?? 0, inRow = items.filter((item) => item.row === row && !item.isLoop);
    const k = inRow.findIndex((item) => chosen && item.start === chosen.start);
    const next = inRow[k < 0 ? 0 : k + by];
    if (next) choose(next, true);
    else pan(by * 0.5);
  }

  canvas.addEventListener("keydown", (event) => {
    const run = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => view(0, total), ",": () => step(-1), ".": () => step(1) }[event.key];
    if (run && !event.ctrlKey && !event.metaKey) { event.preventDefault(); run(); }
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return; // the page scrolls
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.004), at(event.offsetX));
    else pan(event.deltaX / canvas.clientWidth);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { dragged = { x: event.clientX, from, to, moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!dragged) return choose(under(event), false);
    const moved = event.clientX - dragged.x;
    if (Math.abs(moved) > 3 || dragged.moved) {
      dragged.moved = true;
      canvas.classList.add("dragged");
      const shift = -moved / (canvas.clientWidth - left()) * (dragged.to - dragged.from);
      view(dragged.from + shift, dragged.to + shift);
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    if (dragged && !dragged.moved) choose(under(event), true);
    dragged = null;
    canvas.classList.remove("dragged");
  });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, at(event.offsetX)));
  onChange(paint);
  const found = make("div", {}, tools, make("div", { class: "frame" }, canvas), told);
  return { element: found, view, paint: () => view(from, to) };
}

function niceTick(wanted) {
  const power = 10 ** Math.floor(Math.log10(wanted));
  return [1, 2, 5, 10].map((k) => k * power).find((tick) => tick >= wanted);
}
