// The instruments below the strip: rates over the last seconds, the last step beside its prediction, links, keys
// and values, the queue.

import { byteRate, bytes, percent, rate, seconds } from "./figures.js";
import { nodeReadings } from "./nodes.js";
import { HISTORY, reading } from "./reading.js";
import { count, words } from "./words.js";

/** The seconds, and the least number of steps, over which rates are taken. */
const WINDOW_S = 3;
const WINDOW_STEPS = 3;
/** The shortest step that is compared with its floor: in a shorter one, what surrounds the step counts as much. */
const SHORTEST_COMPARED_S = 0.01;

/** The link over which experts come from the disk. */
const EXPERTS = "disk, experts";

/** The difference between two answers of GET /v1/engine/stats. */
class Window {
  #samples = [];

  add(stats) {
    const last = this.#samples.at(-1);
    // If the server was restarted, its counters begin at 0.
    if (last && (stats.num_steps < last.num_steps || stats.time_s < last.time_s)) this.#samples = [];
    this.#samples.push(stats);
    while (this.#samples.length > 2 && this.#isWideWithout(this.#samples[1], stats)) this.#samples.shift();
  }

  #isWideWithout(first, last) {
    return (
      last.time_s - first.time_s >= WINDOW_S &&
      (last.num_steps - first.num_steps >= WINDOW_STEPS || last.time_s - first.time_s > 60)
    );
  }

  /** Tokens per second of computing; 0 if no step has ended. */
  get tokensPerS() {
    const steps = this.#change((stats) => stats.step_seconds);
    return steps > 0 ? this.#change((stats) => stats.generated_tokens) / steps : 0;
  }

  linkRate(name) {
    const elapsed = this.#change((stats) => stats.time_s);
    return elapsed > 0 ? this.#change((stats) => stats.links[name]?.num_bytes ?? 0) / elapsed : 0;
  }

  /** The share of the experts asked for that were in memory; null if none was asked for. */
  get hitRate() {
    const asked = this.#change((stats) => stats.expert_queries);
    return asked > 0 ? this.#change((stats) => stats.expert_hits) / asked : null;
  }

  get expertBytesPerToken() {
    const tokens = this.#change((stats) => stats.step_tokens);
    return tokens > 0 ? this.#change((stats) => stats.links[EXPERTS]?.num_bytes ?? 0) / tokens : 0;
  }

  /** {share, gained}: the share of guesses that were right, and tokens that a sequence gained in a step with
   * guesses; null if nothing was guessed. */
  get guesses() {
    const guessed = this.#change((stats) => stats.draft_tokens);
    if (guessed <= 0) return null;
    const right = this.#change((stats) => stats.accepted_tokens);
    return { share: right / guessed, gained: 1 + right / this.#change((stats) => stats.draft_chains) };
  }

  #change(read) {
    return this.#samples.length > 1 ? read(this.#samples.at(-1)) - read(this.#samples[0]) : 0;
  }
}

/** What came from a tier of keys and values in place of being computed. */
function showKept(reading, tier) {
  const { num_tokens, saved_s } = tier.reads;
  reading.set(
    num_tokens.toLocaleString("en"),
    words(saved_s ? "keptSaved" : "keptRemark", { time: seconds(saved_s), bytes: bytes(tier.num_bytes) }),
  );
}

export class Readings {
  #place;
  #plan;
  #window = new Window();
  #history = Array(HISTORY).fill(0);
  #shown = {};
  #nodes = null;

  constructor(place) {
    this.#place = place;
  }

  /** Begins anew with the plan as GET /v1/plan has it, and the first answer of GET /v1/engine/stats. */
  plan(plan, stats) {
    this.#plan = plan;
    this.#window = new Window();
    this.#shown = {
      tokens: reading(words("tokensPerSTitle"), "explainRate", "spark"),
      step: reading(words("step"), "explainStep", "bar"),
      ...Object.fromEntries(Object.keys(stats.links).map((name) => [name, reading(linkTitle(name), "explainLink", "bar")])),
      ...(plan.num_expert_slots && { experts: reading(words("expertsTitle"), "explainExperts", "bar") }),
      ...(plan.drafting.length > 0 && { guesses: reading(words("guessesTitle"), "explainGuesses", "bar") }),
      kv: reading(words("kvCache"), "explainKv", "bar"),
      ...(stats.kv_host && { keptInRam: reading(words("keptInRamTitle"), "explainKeptInRam") }),
      ...(stats.kv_disk && { kept: reading(words("keptTitle"), "explainKept") }),
      queue: reading(words("sequences"), "explainSequences"),
    };
    this.#nodes = nodeReadings(stats.nodes);
    this.#reserve(stats);
    const views = Object.values(this.#shown).map((each) => each.view);
    this.#place.replaceChildren(...views, ...this.#nodes.views);
  }

  /** Keeps room for what each instrument will say while answers are computed. */
  #reserve(stats) {
    const [time, number] = [seconds(99.9), (999_999).toLocaleString("en")];
    const shown = this.#shown;
    shown.tokens.reserve(words("sinceStart", { tokens: (99_999_999).toLocaleString("en") }));
    shown.step.reserve(words("predictedFloor", { time, percent: percent(1) }));
    for (const name of Object.keys(stats.links))
      shown[name].reserve(words("ofMeasured", { rate: byteRate(this.#ableRate(name) || 1e9) }));
    shown.experts?.reserve(words("expertsRemark", { bytes: bytes(999 << 20), layer: 99, expert: 999 }));
    shown.guesses?.reserve(words("guessesRemark", { gained: "9.9", accepted: number, rejected: number }));
    const blocks = count(stats.kv_blocks_total, "blocks");
    shown.kv.reserve(words("blocksOf", { used: stats.kv_blocks_total.toLocaleString("en"), blocks }));
    for (const tier of [shown.keptInRam, shown.kept])
      tier?.reserve(words("keptSaved", { time, bytes: bytes(999 << 20) }));
    shown.queue.reserve(words("runningWaiting", { waiting: 99 }));
  }

  clear() {
    this.#place.replaceChildren();
  }

  /** Returns the tokens per second. */
  show(stats, isRunning) {
    this.#window.add(stats);
    const tokens = isRunning ? this.#window.tokensPerS : 0;
    this.#history = [...this.#history.slice(1), tokens];
    this.#shown.tokens.set(
      tokens ? rate(tokens) : "0",
      words("sinceStart", { tokens: stats.generated_tokens.toLocaleString("en") }),
    );
    this.#shown.tokens.draw(this.#history);
    this.#showStep(stats.last_step);
    for (const name of Object.keys(stats.links))
      this.#showLink(name, isRunning ? this.#window.linkRate(name) : 0);
    if (stats.experts) this.#showExperts(stats);
    if (this.#shown.guesses) this.#showGuesses(stats);
    const used = stats.kv_blocks_total ? stats.kv_blocks_used / stats.kv_blocks_total : 0;
    this.#shown.kv.set(
      percent(used),
      words("blocksOf", {
        used: stats.kv_blocks_used.toLocaleString("en"),
        blocks: count(stats.kv_blocks_total, "blocks"),
      }),
    );
    this.#shown.kv.fill(used);
    if (stats.kv_host && this.#shown.keptInRam) showKept(this.#shown.keptInRam, stats.kv_host);
    if (stats.kv_disk && this.#shown.kept) showKept(this.#shown.kept, stats.kv_disk);
    this.#nodes.show(stats.nodes);
    this.#shown.queue.set(`${stats.num_running}`, words("runningWaiting", { waiting: stats.num_waiting }));
    return tokens;
  }

  #showStep(step) {
    const expected = this.#plan.step.seconds;
    if (!step) {
      const expectation = words(expected ? "predicted" : "noneYet", { time: seconds(expected) });
      return this.#shown.step.set("–", expectation);
    }
    const time = seconds(step.predicted_s);
    let sentence = words("stepOf", { tokens: count(step.num_tokens, "tokens") });
    if (step.predicted_s && step.duration_s < SHORTEST_COMPARED_S) sentence = words("predicted", { time });
    else if (step.predicted_s)
      sentence = words("predictedFloor", { time, percent: percent(step.floor_s / step.duration_s) });
    this.#shown.step.set(seconds(step.duration_s), sentence);
    const longest = Math.max(step.duration_s, step.predicted_s);
    this.#shown.step.fill(step.duration_s / longest, step.predicted_s / longest);
  }

  #showGuesses(stats) {
    const now = this.#window.guesses;
    const total = {
      accepted: stats.accepted_tokens.toLocaleString("en"),
      rejected: (stats.draft_tokens - stats.accepted_tokens).toLocaleString("en"),
    };
    this.#shown.guesses.set(
      now ? percent(now.share) : "–",
      now
        ? words("guessesRemark", { gained: now.gained.toFixed(1), ...total })
        : words(stats.draft_tokens ? "guesses" : "noneYet", total),
    );
    this.#shown.guesses.fill(now?.share ?? 0);
  }

  #showExperts(stats) {
    const hits = this.#window.hitRate ?? (stats.expert_queries ? stats.expert_hits / stats.expert_queries : 0);
    const hottest = stats.experts.hot[0];
    this.#shown.experts.set(
      percent(hits),
      hottest
        ? words("expertsRemark", {
            bytes: bytes(this.#window.expertBytesPerToken),
            layer: hottest.layer + 1,
            expert: hottest.expert,
          })
        : words("noneYet"),
    );
    this.#shown.experts.fill(hits);
  }

  #showLink(name, now) {
    const able = this.#ableRate(name);
    const shown = this.#shown[name];
    if (!this.#streamedBytes(name)) {
      shown.fill(0);
      return shown.set(words("idle"), words("allResident"));
    }
    shown.set(now ? byteRate(now) : "0", words(able ? "ofMeasured" : "noRate", { rate: byteRate(able) }));
    shown.fill(able ? Math.min(1, now / able) : null);
  }

  /** The layers that each step sweeps; an encoder's come before them. */
  get #stepLayers() {
    return this.#plan.layers.slice(this.#plan.num_encoder_layers);
  }

  get #layerBytes() {
    return this.#plan.layers.reduce((total, layer) => total + layer.num_bytes, 0);
  }

  /** The measured rate of the link, computed from the plan's prediction; 0 if unknown. */
  #ableRate(name) {
    if (name === EXPERTS) return this.#ableRate("disk");
    const busyS = this.#plan.step.terms[name];
    if (!busyS) return 0;
    const planned = name === "disk" ? this.#streamedBytes("disk") + this.#streamedBytes(EXPERTS) : null;
    return (planned ?? this.#streamedBytes(name)) / busyS;
  }

  /** Bytes that a step of one token moves over a link, by the plan. */
  #streamedBytes(name) {
    const { step, expert_slot_bytes, streamed_bytes } = this.#plan;
    if (name === EXPERTS) return step.experts.num_from_disk * expert_slot_bytes;
    if (name !== "disk") return streamed_bytes - step.processor_share * this.#layerBytes;
    const onDisk = this.#stepLayers.filter((layer) => layer.home === "disk");
    return onDisk.reduce((total, layer) => total + layer.num_bytes, 0);
  }
}

const LINKS = { disk: "fromDisk", [EXPERTS]: "expertsFromDisk", "host to device": "toGpu" };
const linkTitle = (name) => (LINKS[name] ? words(LINKS[name]) : name);
