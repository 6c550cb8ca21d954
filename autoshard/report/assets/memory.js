// Memory over the step by group of buffers, its peak and what is alive then.

function memorySection() {
  const found = DATA.memory;
  if (!found) return DATA.schedule ? undefined : section("memory", "Memory", missing("memory over time"));
  const { groups, moment, peak } = found, held = groups.map((_, k) => k).filter((k) => found.bytes[k].some((n) => n > 0));
  const kept = held.length ? held : [0];
  const tops = kept.map((_, n) => moment.map((_, i) => kept.slice(0, n + 1).reduce((sum, k) => sum + found.bytes[k][i], 0)));
  const total = tops.at(-1), most = total[peak], hasLimit = found.limit > 0 && found.limit < 1.6 * most;
  const plot = make("div", { class: "frame plot" });
  const told = make("output", { "aria-live": "polite" });
  const slider = make("input", { type: "range", min: 0, max: moment.length - 1, value: peak, "aria-label": "Moment of the step", oninput: () => show(Number(slider.value), true) });
  let chart;

  function show(i, move) {
    const parts = kept.map((k) => [groups[k], found.bytes[k][i]]).filter(([, n]) => n > 0).map(([name, n]) => `${name} ${bytes(n)}`);
    told.textContent = `${i === peak ? "Peak" : `Kernel ${count(moment[i] >> 1)}`}, ${TEXT[found.at[i]]}: ${bytes(total[i])} — ${parts.join(", ")}.`;
    slider.value = i;
    if (move) chart.setCursor({ left: chart.valToPos(moment[i] / 2, "x"), top: 1 }, false);
  }

  function build() {
    plot.replaceChildren();
    const colours = kept.map((k) => css(MEMORY_COLOURS[k])), muted = css("--muted"), line = css("--line");
    const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
    chart = new uPlot({
      width: Math.max(plot.clientWidth - 14, 200), height: 300, legend: { show: false },
      scales: { x: { time: false }, y: { range: [0, (hasLimit ? Math.max(found.limit, most) : most) * 1.12] } },
      axes: [{ ...axis, label: "kernels in the order in which they run", labelSize: 22 }, { ...axis, size: 66, values: (_, ticks) => ticks.map((n) => n ? bytes(n) : "0") }],
      series: [{}, ...kept.map((_, n) => ({ label: groups[kept[n]], stroke: colours[n], width: 1, fill: colours[n], points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) })).reverse()],
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
      hooks: {
        setCursor: [(u) => { if (u.cursor.idx !== null && u.cursor.idx !== undefined && u.cursor.left >= 0) show(u.cursor.idx, false); }],
        draw: [(u) => mark(u)],
      },
    }, [moment.map((n) => n / 2), ...tops.slice().reverse()], plot);
    chart.over.title = "Drag over a stretch to zoom, double-click to see the whole step.";
  }

  function mark(u) {
    const { ctx } = u, x = u.valToPos(moment[peak] / 2, "x", true), y = u.valToPos(most, "y", true), px = devicePixelRatio || 1;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = css("--fg");
    ctx.font = `600 ${12 * px}px system-ui, sans-serif`;
    if (x >= u.bbox.left && x <= u.bbox.left + u.bbox.width) {
      ctx.beginPath();
      ctx.arc(x, y, 4 * px, 0, 7);
      ctx.fill();
      const text = `peak ${bytes(most)}`, right = x + 90 * px > u.bbox.left + u.bbox.width;
      ctx.textAlign = right ? "right" : "left";
      ctx.fillText(text, x + (right ? -8 : 8) * px, y - 6 * px);
    }
    if (hasLimit) {
      const limit = u.valToPos(found.limit, "y", true);
      ctx.setLineDash([6 * px, 4 * px]);
      ctx.strokeStyle = ctx.fillStyle = css("--warn");
      ctx.beginPath();
      ctx.moveTo(u.bbox.left, limit);
      ctx.lineTo(u.bbox.left + u.bbox.width, limit);
      ctx.stroke();
      ctx.textAlign = "left";
      ctx.fillText(`limit ${bytes(found.limit)}`, u.bbox.left + 6 * px, limit - 5 * px);
    }
    ctx.restore();
  }

  section("memory", "Memory",
    make("p", {}, `A device holds at most ${bytes(most)} at once, ${percent(most / found.limit)} of the ${bytes(found.limit)} that a program may have. ` +
      "Activations are what the forward pass keeps until the backward pass; temporaries are all other values, and copies that collectives make."),
    legend(kept.map((k) => [`var(${MEMORY_COLOURS[k]})`, groups[k]])),
    plot, make("div", { class: "tools" }, slider, make("button", { type: "button", onclick: () => show(peak, true) }, "Peak")), told,
    make("h3", {}, "Alive at the peak"),
    table("What is alive at the peak", [
      { name: "what", value: (row) => row[0], show: (row) => make("span", { class: "mono" }, row[0]), long: true },
      { name: "group", value: (row) => row[1], show: (row) => make("span", { class: "chip", style: `--chip:var(${MEMORY_COLOURS[groups.indexOf(row[1])]})` }, row[1]) },
      { name: "arrays", value: (row) => row[3], number: true },
      { name: "bytes", value: (row) => row[2], show: (row) => bytes(row[2]), number: true },
      { name: "of the peak", value: (row) => row[2] / most, show: (row) => percent(row[2] / most), number: true },
    ], found.alive, 3));
  build();
  show(peak, false);
  onChange(build);
}
