// The messages of a chat on the stage. They stand in chunks. What is far from the window has plain text (so that the
// browser finds it) and no layout; a chunk is made whole when it comes near. Work for a new message does not depend
// on how many there are.

import { element } from "./dom.js";

/** The messages of a chunk. */
const CHUNK = 16;
/** The chunks at the end that are always whole and laid out: what the reader sees when an answer grows. */
const LIVE = 2;

export class Log {
  view = element("div", { class: "messages" });
  #make;
  #chunks = []; // {place, nodes, isWhole}
  #places = new Map(); // node id -> {view, chunk, index}
  #chunkOf = new WeakMap(); // element -> chunk
  #near = new Set();
  #observer;

  /** make(node, isPlain): the element of a message. onNear(nodes): these messages come near the window. */
  constructor(stage, make, onNear) {
    this.#make = make;
    this.#observer = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) {
          const chunk = this.#chunkOf.get(target);
          if (!isIntersecting) this.#near.delete(chunk);
          else if (target.isConnected) {
            this.#near.add(chunk);
            this.#fill(chunk);
            onNear(chunk.nodes);
          }
        }
      },
      { root: stage, rootMargin: "100% 0%" },
    );
  }

  end() {
    this.#observer.disconnect();
  }

  get last() {
    return this.#chunks.at(-1)?.nodes.at(-1) ?? null;
  }

  /** The element of a message; undefined if the message is not shown. */
  viewOf(id) {
    return this.#places.get(id)?.view;
  }

  /** The messages that are near the window. */
  near() {
    const chunks = new Set([...this.#chunks.slice(-LIVE), ...this.#near]);
    return [...chunks].flatMap(({ nodes }) => nodes);
  }

  /** Adds messages at the end. */
  append(nodes) {
    for (const node of nodes) {
      let chunk = this.#chunks.at(-1);
      if (!chunk || chunk.nodes.length === CHUNK) {
        chunk = { place: element("div", { class: "chunk" }), nodes: [], isWhole: false };
        this.#chunks.push(chunk);
        this.#chunkOf.set(chunk.place, chunk);
        this.view.append(chunk.place);
        this.#observer.observe(chunk.place);
      }
      const view = this.#make(node, !chunk.isWhole);
      const index = (this.#chunks.length - 1) * CHUNK + chunk.nodes.length;
      chunk.nodes.push(node);
      chunk.place.append(view);
      this.#places.set(node.id, { view, chunk, index });
    }
    this.#enliven();
  }

  /** Makes a message anew, if it is here and whole. */
  renew(node) {
    const found = this.#places.get(node.id);
    if (!found) return;
    const view = this.#make(node, !found.chunk.isWhole);
    found.view.replaceWith(view);
    found.view = view;
  }

  /** Removes the messages behind `node`; all if it is null. */
  cutBehind(node) {
    this.#cut(node ? this.#places.get(node.id).index + 1 : 0);
  }

  #cut(number) {
    for (const chunk of this.#chunks.splice(Math.ceil(number / CHUNK))) {
      this.#observer.unobserve(chunk.place);
      this.#near.delete(chunk);
      chunk.nodes.forEach(({ id }) => this.#places.delete(id));
      chunk.place.remove();
    }
    const rest = number % CHUNK;
    if (rest === 0) return;
    for (const { id } of this.#chunks.at(-1).nodes.splice(rest)) {
      this.#places.get(id).view.remove();
      this.#places.delete(id);
    }
  }

  #enliven() {
    this.#chunks.at(-LIVE - 1)?.place.classList.remove("live");
    for (const chunk of this.#chunks.slice(-LIVE)) {
      chunk.place.classList.add("live");
      this.#fill(chunk);
    }
  }

  #fill(chunk) {
    if (chunk.isWhole) return;
    chunk.isWhole = true;
    for (const node of chunk.nodes) this.renew(node);
  }
}
