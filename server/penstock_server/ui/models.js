// The model in the header: its name, or a choice where the server has several.

import { byId, element } from "./dom.js";
import { recall, remember } from "./storage.js";
import { count, words } from "./words.js";

const NAME = "penstock.model";

export class Models {
  #all = [];
  #chosen = null;

  /** onChoice(): the reader has chosen another model. */
  constructor(onChoice) {
    byId("model-choice").addEventListener("change", (event) => {
      remember(NAME, event.target.value);
      this.#choose();
      onChoice();
    });
  }

  /** The model that answers, as GET /v1/models has it; null: not known yet. */
  get chosen() {
    return this.#chosen;
  }

  /** Takes the models as GET /v1/models lists them. */
  show(all) {
    const models = all.filter(({ task }) => !task || task === "generate"); // the others write no text
    if (!models.length) return;
    // Names with the same root are one model; an adapter names its model as its parent.
    this.#all = models.filter(
      (model, index) => model.parent || models.findIndex(({ root }) => root === model.root) === index,
    );
    const isChoice = this.#all.length > 1;
    const choice = byId("model-choice");
    choice.hidden = !isChoice;
    if (isChoice) choice.replaceChildren(...this.#all.map(({ id }) => element("option", { value: id }, id)));
    this.#choose();
  }

  #choose() {
    const model = this.#all.find(({ id }) => id === recall(NAME)) ?? this.#all[0];
    this.#chosen = model;
    const tokens = model.max_model_len ? count(model.max_model_len, "tokens") : "";
    const isChoice = this.#all.length > 1;
    byId("model").replaceChildren(
      isChoice ? "" : element("b", {}, model.id),
      tokens && element("span", {}, isChoice ? tokens : words("contextOf", { tokens })),
    );
    if (isChoice) byId("model-choice").value = model.id;
    document.title = `${model.id} · Penstock`;
  }
}
