// Running sequences, and the block table of the chosen one.
import { element, find, getJson, number, reconcile } from "./page.js";

const [, CACHED, ARRIVING] = [0, 1, 2]; // service/engine/kv/table_view.py
const MAX_SHOWN = 512;

const keyOf = (one) => `${one.request}/${one.branch}`;
const plural = (count, one) => `${number(count)} ${one}${count === 1 ? "" : "s"}`;
const short = (id) => (id.length > 14 ? `${id.slice(0, 8)}…${id.slice(-2)}` : id);

function stateOf(one) {
  if (one.num_swapped) return "swapped out";
  if (one.num_computed_tokens < one.num_prompt_tokens) return "prefill";
  return one.num_blocks ? "decoding" : "waiting";
}

export class Sequences {
  /** `blockSize(workerId)`: tokens a block. `onMarked`: called when `marked` has changed. */
  constructor(blockSize, onMarked) {
    this.blockSize = blockSize;
    this.onMarked = onMarked;
    this.chosen = null;
    this.order = new Map();
    this.marked = { worker: null, blocks: [] };
    this.isSeen = false;
    new IntersectionObserver(([entry]) => (this.isSeen = entry.isIntersecting), { rootMargin: "300px" }).observe(find("sequences"));
    find("sequence-rows").addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      const buttons = [...find("sequence-rows").querySelectorAll("button")];
      const next = buttons[buttons.indexOf(event.target) + step];
      if (step && next) {
        event.preventDefault();
        next.focus();
        next.click();
      }
    });
  }

  /** Ask the gateway, only while the section is on screen. */
  async poll(isChosen = false) {
    if (!this.isSeen && !isChosen) return;
    const query = this.chosen ? `?request=${encodeURIComponent(this.chosen.request)}&branch=${this.chosen.branch}` : "";
    const answer = await getJson(`ui/sequences${query}`);
    this.show(answer);
  }

  show({ sequences, table }) {
    for (const one of sequences) if (!this.order.has(keyOf(one))) this.order.set(keyOf(one), this.order.size);
    sequences.sort((one, other) => this.order.get(keyOf(one)) - this.order.get(keyOf(other)));
    this.sequences = sequences;
    find("no-sequences").hidden = sequences.length > 0;
    find("sequence-table").hidden = !sequences.length;
    reconcile(find("sequence-rows"), sequences, keyOf, (one) => this.row(one), (row, one) => this.fill(row, one));
    const counts = this.chosen && sequences.find((one) => keyOf(one) === keyOf(this.chosen));
    if (table && counts && keyOf(table) === keyOf(counts)) this.showTable(counts, table);
    else if (this.chosen && !counts) find("table-summary").textContent = `${short(this.chosen.request)} is no longer listed; this was its last table.`;
    find("table").classList.toggle("ended", Boolean(this.chosen && !counts));
    if (!counts) this.marked = { worker: null, blocks: [] };
    this.onMarked();
  }

  row(one) {
    const choose = element("button", { type: "button", class: "link mono", onclick: () => this.choose(one), title: one.request }, `${short(one.request)}${one.branch ? ` · ${one.branch}` : ""}`);
    return element("tr", {}, element("th", { scope: "row" }, choose), ...["", "number", "number", "number wide", "number wide", "number wide"].map((name) => element("td", { class: name })));
  }

  fill(row, one) {
    const isChosen = this.chosen !== null && keyOf(one) === keyOf(this.chosen);
    row.classList.toggle("chosen", isChosen);
    row.querySelector("button").setAttribute("aria-pressed", isChosen);
    const drafts = one.num_drafted ? `${one.num_accepted} / ${one.num_drafted}` : "–";
    const values = [stateOf(one), number(one.num_tokens), number(one.num_blocks || one.num_swapped), number(one.num_shared), number(one.num_copied), drafts];
    values.forEach((value, index) => {
      const cell = row.children[index + 1];
      if (cell.textContent !== value) cell.textContent = value;
    });
  }

  choose(one) {
    this.chosen = one;
    for (const other of this.sequences) {
      const row = [...find("sequence-rows").children].find((each) => each.dataset.key === keyOf(other));
      if (row) this.fill(row, other);
    }
    this.poll(true).catch(() => null); // the next poll reports it
  }

  showTable(counts, table) {
    const size = this.blockSize(counts.worker);
    const { num_tokens, num_computed_tokens: computed, num_prompt_tokens: prompt, num_drafted, num_accepted } = counts;
    const rejected = num_drafted - num_accepted;
    const empty = Math.max(0, counts.num_blocks * size - computed);
    const hasSeveral = new Set(this.sequences.map((one) => one.worker)).size > 1;
    find("table-summary").textContent =
      `${hasSeveral ? `On ${counts.worker}: ` : ""}${plural(num_tokens, "token")} in ${plural(counts.num_blocks, "block")} of ${size}: ${number(counts.num_shared)} shared, ` +
      `${number(counts.num_copied)} copied on write, ${number(counts.num_swapped)} on the host, ${plural(empty, "empty slot")}.` +
      (num_drafted ? ` Its last step drafted ${plural(num_drafted, "token")}; ${number(num_accepted)} were accepted.` : "");
    const share = (from, to, index) => Math.max(0, Math.min(to, (index + 1) * size) - Math.max(from, index * size)) / size;
    const cells = table.blocks.slice(0, MAX_SHOWN).map((block, index) => ({
      index, block,
      holders: table.holders[index],
      isCached: table.states[index] === CACHED,
      isArriving: table.states[index] === ARRIVING,
      source: table.copied_from[index],
      parts: [share(0, Math.min(prompt, computed), index), share(prompt, Math.max(prompt, computed - num_accepted), index),
        share(Math.max(prompt, computed - num_accepted), computed, index), share(computed, computed + rejected, index)],
      tokens: Math.max(0, Math.min(size, computed - index * size)),
      size,
    }));
    reconcile(find("table-blocks"), cells, (cell) => cell.index, makeBlock, fillBlock);
    const more = counts.num_blocks - cells.length;
    find("table-more").textContent = more > 0 ? `and ${plural(more, "more block")}` : "";
    reconcile(find("table-host"), table.host_blocks.slice(0, MAX_SHOWN).map((block, index) => ({ index, block })), (cell) => cell.index,
      () => element("li", { class: "block swapped" }, element("span", { class: "logical" }), element("b")),
      (part, cell) => { [part.children[0].textContent, part.children[1].textContent] = [cell.index, cell.block]; });
    find("table-host-title").hidden = !table.host_blocks.length;
    find("table").hidden = false;
    find("table-hint").hidden = true;
    this.marked = { worker: counts.worker, blocks: table.blocks };
  }
}

function makeBlock() {
  return element("li", { class: "block" }, element("span", { class: "logical" }), element("b"), element("span", { class: "badge" }), element("span", { class: "fill" }));
}

function fillBlock(part, cell) {
  const isShared = cell.holders > 1;
  const kind = cell.isArriving ? "arriving" : isShared ? "shared" : cell.source !== undefined ? "copied" : cell.isCached ? "cached" : "own";
  part.className = `block ${kind}`;
  const [logical, physical, badge, fill] = part.children;
  logical.textContent = cell.index;
  physical.textContent = cell.block;
  badge.textContent = isShared ? `×${cell.holders}` : cell.source !== undefined ? `← ${cell.source}` : "";
  let at = 0;
  const stops = cell.parts.map((length, index) => {
    const from = at;
    at += 100 * length;
    return `var(--fill-${index}) ${from}% ${at}%`;
  });
  fill.style.background = `linear-gradient(90deg, ${stops.join(", ")}, var(--fill-none) ${at}%)`;
  const words = { arriving: "being copied from the host", shared: `held by ${cell.holders}`, copied: `copied on write from block ${cell.source}`, cached: "kept for later prompts", own: "its own" }[kind];
  const label = `Logical block ${cell.index}: physical block ${cell.block}, ${words}, ${cell.tokens} of ${cell.size} tokens`;
  part.title = label;
  part.setAttribute("aria-label", label);
}
