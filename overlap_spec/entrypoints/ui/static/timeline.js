// The last steps as a picture: who did what when, and step N+1 queued while step N runs.

import { byId, element, plural, seconds, shape } from "./elements.js";
import { keyHeaders } from "./settings.js";
import { spanOf, stepsOf } from "./steps.js";

const EVERY_MS = 1000;
const MOST_STEPS = 40; // asked for, and kept
const MOST_SPANS = 1000; // while there is no step yet
const LABEL = 96; // pixels left of the lanes
const LANE = 30;
const BAR = 18;
const AXIS = 22;
const KINDS = { "verify+accept": "verify", verify: "verify", accept: "verify", "extend+draft": "draft", extend: "draft", draft: "draft" };
const kindOf = ({ isDevice, name }) => (isDevice ? (KINDS[name] ?? "prefill") : "host");

export class Timeline {
  constructor() {
    this.spans = [];
    this.held = false;
    this.inView = false;
    this.timer = 0;
    const observer = new IntersectionObserver(([entry]) => {
      this.inView = entry.isIntersecting;
      this.restart();
    });
    observer.observe(byId("ring-picture").parentElement);
    new ResizeObserver(() => this.draw()).observe(byId("ring-picture"));
    document.addEventListener("visibilitychange", () => this.restart());
    byId("ring-steps").addEventListener("change", () => this.draw());
    byId("ring-hold").addEventListener("click", () => this.hold(!this.held));
  }

  hold(held) {
    this.held = held;
    byId("ring-hold").setAttribute("aria-pressed", String(held));
    this.restart();
  }

  /** Ask now and once a second, while the picture can be seen: so long do the processes record. */
  restart() {
    clearTimeout(this.timer);
    if (document.hidden || this.held || !this.inView) return;
    this.ask().finally(() => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.restart(), EVERY_MS);
    });
  }

  async ask() {
    try {
      const response = await fetch(`ui/timeline?steps=${MOST_STEPS}`, { headers: keyHeaders() });
      if (!response.ok) return;
      const { records } = await response.json();
      if (records.length === 0 || this.held) return; // what was seen last stays
      this.spans = newest(this.spans, records.map(spanOf));
      this.draw();
    } catch {
      // the live panel tells that the server does not answer
    }
  }

  draw() {
    const steps = stepsOf(this.spans).slice(-Number(byId("ring-steps").value));
    if (steps.length === 0) return;
    const from = Math.min(...steps.map((step) => Math.min(step.begin, step.planned ?? step.begin)));
    const to = steps.at(-1).end;
    byId("ring-note").textContent = summary(steps);
    byId("ring-picture").replaceChildren(picture(this.spans, steps, from, to, byId("ring-picture").clientWidth));
    byId("ring-table").replaceChildren(...table(steps, from));
  }
}

/** What is known and what was told now, which repeat each other; of the last steps. */
function newest(known, told) {
  const spans = new Map([...known, ...told].map((span) => [`${span.track} ${span.name} ${span.step} ${span.begin}`, span]));
  const all = [...spans.values()].sort((a, b) => a.begin - b.begin);
  const first = stepsOf(all).slice(-MOST_STEPS)[0];
  return first ? all.filter(({ begin }) => begin >= Math.min(first.begin, first.planned ?? first.begin)) : all.slice(-MOST_SPANS);
}

function summary(steps) {
  const known = steps.filter(({ ahead }) => ahead !== null);
  const queued = known.filter(({ ahead }) => ahead > 0);
  const range = `Steps ${steps[0].step} to ${steps.at(-1).step}.`;
  if (known.length === 0) return range;
  const mean = queued.reduce((sum, { ahead }) => sum + ahead, 0) / Math.max(queued.length, 1);
  const so = queued.length ? `, for ${seconds(mean)} of it on average` : "";
  return `${range} ${queued.length} of ${known.length} were queued while the step before ran${so}.`;
}

/** Lanes from the client to the device; `queued` is what the device has before it. */
function lanesOf(spans) {
  const device = spans.some(({ track }) => track === "GPU") ? "GPU" : "CPU, as device";
  return [
    ["client", (span) => span.track === "client"],
    ["frontend", (span) => span.track === "frontend"],
    ["scheduler", (span) => span.track === "scheduler"],
    ["queued", null],
    ["worker host", (span) => span.track === "worker host" && !span.isDevice],
    [device, (span) => span.isDevice],
  ];
}

function picture(spans, steps, from, to, width) {
  const lanes = lanesOf(spans);
  const height = lanes.length * LANE + AXIS;
  const x = (at) => LABEL + ((width - LABEL - 1) * (at - from)) / (to - from);
  const inside = spans.filter(({ begin, end }) => end >= from && begin <= to);
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Timeline of the last steps; the table below has the same" });
  svg.append(patterns(), ...axis(from, to, x, lanes.length * LANE, width));
  lanes.forEach(([name, belongs], index) => {
    const y = index * LANE;
    svg.append(shape("text", { x: 0, y: y + LANE / 2 + 4, class: "lane", text: name }));
    svg.append(shape("path", { d: `M${LABEL} ${y + LANE}H${width}`, class: "rule" }));
    const marks = belongs ? inside.filter(belongs).map((span) => bar(span, x, y)) : steps.filter(({ planned }) => planned !== null).map((step) => wait(step, x, y));
    svg.append(...marks);
  });
  return svg;
}

function bar(span, x, y) {
  const left = Math.max(x(span.begin), LABEL);
  const length = x(span.end) - left;
  const title = shape("title", { text: `${span.step ? `step ${span.step}: ` : ""}${span.name}, ${span.end > span.begin ? seconds(span.end - span.begin) : "at once"}` });
  if (span.end === span.begin) return shape("path", { d: `M${left} ${y + 4}v${BAR + 4}`, class: "instant" }, title);
  const box = shape("rect", { x: left, y: y + 6, width: Math.max(length, 1.5), height: BAR, class: kindOf(span) }, title);
  return span.isDevice && span.more.part === "before tokens" ? labelled(box, span.step, left, length, y, "on") : box;
}

/** A step from its plan to its begin: what the device has before it while it works. */
function wait(step, x, y) {
  const left = Math.max(x(step.planned), LABEL);
  const length = x(step.begin) - left;
  const title = shape("title", { text: `step ${step.step}: planned, waits ${seconds(step.begin - step.planned)}` });
  const box = shape("rect", { x: left, y: y + 6, width: Math.max(length, 1.5), height: BAR, class: "queued" }, title);
  return labelled(box, step.step, left, length, y, "");
}

function labelled(box, step, left, length, y, kind) {
  if (length < 8 * String(step).length + 6) return box;
  return shape("g", {}, box, shape("text", { x: left + 5, y: y + 19, class: `number ${kind}`, text: step }));
}

/** Hatches, so that kinds differ by more than their colours. */
function patterns() {
  const hatch = (id, kind, transform) =>
    shape(
      "pattern",
      { id, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: transform },
      shape("rect", { width: 5, height: 5, class: `${kind}-ground` }),
      shape("rect", { width: 2, height: 5, class: `${kind}-line` }),
    );
  return shape("defs", {}, hatch("hatch-draft", "draft", "rotate(45)"), hatch("hatch-prefill", "prefill", "rotate(0)"));
}

function* axis(from, to, x, y, width) {
  const about = (to - from) / Math.max(2, Math.floor((width - LABEL) / 90));
  const power = 10 ** Math.floor(Math.log10(about));
  const every = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= about);
  for (let at = 0; at <= to - from; at += every) {
    yield shape("path", { d: `M${x(from + at)} 0V${y + 4}`, class: "tick" });
    yield shape("text", { x: x(from + at), y: y + 17, class: "time", text: at === 0 ? "0" : seconds(at) });
  }
}

function table(steps, from) {
  const at = (time) => (time === null ? "–" : seconds(time - from));
  const names = ["Step", "What", "Planned", "Begins", "Tokens out", "Ends", "Queued while the one before ran"];
  const head = element("thead", {}, element("tr", {}, ...names.map((text) => element("th", { scope: "col", text }))));
  const rows = steps.map((step) => {
    const cells = [step.phase + `, ${plural(step.batch, "request")} of ${plural(step.width, "column")}`, at(step.planned), at(step.begin), at(step.out), at(step.end)];
    cells.push(step.ahead === null ? "–" : seconds(step.ahead));
    return element("tr", {}, element("th", { scope: "row", text: step.step }), ...cells.map((text) => element("td", { text })));
  });
  const caption = element("caption", { text: "Times since the begin of the picture" });
  return [caption, head, element("tbody", {}, ...rows)];
}
