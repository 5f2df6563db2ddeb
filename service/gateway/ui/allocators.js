// KV memory under three policies, on the same arrivals. No DOM: tests run it alone. A step gives each running request
// one token. Sizes are in slots, of one token each. Allocators are those of service/bench/kv_policies/policies.py.

/** Return a generator of numbers in [0, 1) (mulberry32). */
export function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

const clamp = (value, low, high) => Math.max(low, Math.min(high, Math.round(value)));

/** Requests by step: Poisson arrivals, exponential lengths; `total` (prompt and output) is at most `maxLen`. */
export class Arrivals {
  constructor({ seed, rate, maxLen, meanPrompt = 48, meanOutput = 96 }) {
    Object.assign(this, { random: random(seed), rate, maxLen, meanPrompt, meanOutput });
    this.numRequests = 0;
    this.nextAt = this.wait();
  }

  exponential(mean) {
    return -Math.log(1 - this.random()) * mean;
  }

  wait() {
    return this.exponential(1 / this.rate);
  }

  /** Return the requests that arrive before the end of `step`. */
  at(step) {
    const arrived = [];
    while (this.nextAt < step + 1) {
      this.nextAt += this.wait();
      const prompt = clamp(4 + this.exponential(this.meanPrompt), 4, this.maxLen / 2);
      const output = clamp(1 + this.exponential(this.meanOutput), 1, this.maxLen - prompt);
      arrived.push({ id: this.numRequests++, arrival: step, prompt, output, total: prompt + output });
    }
    return arrived;
  }
}

export class BestFit {
  constructor(size) {
    this.holes = size ? [{ start: 0, size }] : [];
  }

  get numFree() {
    return this.holes.reduce((total, hole) => total + hole.size, 0);
  }

  fits(count) {
    return this.holes.some((hole) => hole.size >= count);
  }

  /** Return {start, size}, cut from the first smallest hole that is large enough. */
  take(count) {
    const holes = this.holes.filter((hole) => hole.size >= count);
    if (!holes.length || count < 1) throw new Error(`no hole of ${count}`);
    const hole = holes.reduce((best, other) => (other.size < best.size ? other : best));
    const rest = hole.size > count ? [{ start: hole.start + count, size: hole.size - count }] : [];
    this.holes.splice(this.holes.indexOf(hole), 1, ...rest);
    return { start: hole.start, size: count };
  }

  giveBack({ start, size }) {
    const at = this.holes.findIndex((hole) => hole.start > start);
    this.holes.splice(at < 0 ? this.holes.length : at, 0, { start, size });
    const merged = [];
    for (const hole of this.holes) {
      const last = merged.at(-1);
      if (last && last.start + last.size === hole.start) last.size += hole.size;
      else merged.push({ ...hole });
    }
    this.holes = merged;
  }
}

/** Regions of a power of two, aligned to their size; free halves merge. */
export class Buddy {
  constructor(size) {
    this.starts = new Map(); // by size
    for (let power = 1; power <= size; power *= 2) this.starts.set(power, []);
    let start = 0;
    for (const power of [...this.starts.keys()].reverse()) {
      if (Math.floor(size / power) % 2) {
        this.starts.get(power).push(start);
        start += power;
      }
    }
  }

  get numFree() {
    return [...this.starts].reduce((total, [size, starts]) => total + size * starts.length, 0);
  }

  fits(count) {
    return [...this.starts].some(([size, starts]) => size >= count && starts.length);
  }

  take(count) {
    const sizes = [...this.starts].filter(([size, starts]) => size >= count && starts.length).map(([size]) => size);
    if (!sizes.length || count < 1) throw new Error(`no hole of ${count}`);
    let size = Math.min(...sizes);
    const start = this.starts.get(size).shift();
    while (size >= 2 * count) {
      size /= 2;
      this.free(start + size, size);
    }
    return { start, size };
  }

  giveBack({ start, size }) {
    for (;;) {
      const buddy = Math.floor(start / size) % 2 ? start - size : start + size;
      const at = this.starts.get(size).indexOf(buddy);
      if (at < 0 || !this.starts.has(2 * size)) break;
      this.starts.get(size).splice(at, 1);
      start = Math.min(start, buddy);
      size *= 2;
    }
    this.free(start, size);
  }

  free(start, size) {
    const starts = this.starts.get(size);
    const at = starts.findIndex((other) => other > start);
    starts.splice(at < 0 ? starts.length : at, 0, start);
  }
}

export const nextPower = (count) => 2 ** Math.ceil(Math.log2(Math.max(1, count)));

/** One region a request, from its start to its end. */
export class Contiguous {
  constructor(allocator, wanted) {
    Object.assign(this, { allocator, wanted });
  }

  get numFree() {
    return this.allocator.numFree;
  }

  canStart(run) {
    return this.allocator.fits(this.wanted(run.request));
  }

  /** Free slots that would be enough, if they were in one piece. */
  external(run) {
    return this.numFree >= this.wanted(run.request) && !this.canStart(run) ? this.numFree : 0;
  }

  start(run) {
    run.region = this.allocator.take(this.wanted(run.request));
  }

  grow() {
    return true;
  }

  end(run) {
    this.allocator.giveBack(run.region);
    run.region = null;
  }

  held(run) {
    return run.region.size;
  }

  /** The slot of a request's n-th held place. */
  slot(run, index) {
    return run.region.start + index;
  }
}

/** Blocks anywhere, allocated as tokens come. */
export class Paged {
  constructor(numSlots, blockSize) {
    this.blockSize = blockSize;
    this.free = [...Array(Math.floor(numSlots / blockSize)).keys()].reverse();
  }

  get numFree() {
    return this.free.length * this.blockSize;
  }

  needed(numTokens) {
    return Math.ceil(numTokens / this.blockSize);
  }

  canStart(run) {
    return this.free.length >= this.needed(run.filled + 1);
  }

  external() {
    return 0; // any free block serves any request
  }

  start(run) {
    run.blocks = Array.from({ length: this.needed(run.filled) }, () => this.free.pop());
  }

  /** Return false if no block is free for the next token. */
  grow(run) {
    if (this.needed(run.filled + 1) <= run.blocks.length) return true;
    if (!this.free.length) return false;
    run.blocks.push(this.free.pop());
    return true;
  }

  end(run) {
    this.free.push(...run.blocks.reverse());
    run.blocks = [];
  }

  held(run) {
    return run.blocks.length * this.blockSize;
  }

  slot(run, index) {
    return run.blocks[Math.floor(index / this.blockSize)] * this.blockSize + (index % this.blockSize);
  }
}

export const POLICIES = {
  naive: ({ numSlots, maxLen }) => new Contiguous(new BestFit(numSlots), () => maxLen),
  buddy: ({ numSlots, maxLen }) =>
    new Contiguous(new Buddy(numSlots), (request) => Math.min(maxLen, request.prompt + nextPower(request.output))),
  paged: ({ numSlots, blockSize }) => new Paged(numSlots, blockSize),
};

/** One policy's memory and queue. `usage` counts the slots of the last step; its values add up to `numSlots`. */
export class Machine {
  constructor(policy, options) {
    this.numSlots = options.numSlots;
    this.memory = POLICIES[policy](options);
    this.waiting = [];
    this.running = [];
    this.step = 0;
    Object.assign(this, { numDone: 0, numTokens: 0, numPreempted: 0, waited: 0, sums: {} });
    this.count();
  }

  /** Admit in order of arrival, give each running request a token, end what is complete, count. */
  advance(arrived) {
    for (const request of arrived) this.waiting.push({ request, filled: request.prompt, region: null, blocks: [], started: null });
    while (this.waiting.length && this.memory.canStart(this.waiting[0])) {
      const run = this.waiting.shift();
      this.memory.start(run);
      if (run.started === null) {
        run.started = this.step;
        this.waited += this.step - run.request.arrival;
      }
      this.running.push(run);
    }
    this.decode();
    this.step++;
    this.count();
    for (const [name, value] of Object.entries(this.usage)) this.sums[name] = (this.sums[name] ?? 0) + value;
  }

  decode() {
    for (let index = 0; index < this.running.length; index++) {
      const run = this.running[index];
      while (!this.memory.grow(run)) {
        // The youngest starts again later, with its tokens: as in an engine that recomputes.
        const youngest = this.running.pop();
        this.memory.end(youngest);
        this.waiting.unshift(youngest);
        this.numPreempted++;
        if (youngest === run) return this.finish();
      }
      run.filled++;
      this.numTokens++;
    }
    this.finish();
  }

  finish() {
    const done = this.running.filter((run) => run.filled >= run.request.total);
    for (const run of done) this.memory.end(run);
    this.numDone += done.length;
    this.running = this.running.filter((run) => run.filled < run.request.total);
  }

  /** filled: hold a token; reserved: will; internal: never will; external: free, but in too small pieces. */
  count() {
    const usage = { filled: 0, reserved: 0, internal: 0, external: 0, free: 0 };
    for (const run of this.running) {
      const held = this.memory.held(run);
      const useful = Math.min(held, run.request.total);
      usage.filled += run.filled;
      usage.reserved += useful - run.filled;
      usage.internal += held - useful;
    }
    usage.external = this.waiting.length ? this.memory.external(this.waiting[0]) : 0;
    usage.free = this.numSlots - usage.filled - usage.reserved - usage.internal - usage.external;
    this.usage = usage;
  }

  /** Mean share of the slots over all steps so far, 0 to 1. */
  mean(name) {
    return this.step ? this.sums[name] / (this.step * this.numSlots) : 0;
  }
}

/** The three machines side by side. */
export class Simulation {
  /** `options`: seed, rate (requests a step), numSlots, maxLen, blockSize. */
  constructor(options) {
    this.arrivals = new Arrivals(options);
    this.machines = Object.fromEntries(Object.keys(POLICIES).map((name) => [name, new Machine(name, options)]));
    this.step = 0;
  }

  advance() {
    const arrived = this.arrivals.at(this.step++);
    for (const machine of Object.values(this.machines)) machine.advance(arrived);
  }
}
