// The layers, each at the height of its home, as in a section through a power station: disk above, the
// compute device below. A layer that isn't resident hangs on a pipe, because it has to come down in every sweep.
// A marker shows the layer that is being computed.

import { element } from "./dom.js";
import { bytes, percent, seconds } from "./figures.js";
import { explained } from "./terms.js";
import { count, words } from "./words.js";

/** The shortest time in which a sweep is shown; a faster sweep could not be seen. */
const SHORTEST_SHOWN_S = 0.9;

const NAMES = { disk: "disk", host: "ram", device: "gpu" };
const PLACES = { disk: "onDisk", host: "inRam", device: "onGpu" };
const isStill = matchMedia("(prefers-reduced-motion: reduce)");

export class Strip {
  #place;
  #cells = [];
  #whole = []; // indices of cells that begin a layer; lower planes have a cell of their own
  #streamed = []; // indices of layers that come down in each sweep
  #marker = element("i", { class: "marker" });
  #caption;
  #sample = null;
  #shown = null;
  #arrived = []; // for each layer, the experts that had come when the strip was told last
  #frame = null;
  summary = "";

  constructor(place, caption) {
    this.#place = place;
    this.#caption = caption;
  }

  /** Shows, while the model loads, how many of the resident layers are loaded. */
  load(loaded, total) {
    if (this.#cells.length !== total || this.#place.dataset.state !== "loading") {
      this.#build(
        Array.from({ length: total }, () => ({ home: "host", is_resident: true })),
        ["host"],
        {},
      );
      this.#place.dataset.state = "loading";
    }
    this.#cells.forEach((cell, index) => cell.classList.toggle("absent", index >= loaded));
    this.#describe(
      words(total ? "loadingStripOf" : "loadingStrip", { loaded, layers: count(total, "layers") }),
    );
  }

  /** `plan` as GET /v1/plan has it. */
  plan(plan) {
    const homes = ["disk", "host", "device"].filter((home) =>
      plan.layers.some((layer) => layer.home === home),
    );
    const isShared = plan.kept_share !== null; // the processor computes beside the GPU, in every layer
    const sums = {};
    const number = (layers) => layers.filter((layer) => !layer.is_lower).length;
    const end = plan.num_encoder_layers;
    const cross = number(plan.layers.slice(end - plan.num_cross_layers, end));
    const parts = [count(number(plan.layers) - cross, "layers")];
    if (cross) parts.push(count(cross, "crossProjections"));
    for (const home of homes) {
      const there = plan.layers.filter((layer) => layer.home === home);
      const isPinned = home === "host" && plan.has_gpu;
      const found = isPinned ? words("pinnedLayers", { layers: there.length }) : there.length;
      sums[home] = `${found} · ${bytes(there.reduce((sum, layer) => sum + layer.num_bytes, 0))}`;
      if (!isShared) parts.push(words(PLACES[home], { number: there.length }));
    }
    if (isShared) parts.push(words("keptOnGpu", { share: percent(plan.kept_share) }));
    this.#build(plan.layers, homes, sums);
    this.#place.dataset.state = "ready";
    const streamed = isShared ? "sharedSummary" : "streamedSummary";
    this.summary = words(plan.streamed_bytes ? streamed : "residentSummary", {
      parts: parts.join(words("listComma")),
      bytes: bytes(plan.streamed_bytes),
    });
    if (plan.nodes.length > 0) this.summary = words("ofThisMachine", { summary: this.summary });
    this.#caption.dataset.longest = this.summary; // what is told of a sweep is shorter
    this.#describe(this.summary);
  }

  clear(sentence) {
    this.#stop();
    this.#place.dataset.state = "away";
    this.#describe(sentence);
  }

  /** Takes the newest state: the layer that is being computed (null: none), and the time of a sweep, if known. */
  sample(layer, stepS, isRunning) {
    const cell = this.#whole[layer] ?? null;
    this.#sample = { layer: cell, stepS, isRunning, at: performance.now() };
    if (!isRunning) this.#stop();
    else if (isStill.matches) this.#show(cell);
    else this.#frame ??= requestAnimationFrame(() => this.#move());
  }

  /** Shows how many of each layer's experts are in memory, and in which layers some have arrived since the last
   * time. `experts` as GET /v1/engine/stats has them; null: the model has none. */
  experts(experts) {
    if (!experts) return;
    for (const [layer, total] of experts.num_experts.entries()) {
      const cell = this.#cells[this.#whole[layer]];
      if (!cell || !total) continue;
      if (!cell.firstChild) cell.append(element("i", { class: "experts" }));
      cell.style.setProperty("--held", experts.in_slots[layer] / total);
      const arrived = experts.num_arrived[layer];
      cell.firstChild.classList.toggle("arriving", arrived > (this.#arrived[layer] ?? arrived));
      this.#arrived[layer] = arrived;
    }
  }

  /** Stops the movement while nobody looks. */
  rest() {
    this.#stop();
  }

  #build(layers, homes, sums) {
    this.#stop();
    this.#arrived = [];
    this.#place.style.setProperty("--layers", layers.length);
    this.#place.style.setProperty("--lanes", homes.length);
    this.#place.classList.toggle("dense", layers.length > 40);
    this.#cells = layers.map((layer, index) => {
      const cell = element("i", { class: `cell ${layer.home}${layer.is_resident ? "" : " streamed"}` });
      cell.style.gridColumn = index + 1;
      const lane = homes.indexOf(layer.home) + 1;
      cell.style.gridRow = `${lane} / ${layer.is_resident ? lane + 1 : -1}`;
      return cell;
    });
    this.#whole = layers.flatMap((layer, index) => (layer.is_lower ? [] : [index]));
    this.#streamed = layers.flatMap((layer, index) => (layer.is_resident ? [] : [index]));
    const lanes = homes.map((home) =>
      element(
        "p",
        { class: `lane ${home}` },
        element("b", {}, words(NAMES[home])),
        sums[home] && ` ${sums[home]}`,
      ),
    );
    this.#place.replaceChildren(
      element("div", { class: "lanes" }, lanes),
      element(
        "div",
        { class: "section" },
        element("div", { class: "cells" }, this.#cells),
        element("div", { class: "shaft" }, this.#marker),
      ),
    );
  }

  #move() {
    const { layer, stepS, at } = this.#sample;
    const total = this.#cells.length;
    const now = performance.now();
    let position;
    if (stepS && stepS < SHORTEST_SHOWN_S) position = ((now / 1000 / SHORTEST_SHOWN_S) % 1) * total;
    else position = Math.min((layer ?? total) + (stepS ? ((now - at) / 1000 / stepS) * total : 0), total);
    this.#show(position);
    this.#frame = requestAnimationFrame(() => this.#move());
  }

  #show(position) {
    const total = this.#cells.length;
    const { stepS } = this.#sample;
    this.#place.dataset.sweep = "on";
    this.#marker.style.insetInlineStart = `${(100 * Math.min(position ?? total, total)) / total}%`;
    const current = Math.min(Math.floor(position ?? total), total - 1);
    if (current === this.#shown) return;
    this.#shown = current;
    const next = this.#streamed.find((index) => index > current) ?? this.#streamed[0];
    this.#cells.forEach((cell, index) => {
      cell.classList.toggle("done", index < current);
      cell.classList.toggle("now", index === current);
      cell.classList.toggle("next", index === next && index !== current);
    });
    const slower = stepS && stepS < SHORTEST_SHOWN_S ? Math.round(SHORTEST_SHOWN_S / stepS) : 1;
    this.#tell(
      slower > 1
        ? words("shownSlower", { time: seconds(stepS), times: slower })
        : words("layerOf", {
            layer: this.#whole.filter((index) => index <= current).length,
            total: this.#whole.length,
          }),
    );
  }

  #stop() {
    if (this.#frame !== null) cancelAnimationFrame(this.#frame);
    this.#frame = this.#shown = null;
    delete this.#place.dataset.sweep;
    for (const cell of this.#cells) cell.classList.remove("done", "now", "next");
    this.#tell(this.#place.dataset.state === "ready" ? this.summary : "");
  }

  #describe(sentence) {
    this.#place.setAttribute("aria-label", sentence);
    this.#tell(sentence);
  }

  #tell(sentence) {
    this.#caption.firstElementChild.replaceChildren(...explained(sentence));
  }
}
