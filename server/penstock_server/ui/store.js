// Conversations as the browser keeps them, for all tabs: a record for each conversation and one for each message.
// What is written is what has changed, and messages of two tabs in one conversation stand side by side.

import { newConversation, readConversation } from "./conversation.js";
import { openDatabase, result, transact } from "./database.js";
import { dropLeft, keepLeft, leftBehind } from "./left.js";
import { legacyConversations } from "./legacy.js";
import { recall, recallJson, remember } from "./storage.js";
import { words } from "./words.js";

const NAME = "penstock";
/** `moved` has the conversations that older pages kept in localStorage, and that were taken over. */
const STORES = { conversations: "id", nodes: ["conversation", "id"], moved: "id" };
const OPEN = "penstock.open";
const SETTINGS = "penstock.settings";

/** All nodes of a conversation. */
const nodesOf = (id) => IDBKeyRange.bound([id], [id, []]);

export class Store {
  #database = null;
  #channel = null;
  #heads = new Map(); // id -> the conversation without its nodes, as it was written last
  #unwritten = new Map(); // conversation -> its nodes that are to be written
  #underWay = []; // [conversation, nodes] that are being written
  #inMemory = new Map(); // conversations of a browser that keeps none
  #removed = new Set();
  #writing = Promise.resolve();
  #isDue = false;
  #onChange;
  /** Why something is not written: the key of its words; null if all is. */
  problem = null;

  /** onChange(id, head, nodes): another tab has written a conversation and some of its nodes; head is null if the
   * conversation was removed. onWritten() comes when `problem` may have changed. */
  constructor(onChange, onWritten) {
    this.#onChange = onChange;
    this.onWritten = onWritten;
  }

  async open() {
    this.#database = await openDatabase(NAME, STORES);
    if (this.#database) {
      this.#database.onversionchange = () => this.#database.close();
      this.#channel = new BroadcastChannel(NAME);
      this.#channel.onmessage = ({ data }) => this.#hear(data);
    }
    await this.#takeOver();
    if (!this.#database) return;
    await this.#takeLeft();
    const heads = await transact(this.#database, "readonly", (stores) => result(stores.conversations.getAll()));
    for (const head of heads) this.#heads.set(head.id, head);
  }

  /** Whether conversations stay when the page is left. */
  get isKept() {
    return this.#database !== null;
  }

  /** All conversations without their nodes, the newest first. */
  list() {
    return [...this.#heads.values()].sort((one, other) => other.changed - one.changed);
  }

  head(id) {
    return this.#heads.get(id) ?? null;
  }

  async load(id) {
    if (!this.#heads.has(id)) return null;
    await this.#writing;
    const held = [...this.#unwritten.keys(), ...this.#inMemory.values()].find((each) => each.id === id);
    if (held || !this.#database) return held ?? null;
    const [head, nodes] = await transact(this.#database, "readonly", (stores) =>
      Promise.all([result(stores.conversations.get(id)), result(stores.nodes.getAll(nodesOf(id)))]),
    );
    if (!head) return null;
    this.#heads.set(id, head);
    return whole(head, nodes);
  }

  /** Notes what is to be written: the conversation's own fields, and `nodes`. Returns when it was tried. */
  save(conversation, nodes = []) {
    if (this.#removed.has(conversation.id)) return Promise.resolve();
    conversation.changed = Date.now();
    const { id } = conversation;
    if (!this.#database) {
      this.#heads.set(id, headOf(conversation));
      this.#inMemory.set(id, conversation);
      return Promise.resolve();
    }
    const waiting = this.#unwritten.get(conversation) ?? new Set();
    // What could not be moved has no nodes in the database yet.
    const changed = this.#inMemory.delete(id) ? Object.values(conversation.nodes) : nodes;
    changed.forEach((node) => waiting.add(node));
    this.#unwritten.set(conversation, waiting);
    if (!this.#heads.has(id)) this.#heads.set(id, headOf(conversation));
    if (!this.#isDue) {
      this.#isDue = true;
      this.#writing = this.#writing.then(() => {
        this.#isDue = false;
        return this.#write();
      });
    }
    return this.#writing;
  }

  /** The page is about to be left: what waits is put where the next page finds it. */
  leave() {
    const waiting = [...this.#underWay, ...this.#unwritten];
    if (!this.#database || waiting.length === 0) return;
    keepLeft(
      waiting.map(([conversation, nodes]) => ({
        head: headOf(conversation),
        nodes: [...nodes],
        isNew: !this.#heads.get(conversation.id)?.isWritten,
      })),
    );
  }

  async remove(id) {
    this.#drop(id);
    if (!this.#database) return;
    await transact(this.#database, "readwrite", ({ conversations, nodes }) => {
      conversations.delete(id);
      nodes.delete(nodesOf(id));
    });
    this.#channel.postMessage({ removed: id });
  }

  async exportAll() {
    const found = [];
    for (const { id } of this.list()) found.push(await this.load(id));
    return JSON.stringify({ penstock: 1, conversations: found.filter(Boolean) }, null, 1);
  }

  /** Adds the conversations of a file. Throws Error for a file that is no export. */
  async importAll(text) {
    let data;
    try {
      data = JSON.parse(text);
    } catch {
      throw new Error(words("importNoJson"));
    }
    const found = Array.isArray(data?.conversations) ? data.conversations.map(readConversation) : [null];
    if (found.includes(null)) throw new Error(words("importNoExport"));
    found.reverse().forEach((each) => this.save(each, Object.values(each.nodes)));
    await this.#writing;
  }

  // -- writing ----------------------------------------------------------------------------------

  async #write() {
    const batch = [...this.#unwritten].map(([conversation, nodes]) => [conversation, [...nodes]]);
    if (batch.length === 0) return;
    this.#unwritten.clear();
    this.#underWay = batch;
    try {
      const heads = await transact(this.#database, "readwrite", (stores) =>
        Promise.all(batch.map(([conversation, nodes]) => this.#put(stores, conversation, nodes))),
      );
      heads.forEach((head, index) => this.#written(batch[index], head));
      this.problem = null;
    } catch (error) {
      for (const [conversation, nodes] of batch) {
        const waiting = this.#unwritten.get(conversation) ?? new Set();
        this.#unwritten.set(conversation, new Set([...nodes, ...waiting]));
      }
      this.problem = problemOf(error);
    }
    this.#underWay = [];
    this.onWritten();
  }

  /** Writes the fields that this tab has changed, so that those that another tab has changed stay. Returns the
   * record; null if another tab has removed the conversation. */
  async #put(stores, conversation, nodes) {
    const { id } = conversation;
    const known = this.#heads.get(id);
    let head = headOf(conversation);
    if (known?.isWritten) {
      const kept = await result(stores.conversations.get(id));
      if (!kept) return null;
      const changes = changesOf(known, head);
      // What another tab has changed meanwhile is no change of this tab's.
      for (const name of ["title", "settings"]) if (!(name in changes)) conversation[name] = kept[name];
      head = { ...kept, ...changes };
    }
    head.isWritten = true;
    stores.conversations.put(head);
    for (const node of nodes) stores.nodes.put({ ...node, conversation: id });
    return head;
  }

  #written([conversation, nodes], head) {
    const { id } = conversation;
    if (head === null) {
      this.#drop(id);
      this.#onChange(id, null, []);
      return;
    }
    if (this.#removed.has(id)) return;
    this.#heads.set(id, head);
    this.#channel.postMessage({ written: id, nodes: nodes.map((node) => node.id) });
  }

  #drop(id) {
    this.#removed.add(id);
    this.#heads.delete(id);
    this.#inMemory.delete(id);
    for (const conversation of this.#unwritten.keys())
      if (conversation.id === id) this.#unwritten.delete(conversation);
  }

  // -- other tabs, and older pages --------------------------------------------------------------

  async #hear({ written, nodes, removed }) {
    if (removed) {
      this.#drop(removed);
      this.#onChange(removed, null, []);
    } else if (!this.#removed.has(written)) {
      const [head, ...found] = await transact(this.#database, "readonly", (stores) =>
        Promise.all([
          result(stores.conversations.get(written)),
          ...nodes.map((id) => result(stores.nodes.get([written, id]))),
        ]),
      );
      if (!head || this.#removed.has(written)) return;
      this.#heads.set(written, head);
      this.#onChange(written, head, found.filter(Boolean).map(withoutConversation));
    }
  }

  /** Writes what other pages could not write before they were left. A page that came back has written more. */
  async #takeLeft() {
    for (const { name, entries } of leftBehind()) {
      try {
        await transact(this.#database, "readwrite", (stores) =>
          Promise.all(entries.map((entry) => putLeft(stores, entry))),
        );
        for (const { head, nodes } of entries)
          this.#channel.postMessage({ written: head.id, nodes: nodes.map((node) => node.id) });
        dropLeft(name);
      } catch (error) {
        this.problem = problemOf(error);
      }
    }
  }

  /** Moves what older pages kept in localStorage. A second tab that does the same at the same time adds nothing, and
   * nothing that was removed since comes back. */
  async #takeOver() {
    for (const { name, conversation } of legacyConversations()) {
      const { id, changed } = conversation;
      const nodes = Object.values(conversation.nodes);
      if (!this.#database) {
        this.#heads.set(id, headOf(conversation));
        this.#inMemory.set(id, conversation);
        continue;
      }
      try {
        await transact(this.#database, "readwrite", async (stores) => {
          const moved = await result(stores.moved.get(id));
          const kept = await result(stores.conversations.get(id));
          // An older page, open in another tab, may have written since.
          if (moved && (!kept || moved.changed >= changed)) return;
          if (!kept) stores.conversations.put({ ...headOf(conversation), isWritten: true });
          for (const node of nodes)
            if (!(await result(stores.nodes.getKey([id, node.id]))))
              stores.nodes.put({ ...node, conversation: id });
          stores.moved.put({ id, changed });
        });
        remember(name, null);
      } catch (error) {
        this.problem = problemOf(error); // it stays where it is
        this.#heads.set(id, headOf(conversation));
        this.#inMemory.set(id, conversation);
      }
    }
  }
}

async function putLeft(stores, { head, nodes, isNew }) {
  const kept = await result(stores.conversations.get(head.id));
  if (!kept && !isNew) return; // it was removed
  if (!kept || kept.changed < head.changed) stores.conversations.put({ ...kept, ...head, isWritten: true });
  for (const node of nodes) {
    const before = await result(stores.nodes.get([head.id, node.id]));
    if (!before || before.content.length <= node.content.length)
      stores.nodes.put({ ...node, conversation: head.id });
  }
}

const problemOf = (error) => (error.name === "QuotaExceededError" ? "storageFull" : "notWritten");

const isSame = (one, other) =>
  one === other || (typeof one === "object" && JSON.stringify(one) === JSON.stringify(other));

/** The fields of `now` that differ from those of `known`. */
const changesOf = (known, now) =>
  Object.fromEntries(Object.entries(now).filter(([name, value]) => !isSame(value, known[name])));

function headOf(conversation) {
  const head = { ...conversation };
  delete head.nodes;
  return head;
}

function whole(head, nodes) {
  const found = { ...head, nodes: {} };
  delete found.isWritten;
  for (const node of nodes.sort((one, other) => one.at - other.at))
    found.nodes[node.id] = withoutConversation(node);
  return found;
}

function withoutConversation({ conversation: _, ...node }) {
  return node;
}

// -- what is small stays in localStorage ----------------------------------------------------------

/** The id of the conversation that was open when the page was left. */
export const lastOpen = () => recall(OPEN);
export const rememberOpen = (id) => remember(OPEN, id);

/** A new conversation with the settings that were used last. */
export const freshConversation = (mode) => newConversation(mode, recallJson(SETTINGS, {}));
export const rememberSettings = (settings) => remember(SETTINGS, JSON.stringify(settings));
