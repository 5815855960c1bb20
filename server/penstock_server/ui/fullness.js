// How full the context is, below the message box: what the last answer took, and the draft of the next message.

import { FULL, guessTokens, tokensOf } from "./context.js";
import { byId } from "./dom.js";
import { percent } from "./figures.js";
import { words } from "./words.js";

export class Fullness {
  #sent = null;
  #most = null;

  /** onLeaveOut(): the reader wants old messages to be left out. */
  constructor(onLeaveOut) {
    byId("leave-out").addEventListener("click", onLeaveOut);
  }

  /** `conversation`: null where nothing is to be told. `most`: the tokens of a context; undefined: not known.
   * canLeaveOut(): whether there is something to leave out. */
  show(conversation, most, canLeaveOut) {
    this.#sent = conversation && most ? tokensOf(conversation) : null;
    this.#most = most;
    this.type(byId("prompt").value);
    const isFull = this.#sent !== null && this.#sent.tokens >= FULL * most;
    byId("leave-out").hidden = !(isFull && canLeaveOut());
  }

  /** Takes the draft of the next message. */
  type(draft) {
    const place = byId("fullness");
    place.hidden = this.#sent === null;
    if (place.hidden) return;
    const tokens = this.#sent.tokens + guessTokens(draft);
    const share = tokens / this.#most;
    const isExact = this.#sent.isExact && draft === "";
    place.textContent = words("contextUsed", {
      share: percent(share),
      tokens: `${isExact ? "" : "≈ "}${tokens.toLocaleString("en")}`,
      most: this.#most.toLocaleString("en"),
    });
    place.dataset.state = share > 1 ? "over" : share >= FULL ? "full" : "room";
  }
}
