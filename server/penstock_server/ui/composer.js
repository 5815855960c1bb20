// The message box: its height, its keys, and what is pasted into it or dropped on the page.

import { Attachments } from "./attachments.js";
import { byId } from "./dom.js";
import { isConfirming } from "./keys.js";

export const isTouched = matchMedia("(pointer: coarse)");

export class Composer {
  #prompt = byId("prompt");
  #attachments;
  #onType;

  /** onSubmit(): the reader wants to send. onType(draft) comes with each change. warn(sentence) tells why a file can't
   * be attached. */
  constructor(onSubmit, onType, warn) {
    this.#onType = onType;
    this.#attachments = new Attachments(warn);
    this.#prompt.addEventListener("input", () => this.#changed());
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || isConfirming(event) || isTouched.matches) return;
      event.preventDefault();
      onSubmit();
    });
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      onSubmit();
    });
  }

  /** What is to be sent, with the attached texts behind it; "" if there is nothing. The box is empty then. */
  take() {
    const text = this.#prompt.value;
    if (!text.trim() && this.#attachments.isEmpty) return "";
    this.#prompt.value = "";
    this.#changed();
    return this.#attachments.takeInto(text);
  }

  /** Makes the box as high as its text, up to the limit of the style. */
  #changed() {
    this.#prompt.style.blockSize = "auto";
    this.#prompt.style.blockSize = `${this.#prompt.scrollHeight + 2}px`;
    this.#onType(this.#prompt.value);
  }
}
