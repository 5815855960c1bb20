// Conversations that older pages kept in localStorage, whole, an entry for each.

import { isMode, withFirst } from "./conversation.js";
import { namesWith, recallJson } from "./storage.js";

const PREFIX = "penstock.conversation.";

/** [{name of the entry, conversation}]. An entry that is no conversation stays where it is. */
export function legacyConversations() {
  const found = namesWith(PREFIX).map((name) => ({ name, conversation: recallJson(name, null) }));
  return found
    .filter(({ conversation }) => conversation?.id && conversation.nodes && isMode(conversation.mode))
    .map(({ name, conversation }) => ({ name, conversation: withFirst(conversation) }));
}
