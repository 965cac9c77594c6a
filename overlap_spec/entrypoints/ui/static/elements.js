// Elements and numbers. Text always becomes text: nothing here, or in any file beside it, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes (`text`: its content; `class`, `data-..` and so on as in HTML) and children. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** The same, of an SVG picture. */
export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") made.textContent = value;
    else if (value !== undefined && value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

/** 0.0123 s -> "12.3 ms" */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 ms";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(2)} ms`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.1 ? 1 : 0)} ms`;
  return `${value.toFixed(2)} s`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;

export const count = (number) => number.toLocaleString("en-US");

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
