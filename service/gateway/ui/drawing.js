// The block pool: one square per block, up to 131,072 of them (service/engine/kv/block_pool.py).
import { colour, rgb } from "./page.js";

const [FREE, CACHED, SHARED, MOVING, FIRST_OWNER] = [0, 1, 2, 3, 16];
const NAMES = { [FREE]: "free", [CACHED]: "kept for later prompts", [SHARED]: "shared by several sequences", [MOVING]: "being copied" };
const SHADES = 5; // of active blocks, so that neighbours of several requests differ

export const stateOf = (cell) => NAMES[cell] ?? "active, of one sequence";

export function unpack(packed) {
  const text = atob(packed);
  const cells = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) cells[index] = text.charCodeAt(index);
  return cells;
}

/** Squares of `size` CSS pixels with a gap, as many columns as fit: at most `maxHeight` high while they are 2 px. */
export function layout(width, numCells, maxHeight) {
  const size = Math.max(2, Math.min(16, Math.floor(Math.sqrt((width * maxHeight) / Math.max(1, numCells)))));
  const columns = Math.max(1, Math.floor(width / size));
  return { size, columns, rows: Math.ceil(numCells / columns) };
}

/** A pixel for each value of a cell, as an image stores it. */
function palette() {
  const active = rgb("--block-active");
  const ground = rgb("--surface");
  const shades = [...Array(SHADES).keys()].map((shade) => active.map((value, index) => value + (ground[index] - value) * 0.1 * shade));
  const known = [];
  for (const [cell, name] of [[FREE, "--block-free"], [CACHED, "--block-cached"], [SHARED, "--block-shared"], [MOVING, "--block-moving"]]) known[cell] = rgb(name);
  const pixels = new Uint8ClampedArray(4 * 256);
  for (let cell = 0; cell < 256; cell++) pixels.set([...(known[cell] ?? shades[cell % SHADES]), 255], 4 * cell);
  return new Uint32Array(pixels.buffer);
}

/** Draw the pool: one pixel per cell off screen, scaled up, then the gaps as lines; `marked` cells get a frame. */
export class Pool {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.cells = new Uint8Array();
    this.small = document.createElement("canvas");
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => (tip.textContent = ""));
    new ResizeObserver(() => this.width !== canvas.clientWidth && this.draw()).observe(canvas);
  }

  show(cells, blocksPerCell, marked = []) {
    const marks = JSON.stringify(marked);
    const same = cells.length === this.cells.length && marks === this.marks && cells.every((cell, index) => cell === this.cells[index]);
    Object.assign(this, { cells, blocksPerCell, marked, marks });
    if (!same) this.draw();
  }

  draw() {
    const { canvas, cells } = this;
    const width = (this.width = canvas.clientWidth);
    if (!width || !cells.length) return;
    const { size, columns, rows } = (this.grid = layout(width, cells.length, 240));
    const scale = window.devicePixelRatio || 1;
    const height = rows * size;
    canvas.style.height = `${height}px`;
    Object.assign(canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
    Object.assign(this.small, { width: columns, height: rows });
    const small = this.small.getContext("2d");
    const image = small.createImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer);
    const colours = palette();
    for (let index = 0; index < cells.length; index++) pixels[index] = colours[cells[index]];
    small.putImageData(image, 0, 0);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.small, 0, 0, columns * size, height);
    if (size > 3) {
      context.fillStyle = colour("--surface");
      const gap = size > 7 ? 1 : 0.5;
      for (let column = 1; column <= columns; column++) context.fillRect(column * size - gap, 0, gap, height);
      for (let row = 1; row <= rows; row++) context.fillRect(0, row * size - gap, columns * size, gap);
    }
    context.fillStyle = colour("--mark");
    for (const block of this.marked) {
      const index = Math.floor(block / this.blocksPerCell);
      context.fillRect((index % columns) * size, Math.floor(index / columns) * size, Math.max(2, size - 1), Math.max(2, size - 1));
    }
  }

  point(x, y) {
    if (!this.grid) return;
    const { size, columns } = this.grid;
    const index = Math.floor(y / size) * columns + Math.floor(x / size);
    if (x >= columns * size || index >= this.cells.length) return void (this.tip.textContent = "");
    const first = index * this.blocksPerCell;
    const name = this.blocksPerCell > 1 ? `Blocks ${first} to ${first + this.blocksPerCell - 1}, the first` : `Block ${first}`;
    this.tip.textContent = `${name}: ${stateOf(this.cells[index])}`;
  }
}
