// The tables of tensors, collectives, layers and lines.

function tensorSection() {
  section("tensors", "Tensors",
    make("p", {}, "Arguments and the largest stored activations. * stands for every index; moments that an optimizer keeps of a parameter are counted with it."),
    table("Tensors", [
      { name: "name", value: (row) => row[0], show: (row) => make("span", { class: "mono" }, row[0]), long: true },
      { name: "kind", value: (row) => row[1] },
      { name: "count", value: (row) => row[2], number: true },
      { name: "shape", value: (row) => row[3], show: (row) => [row[3], make("span", { class: "small" }, row[4])] , words: (row) => row[4] },
      { name: "split over", value: (row) => row[8].join(" ") || "whole", show: (row) => [...chips(row[8]), make("span", { class: "small mono" }, row[5])], words: (row) => row[5] },
      { name: "bytes a device", value: (row) => row[6], show: (row) => bytes(row[6]), number: true },
      { name: "unsharded", value: (row) => row[7], show: (row) => bytes(row[7]), number: true },
    ], DATA.tensors, 5));
}

function collectiveSection() {
  const total = DATA.collectives.reduce((sum, row) => sum + row[4], 0), waited = DATA.collectives.reduce((sum, row) => sum + row[5], 0);
  section("collectives", "Collectives", ...(DATA.collectives.length ? [
    make("p", {}, `${seconds(total)} of collectives in a step; compute waits for ${seconds(waited)} of them. Bytes are of one device and one execution; times are of all.`),
    table("Collectives", [
      { name: "kind", value: (row) => row[0], show: (row) => make("span", { class: "mono" }, row[0]) },
      { name: "axes", value: (row) => row[1].join(" "), show: (row) => chips(row[1]) },
      { name: "bytes", value: (row) => row[2], show: (row) => bytes(row[2]), number: true },
      { name: "times", value: (row) => row[3], show: (row) => count(row[3]), number: true },
      { name: "time", value: (row) => row[4], show: (row) => seconds(row[4]), number: true },
      { name: "exposed", value: (row) => row[5], show: (row) => seconds(row[5]), number: true },
      { name: "what, for whom, why", value: (row) => row[6], words: (row) => row.slice(7).join(" "), long: true,
        show: (row) => [make("span", { class: "mono" }, row[6] || row[7]), row[6] ? make("span", { class: "small" }, `for ${row[7]}`) : "", make("span", { class: "small" }, row[8])] },
    ], DATA.collectives, 4),
  ] : [make("p", {}, "None: the devices need nothing of each other.")]));
}

function placeSection() {
  const known = DATA.has_program;
  const columns = (what) => [
    { name: what, value: (row) => row[0], show: (row) => make("span", { class: "mono" }, row[0]), long: true },
    { name: "compute", value: (row) => row[1], show: (row) => seconds(row[1]), number: true },
    { name: "communication", value: (row) => row[2], show: (row) => seconds(row[2]), number: true },
    { name: "exposed", value: (row) => row[3], show: (row) => seconds(row[3]), number: true },
    { name: "of the step", value: (row) => row[1] + row[3], show: (row) => percent((row[1] + row[3]) / DATA.figures.step), number: true },
  ].filter(({ name }) => known || (name !== "compute" && name !== "of the step"));
  section("where", "Where time goes",
    make("p", {}, `${known ? "Compute and communication" : "Communication"} by layer and by source line. Communication is exposed where no compute hides it: the device waits.` + (DATA.schedule ? ` All of it is of ${DATA.busiest}, the busiest.` : "")),
    known || DATA.schedule ? undefined : missing("compute by layer and line"),
    make("h3", {}, "By layer"), table("Layers", columns("layer"), DATA.layers, known ? 4 : 1),
    make("h3", {}, "By source line"), table("Lines", columns("line"), DATA.lines, known ? 4 : 1));
}

function figures() {
  const { step, low, high, compute, exposed, hidden, waiting, matrix_share, peak, limit } = DATA.figures;
  const figure = (what, much, more) => make("div", { class: "figure" }, make("div", { class: "what" }, what), make("div", { class: "much" }, much), make("div", { class: "what" }, more));
  document.getElementById("figures").append(
    figure("step time", seconds(step), high ? `predicted: ${seconds(low)} to ${seconds(high)}` : "predicted"),
    figure("compute", percent(compute / step), seconds(compute)),
    figure("waiting for communication", percent(exposed / step), seconds(exposed)),
    figure("communication hidden", seconds(hidden), "behind compute"),
    figure("peak memory", bytes(peak), `${percent(peak / limit)} of ${bytes(limit)} a device`),
    figure("devices", count(DATA.n_devices), DATA.axes.map(([name, size]) => `${name} ${size}`).join(" × ") || "one"));
  const parts = [["compute", compute, "var(--backward)"], ["waiting for communication", exposed, "var(--c4)"], [DATA.schedule ? "waiting for other stages" : "idle", waiting, "var(--line)"]].filter(([, n]) => n > 1e-6 * step);
  document.getElementById("summary").append(
    make("div", { class: "bar", role: "img", "aria-label": parts.map(([name, n]) => `${name} ${percent(n / step)}`).join(", ") },
      parts.map(([, n, colour]) => make("span", { style: `flex:${n / step};background:${colour}` }))),
    legend(parts.map(([name, n, colour]) => [colour, `${name} ${percent(n / step)}`])),
    DATA.schedule ? make("p", { class: "hint" }, `Compute and waiting are those of ${DATA.busiest}, the busiest.`) : "",
    make("p", { class: "hint" }, `Matrix products and convolutions reach ${percent(matrix_share)} of the device's peak over the whole step.`));
}

function noteSection() {
  if (DATA.notes.length) section("notes", "Notes", make("ul", {}, DATA.notes.map((note) => make("li", {}, note))));
}
