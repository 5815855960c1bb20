// The text of a growing answer for screen readers: whole sentences, at most once in a few seconds. Nobody can
// listen to an answer that is read out token by token.

import { byId } from "./dom.js";

const EVERY_MS = 2500;

export class Reader {
  #told = 0;
  #text = "";
  #timer = null;

  begin() {
    say("Answering.");
  }

  /** Takes the whole text of the answer as it is now. */
  feed(text) {
    this.#text = text;
    this.#timer ??= setTimeout(() => {
      this.#timer = null;
      this.#tell(Math.max(...[". ", "! ", "? ", "\n"].map((end) => this.#text.lastIndexOf(end))) + 1);
    }, EVERY_MS);
  }

  end(words) {
    clearTimeout(this.#timer);
    this.#tell(this.#text.length, words);
  }

  #tell(until, words = "") {
    const next = this.#text.slice(this.#told, until).trim();
    this.#told = Math.max(this.#told, until);
    if (next || words) say(`${next} ${words}`.trim());
  }
}

export const say = (words) => (byId("spoken").textContent = words);
