// Formulas: KaTeX draws them. The library and its style have 300 KB, so that they are fetched with the first
// formula; until then, and where KaTeX can't read a formula, its source is shown.

import { element } from "./dom.js";

/** The most drawn formulas that are kept: a growing answer draws its last block again and again. */
const MOST_KEPT = 200;

let library = null;
let loading = null;
let tell = () => {};
const drawn = new Map(); // "1\\frac.." -> the drawing; 1: on a line of its own

/** Draws the formulas below `root`, the places that tex.js made. */
export function drawFormulas(root) {
  for (const place of root.querySelectorAll("span.math")) {
    const source = place.title;
    place.removeAttribute("title");
    if (library) draw(place, source);
    else {
      loading ??= load();
      loading
        .then(
          () => draw(place, source),
          () => showSource(place, source),
        )
        .then(tell);
    }
  }
}

/** Calls back when a formula that waited for the library has got its size. */
export const onDrawn = (listener) => (tell = listener);

async function load() {
  const style = element("link", { rel: "stylesheet", href: new URL("vendor/katex.css", import.meta.url).href });
  document.head.append(style);
  await import("./vendor/katex.js"); // a script of the older kind: it sets a global name
  library = globalThis.katex;
  document.addEventListener("copy", copySource);
}

function draw(place, source) {
  const isDisplay = place.classList.contains("display");
  const key = Number(isDisplay) + place.textContent;
  try {
    if (!drawn.has(key)) drawn.set(key, drawing(place.textContent, isDisplay));
    if (drawn.size > MOST_KEPT) drawn.delete(drawn.keys().next().value);
    place.replaceChildren((drawn.get(key) ?? drawing(place.textContent, isDisplay)).cloneNode(true));
    place.dataset.source = source;
  } catch {
    showSource(place, source);
  }
}

/** Throws where KaTeX can't read the formula. */
function drawing(tex, isDisplay) {
  const place = element("span");
  library.render(tex, place, {
    displayMode: isDisplay,
    throwOnError: true,
    strict: "ignore",
    trust: false, // no links, no pictures, no HTML
    maxSize: 20,
    maxExpand: 500,
    // KaTeX writes a style into the MathML of this one, which the page's policy forbids.
    macros: { "\\pmb": "\\boldsymbol{#1}" },
  });
  return place.firstElementChild;
}

function showSource(place, source) {
  place.replaceChildren(element("code", {}, source));
}

/** What is copied has formulas as they were written. */
function copySource(event) {
  const selection = getSelection();
  if (selection.isCollapsed) return;
  const box = element("div", { class: "unseen" });
  for (let index = 0; index < selection.rangeCount; index += 1)
    box.append(selection.getRangeAt(index).cloneContents());
  const formulas = box.querySelectorAll("[data-source]");
  if (formulas.length === 0) return;
  formulas.forEach((each) => each.replaceChildren(each.dataset.source));
  document.body.append(box);
  event.clipboardData.setData("text/plain", box.innerText);
  box.remove();
  event.preventDefault();
}
