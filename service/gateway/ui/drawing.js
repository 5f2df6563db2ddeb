// Canvases: lines over time, and the block pool.
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A canvas as sharp as the screen, cleared: its context, width and height in CSS pixels. */
function prepared(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const [across, down] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== across || canvas.height !== down) Object.assign(canvas, { width: across, height: down });
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
}

export class Chart {
  constructor(canvas) {
    this.canvas = canvas;
  }

  /** Lines of one value a look; they share one scale, whose top is written beside it. */
  draw(lines) {
    const height = this.canvas.clientHeight;
    const { context, width } = prepared(this.canvas, height);
    const top = Math.max(1, ...lines.flatMap((line) => line.values));
    const [left, ground] = [2, height - 2];
    context.strokeStyle = colour("--line");
    context.strokeRect(0.5, 0.5, width - 1, height - 1);
    for (const { name, values } of lines) {
      context.strokeStyle = colour(name);
      context.lineWidth = 1.5;
      context.beginPath();
      values.forEach((value, index) => {
        const x = left + ((width - 2 * left) * (index + 120 - values.length)) / 119;
        const y = ground - ((ground - 16) * value) / top;
        index ? context.lineTo(x, y) : context.moveTo(x, y);
      });
      context.stroke();
    }
    context.fillStyle = colour("--quiet");
    context.font = "12px system-ui, sans-serif";
    context.fillText(top.toLocaleString("en", { maximumFractionDigits: 0 }), 6, 14);
  }
}

const [FREE, CACHED, SHARED, MOVING] = [0, 1, 2, 3];
const FIRST_OWNER = 16;

/** A pool, a square a cell; `packed` is base64, a byte a cell (see service/engine/kv/block_pool.py). */
export function drawBlocks(canvas, packed) {
  const cells = Uint8Array.from(atob(packed), (char) => char.charCodeAt(0));
  const room = canvas.clientWidth || 320;
  const size = Math.max(3, Math.min(14, Math.floor(Math.sqrt((room * 220) / cells.length))));
  const columns = Math.max(1, Math.floor(room / size));
  const height = Math.ceil(cells.length / columns) * size;
  canvas.style.height = `${height}px`;
  const { context } = prepared(canvas, height);
  const known = { [FREE]: colour("--free"), [CACHED]: colour("--cached"), [SHARED]: colour("--shared"), [MOVING]: colour("--accent-2") };
  const gap = size > 5 ? 1 : 0.5;
  cells.forEach((cell, index) => {
    // 137.5 degrees, the golden angle, keeps neighbours in number far apart in hue.
    context.fillStyle = known[cell] ?? `hsl(${((cell - FIRST_OWNER) * 137.5) % 360} 62% 52%)`;
    context.fillRect((index % columns) * size, Math.floor(index / columns) * size, size - gap, size - gap);
  });
}
