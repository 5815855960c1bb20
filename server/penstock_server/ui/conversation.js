// A conversation: a tree of messages, of which one path is shown. Plain data and functions on it.
//
// {id, title, mode: "chat" | "completion", changed, settings, nodes: {id: node}, leaf, text, before}
//
// A node is {id, parent, role: "user" | "assistant", content, reasoning, figures, error}. Editing a message
// or asking again makes a sibling, so nothing that was said is lost. `text` is the paper of a completion,
// and `before` what it was before the last one.

/** Begins with a letter: names of digits would not keep their order in an object. */
export const makeId = () =>
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

/** From the first message to the one that is shown last. */
export function pathOf(conversation) {
  const path = [];
  for (let id = conversation.leaf; id !== null; id = conversation.nodes[id].parent)
    path.unshift(conversation.nodes[id]);
  return path;
}

/** Adds a message below `parent` (null: the first) and shows it. */
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

/** Shows `node` and what was last said after it. */
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
  if (!line) return conversation.mode === "chat" ? "New chat" : "New completion";
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

/** What an imported file holds, or null if it is no conversation of ours. Unknown fields are dropped. */
export function readConversation(data) {
  if (typeof data !== "object" || data === null || !["chat", "completion"].includes(data.mode)) return null;
  const nodes = {};
  for (const node of Object.values(data.nodes ?? {})) {
    const { id, parent, role, content, reasoning, figures, error } = node ?? {};
    if (!/^m\w+$/.test(id) || typeof content !== "string" || !["user", "assistant"].includes(role))
      return null;
    // A parent comes before its child, as it did when they were written: so there are no circles.
    if (parent !== null && !(parent in nodes)) return null;
    nodes[id] = { id, parent, role, content, reasoning, figures, error };
  }
  const leaf = data.leaf in nodes ? data.leaf : null;
  const text = typeof data.text === "string" ? data.text : "";
  const title = typeof data.title === "string" ? data.title : "";
  const settings = typeof data.settings === "object" && data.settings !== null ? data.settings : {};
  return { ...newConversation(data.mode, settings), title, nodes, leaf, text };
}
