// The operations page: polls /ui/state once a second and draws it.
import { bytes, compact, describeState, element, find, getJson, number, onTheme, percent, readStored, reason, reconcile, setStatus, store } from "./page.js";
import { Chart } from "./charts.js";
import { History, quantile, rate, sum, acceptance } from "./series.js";
import { Pool, unpack } from "./drawing.js";
import { Sequences } from "./sequences.js";

const POLL_MS = 1000;
const MAX_ROWS = 1800; // half an hour, one per poll
const RANGES = { 120: "2 min", 600: "10 min", 1800: "30 min" };

function earlierRows() {
  try {
    const rows = JSON.parse(sessionStorage.getItem("quire.history")) ?? [];
    return rows.length && Date.now() / 1000 - rows.at(-1)[0] < MAX_ROWS ? rows : [];
  } catch {
    return [];
  }
}

const history = new History(MAX_ROWS, earlierRows());
let range = readStored("quire.range", 120);
let numBlocks = 0;

const charts = [
  ["ttft", "Time to first token", [["ttft50", "p50", "--series-1"], ["ttft99", "p99", "--series-2"]], { unit: "ms", isLog: true }],
  ["gap", "Inter-token gap", [["gap50", "p50", "--series-1"], ["gap99", "p99", "--series-2"]], { unit: "ms", isLog: true }],
  ["tokens", "Throughput", [["output", "output", "--series-1"], ["prompt", "prompt", "--series-3"]], { unit: "tokens/s" }],
  ["requests", "Requests", [["running", "running", "--series-1"], ["waiting", "waiting", "--series-2"]], {}],
  ["blocks", "Block pool",
    [["active", "active", "--block-active"], ["shared", "shared", "--block-shared"], ["cached", "cached", "--block-cached"], ["free", "free", "--block-free"], ["host", "host", "--block-moving"]],
    { unit: "blocks", isStacked: true, top: () => numBlocks }],
  ["acceptance", "Accepted drafts", [["acceptance", "accepted", "--series-3"]], { unit: "%", top: () => 100 }],
].map(([id, title, lines, options]) => ({
  id,
  chart: new Chart(find(`chart-${id}`), title, lines.map(([column, name, colour]) => ({ column, name, colour, isApart: column === "host" })), options),
}));

const sequences = new Sequences((id) => history.last?.workers.find((worker) => worker.id === id)?.block_size ?? 16, () => history.last && showPools(history.last));
const pools = new Map();

/** Tiles: name, value, what it is measured in or of. */
function tiles(now) {
  const { before, window } = history.earlier();
  const spread = (name) => [0.5, 0.99].map((share) => compact(window ? quantile(name, share, window, now) : null));
  const [ttft, gap] = [spread("ttft"), spread("gap")];
  const used = sum(now, "num_blocks_used") + sum(now, "num_blocks_shared");
  const asked = sum(now, "prefix_query_tokens_total");
  const ratio = (part, whole) => (whole ? percent(part / whole) : "–");
  const waste = Math.max(0, ...now.workers.map((worker) => worker.stats.kv_waste_ratio ?? 0));
  const stepMs = Math.max(0, ...now.workers.map((worker) => worker.stats.step_time_ms ?? 0));
  const accepted = window ? acceptance(window, now) : null;
  const rows = [
    ["Running", number(sum(now, "num_running")), `${number(sum(now, "num_waiting") + (now.num_queued ?? 0))} waiting`],
    ["Output tokens/s", compact(Math.round(rate("generation_tokens_total", before, now))), `${compact(Math.round(rate("prompt_tokens_total", before, now)))} prompt`],
    ["TTFT p50, ms", ttft[0], `${ttft[1]} p99`],
    ["Gap p50, ms", gap[0], `${gap[1]} p99`],
    ["Blocks in use", ratio(used, numBlocks), `${percent(waste)} empty`],
    ["Prefix hits", ratio(sum(now, "prefix_hit_tokens_total"), asked), `of ${compact(asked)} tokens`],
    ["Preemptions", number(sum(now, "preemptions_total")), `${number(sum(now, "swapped_total"))} by swap`],
    ["Step, ms", number(stepMs, 1), `${compact(sum(now, "steps_total"))} steps`],
  ];
  if (sum(now, "draft_tokens_total")) rows.push(["Accepted drafts", accepted === null ? "–" : percent(accepted / 100), `of ${compact(sum(now, "draft_tokens_total"))} tokens`]);
  return rows;
}

function show(now) {
  find("model").textContent = find("model").title = now.model;
  setStatus(...describeState(now));
  numBlocks = now.workers.reduce((total, worker) => total + worker.num_blocks, 0);
  reconcile(find("tiles"), tiles(now), ([name]) => name,
    ([name]) => element("div", {}, element("dt", {}, name), element("dd", {}, element("b"), element("small"))),
    (tile, [, value, detail]) => {
      const [main, side] = tile.lastChild.children;
      [main.textContent, side.textContent] = [value, detail];
    });
  find("chart-acceptance").hidden = !sum(now, "draft_tokens_total");
  for (const { chart } of charts) chart.show(history, range);
  showPools(now);
}

function showPools(now) {
  find("no-workers").hidden = now.workers.length > 0;
  reconcile(find("workers"), now.workers, (worker) => worker.id, (worker) => makePool(worker.id), fillPool);
  for (const id of pools.keys()) if (!now.workers.some((worker) => worker.id === id)) pools.delete(id);
}

function makePool(id) {
  const tip = element("p", { class: "tip" });
  const [blocks, host] = ["GPU", "host"].map((tier) => {
    const canvas = element("canvas", { role: "img", hidden: true });
    const counts = element("ul", { class: "counts", "aria-label": `Blocks, ${tier}` });
    return { canvas, counts, pool: new Pool(canvas, tip) };
  });
  pools.set(id, { blocks, host });
  const hostTitle = element("h4", { hidden: true }, "Host memory");
  return element("div", { class: "worker" }, element("h3"), element("p", { class: "quiet" }), blocks.counts, blocks.canvas, hostTitle, host.counts, host.canvas, tip);
}

const COUNTS = [["active", "used", "--block-active"], ["shared", "shared", "--block-shared"], ["cached", "cached", "--block-cached"], ["free", "free", "--block-free"]];
const HOST_COUNTS = [["swapped out", "used", "--block-active"], ["cached", "cached", "--block-cached"], ["free", "free", "--block-free"]];

function fillPool(part, worker) {
  const { stats } = worker;
  const { blocks, host } = pools.get(worker.id);
  part.children[0].textContent = worker.id + (worker.ready ? "" : " (not ready)");
  const each = worker.blocks_per_cell > 1 ? ` A square is ${worker.blocks_per_cell} blocks, in the colour of the first.` : "";
  part.children[1].textContent = `${number(worker.num_blocks)} blocks of ${worker.block_size} tokens.${formats(worker)}${each}`;
  const counted = fillCounts(blocks.counts, COUNTS, (state) => stats[`num_blocks_${state}`]);
  blocks.canvas.setAttribute("aria-label", `Blocks: ${counted}`);
  blocks.canvas.hidden = !worker.blocks;
  const marked = sequences.marked.worker === worker.id ? sequences.marked.blocks : [];
  if (worker.blocks) blocks.pool.show(unpack(worker.blocks), worker.blocks_per_cell, marked);
  part.children[4].hidden = host.counts.hidden = host.canvas.hidden = !worker.host_blocks;
  const onHost = fillCounts(host.counts, HOST_COUNTS, (state) => stats[`num_host_blocks_${state}`] ?? 0);
  host.canvas.setAttribute("aria-label", `Blocks on the host: ${onHost}`);
  if (worker.host_blocks) host.pool.show(unpack(worker.host_blocks), 1);
}

/** Fill a legend with counts; returns it as text. */
function fillCounts(list, states, countOf) {
  const counts = states.map(([name, state, colour]) => ({ name, colour, count: countOf(state) })).filter(({ count }) => count !== undefined);
  reconcile(list, counts, ({ name }) => name,
    ({ name, colour }) => element("li", {}, element("i", { style: `background: var(${colour})` }), element("b"), ` ${name}`),
    (part, { count }) => (part.children[1].textContent = number(count)));
  return counts.map(({ name, count }) => `${number(count)} ${name}`).join(", ");
}

/** What weights and KV cache are made of; nothing for a worker that does not say. */
function formats(worker) {
  if (!worker.kv_cache_dtype) return "";
  return ` KV cache ${worker.kv_cache_dtype}, ${bytes(worker.num_blocks * worker.block_bytes)}; weights ${worker.weight_format}, ${bytes(worker.weight_bytes)}.`;
}

let answeredAt = null;

async function poll() {
  try {
    const state = await getJson("ui/state");
    history.push(state, Date.now() / 1000);
    answeredAt = new Date();
    show(state);
    await sequences.poll();
  } catch (error) {
    const since = answeredAt ? ` What is shown is from ${answeredAt.toLocaleTimeString("en-GB")}.` : "";
    setStatus("bad", reason(error) + since);
  }
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

reconcile(find("ranges"), Object.entries(RANGES), ([seconds]) => seconds,
  ([seconds, name]) => element("button", { type: "button", onclick: () => choose(Number(seconds)) }, name), () => null);

function choose(seconds) {
  range = seconds;
  store("quire.range", range);
  for (const button of find("ranges").children) button.setAttribute("aria-pressed", Number(button.dataset.key) === range);
  if (history.rows.length) for (const { chart } of charts) chart.show(history, range);
}

choose(RANGES[range] ? range : 120);
onTheme(() => {
  for (const { blocks, host } of pools.values()) for (const { pool } of [blocks, host]) pool.draw();
});
window.addEventListener("pagehide", () => {
  try {
    sessionStorage.setItem("quire.history", JSON.stringify(history.rows.map((row) => row.map((value) => (value === null ? null : Math.round(value * 1000) / 1000)))));
  } catch {
    // The charts begin anew.
  }
});
poll();
