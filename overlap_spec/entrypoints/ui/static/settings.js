// What the form says, as fields of a request's body. An empty field leaves the choice to the server.

import { byId } from "./elements.js";

const KEY = "overlap-spec api key"; // in sessionStorage: gone when the tab is closed
const NUMBERS = ["temperature", "top_p", "seed", "max_tokens"];

const number = (id) => {
  const text = byId(id).value.trim();
  return text === "" ? undefined : Number(text);
};

/** The body's fields beside the messages. */
export function requestFields() {
  const fields = Object.fromEntries(NUMBERS.map((id) => [id, number(id)]).filter(([, value]) => value !== undefined));
  const guesses = byId("speculate").checked ? { num_steps: number("num_steps") } : { method: "NONE" };
  return {
    ...fields,
    logprobs: true,
    top_logprobs: number("top_logprobs") ?? 0,
    speculative: { ...guesses, provenance: true, metrics: "summary" },
  };
}

export const systemPrompt = () => byId("system").value.trim();

/** The headers that open the API. */
export function keyHeaders() {
  const key = byId("api_key").value;
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** Show the settings at the key, because the server asks for one. */
export function askForKey() {
  byId("settings").open = true;
  byId("api_key").setAttribute("aria-invalid", "true");
}

/** `changed` is called when another key was entered. */
export function startSettings(changed) {
  byId("options").addEventListener("submit", (event) => event.preventDefault());
  const field = byId("api_key");
  field.value = sessionStorage.getItem(KEY) ?? "";
  field.addEventListener("change", () => {
    sessionStorage.setItem(KEY, field.value);
    field.removeAttribute("aria-invalid");
    changed();
  });
}
