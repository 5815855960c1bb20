// Numbers as people read them.

import { count, words } from "./words.js";

export function seconds(value) {
  if (value == null) return "–";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  for (; value >= 1024 && power < units.length - 1; power += 1) value /= 1024;
  return `${value.toFixed(power === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2)} ${units[power]}`;
}

/** Bytes per second, in decimal units, as for disks and links. */
export function byteRate(value) {
  return value >= 1e9
    ? `${(value / 1e9).toFixed(value >= 1e10 ? 1 : 2)} GB/s`
    : `${(value / 1e6).toFixed(value >= 1e7 ? 0 : 1)} MB/s`;
}

export function rate(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export const percent = (part) => `${Math.round(100 * part)}%`;

const FINISH = { length: "endedAtLimit", stopped: "wasStopped", tool_calls: "asksForTool" };

/** One line with the figures of an answer: tokens, time and rate. */
export function answerFigures(figures) {
  const parts = [];
  if (figures.outputTokens)
    parts.push(`${figures.isCounted ? "" : "≈ "}${count(figures.outputTokens, "tokens")}`);
  if (figures.tokensPerS) parts.push(words("tokensPerS", { rate: rate(figures.tokensPerS) }));
  if (figures.acceptedGuesses || figures.rejectedGuesses)
    parts.push(
      words("guesses", {
        accepted: figures.acceptedGuesses.toLocaleString("en"),
        rejected: figures.rejectedGuesses.toLocaleString("en"),
      }),
    );
  if (figures.firstTokenS != null) parts.push(words("firstAfter", { time: seconds(figures.firstTokenS) }));
  if (figures.promptTokens != null)
    parts.push(words("promptOf", { tokens: count(figures.promptTokens, "tokens") }));
  if (figures.cachedTokens)
    parts.push(words("cached", { tokens: figures.cachedTokens.toLocaleString("en") }));
  if (FINISH[figures.finish]) parts.push(words(FINISH[figures.finish]));
  return parts.join(" · ");
}
