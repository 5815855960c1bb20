// Watches the engine: whether it can be reached, how much is loaded, and what it does. The page asks four times
// a second while something is computed, less and less often while nothing is, and not at all while it is hidden.

import { apiKey, get, health } from "./api.js";
import { byId } from "./dom.js";
import { rate } from "./figures.js";
import { whenAllowed } from "./key.js";
import { ledger } from "./ledger.js";
import { missingNodes } from "./nodes.js";
import { Readings } from "./readings.js";
import { Strip } from "./strip.js";
import { words } from "./words.js";

const BUSY_MS = 250;
const LOADING_MS = 500;
const IDLE_MS = 4000;
const AWAY_MS = 10000;

export class Machine {
  #strip = new Strip(byId("strip"), byId("caption"));
  #readings = new Readings(byId("readings"));
  #onState;
  #onModels;
  #chosen;
  #steps = 0;
  #delay = BUSY_MS;
  #wake = null;
  #isKnown = false;
  #refusedKey = null; // the key in use when the reader cancelled the dialog

  /**
   * onState(name, words) comes with each change, onModels([{id, max_model_len}]) once the server is ready.
   * chosen(): the name of the model to watch; null: not known yet.
   */
  constructor(onState, onModels, chosen) {
    this.#onState = onState;
    this.#onModels = onModels;
    this.#chosen = chosen;
  }

  /** Never returns. */
  async watch() {
    document.addEventListener("visibilitychange", () => this.wake());
    for (;;) {
      if (document.hidden) this.#strip.rest();
      else await this.#look();
      await this.#sleep(document.hidden ? Infinity : this.#delay);
    }
  }

  /** Another model was chosen. */
  forget() {
    this.#isKnown = false;
    this.wake();
  }

  /** Asks at once, because something begins. */
  wake() {
    this.#delay = BUSY_MS;
    this.#wake?.();
  }

  #sleep(ms) {
    return new Promise((resolve) => {
      const timer = ms === Infinity ? null : setTimeout(resolve, ms);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  async #look() {
    if (this.#refusedKey === apiKey()) return;
    this.#refusedKey = null;
    try {
      if (!this.#isKnown && !(await this.#learn())) return;
      this.#show(await whenAllowed(() => this.#ask("v1/engine/stats")));
    } catch (error) {
      this.#lose(error);
    }
  }

  #ask(path) {
    const name = this.#chosen();
    return get(name === null ? path : `${path}?model=${encodeURIComponent(name)}`);
  }

  /** Finds out which model is served; false while the server can't tell. */
  async #learn() {
    const now = await health();
    if (now.status === "loading") {
      this.#strip.load(now.loaded_layers, now.total_layers);
      this.#onState(
        "loading",
        words(now.total_layers ? "loadingLayers" : "loading", {
          loaded: now.loaded_layers,
          total: now.total_layers,
        }),
      );
      this.#delay = LOADING_MS;
      return false;
    }
    if (!["ok", "waiting", "failing", "stuck"].includes(now.status)) {
      throw new Error(words("engineIs", { state: now.status }));
    }
    const models = await whenAllowed(() => get("v1/models"));
    this.#onModels(models.data); // a choice, also while none of several models is loaded
    const plan = await this.#ask("v1/plan");
    const stats = await this.#ask("v1/engine/stats");
    this.#readings.plan(plan, stats);
    this.#strip.plan(plan);
    byId("ledger-toggle").hidden = false;
    byId("ledger").replaceChildren(...ledger(plan));
    this.#isKnown = true;
    return true;
  }

  #show(stats) {
    const isRunning = stats.current_layer !== null || stats.num_running > 0;
    const hasMoved = stats.num_steps !== this.#steps;
    this.#isKnown = stats.num_steps >= this.#steps; // fewer steps: another process, maybe another model
    this.#steps = stats.num_steps;
    this.#strip.sample(stats.current_layer, stats.last_step?.duration_s, isRunning);
    this.#strip.experts(stats.experts);
    const tokensPerS = this.#readings.show(stats, isRunning || hasMoved);
    byId("machine-rate").textContent = tokensPerS ? words("tokensPerS", { rate: rate(tokensPerS) }) : "";
    const missing = missingNodes(stats.nodes);
    if (missing) this.#onState("away", words("waitsForNode", { ranks: missing }));
    else this.#onState(isRunning ? "working" : "ready", words(isRunning ? "working" : "ready"));
    this.#delay = isRunning || hasMoved ? BUSY_MS : Math.min(IDLE_MS, 1.5 * this.#delay);
  }

  #lose(error) {
    this.#isKnown = false;
    const isUnloaded = error.code === "model_not_loaded";
    const reason = { 0: "cannotBeReached", 401: "needsKey" }[error.status] ?? "notReady";
    this.#strip.clear(words(error.status === 401 ? "noKeyNoView" : "nothingKnown"));
    this.#readings.clear();
    byId("machine-rate").textContent = "";
    byId("ledger").hidden = byId("ledger-toggle").hidden = true;
    byId("ledger-toggle").setAttribute("aria-expanded", "false");
    if (isUnloaded) this.#onState("ready", words("notLoaded"));
    else this.#onState(error.status === 401 ? "locked" : "away", words(reason));
    // A cancelled dialog does not come back by itself.
    if (error.status === 401) this.#refusedKey = apiKey();
    this.#delay = error.status === 401 ? Infinity : Math.min(AWAY_MS, Math.max(1000, 1.5 * this.#delay));
  }
}
