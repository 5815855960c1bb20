// A block of code: its language, a button that copies it, and its colours.

import { copyText, element } from "./dom.js";
import DOMPurify from "./vendor/dompurify.js";
import { words } from "./words.js";

/** The longest code that gets colours, in characters: colours take time with each frame of a growing answer. */
const LONGEST = { growing: 4000, whole: 100_000 };
const ALLOWED = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };

let highlighter = null;

/** Puts `pre` into a box. isGrowing: more of the code is to come. */
export function wrapCode(pre, isGrowing) {
  const code = pre.firstElementChild;
  const language = /language-([\w+#.-]+)/.exec(code?.className ?? "")?.[1] ?? "";
  const copy = element(
    "button",
    { type: "button", class: "code-copy", "aria-label": words("copyCode") },
    words("copy"),
  );
  copy.addEventListener("click", () => copyText(pre.textContent, copy));
  const head = element("div", { class: "code-head" }, element("span", {}, language || words("text")), copy);
  const box = element("div", { class: "code-box" }, head);
  pre.replaceWith(box);
  pre.tabIndex = 0; // the keyboard must be able to scroll it
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", words(language ? "codeIn" : "code", { language }));
  box.append(pre);
  if (code && language && pre.textContent.length <= LONGEST[isGrowing ? "growing" : "whole"])
    colour(code, language);
}

/** The library has 130 KB, so that it is fetched with the first code. */
function colour(code, language) {
  if (highlighter) return paint(highlighter, code, language);
  import("./vendor/highlight.js").then(
    (loaded) => paint((highlighter = loaded.default), code, language),
    () => {}, // without colours the code can be read, too
  );
}

function paint(library, code, language) {
  if (!library.getLanguage(language)) return;
  const { value } = library.highlight(code.textContent, { language, ignoreIllegals: true });
  code.replaceChildren(DOMPurify.sanitize(value, ALLOWED));
}
