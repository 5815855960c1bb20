// Words that a newcomer can't know explain themselves: a touch on the word shows what it means.

import { byId, element } from "./dom.js";
import { words } from "./words.js";

/** The keys of words and of their explanations. A longer word stands before a word that is a part of it. */
const TERMS = [
  ["termFloor", "explainFloor"],
  ["termSweep", "explainSweep"],
  ["termStreamed", "explainStreamed"],
  ["termPinned", "explainPinned"],
];
const byWord = new Map(TERMS.map(([key, explanation]) => [words(key), explanation]));
const anyTerm = new RegExp(`(${[...byWord.keys()].join("|")})`);

/** The text with a button in the place of each word that has an explanation: a list of texts and elements. */
export function explained(text) {
  const parts = text.split(anyTerm);
  return parts.map((part) => (byWord.has(part) ? term(part, byWord.get(part)) : part)).filter(Boolean);
}

/** A word that shows the text of a key when it is touched. */
export function term(word, explanation) {
  const button = element("button", { type: "button", class: "term", "aria-haspopup": "dialog" }, word);
  button.addEventListener("click", () => show(button, explanation));
  return button;
}

function show(button, explanation) {
  const place = byId("explanation");
  place.replaceChildren(element("b", {}, button.textContent), element("p", {}, words(explanation)));
  place.showPopover();
  const { left, bottom, top } = button.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = place;
  const isAbove = bottom + height + 12 > innerHeight && top > height;
  place.style.insetInlineStart = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
  place.style.insetBlockStart = `${isAbove ? top - height - 6 : bottom + 6}px`;
}
