// The memory plan as a table, as `penstock plan` prints it.

import { element } from "./dom.js";
import { bytes, rate, seconds } from "./figures.js";
import { count, words } from "./words.js";

/** What a step waits for, as the plan calls it -> the key of its words. */
const BINDINGS = {
  disk: "waitsForDisk",
  "spill disk": "waitsForSpillDisk",
  "host to device": "waitsForLink",
  memory: "waitsForMemory",
  "host memory": "waitsForHostMemory",
  arithmetic: "waitsForArithmetic",
  experts: "waitsForExperts",
};
const waitingFor = (binding) => (BINDINGS[binding] ? words(BINDINGS[binding]) : binding);

/** A row for each home that some of the `layers` have. */
function layerRows(key, layers, resident, streamed, homes) {
  const found = ["device", "host", "disk"].map((home) => layers.filter((layer) => layer.home === home));
  return found
    .filter((there) => there.length > 0)
    .map((there) => [
      count(there.length, key),
      homes[there[0].home],
      there.reduce((sum, layer) => sum + layer.num_bytes, 0),
      words(there[0].is_resident ? resident : streamed),
    ]);
}

/** The tokens whose keys and values have room, and how many of them on disk, or in RAM beside a GPU. */
const keptTokens = (plan) =>
  plan.num_spilled_tokens
    ? words(plan.kv_spill_bytes ? "someInRam" : "someOnDisk", {
        number: count(plan.num_kv_tokens, "tokens"),
        spilled: count(plan.num_spilled_tokens, "tokens"),
      })
    : count(plan.num_kv_tokens, "tokens");

const SOURCES = {
  new_text: "newText",
  quotation: "quotation",
  draft_model: "draftModel",
  mtp: "predictionHead",
  eagle3: "eagleHead",
  planes: "upperPlanes",
};

/** What guesses from a source should bring to a single sequence. */
const expectation = (drafting) =>
  words("guessesShould", {
    source: words(SOURCES[drafting.source]),
    guesses: drafting.num_guesses,
    gained: drafting.num_gained.toFixed(1),
    rate: rate(drafting.tokens_per_s),
    plain: rate(drafting.plain_tokens_per_s),
  });

/** The elements of the table, made of the answer of GET /v1/plan. */
export function ledger(plan) {
  const [ram, gpu] = [words("ram"), words("gpu")];
  const compute = plan.has_gpu ? gpu : ram;
  const homes = { disk: words("diskHome"), host: plan.has_gpu ? words("pinnedRam") : ram, device: gpu };
  const rows = [
    [words("embedding"), ram, plan.embedding_bytes, ""],
    [words("head"), compute, plan.head_bytes, ""],
  ];
  const end = plan.num_encoder_layers;
  const start = end - plan.num_cross_layers;
  const isShared = plan.kept_share !== null;
  for (const [key, layers, streamed] of [
    ["encoderLayers", plan.layers.slice(0, start), "streamedEachPrompt"],
    ["crossProjections", plan.layers.slice(start, end), "streamedEachPrompt"],
    ["layers", plan.layers.slice(end), isShared ? "sharedEachStep" : "streamedEachStep"],
  ])
    rows.push(...layerRows(key, layers, isShared ? "keptShare" : "resident", streamed, homes));
  const staging = (slots) => slots * plan.staging_slot_bytes;
  if (plan.num_staging_slots)
    rows.push([
      words("staging"),
      compute,
      staging(plan.num_staging_slots),
      count(plan.num_staging_slots, "slots"),
    ]);
  if (plan.num_host_slots)
    rows.push([words("staging"), ram, staging(plan.num_host_slots), words("onTheWay")]);
  const experts = (slots) => slots * plan.expert_slot_bytes;
  if (plan.num_expert_slots)
    rows.push([
      words("experts"),
      compute,
      experts(plan.num_expert_slots),
      count(plan.num_expert_slots, "slots"),
    ]);
  if (plan.num_host_expert_slots)
    rows.push([words("experts"), ram, experts(plan.num_host_expert_slots), words("onTheWay")]);
  rows.push([words("keysAndValues"), compute, plan.kv_bytes, keptTokens(plan)]);
  if (plan.kv_spill_bytes)
    rows.push([words("keysAndValues"), ram, plan.kv_spill_bytes, words("comesForEachLayer")]);
  if (plan.kv_host_bytes) rows.push([words("keysAndValues"), ram, plan.kv_host_bytes, words("keptForLater")]);
  if (plan.state_bytes)
    rows.push([
      words("recurrentStates"),
      compute,
      plan.state_bytes,
      count(plan.num_state_slots, "slots"),
    ]);
  rows.push([words("activations"), compute, plan.workspace_bytes, words("atLargestStep")]);
  if (plan.draft_model_bytes)
    rows.push([words("draftModel"), ram, plan.draft_model_bytes, words("besidePlan")]);
  if (plan.draft_model_device_bytes)
    rows.push([words("draftModel"), gpu, plan.draft_model_device_bytes, words("besidePlan")]);
  const budgets = [[ram, plan.host_used_bytes, plan.host_budget_bytes]];
  if (plan.has_gpu) budgets.push([gpu, plan.device_used_bytes, plan.device_budget_bytes]);
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
          ["what", "where", "bytes"].map((key) => element("th", { scope: "col" }, words(key))),
          element("th", { scope: "col" }, element("span", { class: "unseen" }, words("remark"))),
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
      element("p", {}, words("budget", { place: name, used: bytes(used), budget: bytes(budget) })),
    ),
    plan.step.seconds > 0 &&
      element(
        "p",
        {},
        words("stepShould", { time: seconds(plan.step.seconds), what: waitingFor(plan.step.binding) }),
      ),
    ...plan.drafting
      .filter((each) => each.num_seqs === 1 && each.num_guesses > 0)
      .map((each) => element("p", {}, expectation(each))),
    ...[...plan.notes, ...plan.warnings].map((text) => element("p", {}, text)),
  ].filter(Boolean);
}
