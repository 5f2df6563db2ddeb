// A chat of one message; each token of the answer shows its probability and the alternatives.
const find = (id) => document.getElementById(id);
const shown = (text) => JSON.stringify(text).slice(1, -1);
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

export class Playground {
  constructor(model) {
    this.model = model;
    this.tokens = [];
    this.here = -1;
    find("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    find("stop").addEventListener("click", () => this.stopper?.abort());
    find("answer").addEventListener("click", (event) => {
      const index = [...find("answer").children].indexOf(event.target);
      if (index >= 0) this.showToken(index);
    });
    find("answer").addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step && this.tokens.length) {
        event.preventDefault();
        this.showToken(Math.max(0, Math.min(this.tokens.length - 1, this.here + step)));
      }
    });
  }

  async ask() {
    this.stopper = new AbortController();
    this.busy(true);
    this.tokens = [];
    this.here = -1;
    find("answer").replaceChildren();
    find("thought").textContent = "";
    find("thinking").hidden = true;
    find("figures").textContent = "";
    find("figures").classList.remove("bad");
    const start = performance.now();
    let first = null;
    try {
      for await (const chunk of this.chunks()) {
        if (chunk.error) throw new Error(chunk.error.message);
        const choice = chunk.choices[0];
        if (!choice) continue;
        if (choice.delta.content || choice.delta.reasoning) first ??= performance.now();
        this.appendReasoning(choice.delta.reasoning);
        this.appendTokens(choice);
        if (choice.finish_reason) this.figures(start, first, choice.finish_reason);
      }
    } catch (error) {
      const stopped = error.name === "AbortError";
      find("figures").textContent = stopped ? "Stopped." : error instanceof TypeError ? "The gateway does not answer any more." : error.message;
      find("figures").classList.toggle("bad", !stopped);
    } finally {
      this.busy(false);
    }
  }

  async *chunks() {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      signal: this.stopper.signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        model: this.model(),
        messages: [{ role: "user", content: find("message").value }],
        temperature: Number(find("temperature").value),
        max_tokens: Number(find("max-tokens").value),
        logprobs: true,
        top_logprobs: Number(find("top").value),
        stream: true,
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
      }
    }
  }

  appendReasoning(text) {
    if (!text) return;
    find("thinking").hidden = false;
    find("thought").textContent += text;
  }

  /** Tokens arrive with their text, or before it while a character is incomplete. */
  appendTokens(choice) {
    for (const token of choice.logprobs?.content ?? []) {
      const part = document.createElement("span");
      // A token without bytes is not in the answer: reasoning, or an end.
      part.textContent = token.bytes.length ? token.token : "";
      part.style.backgroundColor = `color-mix(in srgb, var(--accent-2) ${Math.round(60 * (1 - Math.exp(token.logprob)))}%, transparent)`;
      find("answer").append(part);
      this.tokens.push(token);
    }
  }

  showToken(index) {
    find("answer").children[this.here]?.classList.remove("here");
    this.here = index;
    find("answer").children[index].classList.add("here");
    const token = this.tokens[index];
    const chosen = document.createElement("b");
    chosen.textContent = `“${shown(token.token)}” ${percent(token.logprob)}`;
    const others = token.top_logprobs.filter((other) => other.token !== token.token);
    const alternatives = others.map((other) => `“${shown(other.token)}” ${percent(other.logprob)}`).join(", ");
    find("token").replaceChildren(chosen, alternatives ? ` instead of ${alternatives}` : "");
  }

  figures(start, first, reason) {
    const end = performance.now();
    const speed = first && this.tokens.length > 1 ? ((this.tokens.length - 1) * 1000) / (end - first) : null;
    find("figures").textContent =
      `${this.tokens.length} tokens (${reason}), first after ${Math.round((first ?? end) - start)} ms` +
      (speed ? `, then ${Math.round(speed)} a second` : "");
  }

  busy(is) {
    find("send").disabled = is;
    find("stop").disabled = !is;
  }
}
