// Long messages collapse, so that a conversation can be looked over.

import { element } from "./dom.js";
import { words } from "./words.js";

const LONG = { characters: 1500, lines: 20 };

export const isLong = (text) =>
  text.length > LONG.characters || text.split("\n", LONG.lines + 1).length > LONG.lines;

/** Shows the beginning of `body`, and returns the button that shows all. isOpen: all is shown at first;
 * onToggle(isOpen) comes with each touch. */
export function collapse(body, isOpen, onToggle) {
  const button = element("button", { type: "button", class: "button small more" });
  const show = () => {
    body.classList.toggle("collapsed", !isOpen);
    button.textContent = words(isOpen ? "showLess" : "showAll");
    button.setAttribute("aria-expanded", String(isOpen));
  };
  button.addEventListener("click", () => {
    isOpen = !isOpen;
    show();
    onToggle(isOpen);
  });
  show();
  return button;
}
