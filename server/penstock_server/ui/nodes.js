// The machines that share a model (--nodes): which layers each computes, its memory, whether it is there, and its
// share of a step.

import { bytes, percent, seconds } from "./figures.js";
import { reading } from "./reading.js";
import { words } from "./words.js";

/** What a machine takes of a step: measured, or predicted as long as nothing was computed; 0 if unknown. */
const timeOf = (node) => (node.num_steps ? node.busy_s / node.num_steps : node.step_s);

/** The value of a machine that takes no steps. */
function stateOf(node) {
  if (node.state === "away") return words("nodeAway", { time: seconds(node.away_s) });
  if (node.state === "failed") return words("nodeFailed");
  return words("nodeLoading");
}

/** The layers and the memory of a machine; what is wrong with it, if something is. */
function remarkOf(node) {
  if (node.state === "failed") return node.reason;
  if (node.state !== "ready") return hasOf(node);
  return words("nodeTakes", { time: seconds(timeOf(node)), has: hasOf(node) });
}

function hasOf(node) {
  const [first, stop] = node.layers;
  return words("nodeHas", {
    first: first + 1,
    last: stop,
    used: bytes(node.used_bytes),
    budget: bytes(node.budget_bytes),
  });
}

/** An instrument for each of `nodes`, as GET /v1/engine/stats has them. */
export function nodeReadings(nodes) {
  const shown = nodes.map(({ rank }) => reading(words("nodeTitle", { rank }), "explainNode", "bar"));
  shown.forEach((each, index) => each.reserve(words("nodeTakes", { time: seconds(99.9), has: hasOf(nodes[index]) })));
  return {
    views: shown.map((each) => each.view),
    show(now) {
      const total = now.reduce((sum, node) => sum + timeOf(node), 0);
      now.forEach((node, index) => {
        const isReady = node.state === "ready";
        const share = total > 0 ? timeOf(node) / total : 0;
        shown[index]?.set(isReady ? (share ? percent(share) : "–") : stateOf(node), remarkOf(node));
        shown[index]?.fill(isReady ? share : 0);
        shown[index]?.view.classList.toggle("missing", !isReady);
      });
    },
  };
}

/** The ranks of machines for which requests wait; "" if there are none. */
export const missingNodes = (nodes) =>
  nodes
    .filter((node) => node.state !== "ready")
    .map((node) => node.rank)
    .join(words("listComma"));
