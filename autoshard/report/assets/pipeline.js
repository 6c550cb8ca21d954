// A pipeline's schedule: which stage works on which microbatch when.

const TASKS = { F: ["--c0", "forward"], B: ["--c1", "backward"], W: ["--c2", "gradients of weights"], U: ["--c3", "update"], A: ["--update", "after all microbatches"] };

function pipelineSection() {
  if (!DATA.schedule) return;
  const passes = [...(DATA.schedule.earlier || []), DATA.schedule], several = passes.length > 1;
  const parts = passes.map((found, k) => passPart(found, several ? `, pass ${k + 1} of ${passes.length}` : "", several));
  section("pipeline", "Pipeline",
    several ? make("p", {}, `The step goes over its microbatches ${passes.length} times, one pipeline after the other, since later parts of it read what comes of all examples in earlier ones.`) : "",
    ...parts.flatMap((part) => part.elements),
    make("p", { class: "hint" }, "Waiting is the share of the step in which a stage's devices have nothing to do until other stages are done. " +
      "Forward, backward, sending and kept each are of one microbatch; update is what follows for gradients and state, after what else runs once a step. Each stage has a program of its own: " +
      `strategy.${several ? "passes[n]" : "stages"}[k].report() has its tables.`));
  for (const part of parts) part.chart.paint();
}

// One pass over the microbatches: its chart, and a table of its stages; times begin with it.
function passPart(found, which, several) {
  const kinds = Object.keys(TASKS).filter((kind) => kind === "A" || found.stages.some((stage) => stage.kind.includes(kind)));
  const after = found.stages.map((_, row) => found.pieces.filter((_, k) => found.parts[k] === row).reduce((sum, piece) => sum + piece[4], 0) * 1e9);
  const until = several ? found.ns + Math.max(...after) : DATA.figures.step * 1e9;
  const chart = gantt(`Schedule of the pipeline${which}: a row a stage, a bar a microbatch`, found.stages.map((_, k) => `stage ${k}`), until, (from, to, least, put) => {
    for (const [row, start, duration, told] of found.waits) {
      if (start > to || start + duration < from) continue;
      put({ row, start, duration, colour: "--line", alpha: 0.5, label: "", told: () => [make("strong", {}, "Waiting"), ` on stage ${row} — ${told}; ${seconds(duration / 1e9)} from ${seconds(start / 1e9)}`] });
    }
    found.stages.forEach((stage, row) => {
      put({ row, start: found.ns, duration: after[row], colour: TASKS.A[0], label: "after", told: () => [
        make("strong", {}, "what runs once a step"), ` on stage ${row} — ${seconds(after[row] / 1e9)} from ${seconds(found.ns / 1e9)}`] });
      stage.start.forEach((start, k) => {
      const duration = stage.duration[k], kind = stage.kind[k];
      if (start > to || start + duration < from) return;
      const number = kind === "U" ? "" : stage.microbatch[k];
      const label = `${kind}${number}${found.n_chunks > 1 ? ` chunk ${stage.chunk[k]}` : ""}`;
      put({ row, start, duration, colour: TASKS[kind][0], alpha: 0.8, label, told: () => [
        make("strong", {}, kind === "U" ? "gradients reduced, state updated" : `${TASKS[kind][1]} of microbatch ${number}`), ` on stage ${row} — ${seconds(duration / 1e9)} from ${seconds(start / 1e9)}`] });
      });
    });
  });
  return { chart, elements: [
    make("p", {}, `Schedule ${found.name}${which}: ${count(found.n_microbatches)} microbatches over ${found.stages.length} stages.`),
    legend(kinds.map((kind) => [`var(${TASKS[kind][0]})`, kind === "A" ? TASKS.A[1] : `${kind}: ${TASKS[kind][1]}`])), chart.element,
    make("h3", {}, `Stages${which}`),
    table(`Stages${which}`, [
      { name: "stage", value: (row) => row.k, number: true, rises: true },
      { name: "mesh", value: (row) => row[0], show: (row) => [row[0] || "one device", make("span", { class: "small" }, `${row[1]} devices`)] },
      ...[["forward", 2], ["backward", 3], ["update", 8], ["after", 4], ["sending", 5]].map(([name, at]) => ({ name, value: (row) => row[at], show: (row) => seconds(row[at]), number: true })),
      { name: "kept each", value: (row) => row[6], show: (row) => bytes(row[6]), number: true },
      { name: "peak memory", value: (row) => row[7], show: (row) => bytes(row[7]), number: true },
      { name: "waiting", value: (row) => found.waiting[found.parts[row.k]], show: (row) => percent(found.waiting[found.parts[row.k]]), number: true },
    ], found.pieces.map((piece, k) => Object.assign(piece, { k })), 0)] };
}

// What is inside the stage that is chosen: its timeline, memory and graph.
function stageSection() {
  const inside = DATA.stages, passes = [...(DATA.schedule.earlier || []), DATA.schedule];
  if (!inside.length) return;
  const names = passes.flatMap((found, n) => found.pieces.map((_, k) => `stage ${k}${passes.length > 1 ? ` of pass ${n + 1}` : ""}`));
  const parts = [["timeline", timelineSection], ["memory", memorySection], ["program", programSection]];
  const choice = make("select", { id: "stage-choice", onchange: () => { show(); links(); } }, inside.map((_, k) => make("option", { value: k }, names.at(k - inside.length))));
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
