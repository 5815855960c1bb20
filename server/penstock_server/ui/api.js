// The server's HTTP API: addresses, the key, errors, streams. This file knows nothing of the page.

import { eventData } from "./sse.js";
import { recall, remember } from "./storage.js";
import { words } from "./words.js";

const KEY = "penstock.key";

/** An error, with a message for people. `status` is 0 if no answer came at all. isServers: the message is the
 * server's, in English. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfterS = null, detail = null } = {}) {
    super(message);
    this.isServers = detail !== null;
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
    this.detail = detail ?? {}; // the whole error object
  }
}

export const apiKey = () => recall(KEY) ?? "";
export const setApiKey = (key) => remember(KEY, key || null);

/** An address relative to the page, so that a proxy may put everything below a prefix. */
const address = (path) => new URL(path, document.baseURI);

async function send(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (body) headers["Content-Type"] = "application/json";
  const method = body ? "POST" : "GET";
  try {
    return await fetch(address(path), {
      method,
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(words("unreachable", { host: location.host }));
  }
}

async function failure(answer) {
  const retryAfterS = Number.parseInt(answer.headers.get("Retry-After"), 10) || null;
  const { error } = await answer.json().catch(() => ({}));
  const message =
    error?.message ?? words("serverAnswered", { status: `${answer.status} ${answer.statusText}` });
  return new ApiError(message, {
    status: answer.status,
    code: error?.code ?? null,
    retryAfterS,
    detail: error ?? null,
  });
}

/** The JSON of an answer. Throws ApiError. */
export async function get(path, signal) {
  const answer = await send(path, { signal });
  if (!answer.ok) throw await failure(answer);
  return answer.json();
}

/** The same of a POST with JSON. */
export async function post(path, body) {
  const answer = await send(path, { body });
  if (!answer.ok) throw await failure(answer);
  return answer.json();
}

/** {status, loaded_layers, total_layers}. The answer is JSON in every state, and needs no key. */
export async function health(signal) {
  const answer = await send("health", { signal });
  return answer.json().catch(() => ({ status: "unknown" }));
}

/** Yields the objects of a streamed answer. Throws ApiError, also for an error event and for a stream that
 * ends before its [DONE], and an AbortError when `signal` is aborted. */
export async function* stream(path, body, signal) {
  const answer = await send(path, {
    body: { stream_options: { include_usage: true }, ...body, stream: true },
    signal,
  });
  if (!answer.ok) throw await failure(answer);
  try {
    for await (const data of eventData(answer.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw inStream(chunk.error);
      yield chunk;
    }
  } catch (error) {
    if (signal.aborted || error instanceof ApiError) throw error;
    throw brokenOff();
  }
  throw brokenOff();
}

const inStream = (error) =>
  new ApiError(error.message, { status: 500, code: error.code ?? null, detail: error });

const brokenOff = () => new ApiError(words("brokenOff"), { code: "connection_lost" });
