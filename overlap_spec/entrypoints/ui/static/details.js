// What is known of the token that is pointed at, or has the focus.

import { byId, element, percent } from "./elements.js";

const GAP = 8; // pixels between a token and its details
const WHITE = { " ": "␣", "\n": "↵", "\t": "⇥" };

const visible = (text) => text.replace(/[ \n\t]/g, (each) => WHITE[each]) || "part of a character";

/** `place` of `size` tokens that the same step committed. */
export function showDetails(token, place, size, origin) {
  const box = byId("details");
  const of = size > 1 ? `, token ${place} of ${size}` : "";
  const facts = [["step", `${token.step}${of}`], ["log-prob", number(token.logprob)], ["probability", percent(Math.exp(token.logprob))]];
  box.replaceChildren(
    element("p", { class: "head" }, element("code", { text: visible(token.text) }), element("span", { class: `origin ${token.origin}`, text: origin })),
    element("dl", {}, ...facts.map(([name, value]) => element("div", {}, element("dt", { text: name }), element("dd", { text: value })))),
  );
  if (token.top.length) box.append(alternatives(token));
  box.hidden = false;
  place_at(box, token.span.getClientRects()[0] ?? token.span.getBoundingClientRect());
}

export function hideDetails() {
  byId("details").hidden = true;
}

function alternatives(token) {
  const rows = token.top.map((each) => {
    const share = Math.exp(each.logprob);
    const bar = element("meter", { min: 0, max: 1, value: share.toFixed(4), "aria-hidden": "true" });
    const chosen = each.logprob === token.logprob;
    return element(
      "tr",
      chosen ? { class: "chosen" } : {},
      element("th", { scope: "row" }, element("code", { text: visible(each.token) })),
      element("td", {}, bar),
      element("td", { text: percent(share) }),
      element("td", { text: number(each.logprob) }),
    );
  });
  return element("table", {}, element("caption", { text: "Most probable here" }), element("tbody", {}, ...rows));
}

const number = (value) => value.toFixed(3).replace("-", "−");

/** Below the token, or above it where there is more room; within the window. */
function place_at(box, at) {
  const { width, height } = box.getBoundingClientRect();
  const left = Math.min(Math.max(at.left, GAP), window.innerWidth - width - GAP);
  const below = at.bottom + GAP;
  const top = below + height <= window.innerHeight || at.top < height + GAP ? below : at.top - height - GAP;
  box.style.left = `${left}px`;
  box.style.top = `${top}px`;
}
