// The text of a growing answer for screen readers: whole sentences, at most once in a few seconds. Nobody can
// listen to an answer that is read out token by token.

import { byId } from "./dom.js";
import { words } from "./words.js";

const EVERY_MS = 2500;
const SENTENCE_ENDS = [". ", "! ", "? ", "\n", "。", "！", "？"];

export class Reader {
  #told = 0;
  #text = "";
  #timer = null;

  begin() {
    say(words("answering"));
  }

  /** Takes the whole text of the answer as it is now. */
  feed(text) {
    this.#text = text;
    this.#timer ??= setTimeout(() => {
      this.#timer = null;
      this.#tell(Math.max(...SENTENCE_ENDS.map((end) => this.#text.lastIndexOf(end))) + 1);
    }, EVERY_MS);
  }

  end(remark) {
    clearTimeout(this.#timer);
    this.#tell(this.#text.length, remark);
  }

  #tell(until, remark = "") {
    const next = this.#text.slice(this.#told, until).trim();
    this.#told = Math.max(this.#told, until);
    if (next || remark) say(`${next} ${remark}`.trim());
  }
}

export const say = (sentence) => (byId("spoken").textContent = sentence);
