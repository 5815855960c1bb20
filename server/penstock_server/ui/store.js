// Conversations as the browser keeps them: an entry for each, and an entry for the name of the open one.

import { newConversation, readConversation } from "./conversation.js";
import { namesWith, recall, recallJson, remember } from "./storage.js";
import { words } from "./words.js";

const PREFIX = "penstock.conversation.";
const OPEN = "penstock.open";
const SETTINGS = "penstock.settings";

export function listConversations() {
  const found = namesWith(PREFIX)
    .map((name) => recallJson(name, null))
    .filter((each) => each?.nodes);
  return found.sort((one, other) => other.changed - one.changed);
}

export const loadConversation = (id) => recallJson(PREFIX + id, null);

export function saveConversation(conversation) {
  conversation.changed = Date.now();
  remember(PREFIX + conversation.id, JSON.stringify(conversation));
}

export const deleteConversation = (id) => remember(PREFIX + id, null);

/** The conversation that was open when the page was left, or an empty one. */
export const lastConversation = () => loadConversation(recall(OPEN)) ?? freshConversation("chat");
export const rememberOpen = (id) => remember(OPEN, id);

/** A new conversation with the settings that were used last. */
export const freshConversation = (mode) => newConversation(mode, recallJson(SETTINGS, {}));
export const rememberSettings = (settings) => remember(SETTINGS, JSON.stringify(settings));

export const exportAll = () => JSON.stringify({ penstock: 1, conversations: listConversations() }, null, 1);

/** Adds the conversations of a file, and returns their number. Throws Error for a file that is no export. */
export function importAll(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error(words("importNoJson"));
  }
  const found = Array.isArray(data?.conversations) ? data.conversations.map(readConversation) : [null];
  if (found.includes(null)) throw new Error(words("importNoExport"));
  found.reverse().forEach(saveConversation);
  return found.length;
}

/** Calls back when another tab changes a conversation. */
export function onChangeElsewhere(tell) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) tell(event.key?.slice(PREFIX.length) ?? null);
  });
}
