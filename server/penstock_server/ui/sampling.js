// The panel of sampling parameters, and the fields of a request that it sets. An empty field stands for the
// model's own default.

import { element } from "./dom.js";
import { words } from "./words.js";

const number = (text) => (text === "" ? undefined : Number(text));

/** `name` as the API calls the field; `label` and `hint` are keys of words. */
const FIELDS = [
  {
    name: "temperature",
    label: "temperature",
    min: 0,
    max: 2,
    step: 0.05,
    hint: "temperatureHint",
  },
  {
    name: "top_p",
    label: "topP",
    min: 0.01,
    max: 1,
    step: 0.01,
    hint: "topPHint",
  },
  { name: "top_k", label: "topK", min: -1, step: 1, hint: "topKHint" },
  { name: "max_tokens", label: "maxTokens", min: 1, step: 1, hint: "maxTokensHint" },
  { name: "seed", label: "seed", step: 1, hint: "seedHint" },
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
      element("h2", {}, words("settings")),
      element("button", { type: "button", class: "button small", onclick: onClose }, words("close")),
    ),
    isChat && textField("system", "systemPrompt", "systemPromptHint", settings, change, 5),
    element("h3", {}, words("sampling")),
    element("p", { class: "hint" }, words("samplingHint")),
    element(
      "div",
      { class: "fields" },
      FIELDS.map((field) => numberField(field, settings, change)),
    ),
    textField("stop", "stopStrings", "stopStringsHint", settings, change, 2),
    element("button", { type: "button", class: "button small", onclick: reset }, words("backToDefaults")),
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
    placeholder: words("standard"),
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
    element("label", { for: input.id }, words(label)),
    input,
    element("p", { class: "hint", id: `hint-${name}` }, words(hint)),
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
    element("label", { for: input.id }, words(label)),
    input,
    element("p", { class: "hint", id: `hint-${name}` }, words(hint)),
  );
}
