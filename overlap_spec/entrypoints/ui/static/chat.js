// The conversation: what is sent, what comes back, and its figures.

import { byId, element, plural, seconds } from "./elements.js";
import { askForKey, keyHeaders, requestFields, systemPrompt } from "./settings.js";
import { streamChat } from "./stream.js";
import { TokenText } from "./tokens.js";

const SENTENCE = /^[\s\S]*[.!?:\n](?=\s|$)/; // what can be read out while the rest is written

export class Chat {
  constructor() {
    this.messages = []; // {role, content}
    this.running = null; // AbortController of the reply that is being written
    byId("composer").addEventListener("submit", (event) => (event.preventDefault(), this.send()));
    byId("prompt").addEventListener("keydown", (event) => this.onKey(event));
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("again").addEventListener("click", () => this.regenerate());
    byId("new").addEventListener("click", () => this.clear());
  }

  onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  send() {
    const content = byId("prompt").value.trim();
    if (!content || this.running) return;
    byId("prompt").value = "";
    byId("empty").hidden = true;
    this.messages.push({ role: "user", content });
    byId("log").append(turn("You", "user", element("p", { class: "said", text: content })));
    return this.reply();
  }

  regenerate() {
    if (this.running || this.messages.at(-1)?.role !== "assistant") return;
    this.messages.pop();
    byId("log").lastElementChild.remove();
    return this.reply();
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    for (const each of byId("log").querySelectorAll(".turn")) each.remove();
    byId("empty").hidden = false;
    this.problem("");
    this.update();
    byId("prompt").focus();
  }

  /** Ask for the next message of the assistant and show it as it comes. */
  async reply() {
    const reply = new Reply(byId("log"));
    const mine = this.messages;
    this.running = new AbortController();
    this.problem("");
    this.update();
    try {
      for await (const chunk of streamChat(this.body(), keyHeaders(), this.running.signal)) reply.add(chunk);
    } catch (error) {
      reply.stopped = error.name === "AbortError";
      if (!reply.stopped) this.failed(error);
    }
    this.running = null;
    reply.finish();
    if (mine === this.messages) mine.push({ role: "assistant", content: reply.content });
    this.update();
  }

  body() {
    const system = systemPrompt();
    const first = system ? [{ role: "system", content: system }] : [];
    const options = { stream: true, stream_options: { include_usage: true } };
    return { messages: [...first, ...this.messages], ...options, ...requestFields() };
  }

  failed(error) {
    if (error.status === 401) askForKey();
    this.problem(error.message);
  }

  problem(text) {
    byId("problem").textContent = text;
  }

  update() {
    const isRunning = this.running !== null;
    byId("send").disabled = isRunning;
    byId("stop").disabled = !isRunning;
    byId("again").disabled = isRunning || this.messages.at(-1)?.role !== "assistant";
  }
}

function turn(who, kind, ...content) {
  return element("article", { class: `turn ${kind}`, "aria-label": who }, element("h3", { text: who }), ...content);
}

/** One message of the assistant, as it grows. */
class Reply {
  constructor(log) {
    this.log = log;
    this.content = "";
    this.unread = ""; // of it, not read out yet
    this.usage = this.metrics = this.reason = null;
    this.stopped = false;
    this.askedAt = performance.now();
    this.firstAt = this.lastAt = 0;
    this.box = element("div", { class: "said", role: "group", "aria-label": "Answer: arrow keys walk its tokens" });
    this.tokens = new TokenText(this.box);
    this.foot = element("footer", { class: "figures", text: "waiting for the first token" });
    this.turn = turn("Assistant", "assistant", this.box, this.foot);
    this.turn.setAttribute("aria-busy", "true");
    log.append(this.turn);
    this.follow();
  }

  add(chunk) {
    this.usage = chunk.usage ?? this.usage;
    this.metrics = chunk.metrics?.speculative_decoding ?? this.metrics;
    const choice = chunk.choices[0];
    if (!choice) return;
    const text = (choice.delta.reasoning_content ?? "") + (choice.delta.content ?? "");
    this.content += choice.delta.content ?? "";
    this.reason = choice.finish_reason ?? this.reason;
    if (choice.logprobs) {
      this.lastAt = performance.now();
      this.firstAt ||= this.lastAt;
      this.tokens.add(choice);
      this.foot.textContent = `${plural(this.tokens.tokens.length, "token")} so far`;
    }
    this.readOut(text);
    this.follow();
  }

  /** Whole sentences go to a screen reader, so that it does not stumble over pieces of words. */
  readOut(text, isLast = false) {
    this.unread += text;
    const ready = isLast ? this.unread : (this.unread.match(SENTENCE)?.[0] ?? "");
    this.unread = this.unread.slice(ready.length);
    if (ready.trim()) byId("announcer").append(element("p", { text: ready.trim() }));
  }

  finish() {
    this.turn.removeAttribute("aria-busy");
    this.tokens.end(this.content);
    this.readOut("", true);
    this.foot.replaceChildren(...this.figures().map((text) => element("span", { text })));
    this.readOut(this.stopped ? "Stopped." : "End of the answer.", true);
    this.follow();
  }

  figures() {
    const number = this.tokens.tokens.length;
    if (number === 0) return [this.stopped ? "stopped before the first token" : "no answer"];
    const { accepted, bonus, plain } = this.tokens.counts();
    const found = [plural(number, "token"), `${accepted} accepted, ${bonus} bonus, ${plain} plain`];
    if (this.lastAt > this.firstAt) found.push(`${((1000 * (number - 1)) / (this.lastAt - this.firstAt)).toFixed(1)} tokens/s`);
    found.push(`first token ${seconds((this.firstAt - this.askedAt) / 1000)}`);
    if (this.metrics?.num_spec_steps) {
      const histogram = this.metrics.acceptance_histogram.map((steps, length) => `${length}: ${steps}`).join(", ");
      found.push(`accept length ${this.metrics.mean_acceptance_length.toFixed(2)}`, `steps by accepted guesses ${histogram}`);
    }
    if (this.stopped) found.push("stopped");
    else if (this.reason === "length") found.push("cut at max tokens");
    return found;
  }

  /** Keep the end in view, unless the reader has scrolled back. */
  follow() {
    const page = document.scrollingElement;
    const box = this.log.scrollHeight > this.log.clientHeight ? this.log : page;
    if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
  }
}
