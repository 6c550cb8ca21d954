// The step's timeline: compute, and the links of each mesh axis.

const PASS_COLOURS = { forward: "--forward", backward: "--backward", recomputed: "--recomputed", update: "--update" };

function timelineSection() {
  const step = DATA.timeline;
  if (!step) return DATA.schedule ? undefined : section("timeline", "Timeline", missing("the timeline of compute and communication"));
  const axesInside = innerAxes(), rows = ["compute", ...DATA.meshAxes.map(([name, size]) => `${name} (${size})`)];
  const longest = make("tbody");
  const chart = gantt("Timeline of one step: compute, and communication on the links of each mesh axis", rows, step.ns,
    (from, to, least, put) => events(step, 0, from, to, least, put), (from, to) => fillLongest(from, to));

  function fillLongest(from, to) {
    const sums = new Map();
    events(step, 0, from, to, 0, (item) => {
      if (item.isLoop || item.again) return;
      const key = `${item.kind} ${item.label}`, inside = Math.min(item.start + item.duration, to) - Math.max(item.start, from);
      const sum = sums.get(key) ?? { item, ns: 0, exposed: 0, n: 0 };
      sum.ns += inside;
      sum.exposed += (item.exposed ?? 0) * inside / item.duration;
      sum.n += 1;
      sums.set(key, sum);
    });
    const ranked = [...sums.values()].sort((a, b) => b.ns - a.ns).slice(0, 8);
    const cell = (name, ...shown) => make("td", { class: name.startsWith("w") ? "long" : "number", "data-name": name }, shown);
    longest.replaceChildren(...ranked.map(({ item, ns, exposed, n }) => make("tr", {},
      cell("what", item.kind === "compute" ? item.label : `${item.kind} of ${item.name}`),
      cell("where", item.axes.length ? chips(item.axes) : "compute"),
      cell("times", count(n)), cell("time", seconds(ns / 1e9)), cell("exposed", item.axes.length ? seconds(exposed / 1e9) : "–"))));
  }

  section("timeline", "Timeline",
    make("p", {}, "One step on one device: what it computes, and what it sends over the links of each mesh axis meanwhile. " +
      "Pale collectives are hidden behind compute; a full one with a dark foot is a time in which the device waits for it."),
    legend([...Object.entries(PASS_COLOURS).filter(([pass]) => TEXT.includes(pass)).map(([pass, colour]) => [`var(${colour})`, pass]), ...axesInside.map((axis) => [axisColour(axis), `links of ${axis}`])]),
    chart.element,
    make("p", { class: "hint" }, "Drag to move, double-click or Ctrl + wheel to zoom. With --trace FILE.json the same is written for ui.perfetto.dev."),
    make("h3", {}, "Longest in view"),
    make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Longest in view" }, make("table", {}, make("thead", {}, make("tr", {}, ["what", "where", "times", "time", "exposed"].map((name, k) =>
      make("th", { scope: "col", class: k > 1 ? "number" : undefined }, name)))), longest)));
  chart.paint();
}

// Bars of a loop's events within a window; trips too short to see are one bar.
function events(loop, start, from, to, least, put) {
  for (let trip = Math.max(0, Math.floor((from - start) / loop.ns)); trip < loop.trips && start + trip * loop.ns < to; trip++) {
    const origin = start + trip * loop.ns;
    for (let k = 0; k < loop.start.length; k++) {
      const begin = origin + loop.start[k], duration = loop.duration[k];
      if (begin > to || begin + duration < from) continue;
      const inner = loop.loops[k];
      if (inner && inner.ns > least * 8) {
        events(inner, begin, from, to, least, put);
        continue;
      }
      const axes = TEXT[loop.axes[k]] ? TEXT[loop.axes[k]].split(",") : [], exposed = loop.exposed[k];
      const item = {
        start: begin, duration, name: TEXT[loop.name[k]], kind: TEXT[loop.kind[k]], axes, exposed, isLoop: Boolean(inner), again: false,
        alpha: axes.length && exposed < 0.05 * duration ? 0.55 : 1,
      };
      item.label = inner ? `${item.name}, ${inner.trips} trips: zoom in` : item.kind === "compute" ? item.name : `${item.kind} ${item.name}`;
      item.told = () => [
        make("strong", {}, item.label), ` — ${seconds(duration / 1e9)} from ${seconds(begin / 1e9)}`,
        make("span", { class: "small" }, [`${TEXT[loop.pass[k]]}, in ${TEXT[loop.layer[k]]}`,
          ...(axes.length ? [`over ${axes.join(", ")}: ${bytes(loop.bytes[k])} a device`, exposed > 0 ? `waited for ${seconds(exposed / 1e9)}` : "hidden behind compute"] : [])].join("; ")),
      ];
      if (axes.length) axes.forEach((axis, n) => put({ ...item, row: 1 + innerAxes().indexOf(axis), colour: `--c${AXES.indexOf(axis) % 6}`, again: n > 0 }));
      if (!axes.length || loop.blocking[k]) {
        const colour = axes.length ? `--c${AXES.indexOf(axes[0]) % 6}` : PASS_COLOURS[TEXT[loop.pass[k]]];
        put({ ...item, row: 0, colour, alpha: axes.length ? 0.3 : 1, exposed: 0, again: axes.length > 0 });
      }
    }
  }
}
