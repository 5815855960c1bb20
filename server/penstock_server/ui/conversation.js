// A conversation: a tree of messages. One path of the tree is shown. Plain data, and functions on the data.
//
// {id, title, mode: "chat" | "completion" | "fill", changed, settings, nodes: {id: node}, leaf, text, before}
//
// A node is {id, parent, role: "user" | "assistant", content, reasoning, figures, error}. Editing a message
// or asking again makes a sibling, so that no message is lost. `text` is the text of a completion, and
// `before` that text before the last answer; or a text with blanks, and `spans` are the texts of its blanks.

import { words } from "./words.js";

/** A new id. It begins with a letter, because an object does not keep the order of keys that are numbers. */
const makeId = () =>
  `m${Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(36)).join("")}`;

export function newConversation(mode, settings) {
  return {
    id: makeId(),
    title: "",
    mode,
    changed: Date.now(),
    settings,
    nodes: {},
    leaf: null,
    text: "",
    before: null,
  };
}

export const isEmpty = (conversation) => conversation.leaf === null && conversation.text === "";

/** The shown messages, from the first to the last. */
export function pathOf(conversation) {
  const path = [];
  for (let id = conversation.leaf; id !== null; id = conversation.nodes[id].parent)
    path.unshift(conversation.nodes[id]);
  return path;
}

/** Adds a message below `parent` (null: the message is the first) and shows the message. */
export function addMessage(conversation, parent, role, content) {
  const node = { id: makeId(), parent, role, content };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  return node;
}

export function siblingsOf(conversation, node) {
  return Object.values(conversation.nodes).filter(
    (each) => each.parent === node.parent && each.role === node.role,
  );
}

/** Shows `node`, and below it the newest messages. */
export function showBranch(conversation, node) {
  let leaf = node;
  for (
    let next = leaf;
    next;
    next = Object.values(conversation.nodes).findLast((each) => each.parent === leaf.id)
  )
    leaf = next;
  conversation.leaf = leaf.id;
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.mode === "chat" ? pathOf(conversation)[0]?.content : conversation.text;
  const line = (first ?? "").trim().split("\n")[0];
  if (!line) return words({ chat: "newChat", completion: "newCompletion", fill: "newFill" }[conversation.mode]);
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

const MODES = ["chat", "completion", "fill"];
const NODE = { id: "string", role: "string", content: "string", reasoning: "string", error: "string" };
const FIGURES = {
  promptTokens: "number",
  cachedTokens: "number",
  outputTokens: "number",
  acceptedGuesses: "number",
  rejectedGuesses: "number",
  isCounted: "boolean",
  firstTokenS: "number",
  tokensPerS: "number",
  finish: "string",
};
const SETTINGS = {
  temperature: "number",
  top_p: "number",
  top_k: "number",
  max_tokens: "number",
  seed: "number",
  stop: "string",
  system: "string",
};

/** The conversation in imported data, or null if the data is none of ours. Other fields are dropped: the page
 * opens the last conversation at its start, so a conversation that it can't show would break it for good. */
export function readConversation(data) {
  if (typeof data !== "object" || data === null || !MODES.includes(data.mode)) return null;
  const nodes = {};
  for (const each of Object.values(data.nodes ?? {})) {
    const node = readNode(each, nodes);
    if (node === null) return null;
    nodes[node.id] = node;
  }
  const leaf = Object.hasOwn(nodes, data.leaf) ? data.leaf : null;
  const { text = "", title = "" } = pick(data, { text: "string", title: "string" });
  const settings = pick(data.settings, SETTINGS);
  return { ...newConversation(data.mode, settings), title, nodes, leaf, text };
}

/** `earlier`: the nodes before this node. A parent has to come before its child, as in exported files, so that
 * there are no circles. */
function readNode(data, earlier) {
  const { id, content, role, ...more } = pick(data, NODE);
  if (!/^m\w+$/.test(id) || content === undefined || !["user", "assistant"].includes(role)) return null;
  if (data.parent !== null && !Object.hasOwn(earlier, data.parent)) return null;
  const figures = data.figures ? pick(data.figures, FIGURES) : undefined;
  return { id, parent: data.parent, role, content, ...more, figures };
}

/** The fields of `data` whose types are those in `types`, by name. */
function pick(data, types) {
  const found = Object.entries(types).filter(([name, type]) => typeof data?.[name] === type);
  return Object.fromEntries(found.map(([name]) => [name, data[name]]));
}
