// A pipeline's schedule: which stage works on which microbatch when.

const TASKS = { F: ["--c0", "forward"], B: ["--c1", "backward"], W: ["--c2", "gradients of weights"] };

function pipelineSection() {
  const found = DATA.schedule;
  if (!found) return;
  const kinds = Object.keys(TASKS).filter((kind) => found.stages.some((stage) => stage.kind.includes(kind)));
  const chart = gantt("Schedule of the pipeline: a row a stage, a bar a microbatch", found.stages.map((_, k) => `stage ${k}`), found.ns, (from, to, least, put) =>
    found.stages.forEach((stage, row) => stage.start.forEach((start, k) => {
      const duration = stage.duration[k], kind = stage.kind[k];
      if (start > to || start + duration < from) return;
      const label = `${kind}${stage.microbatch[k]}${found.n_chunks > 1 ? ` chunk ${stage.chunk[k]}` : ""}`;
      put({ row, start, duration, colour: TASKS[kind][0], alpha: 0.8, label, told: () => [
        make("strong", {}, `${TASKS[kind][1]} of microbatch ${stage.microbatch[k]}`), ` on stage ${row} — ${seconds(duration / 1e9)} from ${seconds(start / 1e9)}`] });
    })));
  section("pipeline", "Pipeline",
    make("p", {}, `Schedule ${found.name}: ${count(found.n_microbatches)} microbatches over ${found.stages.length} stages. ` +
      `Stages are idle ${percent(found.bubble)} of the time between the first and the last task.`),
    legend(kinds.map((kind) => [`var(${TASKS[kind][0]})`, `${kind}: ${TASKS[kind][1]}`])), chart.element,
    make("h3", {}, "Stages"),
    table("Stages", [
      { name: "stage", value: (row) => row.k, number: true },
      { name: "mesh", value: (row) => row[0], show: (row) => [row[0] || "one device", make("span", { class: "small" }, `${row[1]} devices`)] },
      ...["forward", "backward", "after", "sending"].map((name, n) => ({ name, value: (row) => row[2 + n], show: (row) => seconds(row[2 + n]), number: true })),
      { name: "kept a microbatch", value: (row) => row[6], show: (row) => bytes(row[6]), number: true },
      { name: "peak memory", value: (row) => row[7], show: (row) => bytes(row[7]), number: true },
    ], found.pieces.map((piece, k) => Object.assign(piece, { k })), 7),
    make("p", { class: "hint" }, "Each stage has a program of its own: strategy.stages[k].report() has its tables."));
  chart.paint();
}
