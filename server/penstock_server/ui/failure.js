// What went wrong, in the reader's language: the page's own sentence for the server's code. The server speaks
// English; where the page speaks another language, the server's words stand below.

import { CHINESE_ERRORS, CHINESE_STATUS } from "./chinese_errors.js";
import { element } from "./dom.js";
import { language, words } from "./words.js";

/** The fields of a node or conversation that keep an error: `error` is the sentence, `errorCode` the server's code,
 * `errorWords` the server's own words if the sentence is not they. */
export function keepError(place, error) {
  const sentence = sentenceOf(error);
  place.error = sentence ?? error.message;
  if (error.code) place.errorCode = error.code;
  if (sentence && error.isServers) place.errorWords = error.message;
}

export function dropError(place) {
  delete place.error;
  delete place.errorCode;
  delete place.errorWords;
}

/** The page's sentence; undefined if the error's message is in the reader's language already. */
export function sentenceOf(error) {
  if (error.code === "context_length_exceeded" && error.detail.n_ctx)
    return words("contextIsFull", {
      prompt: error.detail.n_prompt_tokens.toLocaleString("en"),
      most: error.detail.n_ctx.toLocaleString("en"),
    });
  if (language !== "zh" || !error.isServers) return undefined;
  const sentence = CHINESE_ERRORS[error.code] ?? CHINESE_STATUS[Math.floor(error.status / 100)];
  return sentence.replace("{param}", error.detail.param ?? "");
}

/** The box of an error. `kept` has the fields of keepError. */
export function failureBox(kept, buttons = []) {
  return element(
    "div",
    { class: "failure" },
    element(
      "div",
      { class: "failure-words" },
      element("p", {}, kept.error),
      kept.errorWords &&
        element(
          "details",
          {},
          element("summary", {}, words("serversWords")),
          element("p", { lang: "en" }, kept.errorWords),
        ),
    ),
    ...buttons,
  );
}
