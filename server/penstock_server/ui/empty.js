// The stage before the first message: a drawing of a power station, and some questions to ask.

import { element, svg } from "./dom.js";
import { inEnglish, words } from "./words.js";

const IDEAS = ["ideaStory", "ideaSum", "ideaWho"];
/** The models that come with Penstock. They were taught English alone. */
const DEMOS = ["demo", "demo-moe"];

export function emptyStage(model, ask) {
  const ideas = IDEAS.map(DEMOS.includes(model) ? inEnglish : (key) => words(key));
  return element(
    "div",
    { class: "empty" },
    drawing(),
    element("p", { class: "empty-lead" }, model ? words("askModel", { model }) : words("ask")),
    element(
      "ul",
      { class: "ideas" },
      ideas.map((text) =>
        element(
          "li",
          {},
          element("button", { type: "button", class: "idea", onclick: () => ask(text) }, text),
        ),
      ),
    ),
    DEMOS.includes(model) && element("p", { class: "hint" }, words("demoHint")),
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
