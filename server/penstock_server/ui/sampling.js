// The panel of sampling parameters, and the fields of a request that it sets. An empty field stands for the
// model's own default.

import { element } from "./dom.js";

const number = (text) => (text === "" ? undefined : Number(text));

//: As the API calls them.
const FIELDS = [
  {
    name: "temperature",
    label: "Temperature",
    min: 0,
    max: 2,
    step: 0.05,
    hint: "0 always takes the likeliest token",
  },
  {
    name: "top_p",
    label: "Top p",
    min: 0.01,
    max: 1,
    step: 0.01,
    hint: "tokens that make up this probability",
  },
  { name: "top_k", label: "Top k", min: -1, step: 1, hint: "so many of the likeliest; -1 is all" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, hint: "the longest answer" },
  { name: "seed", label: "Seed", step: 1, hint: "the same seed gives the same answer" },
];

/** The filled-in fields of the panel, as fields of a request. */
export function samplingFields(settings) {
  const body = {};
  for (const { name } of FIELDS) if (settings[name] !== undefined) body[name] = settings[name];
  const stop = (settings.stop ?? "").split("\n").filter((line) => line !== "");
  if (stop.length > 0) body.stop = stop.map((line) => line.replaceAll("\\n", "\n"));
  return body;
}

/** The panel's content. onChange(settings) is called after each change. */
export function settingsPanel(settings, isChat, onChange, onClose) {
  const change = (name, value) => {
    settings = { ...settings, [name]: value };
    if (value === undefined || value === "") delete settings[name];
    onChange(settings);
  };
  const reset = () => {
    const { system } = settings;
    onChange(system ? { system } : {}, true);
  };
  return [
    element(
      "div",
      { class: "panel-head" },
      element("h2", {}, "Settings"),
      element("button", { type: "button", class: "button small", onclick: onClose }, "Close"),
    ),
    isChat && textField("system", "System prompt", "what the model is told first", settings, change, 5),
    element("h3", {}, "Sampling"),
    element("p", { class: "hint" }, "An empty field is the model's own default."),
    element(
      "div",
      { class: "fields" },
      FIELDS.map((field) => numberField(field, settings, change)),
    ),
    textField("stop", "Stop", "one string per line; \\n is a line end", settings, change, 2),
    element("button", { type: "button", class: "button small", onclick: reset }, "Back to the defaults"),
  ].filter(Boolean);
}

function numberField({ name, label, min, max, step, hint }, settings, change) {
  const input = element("input", {
    id: `set-${name}`,
    type: "number",
    min,
    max,
    step,
    value: settings[name],
    placeholder: "default",
    "aria-describedby": `hint-${name}`,
    inputmode: "decimal",
  });
  input.addEventListener("change", () => {
    // An invalid value is not saved; the browser says why it is invalid.
    if (input.reportValidity()) change(name, number(input.value));
  });
  return element(
    "div",
    { class: "field" },
    element("label", { for: input.id }, label),
    input,
    element("p", { class: "hint", id: `hint-${name}` }, hint),
  );
}

function textField(name, label, hint, settings, change, rows) {
  const input = element(
    "textarea",
    { id: `set-${name}`, rows, "aria-describedby": `hint-${name}`, spellcheck: "false" },
    settings[name] ?? "",
  );
  input.addEventListener("change", () => change(name, input.value));
  return element(
    "div",
    { class: "field" },
    element("label", { for: input.id }, label),
    input,
    element("p", { class: "hint", id: `hint-${name}` }, hint),
  );
}
