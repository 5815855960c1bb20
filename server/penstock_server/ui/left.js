// What a page could not write any more when it was left: an answer under way, for instance. IndexedDB takes its time,
// which such a page has not; localStorage takes a text at once. The next page that opens writes it.

import { namesWith, recallJson, remember } from "./storage.js";

const PREFIX = "penstock.left.";
/** Of this page: others may be left at the same moment. */
const NAME = `${PREFIX}${Date.now().toString(36)}${Math.random().toString(36).slice(2)}`;

/** entries: [{head, nodes, isNew}]. isNew: the conversation was not written before. */
export const keepLeft = (entries) => remember(NAME, JSON.stringify(entries));

/** What pages have left behind: [{name of the entry, entries}]. */
export const leftBehind = () =>
  namesWith(PREFIX).map((name) => ({ name, entries: recallJson(name, []) }));

export const dropLeft = (name) => remember(name, null);
