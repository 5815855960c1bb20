// The page: the open conversation, the running answers, and the actions of keys and buttons.

import { Attachments } from "./attachments.js";
import { Chat } from "./chat.js";
import { Completion } from "./completion.js";
import { isEmpty, titleOf } from "./conversation.js";
import { byId, icon } from "./dom.js";
import { Fill } from "./fill.js";
import { prepareFold } from "./fold.js";
import { askForKey, prepareKeyDialog } from "./key.js";
import { ConversationList } from "./list.js";
import { Machine } from "./machine.js";
import { Models } from "./models.js";
import { Panels } from "./panels.js";
import { settingsPanel } from "./sampling.js";
import { say } from "./spoken.js";
import { isStorageFull } from "./storage.js";
import * as store from "./store.js";
import { prepareTheme } from "./theme.js";
import { fillWords, words } from "./words.js";

const SAVE_EVERY_MS = 1000;
const VIEWS = { chat: Chat, completion: Completion, fill: Fill };
const SEND = { chat: "send", completion: "complete", fill: "fillIn" };
const KEYS = { completion: "ctrlEnterCompletes", fill: "ctrlEnterFills" };
const isTouched = matchMedia("(pointer: coarse)");

/** The page, with the methods that views and lists may call. */
class Page {
  stage = byId("stage");
  #conversation = store.lastConversation();
  #view = null;
  #running = new Map(); // conversation id -> {conversation, controller, reason, savedAt}
  #list = new ConversationList(this, byId("list"));
  #models = new Models(() => {
    this.#modelChanged();
    this.#machine.forget();
  });
  #attachments = new Attachments((sentence) => this.warn(sentence));
  #pending = false;
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
    store.onChangeElsewhere((id) => this.#changedElsewhere(id));
    addEventListener("pagehide", () =>
      this.#running.forEach(({ conversation }) => store.saveConversation(conversation)),
    );
    this.#show(this.#conversation);
    this.#machine.watch();
    if (!isTouched.matches) byId("prompt").focus();
  }

  modelName() {
    return this.#models.chosen?.id ?? null;
  }

  // -- running answers ------------------------------------------------------------------------

  isRunning(conversation) {
    return this.#running.has(conversation.id);
  }

  /** A signal by which the answer is stopped; null if this conversation has an answer under way already. */
  begin(conversation) {
    if (this.isRunning(conversation)) return null;
    const controller = new AbortController();
    this.#running.set(conversation.id, { conversation, controller, reason: null, savedAt: 0 });
    this.warn(null);
    this.save(conversation);
    this.#machine.wake();
    return controller.signal;
  }

  end(conversation) {
    const wasRunning = this.#running.delete(conversation.id);
    if (wasRunning) this.save(conversation);
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
      store.saveConversation(conversation);
    }
    if (conversation !== this.#conversation || this.#pending) return;
    this.#pending = true;
    requestAnimationFrame(() => {
      const begun = performance.now();
      if (this.isRunning(this.#conversation)) this.#view.grow();
      // Laying out a long answer takes long: the page then waits for as long, so that other work gets its turn.
      setTimeout(() => (this.#pending = false), performance.now() - begun);
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

  save(conversation) {
    if (!isEmpty(conversation)) store.saveConversation(conversation);
    if (isStorageFull()) this.warn(words("storageFull"));
    this.#list.render();
    byId("title").textContent = titleOf(this.#conversation);
  }

  // -- conversations --------------------------------------------------------------------------

  openId() {
    return this.#conversation.id;
  }

  /** The conversation's object in use, if the conversation is open or has an answer under way. */
  live(id) {
    return this.#running.get(id)?.conversation ?? (this.#conversation.id === id ? this.#conversation : null);
  }

  open(id) {
    this.#show(this.live(id) ?? store.loadConversation(id) ?? store.freshConversation("chat"));
    this.#panels.uncover();
    byId("prompt").focus();
  }

  openNew(mode = this.#conversation.mode) {
    this.#show(store.freshConversation(mode));
    this.#panels.uncover();
    (byId("paper") ?? byId("prompt")).focus();
  }

  renamed(conversation) {
    if (conversation.id === this.#conversation.id) this.#conversation.title = conversation.title;
    byId("title").textContent = titleOf(this.#conversation);
    this.#list.render();
  }

  deleted(id) {
    this.#running.delete(id);
    if (id === this.#conversation.id) this.#show(store.freshConversation(this.#conversation.mode));
    else this.#list.render();
  }

  #changedElsewhere(id) {
    const isMine = (id === null || id === this.#conversation.id) && !this.isRunning(this.#conversation);
    const now = isMine ? store.loadConversation(this.#conversation.id) : null;
    if (now) this.#show(now);
    else this.#list.render();
  }

  #show(conversation) {
    this.#conversation = conversation;
    this.#view = new VIEWS[conversation.mode](this, conversation);
    store.rememberOpen(conversation.id);
    this.warn(this.#running.get(conversation.id)?.reason ?? null);
    this.#list.render();
    this.#showSettings();
    this.rerender(conversation);
  }

  rerender(conversation) {
    if (conversation !== this.#conversation) return;
    const focused = document.activeElement;
    const hadFocus = this.stage.contains(focused);
    const isChat = conversation.mode === "chat";
    const isRunning = this.isRunning(conversation);
    this.#view.render();
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
    if (hadFocus) (byId("paper") ?? byId("prompt")).focus();
    // If the pressed button disappears, the focus must go elsewhere.
    if (byId("composer").contains(focused) && focused.hidden) byId(isRunning ? "stop" : "send").focus();
  }

  /** Keeps the end of the text in sight, unless the reader has scrolled away from the end. */
  follow(isForced) {
    const stage = this.stage;
    if (isForced || stage.scrollHeight - stage.scrollTop - stage.clientHeight < 120)
      stage.scrollTop = stage.scrollHeight;
  }

  // -- settings and the machine ---------------------------------------------------------------

  #showSettings() {
    const change = (settings, isAnew) => {
      this.#conversation.settings = settings;
      store.rememberSettings(settings);
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
    this.rerender(this.#conversation);
  }

  // -- buttons and keys -----------------------------------------------------------------------

  submit() {
    if (this.isRunning(this.#conversation)) return;
    if (this.#conversation.mode !== "chat") return void this.#view.submit();
    const prompt = byId("prompt");
    const text = prompt.value;
    if (!text.trim() && this.#attachments.isEmpty) return;
    prompt.value = "";
    this.#fitPrompt();
    this.#view.submit(this.#attachments.takeInto(text));
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
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    byId("modes").addEventListener("change", (event) => this.openNew(event.target.value));
  }

  #prepareKeys() {
    const prompt = byId("prompt");
    prompt.addEventListener("input", () => this.#fitPrompt());
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouched.matches) return;
      event.preventDefault();
      this.submit();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
      if (this.#panels.isOver) this.#panels.uncover();
      else if (this.isRunning(this.#conversation)) {
        this.stopRunning();
        say(words("stopped"));
      }
    });
  }

  /** Makes the field as high as its text, up to the limit of the style. */
  #fitPrompt() {
    const prompt = byId("prompt");
    prompt.style.blockSize = "auto";
    prompt.style.blockSize = `${prompt.scrollHeight + 2}px`;
  }
}

new Page().start();
