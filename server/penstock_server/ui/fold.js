// The machine's panel folds away to one line, and the browser remembers whether it is folded.

import { byId, icon } from "./dom.js";
import { recall, remember } from "./storage.js";

const NAME = "penstock.machine";
const hasRoom = matchMedia("(min-width: 40rem) and (min-height: 32rem)");

export function prepareFold() {
  const toggle = byId("machine-toggle");
  toggle.prepend(icon("fold"));
  toggle.addEventListener("click", (event) => {
    event.stopPropagation();
    remember(NAME, isOpen() ? "folded" : "open");
    show();
  });
  // The whole line opens the panel, not its button alone.
  byId("machine-head").addEventListener("click", () => {
    if (isOpen()) return;
    remember(NAME, "open");
    show();
  });
  hasRoom.addEventListener("change", show);
  show();
}

const isOpen = () => (recall(NAME) ? recall(NAME) === "open" : hasRoom.matches);

function show() {
  byId("machine").classList.toggle("folded", !isOpen());
  byId("machine-body").hidden = !isOpen();
  byId("machine-toggle").setAttribute("aria-expanded", String(isOpen()));
}
