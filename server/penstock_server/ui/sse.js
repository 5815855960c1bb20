// Server-sent events from a fetch: the data of each event; comments (keep-alives) are skipped.

/** Yields strings. `body` is a stream of bytes; leaving the loop early cancels it. */
export async function* eventData(body) {
  const parser = new EventParser();
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.feed(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Lines may end with \n, \r\n or \r, and come in pieces. An event that is not ended by an empty line is
 * dropped. */
class EventParser {
  #rest = "";
  #data = [];

  /** The data of the events that `text` completes. */
  *feed(text) {
    this.#rest += text;
    // A \r at the very end may be half of a \r\n.
    const lines = this.#rest.split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) this.#data.push(line.slice(5).replace(/^ /, ""));
      else if (line === "" && this.#data.length > 0) {
        const data = this.#data.join("\n");
        this.#data = [];
        yield data;
      }
    }
  }
}
