// The page: the open conversation, the running answers, and the actions of keys and buttons.

import { Chat } from "./chat.js";
import { Completion } from "./completion.js";
import { Composer, isTouched } from "./composer.js";
import { canLeaveOut } from "./context.js";
import { isAbove, isEmpty, mergeNodes, siblingsOf, titleOf } from "./conversation.js";
import { byId, icon } from "./dom.js";
import { Fill } from "./fill.js";
import { prepareFold } from "./fold.js";
import { Fullness } from "./fullness.js";
import { askForKey, prepareKeyDialog } from "./key.js";
import { isConfirming } from "./keys.js";
import { ConversationList } from "./list.js";
import { onDrawn } from "./math.js";
import { Machine } from "./machine.js";
import { Models } from "./models.js";
import { Panels } from "./panels.js";
import { settingsPanel } from "./sampling.js";
import { say } from "./spoken.js";
import { freshConversation, lastOpen, rememberOpen, rememberSettings, Store } from "./store.js";
import { prepareTheme } from "./theme.js";
import { fillWords, words } from "./words.js";

const SAVE_EVERY_MS = 1000;
const VIEWS = { chat: Chat, completion: Completion, fill: Fill };
const SEND = { chat: "send", completion: "complete", fill: "fillIn" };
const KEYS = { completion: "ctrlEnterCompletes", fill: "ctrlEnterFills" };

/** The page, with the methods that views and lists may call. */
class Page {
  stage = byId("stage");
  store = new Store(
    (id, head, nodes) => this.#changedElsewhere(id, head, nodes),
    () => this.#written(),
  );
  #conversation = freshConversation("chat");
  #view = null;
  #running = new Map(); // conversation id -> {conversation, node, controller, reason, savedAt}
  #list = new ConversationList(this, byId("list"));
  #models = new Models(() => {
    this.#modelChanged();
    this.#machine.forget();
  });
  #composer = new Composer(
    () => this.submit(),
    (draft) => this.#fullness.type(draft),
    (sentence) => this.warn(sentence),
  );
  #fullness = new Fullness(() => this.#view.leaveOut());
  #opening; // the promise of the store
  #asked = 0; // conversations that the reader asked to see
  #pending = false;
  #hasMore = false;
  #isAtEnd = true; // the reader has not scrolled away from the end
  #panels = new Panels();
  #machine = new Machine(
    (state, sentence) => this.#showState(state, sentence),
    (models) => this.#showModels(models),
    () => this.modelName(),
  );

  start() {
    fillWords();
    prepareTheme();
    prepareKeyDialog();
    prepareFold();
    this.#prepareButtons();
    this.#prepareKeys();
    addEventListener("pagehide", () => {
      this.#running.forEach(({ conversation, node }) => this.#keep(conversation, [node]));
      this.store.leave();
    });
    this.stage.addEventListener("scroll", ({ target }) => {
      this.#isAtEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 120;
    });
    onDrawn(() => this.follow(false));
    this.#opening = this.#open();
    this.#machine.watch();
    if (!isTouched.matches) byId("prompt").focus();
  }

  async #open() {
    await this.store.open();
    const last = await this.store.load(lastOpen());
    this.#list.render();
    if (this.#asked === 0) this.#show(last ?? this.#conversation);
    this.#written();
  }

  modelName() {
    return this.#models.chosen?.id ?? null;
  }

  // -- running answers ------------------------------------------------------------------------

  isRunning(conversation) {
    return this.#running.has(conversation.id);
  }

  /** The tokens of a context; undefined: not known. */
  contextTokens() {
    return this.#models.chosen?.max_model_len;
  }

  /** Writes `nodes`, the last of which is about to grow. Returns a signal by which the answer is stopped; null if this
   * conversation has an answer under way already. */
  begin(conversation, nodes = []) {
    if (this.isRunning(conversation)) return null;
    const controller = new AbortController();
    const node = nodes.at(-1);
    this.#running.set(conversation.id, { conversation, node, controller, reason: null, savedAt: 0 });
    this.warn(null);
    this.save(conversation, nodes);
    this.#machine.wake();
    return controller.signal;
  }

  end(conversation) {
    const run = this.#running.get(conversation.id);
    this.#running.delete(conversation.id);
    if (run) this.save(conversation, [run.node].filter(Boolean));
    this.rerender(conversation);
    this.#machine.wake();
  }

  stopRunning(id = this.#conversation.id) {
    this.#running.get(id)?.controller.abort();
  }

  /** Notes that an answer has new text: it is shown with the next frame, and saved from time to time. */
  grow(conversation) {
    const run = this.#running.get(conversation.id);
    if (run && performance.now() - run.savedAt > SAVE_EVERY_MS) {
      run.savedAt = performance.now();
      this.#keep(conversation, [run.node]);
    }
    if (conversation !== this.#conversation) return;
    this.#hasMore = true;
    if (!this.#pending) this.#draw();
  }

  #draw() {
    this.#pending = true;
    requestAnimationFrame(() => {
      const begun = performance.now();
      this.#hasMore = false;
      if (this.isRunning(this.#conversation)) this.#view.grow();
      // Laying out a long answer takes long: the page then waits for as long, so that other work gets its turn.
      setTimeout(() => {
        this.#pending = false;
        if (this.#hasMore) this.#draw(); // what came meanwhile may be the last for a while
      }, performance.now() - begun);
    });
  }

  /** Shows the reason for which an answer waits; null: it waits no more. */
  notify(conversation, reason) {
    const run = this.#running.get(conversation.id);
    const isMore = Boolean(run?.reason);
    if (run) run.reason = reason;
    if (conversation === this.#conversation) this.warn(reason, isMore);
  }

  /** `isQuiet`: screen readers don't read the words, for instance if only the remaining seconds have changed. */
  warn(sentence, isQuiet = false) {
    const notice = byId("notice");
    notice.ariaLive = isQuiet ? "off" : "assertive";
    notice.hidden = !sentence;
    if (notice.textContent !== (sentence ?? "")) notice.textContent = sentence ?? "";
  }

  /** Writes what has changed: the conversation's own fields, and `nodes`. */
  save(conversation, nodes = []) {
    this.#keep(conversation, nodes);
    this.#list.touch(conversation.id);
    if (conversation === this.#conversation) byId("title").textContent = titleOf(conversation);
  }

  #keep(conversation, nodes) {
    if (!isEmpty(conversation)) this.store.save(conversation, nodes.filter(Boolean));
  }

  #written() {
    if (this.store.problem) this.warn(words(this.store.problem));
  }

  // -- conversations --------------------------------------------------------------------------

  openId() {
    return this.#conversation.id;
  }

  /** The conversation's object in use, if the conversation is open or has an answer under way. */
  live(id) {
    return this.#running.get(id)?.conversation ?? (this.#conversation.id === id ? this.#conversation : null);
  }

  async open(id) {
    const asked = (this.#asked += 1);
    rememberOpen(id); // the page may be left before it is read
    const found = this.live(id) ?? (await this.store.load(id));
    if (asked !== this.#asked) return;
    this.#show(found ?? freshConversation("chat"));
    this.#panels.uncover();
    byId("prompt").focus();
  }

  openNew(mode = this.#conversation.mode) {
    this.#asked += 1;
    this.#show(freshConversation(mode));
    this.#panels.uncover();
    (byId("paper") ?? byId("prompt")).focus();
  }

  async rename(id, title) {
    const conversation = this.live(id) ?? (await this.store.load(id));
    if (!conversation) return;
    conversation.title = title;
    this.save(conversation);
  }

  /** Removes a conversation. `isElsewhere`: another tab has removed it. */
  removed(id, isElsewhere = false) {
    this.stopRunning(id);
    this.#running.delete(id);
    if (id === this.#conversation.id) {
      this.#show(freshConversation(this.#conversation.mode));
      if (isElsewhere) this.warn(words("removedElsewhere"));
    }
    this.#list.drop(id);
  }

  /** Another tab has written `nodes` and the conversation's own fields, `head`; null: it has removed all. */
  #changedElsewhere(id, head, nodes) {
    if (head === null) return this.removed(id, true);
    this.#list.touch(id);
    const conversation = this.live(id);
    if (!conversation) return;
    const run = this.#running.get(id);
    const theirs = nodes.filter((node) => node.id !== run?.node?.id);
    mergeNodes(conversation, theirs);
    const { leaf, ...fields } = head;
    const isChanged = JSON.stringify(head.settings) !== JSON.stringify(conversation.settings);
    const hasText = run && conversation.mode !== "chat"; // what is written here is newer
    Object.assign(conversation, hasText ? { title: head.title, settings: head.settings } : fields);
    delete conversation.isWritten;
    // An answer that goes on from what is shown here is shown when it is complete.
    const end = conversation.nodes[leaf];
    const isDone = end && (end.role === "user" || end.figures || end.error);
    if (!run && isDone && isAbove(conversation, conversation.leaf, leaf)) conversation.leaf = leaf;
    if (conversation !== this.#conversation) return;
    if (isChanged) this.#showSettings();
    this.rerender(
      conversation,
      theirs.flatMap((node) => siblingsOf(conversation, conversation.nodes[node.id])),
    );
  }

  #show(conversation) {
    this.#view?.leave();
    this.#conversation = conversation;
    this.#view = new VIEWS[conversation.mode](this, conversation);
    rememberOpen(conversation.id);
    this.warn(this.#running.get(conversation.id)?.reason ?? null);
    this.#list.mark();
    this.#showSettings();
    this.#view.render();
    this.#showControls();
  }

  /** Shows what has changed in a conversation, if it is open: messages at its end, `nodes`, whether an answer is
   * under way. */
  rerender(conversation, nodes = []) {
    if (conversation !== this.#conversation) return;
    const focused = document.activeElement;
    const hadFocus = this.stage.contains(focused);
    this.#view.update(nodes);
    const isLost = hadFocus && (!focused.isConnected || focused.disabled);
    this.#showControls();
    if (isLost) (byId("paper") ?? byId("prompt")).focus();
    // If the pressed button disappears, the focus must go elsewhere.
    if (byId("composer").contains(focused) && focused.hidden)
      byId(this.isRunning(conversation) ? "stop" : "send").focus();
  }

  #showControls() {
    const conversation = this.#conversation;
    const isChat = conversation.mode === "chat";
    const isRunning = this.isRunning(conversation);
    byId("title").textContent = titleOf(conversation);
    document.querySelector(`[name=mode][value=${conversation.mode}]`).checked = true;
    byId("composer").dataset.mode = conversation.mode;
    byId("prompt").hidden = byId("prompt-label").hidden = byId("attach").hidden = !isChat;
    document.querySelector(".skip").href = isChat ? "#prompt" : "#paper";
    byId("fill-mode").hidden = !this.#models.chosen?.max_blanks && conversation.mode !== "fill";
    byId("send").textContent = words(SEND[conversation.mode]);
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
    byId("undo").hidden = isChat || !this.#view.canUndo;
    const keys = isChat ? (isTouched.matches ? [] : ["enterSends", "newLine"]) : [KEYS[conversation.mode]];
    byId("keys").textContent = [...keys, isRunning && "escStops"]
      .filter(Boolean)
      .map((key) => words(key))
      .join(" · ");
    const canLeave = () => !isRunning && canLeaveOut(conversation);
    this.#fullness.show(isChat ? conversation : null, this.contextTokens(), canLeave);
  }

  /** Keeps the end of the text in sight, unless the reader has scrolled away from the end. */
  follow(isForced) {
    this.#isAtEnd ||= isForced;
    if (this.#isAtEnd) this.stage.scrollTop = this.stage.scrollHeight;
  }

  // -- settings and the machine ---------------------------------------------------------------

  #showSettings() {
    const change = (settings, isAnew) => {
      this.#conversation.settings = settings;
      rememberSettings(settings);
      this.save(this.#conversation);
      if (isAnew) this.#showSettings();
    };
    const isChat = this.#conversation.mode === "chat";
    byId("settings").replaceChildren(
      ...settingsPanel(this.#conversation.settings, isChat, change, () =>
        this.#panels.toggle("settings", false),
      ),
    );
  }

  #showState(state, sentence) {
    const place = byId("state");
    place.dataset.state = state;
    if (place.textContent !== sentence) place.textContent = sentence;
  }

  #showModels(models) {
    const before = this.modelName();
    this.#models.show(models);
    if (this.modelName() !== before) this.#modelChanged();
  }

  #modelChanged() {
    if (isEmpty(this.#conversation)) this.#view.render(); // it names the model
    this.#showControls();
  }

  // -- buttons and keys -----------------------------------------------------------------------

  async submit() {
    await this.#opening; // a reader may be faster than the store
    if (this.isRunning(this.#conversation)) return;
    if (this.#conversation.mode !== "chat") return void this.#view.submit();
    const text = this.#composer.take();
    if (text) this.#view.submit(text);
  }

  #prepareButtons() {
    byId("key-button").append(icon("key"));
    byId("ledger-toggle").addEventListener("click", () => {
      const isShown = (byId("ledger").hidden = !byId("ledger").hidden) === false;
      byId("ledger-toggle").setAttribute("aria-expanded", String(isShown));
    });
    byId("key-button").addEventListener("click", async () => {
      await askForKey(false);
      this.#machine.wake();
    });
    byId("stop").addEventListener("click", () => this.stopRunning());
    byId("undo").addEventListener("click", () => this.#view.undo());
    byId("modes").addEventListener("change", (event) => this.openNew(event.target.value));
  }

  #prepareKeys() {
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.defaultPrevented || isConfirming(event)) return;
      if (document.querySelector("dialog[open], :popover-open")) return; // the browser closes it
      const isRunning = this.isRunning(this.#conversation);
      if (this.#panels.escape(isRunning) || !isRunning) return;
      this.stopRunning();
      say(words("stopped"));
    });
  }
}

new Page().start();
