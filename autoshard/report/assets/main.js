// The sections in their order, and the links to them.

figures();
for (const part of [pipelineSection, timelineSection, placeSection, memorySection, meshSection, tensorSection, collectiveSection, programSection, noteSection]) part();

const LINKS = [...document.querySelectorAll("main section")].map((part) => {
  const link = make("a", { href: `#${part.id}` }, part.querySelector("h2").textContent);
  document.getElementById("sections").append(make("li", {}, link));
  return [part, link];
});
function current() {
  const [, now] = LINKS.findLast(([part]) => part.getBoundingClientRect().top < innerHeight / 3) ?? LINKS[0];
  LINKS.forEach(([, link]) => link === now ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current"));
}
addEventListener("scroll", current, { passive: true });
current();
document.documentElement.dataset.ready = "true";
