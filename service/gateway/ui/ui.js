// The operations page: polls /ui/state once a second and draws it; the playground chats with the model.
import { Playground } from "./playground.js";
import { Chart, drawBlocks } from "./drawing.js";

const POLL_MS = 1000;
const MAX_SNAPSHOTS = 120; // kept, one per poll
const PERCENTILE_SPAN = 30;

const find = (id) => document.getElementById(id);
const number = (value, digits = 0) =>
  value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: 0 });

const snapshots = [];
const charts = { tokens: new Chart(find("chart-tokens")), requests: new Chart(find("chart-requests")) };

async function fetchSnapshot() {
  const response = await fetch("ui/state", { cache: "no-store" });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `HTTP ${response.status}`);
  }
  const state = await response.json();
  snapshots.push(state);
  if (snapshots.length > MAX_SNAPSHOTS) snapshots.shift();
  return state;
}

const sum = (state, name) => state.workers.reduce((total, worker) => total + (worker.stats[name] ?? 0), 0);

/** Growth of a counter per second between two snapshots; a worker that left or restarted adds nothing. */
function rate(name, before, now) {
  if (!before) return 0;
  const then = new Map(before.workers.map((worker) => [worker.id, worker.stats[name] ?? 0]));
  const grown = now.workers.reduce(
    (total, worker) => total + Math.max(0, (worker.stats[name] ?? 0) - (then.get(worker.id) ?? worker.stats[name] ?? 0)), 0);
  return grown / Math.max(now.at_s - before.at_s, 1e-3);
}

/** Upper bound, in ms, of the bucket with this share of the observations since an earlier snapshot. */
function percentile(name, share, before, now) {
  const earlier = before ? before.latency[name] : now.latency[name].map(() => 0);
  const counts = now.latency[name].map((count, index) => count - earlier[index]);
  const total = counts.at(-1);
  if (!(total > 0)) return null;
  const index = counts.findIndex((count) => count >= total * share);
  const bound = now.latency_bounds_s[name][index];
  return bound === null ? null : bound * 1000;
}

function tiles(now) {
  const last = snapshots.at(-2);
  const earlier = snapshots.length > PERCENTILE_SPAN ? snapshots[snapshots.length - 1 - PERCENTILE_SPAN] : snapshots[0];
  const spread = (name) => [0.5, 0.99].map((share) => number(percentile(name, share, earlier, now))).join(" / ");
  const used = sum(now, "num_blocks_used") + sum(now, "num_blocks_shared");
  const blocks = now.workers.reduce((total, worker) => total + worker.num_blocks, 0);
  const asked = sum(now, "prefix_query_tokens_total");
  return [
    ["Running", number(sum(now, "num_running"))],
    ["Waiting", number(sum(now, "num_waiting") + (now.num_queued ?? 0))],
    ["Output tokens/s", number(rate("generation_tokens_total", last, now))],
    ["Prompt tokens/s", number(rate("prompt_tokens_total", last, now))],
    ["TTFT p50 / p99, ms", spread("ttft")],
    ["Inter-token p50 / p99, ms", spread("gap")],
    ["Step, ms", number(Math.max(0, ...now.workers.map((worker) => worker.stats.step_time_ms ?? 0)), 1)],
    ["Blocks in use", blocks ? `${number((100 * used) / blocks, 1)} %` : "–"],
    ["Waste", `${number(100 * Math.max(0, ...now.workers.map((worker) => worker.stats.kv_waste_ratio ?? 0)), 1)} %`],
    ["Prefix hits", asked ? `${number((100 * sum(now, "prefix_hit_tokens_total")) / asked, 1)} %` : "–"],
    ["Preemptions", number(sum(now, "preemptions_total"))],
    ["Workers", number(now.workers.filter((worker) => worker.ready).length)],
  ];
}

function show(now) {
  find("model").textContent = now.model;
  const ready = now.workers.some((worker) => worker.ready);
  find("status").textContent = ready ? "" : "No worker is ready: requests wait.";
  find("status").classList.toggle("bad", !ready);
  find("tiles").replaceChildren(...tiles(now).map(([name, value]) => {
    const tile = document.createElement("div");
    const [term, detail] = ["dt", "dd"].map((tag) => document.createElement(tag));
    [term.textContent, detail.textContent] = [name, value];
    tile.append(term, detail);
    return tile;
  }));
  charts.tokens.draw([{ name: "--accent", values: snapshots.map((state, index) => rate("generation_tokens_total", snapshots[index - 1], state)) }]);
  charts.requests.draw([
    { name: "--accent", values: snapshots.map((state) => sum(state, "num_running")) },
    { name: "--accent-2", values: snapshots.map((state) => sum(state, "num_waiting") + (state.num_queued ?? 0)) },
  ]);
  pools(now);
}

function pools(now) {
  const container = find("workers");
  const known = new Map([...container.children].map((part) => [part.dataset.id, part]));
  for (const worker of now.workers) {
    const part = known.get(worker.id) ?? pool(container, worker.id);
    known.delete(worker.id);
    const { stats } = worker;
    const counted = ["used", "shared", "cached", "free"]
      .filter((state) => stats[`num_blocks_${state}`] !== undefined)
      .map((state) => `${number(stats[`num_blocks_${state}`])} ${state}`);
    const each = worker.blocks_per_cell > 1 ? `; a square is ${worker.blocks_per_cell} blocks, in the colour of the first` : "";
    part.children[0].textContent = worker.id + (worker.ready ? "" : " (leaving)");
    part.children[1].textContent = `${formats(worker)}${number(worker.num_blocks)} blocks of ${worker.block_size} tokens: ${counted.join(", ")}${each}`;
    part.children[2].setAttribute("aria-label", `Blocks: ${counted.join(", ")}`);
    if (worker.blocks) {
      part.children[2].hidden = false;
      drawBlocks(part.children[2], worker.blocks);
    }
    const onHost = `${number(stats.num_host_blocks_used ?? 0)} swapped, ${number(stats.num_host_blocks_cached ?? 0)} cached, ${number(stats.num_host_blocks_free ?? 0)} free`;
    const [hostCounts, hostCanvas] = [part.children[3], part.children[4]];
    hostCounts.hidden = hostCanvas.hidden = !worker.host_blocks;
    hostCounts.textContent = `On the host: ${onHost}`;
    hostCanvas.setAttribute("aria-label", `Blocks on the host: ${onHost}`);
    if (worker.host_blocks) drawBlocks(hostCanvas, worker.host_blocks);
  }
  for (const gone of known.values()) gone.remove();
}

/** What weights and KV cache are made of; nothing for a worker that does not say. */
function formats(worker) {
  if (!worker.kv_cache_dtype) return "";
  const [weights, cache] = [worker.weight_bytes, worker.num_blocks * worker.block_bytes].map((bytes) => `${number(bytes / 2 ** 30, 2)} GiB`);
  return `Weights ${worker.weight_format}, ${weights}; KV cache ${worker.kv_cache_dtype}, ${cache}. `;
}

function pool(container, id) {
  const part = document.createElement("div");
  part.className = "worker";
  part.dataset.id = id;
  part.append(document.createElement("p"));
  for (const _ of ["GPU", "host"]) {
    const [counts, canvas] = ["p", "canvas"].map((tag) => document.createElement(tag));
    counts.className = "quiet";
    canvas.setAttribute("role", "img");
    canvas.hidden = true; // until there is something to draw
    part.append(counts, canvas);
  }
  container.append(part);
  return part;
}

async function poll() {
  try {
    show(await fetchSnapshot());
  } catch (error) {
    // Without a connection fetch throws a TypeError whose message differs by browser.
    find("status").textContent =
      error instanceof TypeError ? `The gateway does not answer.${snapshots.length ? " The values below are old." : ""}` : error.message;
    find("status").classList.add("bad");
  }
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

new Playground(() => snapshots.at(-1)?.model);
poll();
