// Line and stacked charts over time, drawn by uPlot.
import { colour, compact, element, onTheme } from "./page.js";
import { decades, logTicks } from "./series.js";

const FONT = "11px system-ui, sans-serif";
const HEIGHT = 168;
const LEAST_S = 20; // shown of a short history
const WHOLE = [1, 2, 5, 10, 25, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6]; // steps of a linear axis: counts and percent
const clock = (seconds, withSeconds) =>
  new Date(seconds * 1000).toLocaleTimeString("en-GB", withSeconds ? {} : { hour: "2-digit", minute: "2-digit" });

const mixed = (name, share) => {
  const [over, under] = [name, "--surface"].map((each) => colour(each).match(/\d+/g).map(Number));
  return `rgb(${over.map((value, index) => Math.round(value * share + under[index] * (1 - share))).join(" ")})`;
};

/** Chart of some columns of a History, in a figure with title, current values and a text alternative. */
export class Chart {
  /** `lines`: {column, name, colour}, first at the bottom of a stack. `options`: {unit, isStacked, isLog, isSteps, top}. */
  constructor(figure, title, lines, options = {}) {
    this.lines = lines;
    this.options = options;
    this.values = lines.map((line) =>
      element("span", { class: "value" }, element("i", { style: `background: var(${line.colour})` }), `${line.name} `, element("b", {}, "–")));
    this.place = element("div", { class: "plot", role: "img" });
    this.title = title;
    const unit = options.unit ? element("small", {}, ` ${options.unit}`) : null;
    figure.replaceChildren(element("figcaption", {}, element("h3", {}, title, unit), element("div", { class: "values" }, ...this.values)), this.place);
    this.data = [[], ...lines.map(() => [])];
    new ResizeObserver(() => this.resize()).observe(this.place);
    onTheme(() => this.build());
    this.build();
  }

  get columns() {
    return this.lines.map((line) => line.column);
  }

  build() {
    this.plot?.destroy();
    const axis = { stroke: colour("--ink-2"), font: FONT, ticks: { show: false }, grid: { stroke: colour("--line"), width: 1 } };
    const { isStacked, isLog } = this.options;
    this.plot = new uPlot(
      {
        width: Math.max(this.place.clientWidth, 120),
        height: HEIGHT,
        padding: [8, 20, 0, 0],
        legend: { show: false },
        cursor: { sync: { key: "quire" }, y: false, points: { size: 6 }, drag: { x: false, y: false } },
        hooks: { setCursor: [(plot) => this.showValues(plot.cursor.idx)] },
        scales: { x: { time: !this.options.isSteps, range: (_, low, high) => [this.seconds ? Math.min(low, high - LEAST_S) : low, high] }, y: isLog ? { distr: 3, range: (_, low, high) => decades(low, high) } : { range: (_, low, high) => [0, this.options.top?.() || Math.max(high * 1.1, 1)] } },
        axes: [
          { ...axis, size: 28, space: 72, values: (_, ticks, __, ___, step) => ticks.map((tick) => (this.options.isSteps ? compact(tick) : clock(tick, step < 60))) },
          { ...axis, size: 44, space: 32, incrs: WHOLE, values: (_, ticks) => ticks.map(compact), ...(isLog ? { splits: (_, __, low, high) => logTicks(low, high), filter: (_, ticks) => ticks } : {}) },
        ],
        series: [
          {},
          ...this.drawn().map((line) => ({
            stroke: colour(line.colour),
            width: 1.5,
            fill: isStacked && !line.isApart ? mixed(line.colour, 0.55) : this.lines.length === 1 ? mixed(line.colour, 0.12) : undefined,
            dash: line.isApart ? [4, 3] : undefined,
            points: { show: false },
            spanGaps: false,
          })),
        ],
      },
      this.stacked(),
      this.place,
    );
  }

  /** A stack is drawn from its top, so that lower areas cover higher ones. */
  drawn() {
    return this.options.isStacked ? [...this.lines].reverse() : this.lines;
  }

  stacked() {
    const [time, ...columns] = this.data;
    if (!this.options.isStacked) return this.data;
    const below = time.map(() => 0);
    const sums = columns.map((column, line) =>
      this.lines[line].isApart ? column : column.map((value, index) => (value === null ? null : (below[index] += value))));
    return [time, ...sums.reverse()];
  }

  resize() {
    const width = this.place.clientWidth;
    if (width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  /** Show a History's last `seconds`. */
  show(history, seconds) {
    this.seconds = seconds;
    this.data = history.columns(this.columns, seconds);
    this.place.classList.toggle("bare", this.data[0].length < 2); // a line needs two points
    this.plot.setData(this.stacked());
    if (this.plot.cursor.idx === null || this.plot.cursor.idx === undefined) this.showValues(null);
    const now = this.lines.map((line, index) => `${line.name} ${compact(this.data[index + 1].at(-1) ?? null)}`);
    this.place.setAttribute("aria-label", `${this.title}${this.options.unit ? `, ${this.options.unit}` : ""}: now ${now.join(", ")}`);
  }

  showValues(index) {
    this.values.forEach((value, line) => {
      value.lastChild.textContent = compact(this.data[line + 1].at(index ?? -1) ?? null);
    });
  }
}
