// A conversation: a tree of messages. One path of the tree is shown. Plain data, and functions on the data.
//
// {id, title, first, mode: "chat" | "completion" | "fill", changed, settings, nodes: {id: node}, leaf, start, text,
// before}
//
// A node is {id, parent, at, role: "user" | "assistant", content, reasoning, model, figures, error, errorCode,
// errorWords}. Editing a message or asking again makes a sibling, so that no message is lost. `at` orders siblings.
// `start` is the first message that the model still gets (null: all). `first` is the first line of the first message.
// `text` is the text of a completion, and `before` that text before the last answer; or a text with blanks, and
// `spans` are the texts of its blanks.

import { words } from "./words.js";

/** A new id. It begins with a letter, because an object does not keep the order of keys that are numbers. */
const makeId = () =>
  `m${Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(36)).join("")}`;

export function newConversation(mode, settings) {
  return {
    id: makeId(),
    title: "",
    first: "",
    mode,
    changed: Date.now(),
    settings,
    nodes: {},
    leaf: null,
    start: null,
    text: "",
    before: null,
  };
}

export const isEmpty = (conversation) => conversation.leaf === null && conversation.text === "";

/** The shown messages, from the first to the last. */
export function pathOf(conversation) {
  const path = [];
  const { nodes } = conversation;
  for (let node = nodes[conversation.leaf]; node; node = nodes[node.parent]) path.push(node);
  return path.reverse();
}

// -- the tree -----------------------------------------------------------------------------------

/** Conversation -> parent's id -> the nodes below the parent, in their order. It is made when it is asked for first. */
const children = new WeakMap();

function childrenOf(conversation, parent) {
  if (!children.has(conversation)) {
    const found = new Map();
    children.set(conversation, found);
    for (const node of Object.values(conversation.nodes).sort(byTime))
      addTo(found, node);
  }
  return children.get(conversation).get(parent) ?? [];
}

function addTo(found, node) {
  if (!found.has(node.parent)) found.set(node.parent, []);
  found.get(node.parent).push(node);
}

/** Adds a message below `parent` (null: the message is the first) and shows the message. */
export function addMessage(conversation, parent, role, content) {
  // The clocks of two tabs are one; a child comes after its parent, also within a millisecond.
  const at = Math.max(Date.now(), (conversation.nodes[parent]?.at ?? 0) + 1);
  const node = { id: makeId(), parent, at, role, content };
  insert(conversation, node);
  conversation.leaf = node.id;
  if (parent === null) conversation.first = firstLine(content);
  return node;
}

function insert(conversation, node) {
  conversation.nodes[node.id] = node;
  const found = children.get(conversation);
  if (found) addTo(found, node);
}

/** Takes nodes that another tab has written: new ones, and known ones as they are now. */
export function mergeNodes(conversation, nodes) {
  for (const node of nodes) {
    const known = conversation.nodes[node.id];
    if (!known) {
      insert(conversation, node);
      childrenOf(conversation, node.parent).sort(byTime);
    } else {
      for (const name of Object.keys(known)) if (!(name in node)) delete known[name];
      Object.assign(known, node);
    }
  }
}

const byTime = (one, other) => one.at - other.at;

export const siblingsOf = (conversation, node) =>
  childrenOf(conversation, node.parent).filter((each) => each.role === node.role);

/** Shows `node`, and below it the newest messages. */
export function showBranch(conversation, node) {
  let leaf = node;
  for (let next = leaf; next; next = childrenOf(conversation, leaf.id).at(-1)) leaf = next;
  conversation.leaf = leaf.id;
  if (conversation.mode === "chat") conversation.first = firstLine(pathOf(conversation)[0].content);
}

/** Whether the message `id` is `last` or stands above it. */
export function isAbove(conversation, id, last) {
  for (let node = conversation.nodes[last]; node; node = conversation.nodes[node.parent])
    if (node.id === id) return true;
  return id === null;
}

// -- titles -------------------------------------------------------------------------------------

/** The first line of a text that has signs. */
function firstLine(text) {
  const line = /\S[^\n]{0,80}/.exec(text)?.[0].trimEnd() ?? "";
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

export function titleOf(conversation) {
  const { mode, title, first, text } = conversation;
  return (
    title ||
    (mode === "chat" ? first : firstLine(text)) ||
    words({ chat: "newChat", completion: "newCompletion", fill: "newFill" }[mode])
  );
}

// -- what is imported, or was kept by older pages ------------------------------------------------

const MODES = ["chat", "completion", "fill"];
export const isMode = (mode) => MODES.includes(mode);

const NODE = {
  id: "string",
  role: "string",
  content: "string",
  reasoning: "string",
  model: "string",
  from: "string",
  error: "string",
  errorCode: "string",
  errorWords: "string",
};
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
  if (typeof data !== "object" || data === null || !isMode(data.mode)) return null;
  const nodes = {};
  for (const each of Object.values(data.nodes ?? {})) {
    const node = readNode(each, nodes);
    if (node === null) return null;
    nodes[node.id] = node;
  }
  const known = (id) => (Object.hasOwn(nodes, id) ? id : null);
  const { text = "", title = "" } = pick(data, { text: "string", title: "string" });
  const made = newConversation(data.mode, pick(data.settings, SETTINGS));
  Object.assign(made, { title, nodes, leaf: known(data.leaf), start: known(data.start), text });
  return withFirst(made);
}

/** Adds what conversations of older pages lack: the order of messages, and the first line. */
export function withFirst(conversation) {
  Object.values(conversation.nodes).forEach((node, index) => (node.at = index));
  conversation.start ??= null;
  conversation.first = firstLine(pathOf(conversation)[0]?.content ?? "");
  return conversation;
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
