// The conversations that this browser keeps.

import { titleOf } from "./conversation.js";
import { download, element, icon, iconButton } from "./dom.js";
import { deleteConversation, exportAll, importAll, listConversations, saveConversation } from "./store.js";
import { words } from "./words.js";

/** `page` opens conversations and says which one is open. */
export class ConversationList {
  #page;
  #place;

  constructor(page, place) {
    this.#page = page;
    this.#place = place;
  }

  render() {
    const open = this.#page.openId();
    const items = listConversations().map((each) => this.#item(each, each.id === open));
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
      items.length > 0 ? element("ul", {}, items) : element("p", { class: "hint" }, words("noneKept")),
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
      element("p", { class: "hint" }, words("theyStay")),
    );
  }

  #item(conversation, isOpen) {
    const title = titleOf(conversation);
    const open = element(
      "button",
      {
        type: "button",
        class: "item-open",
        "aria-current": isOpen ? "true" : null,
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
      { class: isOpen ? "item open" : "item" },
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
    const finish = (isKept) => {
      const current = this.#page.live(conversation.id) ?? conversation;
      if (isKept) {
        current.title = input.value.trim();
        saveConversation(current);
      }
      this.#page.renamed(current);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === "Escape") {
        event.stopPropagation();
        input.onblur = null;
        finish(event.key === "Enter");
      }
    });
    input.onblur = () => finish(true);
    item.replaceChildren(input);
    input.select();
  }

  #delete(conversation, title) {
    if (!confirm(words("confirmRemove", { title }))) return;
    this.#page.stopRunning(conversation.id);
    deleteConversation(conversation.id);
    this.#page.deleted(conversation.id);
  }

  #export() {
    download(`penstock-${new Date().toISOString().slice(0, 10)}.json`, exportAll());
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
        importAll(await input.files[0].text());
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
