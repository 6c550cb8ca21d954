// What all parts of the report share: the data, words for numbers, elements, and sections.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const TEXT = DATA.texts;
const AXES = DATA.axes.map(([name]) => name);
const MEMORY_COLOURS = ["--m0", "--m1", "--m2", "--m3", "--m4", "--m5"];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const innerAxes = () => DATA.meshAxes.map(([name]) => name); // of the program that is shown: a stage of a pipeline has fewer
const axisColour = (axis) => `var(--c${Math.max(AXES.indexOf(axis), 0) % 6})`;

// Three significant digits and a unit, as the text report has them.
function scaled(number, unit, steps) {
  const [prefix, size] = steps.findLast(([, size]) => Math.abs(number) >= 0.9995 * size) ?? steps[0];
  const text = number === 0 ? "0" : (number / size).toPrecision(3);
  return `${text.includes("e") ? Math.round(number / size) : text} ${prefix}${unit}`;
}
const seconds = (n) => n === 0 ? "0 s" : Math.abs(n) < 0.9995e-9 ? "< 1 ns" : scaled(n, "s", [["n", 1e-9], ["µ", 1e-6], ["m", 1e-3], ["", 1]]);
const bytes = (n) => Math.abs(n) < 999.5 ? `${Math.round(n)} B` : scaled(n, "B", [["k", 1e3], ["M", 1e6], ["G", 1e9], ["T", 1e12], ["P", 1e15]]);
const count = (n) => n.toLocaleString("en-US");
const percent = (share) => share > 0 && share < 5e-5 ? "< 0.01 %" : `${share > 0 && share < 0.01 ? (share * 100).toFixed(2) : Math.round(share * 100)} %`;

// Black or white, whichever is easier to read on a colour that covers a background to so much: the ratio is 4.5 or more on any (WCAG 2.1, AA).
function inkOn(colour, alpha, background) {
  const [over, under] = [colour, background].map((hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16) / 255));
  const [r, g, b] = over.map((n, k) => alpha * n + (1 - alpha) * under[k]).map((n) => n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

// An element with attributes, listeners (onclick: ...) and children; texts are never parsed as HTML.
function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}
function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}
function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null));
  return element;
}

function section(id, title, ...children) {
  const found = make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), ...children);
  document.getElementById("main").append(found);
  return found;
}

function missing(what) {
  return make("p", { class: "missing" },
    `This strategy was read from a file, which has no program, and ${what} needs it. Name the program and its arguments to have it here:`,
    make("code", {}, "autoshard explain FILE.json MODULE:FUNCTION --args MODULE:NAME --html report.html"));
}

function legend(entries) {
  return make("ul", { class: "legend" }, entries.map(([colour, text]) => make("li", {}, make("i", { style: `background:${colour}` }), text)));
}

const chips = (axes) => axes.length
  ? axes.map((axis) => make("span", { class: "chip", style: `--chip:${axisColour(axis)}` }, axis))
  : [make("span", { class: "chip" }, "whole")];

// Runs when colours or widths change.
const redraws = [];
function onChange(run) {
  redraws.push(run);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((run) => run()));
let waiting = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => redraws.forEach((run) => run()));
});
