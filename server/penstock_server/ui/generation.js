// One answer: sends the request, waits while the server is busy or loading, collects the stream, and measures.

import { ApiError, health, stream } from "./api.js";
import { whenAllowed } from "./key.js";
import { words } from "./words.js";

const WAIT_S = 5;
/** The shortest time between first and last piece that tells a rate; pieces that come together tell none. */
const SHORTEST_SPAN_S = 0.05;

/**
 * Streams an answer and returns its figures:
 * {promptTokens, outputTokens, acceptedGuesses, rejectedGuesses, firstTokenS, tokensPerS, finish, model}.
 *
 * onText(text) and onReasoning(text) get new text, onSpan({index, text}) new text of a blank; onWait(message | null)
 * gets the reason for waiting. Throws ApiError. When `signal` is aborted, returns the figures so far, with finish "stopped".
 */
export async function generate({ path, body, signal, onText, onReasoning, onSpan, onWait }) {
  const clock = new Clock();
  try {
    const take = { onText, onReasoning, onSpan };
    await patiently(() => collect(path, body, signal, clock, take), signal, onWait);
  } catch (error) {
    if (!signal.aborted) throw Object.assign(error, { figures: clock.figures() });
    clock.finish = "stopped";
  } finally {
    onWait(null);
  }
  return clock.figures();
}

async function collect(path, body, signal, clock, { onText, onReasoning, onSpan }) {
  clock.start();
  for await (const chunk of stream(path, body, signal)) {
    const choice = chunk.choices?.[0];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    const reasoning = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
    if (text || reasoning) clock.tick();
    if (reasoning) onReasoning(reasoning);
    if (text) onText(text);
    if (choice?.finish_reason) clock.finish = choice.finish_reason;
    for (const span of chunk.spans ?? []) {
      clock.tick();
      onSpan(span);
      if (span.finish_reason && clock.finish !== "length") clock.finish = span.finish_reason;
    }
    clock.model ??= chunk.model;
    if (chunk.usage) clock.usage = chunk.usage;
  }
}

/** The measurement of an answer: times by the page's clock in milliseconds, tokens as the server counts them. */
class Clock {
  finish = null;
  usage = null;
  model = undefined;

  start() {
    this.asked = performance.now();
    this.first = this.last = null;
    this.ticks = 0;
  }

  tick() {
    this.last = performance.now();
    this.first ??= this.last;
    this.ticks += 1;
  }

  figures() {
    const outputTokens = this.usage?.completion_tokens ?? this.ticks;
    const span = (this.last - this.first) / 1000;
    const details = this.usage?.completion_tokens_details;
    return {
      promptTokens: this.usage?.prompt_tokens ?? null,
      cachedTokens: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
      acceptedGuesses: details?.accepted_prediction_tokens ?? null,
      rejectedGuesses: details?.rejected_prediction_tokens ?? null,
      outputTokens,
      isCounted: this.usage !== null,
      firstTokenS: this.first === null ? null : (this.first - this.asked) / 1000,
      // The tokens of the first piece came before the span began; a piece has the same number as any other.
      tokensPerS: span >= SHORTEST_SPAN_S ? (outputTokens * (1 - 1 / this.ticks)) / span : null,
      finish: this.finish,
      model: this.model,
    };
  }
}

/** Does `work`, and repeats it if the server says "later" or asks for a key. Throws all other errors. */
async function patiently(work, signal, onWait) {
  for (;;) {
    try {
      return await whenAllowed(work);
    } catch (error) {
      if (!isForLater(error)) throw error;
      if (error.code === "model_loading") await untilLoaded(signal, onWait);
      else await countDown(error.retryAfterS ?? WAIT_S, signal, onWait);
      onWait(null);
    }
  }
}

/** Whether the server is busy, loading, or over a rate limit; false if only a restart can help. */
const isForLater = (error) =>
  error instanceof ApiError &&
  [429, 503].includes(error.status) &&
  !["engine_dead", "shutting_down"].includes(error.code);

async function countDown(seconds, signal, onWait) {
  for (let left = seconds; left > 0; left -= 1) {
    onWait(words("busy", { seconds: left }));
    await pause(1000, signal);
  }
}

async function untilLoaded(signal, onWait) {
  for (;;) {
    const now = await health(signal);
    if (now.status !== "loading") return;
    const progress = { loaded: now.loaded_layers, total: now.total_layers };
    onWait(words(now.total_layers ? "loadingLayersThenSent" : "loadingThenSent", progress));
    await pause(500, signal);
  }
}

/** Throws the reason for which `signal` was aborted. */
function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const end = () => reject(signal.reason);
    if (signal.aborted) end();
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", end);
      resolve();
    }, ms);
    signal.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        end();
      },
      { once: true },
    );
  });
}
