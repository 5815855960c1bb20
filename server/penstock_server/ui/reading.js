// One instrument of the machine panel: a title, a value, a picture and a remark.

import { element, svg } from "./dom.js";
import { explained, term } from "./terms.js";

/** The values of a line. */
export const HISTORY = 60;

/** One instrument. explanation: the key of what its title means. An instrument of the `kind` "bar" has a bar with a mark, "spark" a line of the last values. */
export function reading(title, explanation, kind) {
  const value = element("b", {}, "–");
  const remark = element("span");
  const room = element("span", { class: "words steady" }, remark);
  const fill = element("i", { class: "fill" });
  const mark = element("i", { class: "mark", hidden: true });
  const line = svg("polyline", {});
  const picture =
    kind === "spark"
      ? svg(
          "svg",
          {
            class: "spark",
            viewBox: `0 0 ${HISTORY} 12`,
            preserveAspectRatio: "none",
            "aria-hidden": "true",
          },
          line,
        )
      : element("span", { class: "gauge", "aria-hidden": "true", hidden: kind !== "bar" }, fill, mark);
  const view = element(
    "div",
    { class: "reading" },
    element("dt", {}, term(title, explanation)),
    element("dd", {}, value, picture, room),
  );
  return {
    view,
    /** Keeps room for the longest remark, so that nothing below moves with the figures. */
    reserve(sentence) {
      room.dataset.longest = sentence;
    },
    set(text, sentence) {
      if (value.textContent !== text) value.textContent = text;
      if (remark.textContent !== sentence) remark.replaceChildren(...explained(sentence));
    },
    fill(part, marked = null) {
      picture.hidden = part === null;
      fill.style.inlineSize = `${100 * part}%`;
      mark.hidden = !marked;
      if (marked) mark.style.insetInlineStart = `${100 * marked}%`;
    },
    draw(values) {
      const most = Math.max(...values, 1e-9);
      line.setAttribute(
        "points",
        values.map((each, index) => `${index},${11.5 - 11 * (each / most)}`).join(" "),
      );
    },
  };
}
