// Server-sent events of a fetch: the data of each event. Comments (keep-alives) are skipped.

/** Yields the data of each event. `body` is a stream of bytes; leaving the loop early cancels the stream. */
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

/** A parser of events. Lines may end with \n, \r\n or \r, and may come in pieces. An event without an empty line
 * at its end is dropped. */
class EventParser {
  #rest = "";
  #data = [];

  /** The data of the events that `text` completes. */
  *feed(text) {
    this.#rest += text;
    // A \r at the end of a piece may be half of a \r\n.
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
