// The playground: conversations with the model, tools, structured output, probabilities of tokens.
import { checked, describeState, element, find, getJson, number, own, readStored, reason, reconcile, setStatus, store } from "./page.js";
import { Conversations, applyChunk, curl, events, openCalls, requestBody } from "./conversations.js";

const POLL_MS = 5000;
const EXAMPLES = {
  tools: { name: "get_weather", description: "Weather in a city now", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } },
  schema: { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"], additionalProperties: false },
};
const WHO = { user: "You", assistant: "Model", tool: "Tool result" };

function localStore() {
  try {
    return window.localStorage;
  } catch {
    return null; // forbidden
  }
}

const conversations = new Conversations(localStore());
const form = find("form");
let model = "";
let stopper = null;

const fields = () => Object.fromEntries(new FormData(form));
const shown = (text) => JSON.stringify(text).slice(1, -1);
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

function showConversations() {
  reconcile(find("conversations"), conversations.list, (one) => one.id,
    (one) => element("li", {}, element("button", { type: "button", class: "open", onclick: () => open(one.id) }),
      element("button", { type: "button", class: "icon remove", title: "Delete", onclick: () => remove(one) }, "×")),
    (part, one) => {
      const [name, gone] = part.children;
      name.textContent = one.title;
      gone.setAttribute("aria-label", `Delete ${one.title}`);
      name.setAttribute("aria-current", one === conversations.current);
    });
}

function open(id) {
  stopper?.abort();
  conversations.open(id);
  showAll();
  find("message").focus();
}

function remove(one) {
  if (one === conversations.current) stopper?.abort();
  conversations.remove(one.id);
  showAll();
}

function showAll() {
  showConversations();
  find("log").replaceChildren();
  find("token").hidden = true;
  showMessages();
}

function showMessages() {
  const { messages } = conversations.current;
  const log = find("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
  if (!messages.length) log.replaceChildren(element("p", { class: "empty" }, "Ask the model something. What it answers is shaded by probability: the darker a token, the less sure."));
  else {
    log.querySelector(":scope > .empty")?.remove();
    reconcile(log, messages.map((message, index) => ({ message, index })), ({ index }) => index, makeMessage, fillMessage);
  }
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function makeMessage({ message }) {
  return element("article", { class: `message ${message.role}` }, element("h3", {}, WHO[message.role]),
    element("details", { class: "reasoning", hidden: true }, element("summary", {}, "Reasoning"), element("p")),
    element("div", { class: "text" }), element("div", { class: "calls" }), element("p", { class: "quiet figures" }));
}

function fillMessage(part, { message }) {
  const [, reasoning, text, calls, figures] = part.children;
  reasoning.hidden = !message.reasoning;
  if (message.reasoning) reasoning.lastChild.textContent = message.reasoning;
  if (message.tokens && message.content) fillTokens(text, message);
  else if (text.textContent !== message.content) text.textContent = message.content;
  reconcile(calls, message.tool_calls ?? [], (call) => call.id || "…", (call) => makeCall(call), fillCall);
  figures.textContent = message.error ?? message.figures ?? (message === busyWith ? "…" : "");
  figures.classList.toggle("bad", Boolean(message.error));
}

/** Append a span per new token; one without bytes is not in the answer: reasoning, or an end. */
function fillTokens(text, message) {
  text.tabIndex = 0;
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", "Answer: arrow keys go from token to token");
  for (const token of message.tokens.slice(text.children.length)) {
    const span = element("span", {}, token.bytes.length ? token.token : "");
    span.style.setProperty("--doubt", `${Math.round(45 * (1 - Math.exp(token.logprob)))}%`);
    span.token = token;
    text.append(span);
  }
}

function showToken(span) {
  if (!span?.token) return;
  for (const other of document.querySelectorAll(".here")) other.classList.remove("here");
  span.classList.add("here");
  const { token } = span;
  const others = token.top_logprobs.filter((other) => other.token !== token.token);
  const alternatives = others.map((other) => `“${shown(other.token)}” ${percent(other.logprob)}`).join(", ");
  find("token").hidden = false;
  find("token").replaceChildren(element("b", {}, `“${shown(token.token)}” ${percent(token.logprob)}`), alternatives ? ` instead of ${alternatives}` : "");
}

function makeCall(call) {
  const answer = element("input", { placeholder: "Result, such as {\"degrees\": 21}", "aria-label": `Result of ${call.function.name}` });
  const reply = element("form", { class: "reply" }, answer, element("button", {}, "Answer"));
  reply.addEventListener("submit", (event) => {
    event.preventDefault();
    conversations.current.messages.push({ role: "tool", content: answer.value, tool_call_id: call.id });
    if (openCalls(conversations.current.messages).length) showMessages();
    else ask();
  });
  return element("div", { class: "call" }, element("code", {}), reply);
}

function fillCall(part, call) {
  part.firstChild.textContent = `${call.function.name}(${call.function.arguments})`;
  part.lastChild.hidden = stopper !== null || !openCalls(conversations.current.messages).includes(call);
}

let busyWith = null;

/** Send the conversation and read the answer into it. */
async function ask() {
  const conversation = conversations.current;
  const { messages } = conversation;
  const message = { role: "assistant", content: "" };
  const start = performance.now();
  let first = null;
  let body;
  try {
    body = requestBody(model, messages, fields());
  } catch (error) {
    return fail(error.message);
  }
  const mine = (stopper = new AbortController());
  busyWith = message;
  messages.push(message);
  showBusy();
  const isShown = () => conversations.current === conversation;
  try {
    const answer = await fetch(own("../v1/chat/completions"), { method: "POST", signal: mine.signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    for await (const chunk of events((await checked(answer)).body)) {
      applyChunk(message, chunk);
      if (message.content || message.reasoning || message.tool_calls) first ??= performance.now();
      if (isShown()) requestPaint();
    }
    message.figures = figuresOf(message, start, first ?? performance.now(), performance.now());
  } catch (error) {
    if (error.name === "AbortError") message.figures = "Stopped.";
    else message.error = reason(error);
  }
  if (stopper === mine) stopper = busyWith = null;
  showBusy();
  if (!conversations.save()) fail("The browser has no room for the conversation: it is lost when the page is left.");
  showConversations();
  if (isShown()) showMessages();
}

function figuresOf(message, start, first, end) {
  const { prompt_tokens, completion_tokens } = message.usage ?? {};
  const ended = { length: "cut off at max tokens", tool_calls: "calls a tool", content_filter: "filtered" }[message.finish];
  const isTimed = completion_tokens > 1 && end - first > 20; // not in one piece
  const speed = isTimed ? `${number(((completion_tokens - 1) * 1000) / (end - first))} tokens/s` : null;
  return [`${number(prompt_tokens)} + ${number(completion_tokens)} tokens`, `first after ${number(first - start)} ms`, speed, ended].filter(Boolean).join(" · ");
}

let isPainting = false;
function requestPaint() {
  if (isPainting) return;
  isPainting = true;
  requestAnimationFrame(() => {
    isPainting = false;
    showMessages();
  });
}

function showBusy() {
  find("send").disabled = stopper !== null;
  find("stop").disabled = stopper === null;
  showMessages();
}

function fail(text) {
  clearTimeout(counting); // or the count would replace the text
  counting = 0;
  find("count").textContent = text;
  find("count").classList.add("bad");
}

function submit() {
  const content = find("message").value;
  if (stopper || !content.trim()) return;
  try {
    requestBody(model, [], fields());
  } catch (error) {
    return fail(error.message);
  }
  const { messages } = conversations.current;
  for (const call of openCalls(messages)) messages.push({ role: "tool", content: "", tool_call_id: call.id });
  messages.push({ role: "user", content });
  find("message").value = "";
  countTokens();
  conversations.save();
  showConversations();
  ask();
}

/** Show the tokens of what is typed; waits until typing pauses. */
let counting = 0;
function countTokens() {
  clearTimeout(counting);
  const prompt = find("message").value;
  find("count").classList.remove("bad");
  counting = 0;
  if (!prompt) return void (find("count").textContent = "");
  const mine = (counting = setTimeout(async () => {
    const answer = await fetch(own("../tokenize"), { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ model, prompt, add_special_tokens: false }) }).catch(() => null);
    if (answer?.ok && counting === mine) {
      const { count } = await answer.json();
      find("count").textContent = `${number(count)} ${count === 1 ? "token" : "tokens"}`;
    }
  }, 250));
}

async function copyCurl() {
  const typed = find("message").value;
  const messages = typed ? [...conversations.current.messages, { role: "user", content: typed }] : conversations.current.messages;
  try {
    const text = curl(own("../v1/chat/completions"), requestBody(model, messages, fields()));
    await navigator.clipboard.writeText(text);
    find("curl").textContent = "Copied";
    setTimeout(() => (find("curl").textContent = "Copy as curl"), 1500);
  } catch (error) {
    fail(error.name === "NotAllowedError" || error instanceof TypeError ? "The browser does not let this page use the clipboard." : error.message);
  }
}

async function poll() {
  try {
    const state = await getJson("state");
    model = find("model").textContent = find("model").title = state.model;
    setStatus(...describeState(state));
  } catch (error) {
    setStatus("bad", reason(error));
  }
  setTimeout(poll, document.hidden ? 4 * POLL_MS : POLL_MS);
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
find("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => event.key === "Escape" && stopper?.abort());
find("message").addEventListener("input", countTokens);
find("stop").addEventListener("click", () => stopper?.abort());
find("curl").addEventListener("click", copyCurl);
find("new").addEventListener("click", () => {
  stopper?.abort();
  if (conversations.current.messages.length) conversations.create();
  showAll();
  find("message").focus();
});
find("log").addEventListener("click", (event) => showToken(event.target));
find("log").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const text = event.target.closest(".text");
  if (!step || !text?.children.length) return;
  event.preventDefault();
  const here = [...text.children].findIndex((span) => span.classList.contains("here"));
  showToken(text.children[Math.max(0, Math.min(text.children.length - 1, here + step))]);
});
for (const [name, example] of Object.entries(EXAMPLES)) {
  find(`${name}-example`).addEventListener("click", () => {
    form.elements[name].value = JSON.stringify(example, null, 2);
    form.dispatchEvent(new Event("input"));
  });
}
/** Give each JSON box as many rows as its text has lines, within bounds. */
function fit() {
  for (const name of Object.keys(EXAMPLES)) form.elements[name].rows = Math.min(Math.max(form.elements[name].value.split("\n").length + 1, 3), 16);
}

form.addEventListener("input", () => {
  store("quire.form", fields());
  fit();
});
form.addEventListener("submit", (event) => event.preventDefault());
const kept = readStored("quire.form", null);
if (kept) {
  for (const field of form.elements) {
    if (field.type === "checkbox") field.checked = Boolean(kept[field.name]);
    else if (field.name in kept) field.value = kept[field.name];
  }
}
fit();
showAll();
poll();
