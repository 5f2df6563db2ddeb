// Canvases: line charts and the block pool.
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Clear a canvas and scale it to the screen; returns its context and its width in CSS pixels. */
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

  /** One value per snapshot and line; all share a scale, labelled with its top. */
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

/** Draw a pool, one square per cell; `packed` is base64, one byte per cell (service/engine/kv/block_pool.py). */
export function drawBlocks(canvas, packed) {
  const cells = Uint8Array.from(atob(packed), (char) => char.charCodeAt(0));
  const available = canvas.clientWidth || 320;
  const size = Math.max(3, Math.min(14, Math.floor(Math.sqrt((available * 220) / cells.length))));
  const columns = Math.max(1, Math.floor(available / size));
  const height = Math.ceil(cells.length / columns) * size;
  canvas.style.height = `${height}px`;
  const { context } = prepared(canvas, height);
  const known = { [FREE]: colour("--free"), [CACHED]: colour("--cached"), [SHARED]: colour("--shared"), [MOVING]: colour("--accent-2") };
  const gap = size > 5 ? 1 : 0.5;
  cells.forEach((cell, index) => {
    // The golden angle keeps the hues of consecutive numbers far apart.
    context.fillStyle = known[cell] ?? `hsl(${((cell - FIRST_OWNER) * 137.5) % 360} 62% 52%)`;
    context.fillRect((index % columns) * size, Math.floor(index / columns) * size, size - gap, size - gap);
  });
}
