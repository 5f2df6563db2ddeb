// What all pages share: elements, numbers, requests, the theme.
export const find = (id) => document.getElementById(id);

/** Make an element; attributes that are null or false are left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Make the children of `container` those of `items`, by key; elements that stay keep focus and selection. */
export function reconcile(container, items, key, make, update) {
  const known = new Map([...container.children].map((child) => [child.dataset.key, child]));
  const names = items.map((item) => String(key(item)));
  const wanted = new Set(names);
  for (const [name, child] of known) if (!wanted.has(name)) child.remove(); // first: what is moved loses focus
  let place = container.firstElementChild;
  for (const [index, item] of items.entries()) {
    const name = names[index];
    let child = known.get(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else container.insertBefore(child, place);
  }
}

export const number = (value, digits = 0) =>
  value === null || value === undefined || Number.isNaN(value)
    ? "–"
    : value.toLocaleString("en", { maximumFractionDigits: digits });

export const percent = (share) => `${(100 * share).toFixed(1)} %`;

/** Number with three digits, whole below 10,000, else with a unit letter: 1,234,000 is 1.23M. */
export function compact(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 10) return number(value, size < 0.1 ? 3 : 2);
  if (size >= 1000 && size < 10_000) return number(value);
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}

export const bytes = (value) =>
  value < 2 ** 20 ? `${number(value / 2 ** 10, 1)} KiB` : value < 2 ** 30 ? `${number(value / 2 ** 20, 1)} MiB` : `${number(value / 2 ** 30, 2)} GiB`;

const GONE = "The gateway does not answer.";
const NO_KEY = "The API key is missing or wrong. Reload the page and enter the key as the password.";

/** Say in plain words why a request failed; browsers word a lost connection differently. */
export const reason = (error) => (error instanceof TypeError ? GONE : error.message);

/** Raise an Error with the message of the server's answer. */
export async function checked(response) {
  if (response.ok) return response;
  if (response.status === 401) throw new Error(NO_KEY);
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `The gateway answers with HTTP ${response.status}.`);
}

/** A path from this page, without a user and password of its address: fetch takes none. */
export const own = (path) => new URL(path, location.origin + location.pathname).href;

export const getJson = async (path) => (await checked(await fetch(own(path), { cache: "no-store" }))).json();

export function readStored(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise; // forbidden, or not ours
  }
}

/** Return whether it was stored: storage may be full or forbidden. */
export function store(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

const probe = element("i", { hidden: true });

/** Resolve a custom property to [r, g, b]. */
export function rgb(name) {
  probe.style.color = `var(${name})`;
  if (!probe.isConnected) document.body.append(probe);
  const [red, green, blue] = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
  return [red, green, blue];
}

export const colour = (name) => `rgb(${rgb(name).join(" ")})`;

const themeWatchers = [];
export const onTheme = (watcher) => themeWatchers.push(watcher);

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";

function themed() {
  const button = find("theme");
  const other = isDark() ? "light" : "dark";
  button.setAttribute("aria-label", `Switch to the ${other} theme`);
  button.title = `Switch to the ${other} theme`;
  button.dataset.shows = other;
  for (const watcher of themeWatchers) watcher();
}

find("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("quire.theme", theme);
  } catch {
    // It lasts until the page is left.
  }
  themed();
});
dark.addEventListener("change", themed);
themed();

/** Show what is wrong, or right, in the header. `level`: "good", "warn" or "bad". */
export function setStatus(level, text) {
  const status = find("status");
  if (status.textContent !== text) status.textContent = text; // a screen reader repeats what is set
  status.className = level;
}

/** Say in plain words what a fleet's state means for requests. */
export function describeState(state) {
  const ready = state.workers.filter((worker) => worker.ready).length;
  if (state.num_queued === null) return ["bad", "Redis does not answer: requests are refused until it is back."];
  if (!state.workers.length) return ["bad", "No worker runs: requests wait until one starts."];
  if (!ready) return ["bad", "No worker is ready: requests wait."];
  const leaving = state.workers.length - ready;
  const workers = `${ready} ${ready === 1 ? "worker" : "workers"} ready`;
  return leaving ? ["warn", `${workers}, ${leaving} not ready`] : ["good", workers];
}
