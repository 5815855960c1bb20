// The conversations that this browser keeps.

import { titleOf } from "./conversation.js";
import { download, element, icon, iconButton } from "./dom.js";
import { isConfirming } from "./keys.js";
import { words } from "./words.js";

/** `page` opens conversations, says which one is open, and has the store. */
export class ConversationList {
  #page;
  #place;
  #items = new Map(); // id -> element; the newest is the first in the list
  #list = element("ul");
  #hint = element("p", { class: "hint" });

  constructor(page, place) {
    this.#page = page;
    this.#place = place;
  }

  /** Shows all. */
  render() {
    this.#items = new Map(this.#page.store.list().map((head) => [head.id, this.#item(head)]));
    this.#list.replaceChildren(...this.#items.values());
    this.#hint.textContent = words("noneKept");
    this.#hint.hidden = this.#items.size > 0;
    this.#place.replaceChildren(
      element(
        "div",
        { class: "panel-head" },
        element("h2", {}, words("conversations")),
        element(
          "button",
          { type: "button", class: "button small", onclick: () => this.#page.openNew() },
          icon("more"),
          words("newConversation"),
        ),
      ),
      this.#list,
      this.#hint,
      element(
        "div",
        { class: "list-foot" },
        element(
          "button",
          { type: "button", class: "button small", onclick: () => this.#export() },
          words("export"),
        ),
        this.#importButton(),
      ),
      element("p", { class: "hint" }, words(this.#page.store.isKept ? "theyStay" : "theyGo")),
    );
    this.mark();
  }

  /** A conversation has changed: it is the newest. `isSame`: it has not, and keeps its place. */
  touch(id, isSame = false) {
    const head = this.#page.live(id) ?? this.#page.store.head(id);
    if (!head || !this.#page.store.head(id)) return;
    const item = this.#item(head);
    const before = this.#items.get(id);
    const hadFocus = before?.contains(document.activeElement);
    if (before && (isSame || this.#list.firstElementChild === before)) before.replaceWith(item);
    else {
      before?.remove();
      this.#list.prepend(item);
    }
    this.#items.set(id, item);
    this.#hint.hidden = true;
    this.mark();
    if (hadFocus) item.querySelector("button").focus();
  }

  drop(id) {
    this.#items.get(id)?.remove();
    this.#items.delete(id);
    this.#hint.hidden = this.#items.size > 0;
    this.mark();
  }

  /** Marks the open conversation. */
  mark() {
    for (const item of this.#list.querySelectorAll(".open")) {
      item.classList.remove("open");
      item.querySelector(".item-open")?.removeAttribute("aria-current");
    }
    const item = this.#items.get(this.#page.openId());
    item?.classList.add("open");
    item?.querySelector(".item-open")?.setAttribute("aria-current", "true");
  }

  #item(conversation) {
    const title = titleOf(conversation);
    const open = element(
      "button",
      {
        type: "button",
        class: "item-open",
        onclick: () => this.#page.open(conversation.id),
      },
      element("span", { class: "item-title" }, title),
      conversation.mode !== "chat" &&
        element(
          "span",
          { class: "item-mode" },
          words(conversation.mode === "fill" ? "ofFill" : "ofCompletion"),
        ),
    );
    const item = element(
      "li",
      { class: "item" },
      open,
      element(
        "span",
        { class: "item-tools" },
        iconButton("edit", words("rename", { title }), () => this.#rename(conversation, item)),
        iconButton("remove", words("remove", { title }), () => this.#delete(conversation, title)),
      ),
    );
    return item;
  }

  #rename(conversation, item) {
    const input = element("input", {
      value: titleOf(conversation),
      "aria-label": words("name"),
      maxlength: "120",
    });
    const finish = async (isKept) => {
      if (isKept) await this.#page.rename(conversation.id, input.value.trim());
      this.touch(conversation.id, !isKept);
    };
    input.addEventListener("keydown", (event) => {
      if (!isConfirming(event) && (event.key === "Enter" || event.key === "Escape")) {
        event.stopPropagation();
        input.onblur = null;
        finish(event.key === "Enter");
      }
    });
    input.onblur = () => finish(true);
    item.replaceChildren(input);
    input.select();
  }

  async #delete({ id }, title) {
    if (!confirm(words("confirmRemove", { title }))) return;
    await this.#page.store.remove(id);
    this.#page.removed(id);
  }

  async #export() {
    download(
      `penstock-${new Date().toISOString().slice(0, 10)}.json`,
      await this.#page.store.exportAll(),
    );
  }

  #importButton() {
    const input = element("input", {
      type: "file",
      accept: "application/json,.json",
      class: "unseen",
      tabindex: "-1",
      "aria-label": words("importFile"),
    });
    input.addEventListener("change", async () => {
      try {
        await this.#page.store.importAll(await input.files[0].text());
        input.value = ""; // the same file may be chosen again
        this.render();
      } catch (error) {
        this.#page.warn(error.message);
      }
    });
    return [
      element(
        "button",
        { type: "button", class: "button small", onclick: () => input.click() },
        words("import"),
      ),
      input,
    ];
  }
}
