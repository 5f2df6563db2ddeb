// The page-table simulator: draws the three machines of allocators.js.
import { colour, compact, element, find, number, onTheme, percent, rgb } from "./page.js";
import { Simulation } from "./allocators.js";
import { Chart } from "./charts.js";

const [NUM_SLOTS, MAX_LEN, SIDE, SHADES] = [4096, 512, 64, 5];
const MAX_ROWS = 600;
const FIRST_STEPS = 80; // a page that opens has something to show
const NAMES = {
  naive: ["Naive", "one region of 512 slots a request"],
  buddy: ["Power of two", "one region; output, then region rounded up to a power of two"],
  paged: ["Paged", "blocks on demand, anywhere"],
};
const SHARES = [
  ["filled", "hold tokens", "--block-active"], ["reserved", "reserved, used later", "--sim-reserved"],
  ["internal", "internal fragmentation", "--sim-internal"], ["external", "external fragmentation", "--sim-external"],
  ["free", "free", "--block-free"],
];

const options = () => ({ seed: Number(find("seed").value), rate: Number(find("rate").value) / 100, numSlots: NUM_SLOTS, maxLen: MAX_LEN, blockSize: 2 ** Number(find("block").value) });

let simulation;
let rows;
let isRunning = !window.matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Same shape as a History (series.js): columns by name. */
const recorded = { columns: (names) => ["step", ...names].map((name) => rows.map((row) => row[name])) };

const lines = (what) => Object.keys(NAMES).map((policy, index) => ({ column: `${policy}-${what}`, name: NAMES[policy][0].toLowerCase(), colour: ["--series-2", "--series-3", "--series-1"][index] }));
const charts = [
  new Chart(find("chart-filled"), "Slots that hold tokens", lines("filled"), { unit: "%", top: () => 100, isSteps: true }),
  new Chart(find("chart-running"), "Running requests", lines("running"), { isSteps: true }),
];

const views = Object.entries(NAMES).map(([policy, [name, words]]) => {
  const canvas = element("canvas", { role: "img", width: SIDE, height: SIDE });
  const shares = element("dl", { class: "shares" }, ...SHARES.map(([, label, swatch]) =>
    element("div", {}, element("dt", {}, element("i", { style: `background: var(${swatch})` }), label), element("dd", {}, "–"))));
  const figures = element("dl", { class: "shares" }, ...["running", "waiting", "finished", "tokens a step", "mean wait, steps", "preempted"].map((label) =>
    element("div", {}, element("dt", {}, label), element("dd", {}, "–"))));
  find("machines").append(element("article", {}, element("h3", {}, name), element("p", { class: "quiet" }, words), canvas, element("h4", {}, "Mean share of memory"), shares, element("h4", {}, "Requests"), figures));
  return { policy, canvas, shares, figures };
});

function draw() {
  find("now").textContent = number(simulation.step);
  const [active, ground] = [rgb("--block-active"), rgb("--surface")];
  const shades = [...Array(SHADES).keys()].map((shade) => active.map((value, index) => value + (ground[index] - value) * 0.12 * shade));
  const [free, reserved, internal, external] = ["--block-free", "--sim-reserved", "--sim-internal", "--sim-external"].map(rgb);
  for (const { policy, canvas, shares, figures } of views) {
    const machine = simulation.machines[policy];
    const context = canvas.getContext("2d");
    const image = context.createImageData(SIDE, SIDE);
    const paint = (slot, [red, green, blue]) => image.data.set([red, green, blue, 255], 4 * slot);
    for (let slot = 0; slot < NUM_SLOTS; slot++) paint(slot, machine.usage.external ? external : free);
    for (const run of machine.running) {
      const held = machine.memory.held(run);
      for (let index = 0; index < held; index++) {
        paint(machine.memory.slot(run, index), index < run.filled ? shades[run.request.id % SHADES] : index < run.request.total ? reserved : internal);
      }
    }
    context.putImageData(image, 0, 0);
    SHARES.forEach(([name], index) => (shares.children[index].lastChild.textContent = percent(machine.mean(name))));
    const started = machine.numDone + machine.running.length;
    [machine.running.length, machine.waiting.length, machine.numDone, compact(simulation.step ? machine.numTokens / simulation.step : 0), compact(started ? machine.waited / started : 0), machine.numPreempted]
      .forEach((value, index) => (figures.children[index].lastChild.textContent = typeof value === "number" ? number(value) : value));
    canvas.setAttribute("aria-label", `${NAMES[policy][0]}: ${SHARES.map(([name, label]) => `${percent(machine.usage[name] / NUM_SLOTS)} ${label}`).join(", ")}`);
  }
  for (const chart of charts) chart.show(recorded);
}

function advance() {
  simulation.advance();
  const row = { step: simulation.step };
  for (const [policy, machine] of Object.entries(simulation.machines)) {
    row[`${policy}-filled`] = (100 * machine.usage.filled) / NUM_SLOTS;
    row[`${policy}-running`] = machine.running.length;
  }
  rows.push(row);
  if (rows.length > MAX_ROWS) rows.shift();
}

function restart(numSteps = 0) {
  simulation = new Simulation(options());
  rows = [];
  for (let step = 0; step < numSteps; step++) advance();
  draw();
}

function label() {
  const words = { speed: `${find("speed").value} steps/s`, rate: `${number(options().rate, 2)} a step`, block: `${options().blockSize} ${options().blockSize === 1 ? "slot" : "slots"}`, seed: find("seed").value };
  for (const [id, text] of Object.entries(words)) {
    find(`${id}-value`).textContent = text;
    find(id).setAttribute("aria-valuetext", text);
  }
  find("run").textContent = isRunning ? "Pause" : "Run";
}

find("run").addEventListener("click", () => {
  isRunning = !isRunning;
  label();
});
find("step").addEventListener("click", () => {
  isRunning = false;
  label();
  advance();
  draw();
});
find("again").addEventListener("click", () => restart());
find("speed").addEventListener("input", label);
for (const id of ["rate", "block", "seed"]) find(id).addEventListener("input", () => {
  label();
  restart();
});
onTheme(() => simulation && draw());

let due = 0;
let before = performance.now();
function frame(now) {
  if (isRunning) {
    due = Math.min(due + ((now - before) * Number(find("speed").value)) / 1000, 10);
    const isDue = due >= 1;
    for (; due >= 1; due--) advance();
    if (isDue) draw();
  }
  before = now;
  requestAnimationFrame(frame);
}

label();
restart(FIRST_STEPS);
requestAnimationFrame(frame);
