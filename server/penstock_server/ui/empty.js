// The stage before the first message: a drawing of a power station, and some questions to ask.

import { element, svg } from "./dom.js";

const IDEAS = ["Tell me a story about a fox.", "What is 7 plus 5?", "Who are you?"];

export function emptyStage(model, ask) {
  return element(
    "div",
    { class: "empty" },
    drawing(),
    element("p", { class: "empty-lead" }, model ? `Ask ${model} something.` : "Ask something."),
    element(
      "ul",
      { class: "ideas" },
      IDEAS.map((text) =>
        element(
          "li",
          {},
          element("button", { type: "button", class: "idea", onclick: () => ask(text) }, text),
        ),
      ),
    ),
  );
}

/** A drawing of reservoir, pipe and turbine. */
function drawing() {
  const line = (d, name) => svg("path", { d, class: name });
  return svg(
    "svg",
    { viewBox: "0 0 320 120", class: "drawing", "aria-hidden": "true" },
    line("M2 22h82M14 31h70M30 40h54", "water"),
    line("M2 14l40 42h42V12h8v32M92 64l128 46h16M280 118h38", "ground"),
    line("M84 46h14l130 46h14M84 56h12l130 46h16", "pipe"),
    svg("circle", { cx: 258, cy: 98, r: 15, class: "wheel" }),
    line("M258 83v30M243 98h30M247.400 87.400l21.200 21.200M268.600 87.400l-21.200 21.200", "wheel"),
    line("M276 109h42", "water"),
  );
}
