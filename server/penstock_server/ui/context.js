// How full the context is: what the model gets with the next message, and what can be left out.

import { post } from "./api.js";
import { isAbove, pathOf } from "./conversation.js";

/** From this share on, old messages may be left out; and the share that is taken afterwards. */
export const FULL = 0.75;
const AFTERWARDS = 0.5;
/** The most questions to the server about one choice. */
const MOST_QUESTIONS = 5;

/** Tokens of a text, roughly: four letters each, and a little more than one sign of Chinese. */
export function guessTokens(text) {
  let others = 0;
  for (let index = 0; index < text.length; index += 1) if (text.charCodeAt(index) > 0x7f) others += 1;
  return Math.ceil((text.length - others) / 4 + 0.8 * others);
}

/** The messages that are sent with a new one below `last`: all above it from `start` on. */
export function sentUntil(conversation, last) {
  const path = pathOf({ ...conversation, leaf: last?.id ?? null });
  const from = path.findIndex(({ id }) => id === conversation.start);
  return from < 0 ? path : path.slice(from);
}

/** {tokens, isExact} of what is sent below the last message, or null if there is none. The server counted the
 * prompt of the last answer and the answer itself; what came since is guessed. */
export function tokensOf(conversation) {
  const { leaf, settings } = conversation;
  const start = isAbove(conversation, conversation.start, leaf) ? conversation.start : null;
  let guessed = 0;
  for (let node = conversation.nodes[leaf]; node; node = conversation.nodes[node.parent]) {
    const { promptTokens, outputTokens } = node.figures ?? {};
    if (promptTokens != null && (node.from ?? null) === start) {
      const thoughts = node.reasoning?.length ?? 0;
      const kept = node.content.length / (node.content.length + thoughts || 1);
      return { tokens: promptTokens + Math.round(outputTokens * kept) + guessed, isExact: guessed === 0 };
    }
    guessed += guessTokens(node.content);
    if (node.id === start) break;
  }
  return guessed ? { tokens: guessed + guessTokens(settings.system ?? ""), isExact: false } : null;
}

/** The user's messages that can be the first one sent: those after the first. */
const choices = (sent) => sent.flatMap(({ role }, index) => (role === "user" && index > 0 ? [index] : []));

export const canLeaveOut = (conversation) =>
  choices(sentUntil(conversation, conversation.nodes[conversation.leaf])).length > 0;

/** The id of the message from which on messages should be sent, so that half of a context of `most` tokens is free;
 * null if there is but one question. bodyOf(messages): the fields of a request with these messages. */
export async function firstToSend(conversation, most, bodyOf) {
  const sent = sentUntil(conversation, conversation.nodes[conversation.leaf]);
  const starts = choices(sent);
  if (starts.length === 0) return null;
  const sizes = sent.map(({ content }) => guessTokens(content));
  const all = sizes.reduce((sum, size) => sum + size, 0);
  // The guess is scaled by what is known of the whole.
  const scale = (tokensOf(conversation)?.tokens ?? all) / (all || 1);
  let left = all;
  let index = 0;
  for (let at = 0; at < starts.at(-1); at += 1) {
    left -= sizes[at];
    if (at + 1 === starts[index] && left * scale > AFTERWARDS * most) index += 1;
  }
  index = Math.min(index, starts.length - 1);
  for (let question = 0; question < MOST_QUESTIONS && index < starts.length - 1; question += 1) {
    const tokens = await count(bodyOf(sent.slice(starts[index])));
    if (tokens === null || tokens <= FULL * most) break;
    // The half of what may still go goes.
    index = question === MOST_QUESTIONS - 2 ? starts.length - 1 : Math.ceil((index + starts.length - 1) / 2);
  }
  return sent[starts[index]].id;
}

/** The tokens of messages as the server counts them; Infinity if they are too many to count; null if it can't tell. */
async function count(body) {
  try {
    return (await post("v1/tokenize", body)).count;
  } catch (error) {
    return error.status === 400 ? Infinity : null;
  }
}
