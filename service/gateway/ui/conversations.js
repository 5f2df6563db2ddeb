// Conversations, the requests made of them, and the answers read into them. No DOM: tests run it alone.
const KEY = "quire.conversations";
const MAX_CONVERSATIONS = 50;
const MAX_TITLE = 60;

/** Kept in `storage` (localStorage, or null), newest first. */
export class Conversations {
  constructor(storage, now = Date.now) {
    this.storage = storage;
    this.now = now;
    this.list = this.read();
    if (!this.list.length) this.create();
    this.current = this.list[0];
  }

  read() {
    try {
      const list = JSON.parse(this.storage.getItem(KEY));
      return Array.isArray(list) ? list.filter((one) => typeof one?.id === "string" && Array.isArray(one.messages)) : [];
    } catch {
      return []; // forbidden, or not ours
    }
  }

  create() {
    this.current = { id: `${this.now()}-${this.list.length}`, title: "New conversation", messages: [] };
    this.list.unshift(this.current);
    return this.current;
  }

  open(id) {
    this.current = this.list.find((one) => one.id === id) ?? this.current;
  }

  remove(id) {
    this.list = this.list.filter((one) => one.id !== id);
    if (!this.list.length) this.create();
    if (this.current.id === id) this.current = this.list[0];
    this.save();
  }

  /** Name the current conversation after its first message and store what fits, newest first; false if none does. */
  save() {
    const first = this.current.messages.find((message) => message.role === "user");
    if (first) this.current.title = first.content.slice(0, MAX_TITLE).replace(/\s+/g, " ") || this.current.title;
    this.list = this.list.slice(0, MAX_CONVERSATIONS);
    if (!this.list.includes(this.current)) this.list.unshift(this.current);
    // Probabilities take a hundred times the room of the text.
    const stored = (count) => JSON.stringify(this.list.slice(0, count), (name, value) => (name === "tokens" ? undefined : value));
    for (let count = this.list.length; count; count = Math.floor(count / 2)) {
      try {
        this.storage.setItem(KEY, stored(count));
        return true;
      } catch {
        // Full, or forbidden: fewer may fit.
      }
    }
    return false;
  }
}

/** Parse a JSON box; empty is undefined. Raises Error with the box's name. */
export function parseBox(name, text) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not valid JSON: ${error.message}`);
  }
}

/** Accept one function, OpenAI's {type, function}, or a list of either. */
export function readTools(text) {
  const tools = parseBox("Tools", text);
  if (tools === undefined) return undefined;
  return (Array.isArray(tools) ? tools : [tools]).map((tool) => (tool?.type === "function" ? tool : { type: "function", function: tool }));
}

const sent = ({ role, content, tool_calls, tool_call_id }) => {
  const message = { role, content };
  if (tool_calls?.length) message.tool_calls = tool_calls;
  if (tool_call_id) message.tool_call_id = tool_call_id;
  return message;
};

/** The body of a chat request. `form`: strings of the page's fields; empty ones are left out. */
export function requestBody(model, messages, form) {
  const body = { model, messages: messages.filter((message) => !message.error).map(sent), stream: true, stream_options: { include_usage: true } };
  if (form.system?.trim()) body.messages.unshift({ role: "system", content: form.system });
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) if (form[name]) body[name] = Number(form[name]);
  if (form.effort) body.reasoning_effort = form.effort;
  if (form.stop) body.stop = form.stop.split("\n").filter(Boolean);
  if (form.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  const tools = readTools(form.tools ?? "");
  if (tools) Object.assign(body, { tools, tool_choice: form.tool_choice || "auto" });
  const schema = parseBox("JSON schema", form.schema ?? "");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  return body;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A command line that sends the body. The key is read from the shell's QUIRE_KEY, never written out. */
export const curl = (url, body) =>
  [`curl -N ${quoted(url)}`, "-H 'Content-Type: application/json'", '-H "Authorization: Bearer $QUIRE_KEY"', `-d ${quoted(JSON.stringify(body))}`].join(" \\\n  ");

/** Read a stream's chunk into an assistant's message. */
export function applyChunk(message, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) message.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { delta } = choice;
  message.content += delta.content ?? "";
  if (delta.reasoning) message.reasoning = (message.reasoning ?? "") + delta.reasoning;
  for (const part of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = (message.tool_calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id += part.id ?? "";
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
  if (choice.logprobs?.content) message.tokens = [...(message.tokens ?? []), ...choice.logprobs.content];
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

/** Tool calls of the last answer that have no result yet. */
export function openCalls(messages) {
  const last = messages.findLastIndex((message) => message.role === "assistant");
  if (last < 0) return [];
  const answered = new Set(messages.slice(last + 1).map((message) => message.tool_call_id));
  return (messages[last].tool_calls ?? []).filter((call) => !answered.has(call.id));
}

/** Yield the events' JSON of a response body. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}
