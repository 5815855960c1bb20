// Asks the reader for the API key when the server asks for one: once for all requests that wait.

import { ApiError, apiKey, setApiKey } from "./api.js";
import { byId } from "./dom.js";
import { words } from "./words.js";

let asking = null;

/** The result of `work`. If the key is missing or wrong, `work` is done again with the key that the reader gives.
 * Throws the ApiError 401 if the reader gives none. */
export async function whenAllowed(work) {
  for (;;) {
    const key = apiKey();
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 401) throw error;
      // Another request may have got a key in the meantime.
      if (apiKey() === key && !(await askForKey())) throw error;
    }
  }
}

/** Returns true if there is a new key. `isWanted`: the server asks for a key. */
export function askForKey(isWanted = true) {
  asking ??= showDialog(isWanted).finally(() => (asking = null));
  return asking;
}

function showDialog(isWanted) {
  const dialog = byId("key-dialog");
  const input = byId("key");
  byId("key-title").textContent = words(isWanted ? "keyAsked" : "apiKey");
  byId("key-text").textContent = words(isWanted && apiKey() ? "keyRefused" : "keyWhence");
  byId("key-forget").hidden = !apiKey();
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const given = dialog.returnValue === "ok" ? input.value.trim() : "";
        if (given) setApiKey(given);
        resolve(given !== "");
      },
      { once: true },
    );
  });
}

export function prepareKeyDialog() {
  const dialog = byId("key-dialog");
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-forget").addEventListener("click", () => {
    setApiKey("");
    dialog.close();
  });
}
