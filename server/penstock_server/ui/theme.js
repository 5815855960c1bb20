// The theme: light, dark, or that of the system.

import { byId, icon } from "./dom.js";
import { recall, remember } from "./storage.js";
import { words } from "./words.js";

const NAME = "penstock.theme";
const NEXT = { system: "light", light: "dark", dark: "system" };

export function prepareTheme() {
  const button = byId("theme-button");
  const show = () => {
    const theme = recall(NAME) ?? "system";
    document.documentElement.dataset.theme = theme;
    const label = words("colours", { theme: words(theme), next: words(NEXT[theme]) });
    button.setAttribute("aria-label", label);
    button.title = label;
    button.replaceChildren(icon(theme));
  };
  button.addEventListener("click", () => {
    remember(NAME, NEXT[recall(NAME) ?? "system"]);
    show();
  });
  show();
}
