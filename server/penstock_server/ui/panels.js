// The panels of conversations and of settings. They stand beside the conversation if there is room; otherwise
// they lie over it and the machine, one at a time.

import { byId, icon } from "./dom.js";

const isWide = matchMedia("(min-width: 60rem)");

export class Panels {
  constructor() {
    for (const id of ["list", "settings"]) {
      const button = byId(`${id}-toggle`);
      button.append(icon(id));
      button.addEventListener("click", () => this.toggle(id));
    }
    byId("scrim").addEventListener("click", () => this.uncover());
    byId("list").hidden = !isWide.matches;
    byId("list-toggle").setAttribute("aria-expanded", String(isWide.matches));
    isWide.addEventListener("change", () => this.toggle("list", isWide.matches));
  }

  /** Whether a panel lies over the conversation. */
  get isOver() {
    return !isWide.matches && !(byId("list").hidden && byId("settings").hidden);
  }

  /** Closes what Escape closes: the panel over the conversation, or the settings beside it. False: there is nothing.
   * isBusy: Escape has something else to do, so that the settings close only from within. */
  escape(isBusy) {
    if (this.isOver) this.uncover();
    else if (!byId("settings").hidden && (!isBusy || byId("settings").contains(document.activeElement)))
      this.toggle("settings", false);
    else return false;
    return true;
  }

  toggle(id, isShown = byId(id).hidden) {
    const wasInside = byId(id).contains(document.activeElement);
    byId(id).hidden = !isShown;
    byId(`${id}-toggle`).setAttribute("aria-expanded", String(isShown));
    if (isShown && !isWide.matches) {
      this.toggle(id === "list" ? "settings" : "list", false);
      byId(id).querySelector("button")?.focus();
    }
    byId("scrim").hidden = !this.isOver;
    if (!isShown && wasInside) byId(`${id}-toggle`).focus();
  }

  /** Closes the panel that lies over the conversation. */
  uncover() {
    if (isWide.matches) return;
    this.toggle("list", false);
    this.toggle("settings", false);
  }
}
