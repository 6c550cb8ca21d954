// A pipeline's schedule: which stage works on which microbatch when.

const TASKS = { F: ["--c0", "forward"], B: ["--c1", "backward"], W: ["--c2", "gradients of weights"], A: ["--update", "after all microbatches"] };

function pipelineSection() {
  const found = DATA.schedule;
  if (!found) return;
  const kinds = Object.keys(TASKS).filter((kind) => kind === "A" || found.stages.some((stage) => stage.kind.includes(kind)));
  const n = found.stages.length, after = found.stages.map((_, row) => found.pieces.filter((_, k) => k % n === row).reduce((sum, piece) => sum + piece[4], 0) * 1e9);
  const chart = gantt("Schedule of the pipeline: a row a stage, a bar a microbatch", found.stages.map((_, k) => `stage ${k}`), DATA.figures.step * 1e9, (from, to, least, put) =>
    found.stages.forEach((stage, row) => {
      put({ row, start: found.ns, duration: after[row], colour: TASKS.A[0], label: "after", told: () => [
        make("strong", {}, "what runs once a step, such as the optimizer's update"), ` on stage ${row} — ${seconds(after[row] / 1e9)} from ${seconds(found.ns / 1e9)}`] });
      stage.start.forEach((start, k) => {
      const duration = stage.duration[k], kind = stage.kind[k];
      if (start > to || start + duration < from) return;
      const label = `${kind}${stage.microbatch[k]}${found.n_chunks > 1 ? ` chunk ${stage.chunk[k]}` : ""}`;
      put({ row, start, duration, colour: TASKS[kind][0], alpha: 0.8, label, told: () => [
        make("strong", {}, `${TASKS[kind][1]} of microbatch ${stage.microbatch[k]}`), ` on stage ${row} — ${seconds(duration / 1e9)} from ${seconds(start / 1e9)}`] });
      });
    }));
  section("pipeline", "Pipeline",
    make("p", {}, `Schedule ${found.name}: ${count(found.n_microbatches)} microbatches over ${found.stages.length} stages.`),
    legend(kinds.map((kind) => [`var(${TASKS[kind][0]})`, kind === "A" ? TASKS.A[1] : `${kind}: ${TASKS[kind][1]}`])), chart.element,
    make("h3", {}, "Stages"),
    table("Stages", [
      { name: "stage", value: (row) => row.k, number: true },
      { name: "mesh", value: (row) => row[0], show: (row) => [row[0] || "one device", make("span", { class: "small" }, `${row[1]} devices`)] },
      ...["forward", "backward", "after", "sending"].map((name, n) => ({ name, value: (row) => row[2 + n], show: (row) => seconds(row[2 + n]), number: true })),
      { name: "kept each", value: (row) => row[6], show: (row) => bytes(row[6]), number: true },
      { name: "peak memory", value: (row) => row[7], show: (row) => bytes(row[7]), number: true },
      { name: "waiting", value: (row) => found.waiting[row.k % found.stages.length], show: (row) => percent(found.waiting[row.k % found.stages.length]), number: true },
    ], found.pieces.map((piece, k) => Object.assign(piece, { k })), 7),
    make("p", { class: "hint" }, "Waiting is the share of the step in which a stage's devices have nothing to do until other stages are done. " +
      "Forward, backward, sending and kept each are of one microbatch; after is what runs once a step. Each stage has a program of its own: strategy.stages[k].report() has its tables."));
  chart.paint();
}

// What is inside the stage that is chosen: its timeline, memory and graph.
function stageSection() {
  const inside = DATA.stages;
  if (!inside.length) return;
  const parts = [["timeline", timelineSection], ["memory", memorySection], ["program", programSection]];
  const choice = make("select", { id: "stage-choice", onchange: () => { show(); links(); } }, inside.map((_, k) => make("option", { value: k }, `stage ${k}`)));
  const host = section("stage", "Inside a stage",
    make("p", {}, make("label", { for: "stage-choice" }, "Timeline, memory and program below are those of "), choice,
      " They are of all microbatches, computed without waiting for other stages, with what the stage's own program holds: the table above " +
      "has the peak with the microbatches that are in flight."));
  let own = [];

  function show() {
    redraws.splice(0, redraws.length, ...redraws.filter((run) => !own.includes(run)));
    const before = [...redraws];
    Object.assign(DATA, inside[choice.value]);
    let last = host;
    for (const [id, part] of parts) {
      document.getElementById(id)?.remove();
      part();
      last.after(document.getElementById(id));
      last = last.nextElementSibling;
    }
    own = redraws.filter((run) => !before.includes(run));
  }
  show();
}
