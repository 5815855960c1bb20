// From Markdown to elements. marked makes HTML of the model's text. DOMPurify removes everything active: images
// (their addresses could send the conversation away), forms, styles, scripts.

import { wrapCode } from "./code.js";
import { element } from "./dom.js";
import { drawFormulas } from "./math.js";
import { escape, texExtensions } from "./tex.js";
import DOMPurify from "./vendor/dompurify.js";
import { Marked } from "./vendor/marked.js";
import { words } from "./words.js";

let isGrowing = false;

const marked = new Marked({ gfm: true, breaks: true });
marked.use(
  {
    renderer: {
      // HTML tags are shown as text: models write about HTML more often than in HTML.
      html: ({ text }) => escape(text),
      image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || words("image"))}</a>`,
    },
  },
  texExtensions(() => isGrowing),
);

const ALLOWED = {
  ALLOWED_TAGS: [
    "p",
    "br",
    "hr",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "em",
    "strong",
    "del",
    "code",
    "pre",
    "blockquote",
    "ul",
    "ol",
    "li",
    "a",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "input",
    "span",
  ],
  ALLOWED_ATTR: ["href", "title", "class", "start", "align", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["align", "start", "type"], // they are no addresses
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** A text as a fragment of the page. */
export const markdown = (text) => fragmentOf(blocksOf(text, false), false);

/** The blocks that are not final yet while a text grows: the last one, and one that it may still join. */
const OPEN_BLOCKS = 2;

/** A text that grows, at the end of an element. With each piece only the last blocks are made anew. */
export class GrowingMarkdown {
  #place;
  #first; // the last child of the place that is not ours
  #length = 0; // characters in final blocks
  #final; // the last child of the final blocks

  constructor(place) {
    this.#place = place;
    this.#first = this.#final = place.lastChild;
  }

  /** `text`: the whole text as it is now. */
  update(text) {
    const blocks = blocksOf(text.replace(/\r\n?/g, "\n").slice(this.#length), true);
    const solid = blocks.flatMap((block, index) => (block.type === "space" ? [] : [index]));
    const cut = solid.at(-OPEN_BLOCKS) ?? 0;
    while (this.#place.lastChild !== this.#final) this.#place.lastChild.remove();
    if (cut > 0) {
      const done = blocks.slice(0, cut);
      this.#length += done.reduce((sum, { raw }) => sum + raw.length, 0);
      this.#place.append(fragmentOf(done, false));
      this.#final = this.#place.lastChild;
    }
    this.#place.append(fragmentOf(blocks.slice(cut), true));
  }

  /** Takes a child in front of the text. */
  moveBehind(child) {
    if (this.#final === this.#first) this.#final = child;
    this.#first = child;
  }
}

function blocksOf(text, isMoreToCome) {
  isGrowing = isMoreToCome;
  try {
    return marked.lexer(text);
  } finally {
    isGrowing = false;
  }
}

function fragmentOf(blocks, isMoreToCome) {
  const fragment = DOMPurify.sanitize(marked.parser(blocks), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const input of fragment.querySelectorAll("input")) {
    input.type = "checkbox"; // only task lists have inputs
    input.disabled = true;
    input.setAttribute("aria-label", input.parentElement?.textContent.trim() || words("task"));
  }
  // Headings of an answer have a lower level than the page's own headings.
  for (const heading of fragment.querySelectorAll("h1, h2")) {
    heading.replaceWith(element("h3", {}, ...heading.childNodes));
  }
  fragment.querySelectorAll("table").forEach(wrapTable);
  fragment.querySelectorAll("pre").forEach((pre) => wrapCode(pre, isMoreToCome));
  drawFormulas(fragment);
  return fragment;
}

function wrapTable(table) {
  const box = element("div", {
    class: "table-box",
    tabindex: "0",
    role: "region",
    "aria-label": words("table"),
  });
  table.replaceWith(box);
  box.append(table);
}
