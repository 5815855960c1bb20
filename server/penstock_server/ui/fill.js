// A text with blanks: the reader writes the text, the model what is missing. The filled text stands below.

import { copyText, element } from "./dom.js";
import { answerFigures } from "./figures.js";
import { dropError, failureBox, keepError } from "./failure.js";
import { generate } from "./generation.js";
import { isConfirming } from "./keys.js";
import { samplingFields } from "./sampling.js";
import { Reader } from "./spoken.js";
import { words } from "./words.js";

const PATH = "v1/fill";
const MARK = "____";

/** The text around the blanks, by the server's rule: <span>, or underscores in a text without <span>. */
const piecesOf = (text) => text.split(text.includes("<span>") ? "<span>" : /_{4,}/);

export class Fill {
  #page;
  #conversation;
  #paper;
  #result;

  constructor(page, conversation) {
    this.#page = page;
    this.#conversation = conversation;
  }

  canUndo = false;

  leave() {}

  update() {
    this.render();
  }

  render() {
    const conversation = this.#conversation;
    this.#paper = element("textarea", {
      id: "paper",
      class: "paper",
      "aria-label": words("textToFill"),
      placeholder: words("fillExample"),
      spellcheck: "false",
      readonly: this.#page.isRunning(conversation),
    });
    this.#paper.value = conversation.text;
    this.#paper.addEventListener("input", () => this.#write(this.#paper.value));
    this.#paper.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !isConfirming(event) && (event.ctrlKey || event.metaKey)) this.#page.submit();
    });
    const blank = element("button", { type: "button", class: "button small" }, words("addBlank"));
    blank.addEventListener("click", () => this.#addBlank());
    const copy = element("button", { type: "button", class: "button small" }, words("copy"));
    copy.addEventListener("click", () => copyText(this.#filled(), copy));
    this.#result = element("p", { class: "filled", "aria-label": words("filledText") });
    this.#page.stage.replaceChildren(
      element(
        "div",
        { class: "paper-box" },
        this.#paper,
        element("div", { class: "foot" }, element("div", { class: "tools" }, blank)),
        this.#result,
        element(
          "div",
          { class: "foot" },
          conversation.spans && element("div", { class: "tools" }, copy),
          conversation.figures && element("p", { class: "figures" }, answerFigures(conversation.figures)),
        ),
        conversation.error && failureBox(conversation),
      ),
    );
    this.grow();
  }

  /** Shows the filled text. A blank without text yet is shown as a blank. */
  grow() {
    const { spans, text } = this.#conversation;
    this.#result.hidden = !spans;
    if (!spans) return;
    const pieces = piecesOf(text);
    const filled = (index) => element("mark", {}, spans[index] || MARK);
    this.#result.replaceChildren(
      ...pieces.flatMap((piece, index) => (index === 0 ? [piece] : [filled(index - 1), piece])),
    );
  }

  async submit() {
    const conversation = this.#conversation;
    if (!conversation.text) return this.#paper.focus();
    const signal = this.#page.begin(conversation);
    if (!signal) return;
    conversation.spans = piecesOf(conversation.text).slice(1).map(() => "");
    delete conversation.figures;
    dropError(conversation);
    this.#page.rerender(conversation);
    const reader = new Reader();
    reader.begin();
    try {
      conversation.figures = await this.#generate(signal);
      const isStopped = conversation.figures.finish === "stopped";
      reader.feed(this.#filled());
      reader.end(isStopped ? words("stopped") : "");
    } catch (error) {
      delete conversation.spans;
      keepError(conversation, error);
      reader.end(conversation.error);
    } finally {
      this.#page.end(conversation);
    }
  }

  #generate(signal) {
    const conversation = this.#conversation;
    return generate({
      path: PATH,
      body: {
        ...samplingFields(conversation.settings),
        prompt: conversation.text,
        model: this.#page.modelName() ?? undefined,
        stream_options: undefined, // the last event has the usage in any case
      },
      signal,
      onSpan: ({ index, text }) => {
        conversation.spans = conversation.spans.with(index, conversation.spans[index] + text);
        this.#page.grow(conversation);
      },
      onWait: (reason) => this.#page.notify(conversation, reason),
    });
  }

  #filled() {
    const { spans, text } = this.#conversation;
    return piecesOf(text)
      .map((piece, index) => (index === 0 ? piece : (spans[index - 1] ?? "") + piece))
      .join("");
  }

  /** A text that has changed has other blanks: what was filled in is dropped. */
  #write(text) {
    const conversation = this.#conversation;
    conversation.text = text;
    const hadSpans = Boolean(conversation.spans);
    delete conversation.spans;
    delete conversation.figures;
    dropError(conversation);
    this.#page.save(conversation);
    if (hadSpans) this.grow();
  }

  /** Puts a blank where the cursor is, in the place of the selected text. */
  #addBlank() {
    const paper = this.#paper;
    if (paper.readOnly) return;
    const mark = paper.value.includes("<span>") ? "<span>" : MARK;
    paper.setRangeText(mark, paper.selectionStart, paper.selectionEnd, "end");
    this.#write(paper.value);
    paper.focus();
  }
}
