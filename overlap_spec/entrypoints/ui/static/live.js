// The figures of /ui/live, once a second while the page is in view.

import { byId, count, element, percent, plural, seconds, shape } from "./elements.js";
import { askForKey, keyHeaders } from "./settings.js";
import { messageOf } from "./stream.js";

const EVERY_MS = 1000;
const KEPT = 60; // readings of a curve
const CURVE = { width: 120, height: 28 };

export class LivePanel {
  constructor() {
    this.curves = { tokens: [], accept: [] };
    this.busy = null; // the last reading with work: what followed it is a rest of a second
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.restart());
    this.restart();
  }

  /** Ask now, and once a second; not at all while nobody sees the page. */
  restart() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    this.ask().finally(() => {
      clearTimeout(this.timer);
      if (!document.hidden) this.timer = setTimeout(() => this.restart(), EVERY_MS);
    });
  }

  async ask() {
    try {
      const response = await fetch("ui/live", { headers: keyHeaders() });
      if (response.status === 401) askForKey();
      if (response.ok) this.show(await response.json());
      else this.silent(await messageOf(response));
    } catch {
      this.silent("the server does not answer");
    }
  }

  silent(reason) {
    setState("unknown", reason);
  }

  show(live) {
    byId("model").textContent = live.model;
    const method = live.num_steps === 0 ? "plain decoding" : live.method;
    byId("method").textContent = live.ranks > 1 ? `${method}, ${live.ranks} ranks` : method;
    setState(live.state, live.draft === "dead" || live.draft === "collapsed" ? `draft ${live.draft}` : live.state);
    const isIdle = live.running + live.queued === 0;
    if (!isIdle) this.busy = live;
    const rates = this.busy ?? live;
    byId("live-note").textContent = isIdle ? "idle: rates are those of the last second with work" : "the last second";
    keep(this.curves.tokens, isIdle ? 0 : live.tokens_per_s);
    keep(this.curves.accept, isIdle ? null : live.accept_length);
    byId("figures").replaceChildren(...this.figures(live, rates));
  }

  /** `rates`: the reading whose rates are shown. */
  figures(live, rates) {
    const { pages, first_token: first } = live;
    const accepted = live.accepted_per_position.reduce((sum, each) => sum + each, 0);
    return [
      figure("accept", "Accept length", rates.accept_length ? rates.accept_length.toFixed(2) : "–", "tokens a verify step", curve(this.curves.accept, 1)),
      figure("tokens", "Tokens a second", rates.tokens_per_s.toFixed(1), `${count(live.generated)} since the start`, curve(this.curves.tokens, 0)),
      figure("first", "First token", seconds(first.newest), `mean ${seconds(first.mean)} of ${plural(first.count, "request")}`),
      figure("queue", "Queue", `${live.queued}`, `waiting; ${live.running} running`),
      figure("pages", "Pages", count(pages.used), `of ${count(pages.total)} in use, ${count(pages.cached)} cached`, pool(pages)),
      ...(pages.most_snapshot_bytes ? [snapshots(pages)] : []),
      figure("guesses", "Guesses accepted", live.proposed ? percent(accepted / live.proposed) : "–", "since the start; by place:", places(live)),
      ...(live.adapt ? [learning(live.adapt)] : []),
      figure("step", "Step time", seconds(rates.step.device), `${plural(rates.step.width, "column")}; ${plural(live.step.count, "step")} since the start`, parts(rates.step)),
    ];
  }
}

function setState(state, words) {
  const box = byId("state");
  if (box.textContent === words) return;
  box.dataset.state = state;
  box.textContent = words;
}

/** Of recurrent states, which a prefix needs beside its pages. */
function snapshots(pages) {
  const mib = (bytes) => Math.round(bytes / 2 ** 20);
  const { snapshot_lookups: all, snapshot_hits: hits } = pages;
  const note = `of ${mib(pages.most_snapshot_bytes)} MiB; found for ${hits} of ${plural(all, "request")}`;
  return figure("snapshots", "State snapshots", `${mib(pages.snapshot_bytes)} MiB`, note);
}

/** Of a draft that learns: whoever chats here is told. */
function learning({ versions, gain, samples }) {
  const gained = versions ? `the last gained ${percent(gain)}; ` : "";
  const note = `${gained}it learns from texts of requests, ${plural(samples, "sample")} now`;
  return figure("adapt", "Draft versions", count(versions), note);
}

function keep(values, value) {
  values.push(value);
  if (values.length > KEPT) values.shift();
}

function figure(id, name, value, note, ...more) {
  return element(
    "div",
    { class: "figure", id: `figure-${id}` },
    element("dt", { text: name }),
    element("dd", {}, element("strong", { text: value }), element("span", { class: "note", text: note }), ...more),
  );
}

/** The last minute. What it shows is told in words beside it. */
function curve(values, least) {
  const most = Math.max(least + 1, ...values.map((each) => each ?? least));
  const x = (index) => (CURVE.width * (index + KEPT - values.length)) / (KEPT - 1);
  const y = (value) => CURVE.height - 2 - ((CURVE.height - 4) * (value - least)) / (most - least);
  let line = "";
  values.forEach((value, index) => {
    if (value !== null) line += `${line && values[index - 1] !== null ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  const { width, height } = CURVE;
  const box = { class: "curve", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" };
  return shape("svg", box, shape("path", { d: `M0 ${height - 1}H${width}`, class: "axis" }), shape("path", { d: line }));
}

/** A bar of shares, each with a pattern of its own. */
function bar(shares) {
  const box = element("div", { class: "shares", "aria-hidden": "true" });
  for (const [name, share] of shares) {
    const part = element("span", { class: name });
    part.style.flexGrow = share;
    if (share > 0) box.append(part);
  }
  return box;
}

function pool({ used, cached, total }) {
  return bar([["used", used], ["cached", cached], ["free", Math.max(total - used - cached, 0)]]);
}

/** How often the guess at each place was accepted. */
function places({ accepted_per_position: accepted, drafts }) {
  const list = element("ol", { class: "places" });
  accepted.forEach((hits, index) => {
    const share = drafts ? hits / drafts : 0;
    const column = element("span", { class: "column", "aria-hidden": "true" });
    column.style.height = `${Math.max(2, 28 * share)}px`;
    list.append(element("li", {}, column, element("span", { text: `${index + 1}: ${percent(share)}` })));
  });
  return list;
}

/** What a step is made of: the device's work and the gap before it; the host's part, most of it beside the device. */
function parts(step) {
  const exposed = Math.max(step.host - step.host_hidden, 0);
  const rows = [
    ["device works", step.device, "work"],
    ["device waits", step.gap, "gap"],
    ["host, hidden", step.host_hidden, "hidden-host"],
    ["host, waited for", exposed, "gap"],
  ];
  const longest = Math.max(...rows.map(([, value]) => value), 1e-9);
  const body = rows.map(([name, value, kind]) => {
    const mark = bar([[kind, value], ["rest", longest - value]]);
    return element("tr", {}, element("th", { scope: "row", text: name }), element("td", {}, mark), element("td", { text: seconds(value) }));
  });
  if (step.efficiency !== null) {
    const mark = bar([["work", step.efficiency], ["free", 1 - step.efficiency]]);
    body.push(element("tr", {}, element("th", { scope: "row", text: "efficiency" }), element("td", {}, mark), element("td", { text: percent(step.efficiency) })));
  }
  if (step.experts !== null) {
    const mark = bar([["work", step.experts], ["free", step.num_experts - step.experts]]);
    const text = `${step.experts.toFixed(1)} of ${step.num_experts}`;
    body.push(element("tr", {}, element("th", { scope: "row", text: "experts read" }), element("td", {}, mark), element("td", { text })));
  }
  return element("table", { class: "parts" }, element("caption", { class: "hidden", text: "Parts of a step" }), element("tbody", {}, ...body));
}
