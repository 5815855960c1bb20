// From Markdown to elements. marked makes HTML of the model's text. DOMPurify removes everything active: images
// (their addresses could send the conversation away), forms, styles, scripts.

import { wrapCode } from "./code.js";
import { element } from "./dom.js";
import DOMPurify from "./vendor/dompurify.js";
import { Marked } from "./vendor/marked.js";
import { words } from "./words.js";

const escape = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

const marked = new Marked({ gfm: true, breaks: true });
marked.use({
  renderer: {
    // HTML tags are shown as text: models write about HTML more often than in HTML.
    html: ({ text }) => escape(text),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || words("image"))}</a>`,
  },
});

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
  ],
  ALLOWED_ATTR: ["href", "title", "class", "start", "align", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** A fragment of the page. isGrowing: more of the text is to come. */
export function markdown(text, isGrowing = false) {
  const fragment = DOMPurify.sanitize(marked.parse(text), ALLOWED);
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
  fragment.querySelectorAll("pre").forEach((pre) => wrapCode(pre, isGrowing));
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
