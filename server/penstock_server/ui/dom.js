// Functions that make elements. Text stays text: no function here turns a string into HTML.

import { words } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

/** element("button", {class: "x", onclick: f, hidden: true}, "text", child, null). null and false are left
 * out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null && child !== false));
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

const ICONS = {
  list: "M4 6h16M4 12h16M4 18h10",
  settings: "M4 7h10M18 7h2M4 17h2M10 17h10M14 4v6M10 14v6",
  key: "M14 10a4 4 0 1 0-3.5 4L13 16.500h2.500v2.500H18V21h3v-3.500L13.700 11.500M9 9.500h.01",
  light:
    "M12 8a4 4 0 1 0 0 8a4 4 0 1 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2" +
    "M5 5l1.400 1.400M17.600 17.600L19 19M5 19l1.400-1.400M17.600 6.400L19 5",
  dark: "M20 14.500A8.500 8.500 0 1 1 9.500 4a7 7 0 0 0 10.500 10.500z",
  system: "M4 5h16v11H4zM9 20h6M12 16v4",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  again: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  remove: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  next: "M9 5l7 7-7 7",
  previous: "M15 5l-7 7 7 7",
  attach: "M8 12.500l6-6a3 3 0 0 1 4.200 4.200l-8 8a5 5 0 0 1-7-7l8-8",
  fold: "M6 9l6 6 6-6",
  more: "M6 12h12M12 6v12",
  close: "M6 6l12 12M18 6L6 18",
};

export function icon(name) {
  const path = svg("path", { d: ICONS[name] });
  return svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, path);
}

/** A button that shows an icon; `label` is its name. */
export function iconButton(name, label, onclick, attributes = {}) {
  return element(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...attributes },
    icon(name),
  );
}

/** Copies a text, and says so on the button for a moment. Browsers have a clipboard in a secure context only. */
export async function copyText(text, button) {
  const before = button.getAttribute("aria-label") ?? button.textContent;
  const say = (label) => {
    if (button.hasAttribute("aria-label")) button.setAttribute("aria-label", label);
    else button.textContent = label;
    button.classList.toggle("done", label !== before);
  };
  say((await writeClipboard(text)) ? words("copied") : words("cannotCopy"));
  setTimeout(() => say(before), 1500);
}

async function writeClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 0);
}
