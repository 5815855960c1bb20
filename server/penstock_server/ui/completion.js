// A completion: one text on which the reader and the model write in turn.

import { copyText, element } from "./dom.js";
import { answerFigures } from "./figures.js";
import { dropError, failureBox, keepError } from "./failure.js";
import { generate } from "./generation.js";
import { isConfirming } from "./keys.js";
import { samplingFields } from "./sampling.js";
import { Reader } from "./spoken.js";
import { words } from "./words.js";

const PATH = "v1/completions";
/** The default of max_tokens. OpenAI's own default, 16, is too short for the page. */
const MAX_TOKENS = 128;

export class Completion {
  #page;
  #conversation;
  #paper;

  constructor(page, conversation) {
    this.#page = page;
    this.#conversation = conversation;
  }

  leave() {}

  update() {
    this.render();
  }

  render() {
    const conversation = this.#conversation;
    const isRunning = this.#page.isRunning(conversation);
    this.#paper = element("textarea", {
      id: "paper",
      class: "paper",
      "aria-label": words("textToComplete"),
      placeholder: words("onceUpon"),
      spellcheck: "false",
      readonly: isRunning,
    });
    this.#paper.value = conversation.text;
    this.#paper.addEventListener("input", () => {
      conversation.text = this.#paper.value;
      conversation.before = null;
      this.#page.save(conversation);
    });
    this.#paper.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !isConfirming(event) && (event.ctrlKey || event.metaKey)) this.#page.submit();
    });
    const copy = element("button", { type: "button", class: "button small" }, words("copy"));
    copy.addEventListener("click", () => copyText(conversation.text, copy));
    const foot = element(
      "div",
      { class: "foot" },
      element("div", { class: "tools" }, copy),
      conversation.figures && element("p", { class: "figures" }, answerFigures(conversation.figures)),
    );
    this.#page.stage.replaceChildren(
      element(
        "div",
        { class: "paper-box" },
        this.#paper,
        foot,
        conversation.error && failureBox(conversation),
      ),
    );
    this.#paper.scrollTop = this.#paper.scrollHeight;
  }

  get canUndo() {
    return this.#conversation.before !== null && !this.#page.isRunning(this.#conversation);
  }

  undo() {
    this.#conversation.text = this.#conversation.before;
    this.#conversation.before = null;
    this.#page.save(this.#conversation);
    this.#page.rerender(this.#conversation);
  }

  async submit() {
    const conversation = this.#conversation;
    if (!conversation.text) return this.#paper.focus();
    const signal = this.#page.begin(conversation);
    if (!signal) return;
    conversation.before = conversation.text;
    delete conversation.figures;
    dropError(conversation);
    this.#page.rerender(conversation);
    const reader = new Reader();
    reader.begin();
    try {
      conversation.figures = await this.#ask(signal, reader);
      reader.end(conversation.figures.finish === "stopped" ? words("stopped") : words("completionDone"));
    } catch (error) {
      keepError(conversation, error);
      reader.end(conversation.error);
    } finally {
      this.#page.end(conversation);
    }
  }

  /** Asks for MAX_TOKENS, unless the reader has set a number. If the context has less room, asks for the room. */
  async #ask(signal, reader) {
    const body = { max_tokens: MAX_TOKENS, ...samplingFields(this.#conversation.settings) };
    try {
      return await this.#generate(body, signal, reader);
    } catch (error) {
      const { n_ctx, n_prompt_tokens } = error.detail ?? {};
      if (this.#conversation.settings.max_tokens || !(n_ctx > n_prompt_tokens)) throw error;
      return this.#generate({ ...body, max_tokens: n_ctx - n_prompt_tokens }, signal, reader);
    }
  }

  #generate(body, signal, reader) {
    const conversation = this.#conversation;
    const start = conversation.before;
    return generate({
      path: PATH,
      body: { ...body, prompt: start, model: this.#page.modelName() ?? undefined },
      signal,
      onText: (text) => {
        conversation.text += text;
        reader.feed(conversation.text.slice(start.length));
        this.#page.grow(conversation);
      },
      onReasoning: () => {},
      onWait: (reason) => this.#page.notify(conversation, reason),
    });
  }

  grow() {
    const isAtEnd = this.#paper.scrollTop + this.#paper.clientHeight > this.#paper.scrollHeight - 40;
    this.#paper.value = this.#conversation.text;
    if (isAtEnd) this.#paper.scrollTop = this.#paper.scrollHeight;
  }
}
