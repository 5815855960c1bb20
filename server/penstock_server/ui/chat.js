// A chat: its messages on the stage, and what their buttons do.

import { canLeaveOut, firstToSend, sentUntil } from "./context.js";
import { addMessage, pathOf, showBranch, siblingsOf } from "./conversation.js";
import { element } from "./dom.js";
import { emptyStage } from "./empty.js";
import { dropError, keepError } from "./failure.js";
import { generate } from "./generation.js";
import { Log } from "./log.js";
import { GrowingText, lock, messageView } from "./message.js";
import { samplingFields } from "./sampling.js";
import { Reader } from "./spoken.js";
import { words } from "./words.js";

const PATH = "v1/chat/completions";
/** What the server says to a conversation that is too long, be it for the model or for a request. */
const TOO_LONG = ["context_length_exceeded", "string_above_max_length", "request_too_large"];
/** More messages are too many for a request of any model. */
const MOST_MESSAGES = 4096;

export class Chat {
  canUndo = false;
  opened = new Set(); // ids of long messages that the reader has opened
  #page;
  #conversation;
  #log = null;
  #growing = null; // {node, text} of the answer that is written

  constructor(page, conversation) {
    this.#page = page;
    this.#conversation = conversation;
  }

  /** Shows all. */
  render() {
    this.leave();
    const { stage } = this.#page;
    const path = pathOf(this.#conversation);
    if (path.length === 0) {
      stage.replaceChildren(emptyStage(this.#page.modelName(), (text) => this.submit(text)));
      return;
    }
    this.#log = new Log(
      stage,
      (node, isPlain) => messageView(this, node, isPlain),
      (nodes) => this.#lock(nodes),
    );
    this.#log.append(path);
    stage.replaceChildren(this.#log.view);
    this.grow();
    this.#page.follow(true);
  }

  /** The view is shown no longer. */
  leave() {
    this.#log?.end();
    this.#log = this.#growing = null;
  }

  /** Shows what has changed: other messages at the end, and whether an answer is under way. `nodes` have changed. */
  update(nodes = []) {
    if (!this.#log || this.#conversation.leaf === null) return this.render();
    const last = this.#log.last;
    const added = [];
    let node = this.#conversation.nodes[this.#conversation.leaf];
    for (; node && !this.#log.viewOf(node.id); node = this.#conversation.nodes[node.parent]) added.push(node);
    this.#log.cutBehind(node);
    this.#log.append(added.reverse());
    // What was the newest answer may collapse now.
    if (last && last.id !== this.#conversation.leaf) this.#log.renew(last);
    if (this.#growing && !this.isGrowing(this.#growing.node)) nodes = [...nodes, this.#growing.node];
    for (const node of nodes) if (!this.isGrowing(node)) this.#log.renew(node);
    if (this.#growing && !this.isGrowing(this.#growing.node)) this.#growing = null;
    this.#lock(this.#log.near());
    this.grow();
    this.#page.follow(false);
  }

  #lock(nodes) {
    const isLocked = this.isLocked();
    for (const { id } of nodes) lock(this.#log.viewOf(id), isLocked);
  }

  /** Shows the new text of the answer that is being written. */
  grow() {
    const node = this.#conversation.nodes[this.#conversation.leaf];
    if (!node || !this.isGrowing(node)) return;
    if (this.#growing?.node !== node) {
      this.#log.renew(node); // with the looks of an answer that grows
      this.#growing = { node, text: new GrowingText(this.#log.viewOf(node.id), node) };
      this.#page.follow(true);
    } else {
      this.#growing.text.update(node);
      this.#page.follow(false);
    }
  }

  submit(text) {
    const { leaf } = this.#conversation;
    if (this.isLocked()) return;
    this.#answer(addMessage(this.#conversation, leaf, "user", text), true);
  }

  // -- what messages ask for --------------------------------------------------------------------

  isGrowing(node) {
    return node.id === this.#conversation.leaf && node.role === "assistant" && this.isLocked();
  }

  isLocked() {
    return this.#page.isRunning(this.#conversation);
  }

  isNewest(node) {
    return node.id === this.#conversation.leaf;
  }

  /** Whether the model gets this message, but none above it. */
  isFirstSent(node) {
    return node.id === this.#conversation.start && node.parent !== null;
  }

  siblings(node) {
    return siblingsOf(this.#conversation, node);
  }

  show(node) {
    if (this.isLocked()) return;
    showBranch(this.#conversation, node);
    this.#page.save(this.#conversation);
    this.#page.rerender(this.#conversation);
  }

  renew(node) {
    this.#log.renew(node);
  }

  again(answer) {
    if (!this.isLocked()) this.#answer(this.#conversation.nodes[answer.parent]);
  }

  edit(node, text) {
    if (this.isLocked()) return;
    this.#answer(addMessage(this.#conversation, node.parent, "user", text), true);
  }

  /** Lets the answer go on where it ended. */
  goOn(answer) {
    const { model } = answer;
    const name = this.#page.modelName();
    if (model && name && !model.split(" → ").includes(name)) answer.model = `${model} → ${name}`;
    this.#stream([answer], answer, { continue_final_message: true, add_generation_prompt: false });
  }

  /** The buttons beside an error. */
  waysOut(node) {
    const isFull = node.errorCode === TOO_LONG[0];
    if (isFull && !canLeaveOut(this.#conversation)) return [element("p", {}, words("shortenIt"))];
    const retry = () => (node.content && isFull ? this.goOn(node) : this.again(node));
    const leaveOut = async () => {
      await this.leaveOut();
      retry();
    };
    return [
      element(
        "button",
        {
          type: "button",
          class: "button small",
          "data-locks": true,
          onclick: isFull ? leaveOut : retry,
        },
        words(isFull ? "leaveOutAndRetry" : "tryAgain"),
      ),
    ];
  }

  // -- the context ------------------------------------------------------------------------------

  /** Leaves out old messages, so that half of the context is free. */
  async leaveOut() {
    const conversation = this.#conversation;
    const first = await firstToSend(conversation, this.#page.contextTokens(), (sent) => ({
      messages: this.#messages(sent.filter(({ content }) => content)),
      model: this.#page.modelName() ?? undefined,
    }));
    if (first !== null) this.#startAt(first);
  }

  sendAll() {
    this.#startAt(null);
  }

  #startAt(id) {
    const { nodes, start } = this.#conversation;
    this.#conversation.start = id;
    this.#page.save(this.#conversation);
    this.#page.rerender(
      this.#conversation,
      [start, id].flatMap((each) => nodes[each] ?? []),
    );
  }

  #messages(nodes) {
    const { system } = this.#conversation.settings;
    const head = system ? [{ role: "system", content: system }] : [];
    return [...head, ...nodes.map(({ role, content }) => ({ role, content }))];
  }

  // -- asking -----------------------------------------------------------------------------------

  #answer(question, isNew = false) {
    const answer = addMessage(this.#conversation, question.id, "assistant", "");
    answer.model = this.#page.modelName() ?? undefined;
    this.#stream(isNew ? [question, answer] : [answer], question, {});
  }

  /** Streams into the last of `nodes`, which are to be written. The model gets the messages until `last`. */
  async #stream(nodes, last, more) {
    const conversation = this.#conversation;
    const answer = nodes.at(-1);
    const signal = this.#page.begin(conversation, nodes);
    if (!signal) return;
    const sent = sentUntil(conversation, last);
    answer.from = sent[0]?.id === conversation.start ? conversation.start : undefined;
    delete answer.figures;
    dropError(answer);
    this.#page.rerender(conversation);
    const reader = new Reader();
    reader.begin();
    try {
      const { model, ...figures } = await generate({
        path: PATH,
        body: {
          messages: this.#messages(sent),
          ...more,
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
      answer.figures = figures;
      answer.model ??= model;
      reader.end(figures.finish === "stopped" ? words("stopped") : words("answerDone"));
    } catch (error) {
      answer.figures = error.figures;
      keepError(answer, error);
      const isTooMany = error.detail?.param === "messages" && sent.length >= MOST_MESSAGES;
      if (isTooMany || TOO_LONG.includes(error.code)) answer.errorCode = TOO_LONG[0];
      reader.end(answer.error);
    } finally {
      this.#page.end(conversation);
    }
  }
}
