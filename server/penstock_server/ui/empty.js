// The stage before the first message: a section through a power station, and some things to ask.

import { element, svg } from "./dom.js";

const IDEAS = ["Tell me a story about a fox.", "What is 7 plus 5?", "Who are you?"];

export function emptyStage(model, ask) {
  return element("div", { class: "empty" },
    drawing(),
    element("p", { class: "empty-lead" }, model ? `Ask ${model} something.` : "Ask something."),
    element("ul", { class: "ideas" }, IDEAS.map((text) =>
      element("li", {}, element("button", { type: "button", class: "idea", onclick: () => ask(text) }, text)))));
}

/** Reservoir, pipe, turbine. */
function drawing() {
  const line = (d, name) => svg("path", { d, class: name });
  return svg("svg", { viewBox: "0 0 320 120", class: "drawing", "aria-hidden": "true" },
    line("M8 26h92M20 34h72M34 42h50", "water"),
    line("M4 22l34 44h30l16-14h22V18", "ground"),
    line("M106 58h16l104 38h22M106 68h13l104 38h25", "pipe"),
    svg("circle", { cx: 262, cy: 100, r: 13, class: "wheel" }),
    line("M262 87v26M249 100h26M253 91l18 18M271 91l-18 18", "wheel"),
    line("M276 108h38", "water"),
    line("M130 116h62M200 116h8", "ground"));
}
