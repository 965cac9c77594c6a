// The tokens of one reply: each a span with its origin as a mark, walked by the arrow keys as one stop of Tab.

import { element } from "./elements.js";
import { hideDetails, showDetails } from "./details.js";

export const ORIGINS = {
  accepted: "drafted and accepted",
  bonus: "bonus: the target’s own, after the guesses",
  plain: "plain: nothing was guessed",
};
const SPECIAL = /^<[|/].*>$/; // </s>, <|im_end|>: what ends an answer and is no part of it

/** Adds the tokens of chunks to an element, and keeps what is known of each. */
export class TokenText {
  constructor(box) {
    this.box = box;
    this.tokens = []; // {text, origin, step, logprob, top, span}
    this.decoder = new TextDecoder();
    box.addEventListener("keydown", (event) => this.walk(event));
    box.addEventListener("pointerover", (event) => this.show(event.target));
    box.addEventListener("pointerout", () => box.contains(document.activeElement) || hideDetails());
    box.addEventListener("focusin", (event) => this.show(event.target));
    box.addEventListener("focusout", hideDetails);
  }

  /** A choice of a chunk: its log-probs and its provenance have an entry for each token. */
  add(choice) {
    const entries = choice.logprobs?.content ?? [];
    entries.forEach((entry, index) => this.append(entry, choice.provenance[index]));
  }

  append(entry, { origin, step }) {
    const text = this.decoder.decode(new Uint8Array(entry.bytes), { stream: true }); // "": half a character so far
    const before = this.tokens.at(-1);
    const span = element("span", { class: `token ${origin}`, text, tabindex: before ? -1 : 0, "data-step": step });
    if (before && before.step !== step) span.classList.add("first");
    if (text.includes("\n")) span.classList.add("newline");
    span.dataset.index = this.tokens.length;
    this.tokens.push({ text, origin, step, logprob: entry.logprob, top: entry.top_logprobs, span });
    this.box.append(span);
  }

  /** Mark what ended the answer: it was drawn as a token, and is no part of the text. */
  end(content) {
    const last = this.tokens.at(-1);
    if (last && SPECIAL.test(last.text) && !content.endsWith(last.text)) last.span.classList.add("special");
  }

  /** How many tokens have which origin. */
  counts() {
    const counts = { accepted: 0, bonus: 0, plain: 0 };
    for (const { origin } of this.tokens) counts[origin] += 1;
    return counts;
  }

  show(target) {
    const token = this.tokens[target.dataset?.index];
    if (!token) return;
    const run = this.tokens.filter(({ step }) => step === token.step);
    showDetails(token, run.indexOf(token) + 1, run.length, ORIGINS[token.origin]);
  }

  walk(event) {
    const at = Number(event.target.dataset.index);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.tokens.length - 1 }[event.key];
    if (event.key === "Escape") hideDetails();
    if (to === undefined || !this.tokens[to]) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    this.tokens[to].span.tabIndex = 0;
    this.tokens[to].span.focus();
  }
}
