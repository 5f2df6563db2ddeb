// Rows of numbers for the charts, computed from the gateway's snapshots, and the ticks of logarithmic axes. No DOM: tests run it alone.
export const SPAN_S = 10; // of latencies
export const RATE_SPAN_S = 3; // of rates: workers report once a second, not in step with the page

export const COLUMNS = [
  "time", "ttft50", "ttft99", "gap50", "gap99", "output", "prompt", "running", "waiting",
  "active", "shared", "cached", "free", "host", "acceptance",
];

export const sum = (state, name) => state.workers.reduce((total, worker) => total + (worker.stats[name] ?? 0), 0);

/** Growth of a counter between two snapshots; a worker that left or restarted adds nothing. */
export function growth(name, before, now) {
  if (!before) return 0;
  const then = new Map(before.workers.map((worker) => [worker.id, worker.stats[name] ?? 0]));
  return now.workers.reduce((total, worker) => {
    const value = worker.stats[name] ?? 0;
    return total + Math.max(0, value - (then.get(worker.id) ?? value));
  }, 0);
}

export const rate = (name, before, now) => (before ? growth(name, before, now) / Math.max(now.at_s - before.at_s, 1e-3) : 0);

/** Quantile in ms of the observations between two snapshots, linear inside a bucket; null without any. */
export function quantile(name, share, before, now) {
  const bounds = now.latency_bounds_s[name];
  const counts = now.latency[name].map((count, index) => count - (before?.latency[name][index] ?? 0));
  const total = counts.at(-1);
  if (!(total > 0)) return null;
  const rank = total * share;
  const index = counts.findIndex((count) => count >= rank);
  const low = index ? bounds[index - 1] : 0;
  if (bounds[index] === null) return 1000 * low; // beyond the last bound
  const below = index ? counts[index - 1] : 0;
  return 1000 * (low + ((bounds[index] - low) * (rank - below)) / (counts[index] - below));
}

/** Share of the drafts accepted between two snapshots, in percent; null without drafts. */
export function acceptance(before, now) {
  const drafted = growth("draft_tokens_total", before, now);
  return drafted ? (100 * growth("accepted_tokens_total", before, now)) / drafted : null;
}

/** Whole decades around two positive numbers. */
export const decades = (low, high) => {
  if (!(low > 0)) return [1, 1000];
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  return [10 ** from, 10 ** Math.max(to, from + 1)];
};

/** Ticks between two powers of ten: these, and 2 and 5 times them where there is room. */
export const logTicks = (low, high) => {
  const decade = high / low > 100 ? [1] : [1, 2, 5];
  const ticks = [];
  for (let power = low; power < high; power *= 10) ticks.push(...decade.map((factor) => factor * power));
  return [...ticks, high];
};

export class History {
  /** `rows` of an earlier visit are kept if they are younger than the history is long. */
  constructor(maxRows, rows = []) {
    this.maxRows = maxRows;
    this.rows = rows;
    this.snapshots = [];
  }

  get last() {
    return this.snapshots.at(-1);
  }

  /** The first snapshot of the last `seconds`, if there is one before the last snapshot. */
  since(seconds) {
    const now = this.last;
    const first = this.snapshots.find((state) => now.at_s - state.at_s <= seconds + 0.5);
    return first === now ? undefined : first;
  }

  /** The snapshots from which rates and latencies are counted. */
  earlier() {
    return { before: this.since(RATE_SPAN_S), window: this.since(SPAN_S) };
  }

  push(state, time) {
    if (this.last && state.at_s < this.last.at_s) this.snapshots = []; // the gateway restarted
    this.snapshots.push(state);
    if (this.snapshots.length > 64) this.snapshots.shift();
    const { before, window } = this.earlier();
    const observed = (name, share) => (window ? quantile(name, share, window, state) : null);
    const row = [
      time,
      observed("ttft", 0.5), observed("ttft", 0.99), observed("gap", 0.5), observed("gap", 0.99),
      ...["generation_tokens_total", "prompt_tokens_total"].map((name) => (before ? rate(name, before, state) : null)),
      sum(state, "num_running"), sum(state, "num_waiting") + (state.num_queued ?? 0),
      sum(state, "num_blocks_used"), sum(state, "num_blocks_shared"), sum(state, "num_blocks_cached"),
      sum(state, "num_blocks_free"), sum(state, "num_host_blocks_used"),
      window ? acceptance(window, state) : null,
    ];
    const gap = this.rows.length && time - this.rows.at(-1)[0] > 15;
    if (gap) this.rows.push([time - 1, ...COLUMNS.slice(1).map(() => null)]); // breaks the lines
    this.rows.push(row);
    while (this.rows.length > this.maxRows) this.rows.shift();
    return row;
  }

  /** Columns by name, of the rows of the last `seconds`. */
  columns(names, seconds) {
    const since = (this.rows.at(-1)?.[0] ?? 0) - seconds;
    const rows = this.rows.filter((row) => row[0] >= since);
    return ["time", ...names].map((name) => rows.map((row) => row[COLUMNS.indexOf(name)]));
  }
}
