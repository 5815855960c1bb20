// One message of a chat: its text, what went wrong, its buttons and figures.

import { collapse, isLong } from "./collapse.js";
import { copyText, element, iconButton } from "./dom.js";
import { failureBox } from "./failure.js";
import { answerFigures } from "./figures.js";
import { isConfirming } from "./keys.js";
import { GrowingMarkdown, markdown } from "./markdown.js";
import { words } from "./words.js";

/** The element of a message. `chat` tells how things stand, and does what the buttons ask for:
 * isGrowing(node), isLocked(), isNewest(node), isFirstSent(node), siblings(node), opened (a set of ids), waysOut(node),
 * show(node), renew(node), again(node), goOn(node), edit(node, text), sendAll(). isPlain: the message is far from the window. */
export function messageView(chat, node, isPlain) {
  const view = article(chat, node, isPlain);
  return chat.isFirstSent(node) ? element("div", {}, leftOut(chat), view) : view;
}

function article(chat, node, isPlain) {
  const isUser = node.role === "user";
  const isGrowing = chat.isGrowing(node);
  const name = isUser ? words("you") : (node.model ?? words("model"));
  const body = element("div", { class: "body" });
  const view = element(
    "article",
    {
      class: `message ${node.role}${isGrowing ? " growing" : ""}`,
      "aria-label": name,
      "aria-busy": isGrowing ? "true" : null,
    },
    element("p", { class: "who" }, name),
    body,
  );
  const collapses = isLong(node.content) && (isUser || !chat.isNewest(node));
  if (isPlain) {
    body.textContent = node.content;
    body.classList.toggle("collapsed", collapses);
    return view;
  }
  if (isUser) body.textContent = node.content;
  else body.append(...[thoughts(node), markdown(node.content)].filter(Boolean));
  if (collapses)
    view.append(
      collapse(body, chat.opened.has(node.id), (isOpen) =>
        isOpen ? chat.opened.add(node.id) : chat.opened.delete(node.id),
      ),
    );
  if (node.error) view.append(failureBox(node, chat.waysOut(node)));
  if (!isGrowing) view.append(foot(chat, node, view));
  lock(view, chat.isLocked());
  return view;
}

/** While an answer is written, buttons are off that would leave it, or begin an edit that its end would drop. */
export function lock(view, isLocked) {
  for (const button of view.querySelectorAll("[data-locks]")) button.disabled = isLocked;
}

function thoughts(node) {
  return (
    node.reasoning &&
    element(
      "details",
      { class: "thoughts" },
      element("summary", {}, words("thoughts")),
      element("div", {}, node.reasoning),
    )
  );
}

/** The line between messages that the model no longer gets and those that it gets. */
function leftOut(chat) {
  return element(
    "div",
    { class: "left-out" },
    element("p", {}, words("leftOut")),
    element(
      "button",
      { type: "button", class: "button small", onclick: () => chat.sendAll(), "data-locks": true },
      words("sendAll"),
    ),
  );
}

/** The text of an answer that is being written, in the element of its message. */
export class GrowingText {
  #body;
  #text;
  #thoughts = null;
  #thought = 0; // characters of the thoughts that are shown

  constructor(view, node) {
    this.#body = view.querySelector(".body");
    this.#body.replaceChildren();
    this.#text = new GrowingMarkdown(this.#body);
    this.update(node);
  }

  update(node) {
    const reasoning = node.reasoning ?? "";
    if (reasoning && !this.#thoughts) {
      this.#thoughts = thoughts({ reasoning: " " });
      this.#thoughts.lastChild.replaceChildren("");
      this.#body.prepend(this.#thoughts);
      this.#text.moveBehind(this.#thoughts);
    }
    if (reasoning.length > this.#thought) {
      this.#thoughts.lastChild.append(reasoning.slice(this.#thought));
      this.#thought = reasoning.length;
    }
    this.#text.update(node.content);
  }
}

// -- what stands below a message ------------------------------------------------------------------

function foot(chat, node, view) {
  const isUser = node.role === "user";
  const locks = { "data-locks": true };
  const tools = [
    branches(chat, node),
    iconButton("copy", words("copy"), (event) => copyText(node.content, event.currentTarget)),
  ];
  if (isUser) tools.push(iconButton("edit", words("editAndSend"), () => edit(chat, node, view), locks));
  else tools.push(iconButton("again", words("answerAgain"), () => chat.again(node), locks));
  if (!isUser && node.content && node.figures?.finish !== "stop") {
    tools.push(
      element(
        "button",
        { type: "button", class: "button small", onclick: () => chat.goOn(node), ...locks },
        words("goOn"),
      ),
    );
  }
  const sentence = isUser ? "" : node.figures ? answerFigures(node.figures) : words("pageWasLeft");
  return element(
    "div",
    { class: "foot" },
    element("div", { class: "tools" }, tools.filter(Boolean)),
    sentence && element("p", { class: "figures" }, sentence),
  );
}

function branches(chat, node) {
  const siblings = chat.siblings(node);
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(node);
  const button = (name, label, sibling) =>
    iconButton(
      name,
      words(label),
      () => chat.show(sibling),
      sibling ? { "data-locks": true } : { disabled: true },
    );
  return element(
    "span",
    { class: "branches" },
    button("previous", "previousVersion", siblings[at - 1]),
    element("span", {}, `${at + 1}/${siblings.length}`),
    button("next", "nextVersion", siblings[at + 1]),
  );
}

function edit(chat, node, view) {
  const input = element("textarea", {
    rows: Math.min(12, node.content.split("\n").length + 1),
    "aria-label": words("editMessage"),
  });
  input.value = node.content;
  const cancel = () => chat.renew(node);
  const form = element(
    "form",
    { class: "edit" },
    input,
    element(
      "div",
      { class: "dialog-actions" },
      element("button", { type: "button", class: "button small", onclick: cancel }, words("cancel")),
      element("button", { type: "submit", class: "button small primary" }, words("sendBranch")),
    ),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (input.value.trim()) chat.edit(node, input.value);
  });
  form.addEventListener("keydown", (event) => {
    if (isConfirming(event)) return;
    if (event.key === "Escape") cancel();
    else if (event.key === "Enter" && !event.shiftKey) form.requestSubmit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  const body = view.querySelector(".body");
  body.classList.remove("collapsed");
  body.replaceChildren(form);
  view.querySelectorAll(".foot, .more").forEach((each) => (each.hidden = true));
  input.focus();
}
