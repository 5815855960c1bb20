// The memory plan as a table, as `penstock plan` prints it.

import { element } from "./dom.js";
import { bytes, count, seconds } from "./figures.js";

/** The elements of the table, made of the answer of GET /v1/plan. */
export function ledger(plan) {
  const compute = plan.has_gpu ? "GPU" : "RAM";
  const homes = { disk: "disk", host: plan.has_gpu ? "pinned RAM" : "RAM", device: "GPU" };
  const rows = [
    ["embedding", "RAM", plan.embedding_bytes, ""],
    ["head", compute, plan.head_bytes, ""],
  ];
  for (const home of ["device", "host", "disk"]) {
    const layers = plan.layers.filter((layer) => layer.home === home);
    if (layers.length === 0) continue;
    const size = layers.reduce((sum, layer) => sum + layer.num_bytes, 0);
    rows.push([
      count(layers.length, "layer"),
      homes[home],
      size,
      layers[0].is_resident ? "resident" : "streamed in each step",
    ]);
  }
  const staging = (slots) => slots * plan.staging_slot_bytes;
  if (plan.num_staging_slots)
    rows.push(["staging", compute, staging(plan.num_staging_slots), count(plan.num_staging_slots, "slot")]);
  if (plan.num_host_slots)
    rows.push(["staging", "RAM", staging(plan.num_host_slots), "on the way to the GPU"]);
  const experts = (slots) => slots * plan.expert_slot_bytes;
  if (plan.num_expert_slots)
    rows.push(["experts", compute, experts(plan.num_expert_slots), count(plan.num_expert_slots, "slot")]);
  if (plan.num_host_expert_slots)
    rows.push(["experts", "RAM", experts(plan.num_host_expert_slots), "on the way to the GPU"]);
  rows.push(["keys and values", compute, plan.kv_bytes, count(plan.num_kv_tokens, "token")]);
  rows.push(["activations", compute, plan.workspace_bytes, "at the largest step"]);
  const budgets = [["RAM", plan.host_used_bytes, plan.host_budget_bytes]];
  if (plan.has_gpu) budgets.push(["GPU", plan.device_used_bytes, plan.device_budget_bytes]);
  return [
    element(
      "table",
      {},
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          ["What", "Where", "Bytes", ""].map((text) =>
            element("th", { scope: "col" }, text || element("span", { class: "unseen" }, "Remark")),
          ),
        ),
      ),
      element(
        "tbody",
        {},
        rows.map(([what, where, size, remark]) =>
          element(
            "tr",
            {},
            element("th", { scope: "row" }, what),
            element("td", {}, where),
            element("td", { class: "number" }, bytes(size)),
            element("td", {}, remark),
          ),
        ),
      ),
    ),
    ...budgets.map(([name, used, budget]) =>
      element("p", {}, `${name}: ${bytes(used)} of a budget of ${bytes(budget)}`),
    ),
    plan.step.seconds > 0 &&
      element(
        "p",
        {},
        `A step of one token should take ${seconds(plan.step.seconds)}; it waits for ${plan.step.binding}.`,
      ),
    ...[...plan.notes, ...plan.warnings].map((text) => element("p", {}, text)),
  ].filter(Boolean);
}
