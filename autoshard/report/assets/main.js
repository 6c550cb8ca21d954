// The sections in their order, and the links to them.

figures();
const INSIDE = [timelineSection, memorySection, programSection];  // of a pipeline each stage has these
for (const part of [pipelineSection, stageSection, timelineSection, placeSection, memorySection, meshSection, tensorSection, collectiveSection, programSection, noteSection]) {
  if (!DATA.stages.length || !INSIDE.includes(part)) part();
}

let LINKS = [];
function links() {
  const list = document.getElementById("sections");
  list.replaceChildren();
  LINKS = [...document.querySelectorAll("main section")].map((part) => {
    const link = make("a", { href: `#${part.id}` }, part.querySelector("h2").textContent);
    list.append(make("li", {}, link));
    return [part, link];
  });
}
links();
function current() {
  const [, now] = LINKS.findLast(([part]) => part.getBoundingClientRect().top < innerHeight / 3) ?? LINKS[0];
  LINKS.forEach(([, link]) => link === now ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current"));
}
addEventListener("scroll", current, { passive: true });
current();
document.documentElement.dataset.ready = "true";
