// A chat: its messages on the stage, and the buttons of each message.

import { addMessage, pathOf, showBranch, siblingsOf } from "./conversation.js";
import { collapse, isLong } from "./collapse.js";
import { copyText, element, iconButton } from "./dom.js";
import { answerFigures } from "./figures.js";
import { generate } from "./generation.js";
import { markdown } from "./markdown.js";
import { emptyStage } from "./empty.js";
import { samplingFields } from "./sampling.js";
import { Reader } from "./spoken.js";
import { words } from "./words.js";

const PATH = "v1/chat/completions";

export class Chat {
  #page;
  #conversation;
  #views = new Map(); // node id -> its element
  #opened = new Set(); // ids of long messages that the reader has opened

  constructor(page, conversation) {
    this.#page = page;
    this.#conversation = conversation;
  }

  render() {
    const path = pathOf(this.#conversation);
    this.#views = new Map(path.map((node) => [node.id, this.#message(node)]));
    const log = element("div", { class: "messages" }, ...this.#views.values());
    this.#page.stage.replaceChildren(
      path.length > 0 ? log : emptyStage(this.#page.modelName(), (text) => this.submit(text)),
    );
    this.#page.follow(true);
  }

  async submit(text) {
    const message = addMessage(this.#conversation, this.#conversation.leaf, "user", text);
    await this.#answer(message);
  }

  // -- asking ---------------------------------------------------------------------------------

  async #answer(question) {
    // The check comes before anything is added: a conversation has at most one answer under way.
    if (this.#page.isRunning(this.#conversation)) return;
    const answer = addMessage(this.#conversation, question.id, "assistant", "");
    await this.#stream(answer, { messages: this.#messagesUntil(question) });
  }

  /** Lets the answer go on where it ended. */
  async #continue(answer) {
    const messages = this.#messagesUntil(answer);
    await this.#stream(answer, { messages, continue_final_message: true, add_generation_prompt: false });
  }

  #messagesUntil(last) {
    const path = pathOf(this.#conversation);
    const until = path.slice(0, path.indexOf(last) + 1);
    const { system } = this.#conversation.settings;
    const head = system ? [{ role: "system", content: system }] : [];
    return [...head, ...until.map(({ role, content }) => ({ role, content }))];
  }

  async #stream(answer, body) {
    const conversation = this.#conversation;
    const signal = this.#page.begin(conversation);
    if (!signal) return;
    delete answer.figures;
    delete answer.error;
    this.#page.rerender(conversation);
    const reader = new Reader();
    reader.begin();
    try {
      answer.figures = await generate({
        path: PATH,
        body: {
          ...body,
          ...samplingFields(conversation.settings),
          model: this.#page.modelName() ?? undefined,
        },
        signal,
        onText: (text) => {
          answer.content += text;
          reader.feed(answer.content);
          this.#page.grow(conversation);
        },
        onReasoning: (text) => {
          answer.reasoning = (answer.reasoning ?? "") + text;
          this.#page.grow(conversation);
        },
        onWait: (reason) => this.#page.notify(conversation, reason),
      });
      reader.end(answer.figures.finish === "stopped" ? words("stopped") : words("answerDone"));
    } catch (error) {
      answer.figures = error.figures;
      answer.error = error.message;
      reader.end(error.message);
    } finally {
      this.#page.end(conversation);
    }
  }

  /** Shows the new text of the answer that is being written. */
  grow() {
    const node = this.#conversation.nodes[this.#conversation.leaf];
    const view = this.#views.get(node?.id);
    if (!view) return;
    this.#fill(view.querySelector(".body"), node);
    this.#page.follow(false);
  }

  // -- messages -------------------------------------------------------------------------------

  #message(node) {
    const isUser = node.role === "user";
    const isGrowing = !isUser && this.#isGrowing(node);
    const name = isUser ? words("you") : (this.#page.modelName() ?? words("model"));
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
    if (isUser) body.textContent = node.content;
    else this.#fill(body, node);
    if (this.#collapses(node)) view.append(this.#collapse(node, body));
    if (node.error) view.append(this.#failure(node));
    if (!isGrowing) view.append(this.#foot(node, view));
    return view;
  }

  /** The newest answer is what the reader waits for, and stays whole. */
  #collapses(node) {
    return isLong(node.content) && (node.role === "user" || node.id !== this.#conversation.leaf);
  }

  #collapse(node, body) {
    return collapse(body, this.#opened.has(node.id), (isOpen) =>
      isOpen ? this.#opened.add(node.id) : this.#opened.delete(node.id),
    );
  }

  #isGrowing(node) {
    return node.id === this.#conversation.leaf && this.#page.isRunning(this.#conversation);
  }

  #fill(body, node) {
    const thoughts =
      node.reasoning &&
      element(
        "details",
        { class: "thoughts", open: body.querySelector(".thoughts")?.open ?? false },
        element("summary", {}, words("thoughts")),
        element("div", {}, node.reasoning),
      );
    const text = markdown(node.content, this.#isGrowing(node));
    body.replaceChildren(...[thoughts, text].filter(Boolean));
  }

  #failure(node) {
    const again = element(
      "button",
      {
        type: "button",
        class: "button small",
        disabled: this.#page.isRunning(this.#conversation),
        onclick: () => this.#again(node),
      },
      words("tryAgain"),
    );
    return element("div", { class: "failure" }, element("p", {}, node.error), again);
  }

  #foot(node, view) {
    const isUser = node.role === "user";
    // While an answer is written, buttons are off that would leave it, or begin an edit that its end would drop.
    const disabled = this.#page.isRunning(this.#conversation);
    const tools = [
      this.#branches(node, disabled),
      iconButton("copy", words("copy"), (event) => copyText(node.content, event.currentTarget)),
    ];
    if (isUser)
      tools.push(iconButton("edit", words("editAndSend"), () => this.#edit(node, view), { disabled }));
    else tools.push(iconButton("again", words("answerAgain"), () => this.#again(node), { disabled }));
    if (!isUser && node.content && node.figures?.finish !== "stop") {
      tools.push(
        element(
          "button",
          { type: "button", class: "button small", disabled, onclick: () => this.#continue(node) },
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

  #branches(node, isLocked) {
    const siblings = siblingsOf(this.#conversation, node);
    if (siblings.length < 2) return null;
    const at = siblings.indexOf(node);
    const go = (step) => () => {
      showBranch(this.#conversation, siblings[at + step]);
      this.#page.save(this.#conversation);
      this.render();
    };
    return element(
      "span",
      { class: "branches" },
      iconButton("previous", words("previousVersion"), go(-1), { disabled: isLocked || at === 0 }),
      element("span", {}, `${at + 1}/${siblings.length}`),
      iconButton("next", words("nextVersion"), go(1), { disabled: isLocked || at === siblings.length - 1 }),
    );
  }

  #again(answer) {
    return this.#answer(this.#conversation.nodes[answer.parent]);
  }

  #edit(node, view) {
    const input = element("textarea", {
      rows: Math.min(12, node.content.split("\n").length + 1),
      "aria-label": words("editMessage"),
    });
    input.value = node.content;
    const form = element(
      "form",
      { class: "edit" },
      input,
      element(
        "div",
        { class: "dialog-actions" },
        element(
          "button",
          { type: "button", class: "button small", onclick: () => this.render() },
          words("cancel"),
        ),
        element("button", { type: "submit", class: "button small primary" }, words("sendBranch")),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!input.value.trim() || this.#page.isRunning(this.#conversation)) return;
      this.#answer(addMessage(this.#conversation, node.parent, "user", input.value));
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.render();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    view.querySelector(".body").replaceChildren(form);
    view.querySelector(".foot").hidden = true;
    input.focus();
  }
}
