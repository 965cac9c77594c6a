// Records of the processes, step by step. Times are seconds on the engine's clock.

const [TRACK, NAME, BEGIN, END, STEP, MORE] = [0, 1, 2, 3, 4, 5];

/** A record as an object; `isDevice`: what the device did, also where that is the worker's own processor. */
export function spanOf(record) {
  const more = record[MORE];
  return {
    track: record[TRACK],
    name: record[NAME],
    begin: record[BEGIN],
    end: record[END],
    step: record[STEP],
    more,
    isDevice: "phase" in more,
  };
}

/** The steps that the device has done, in order, with when each was planned, began, had its tokens out and ended. */
export function stepsOf(spans) {
  const steps = new Map();
  for (const span of spans.filter(({ isDevice }) => isDevice)) {
    const step = steps.get(span.step) ?? { step: span.step, begin: span.begin, end: span.end, out: null, planned: null, ...span.more };
    step.begin = Math.min(step.begin, span.begin);
    step.end = Math.max(step.end, span.end);
    if (span.more.part === "before tokens") step.out = Math.max(step.out ?? 0, span.end);
    steps.set(span.step, step);
  }
  for (const span of spans) if (span.name === "plan" && steps.has(span.step)) steps.get(span.step).planned = span.end;
  const found = [...steps.values()].sort((a, b) => a.step - b.step);
  found.forEach((step, index) => (step.ahead = aheadOf(step, found[index - 1])));
  return found;
}

/** For how long a step was queued while the one before ran; null where that is not known. */
function aheadOf(step, before) {
  if (!before || before.step !== step.step - 1 || step.planned === null) return null;
  return Math.max(0, before.end - Math.max(step.planned, before.begin));
}
