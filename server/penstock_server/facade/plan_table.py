"""The memory plan as text: a line for each thing that takes memory, and a line for each budget."""

from __future__ import annotations

from penstock.memory.planning.plan import CUDA_CONTEXT_BYTES, HANDOVER_BYTES, INLET_BYTES, gib
from penstock_server.facade.expected_drafts import draft_model_line, drafting_table
from penstock_server.protocol.engine_bodies import NodeBody, PlanBody, ServedPlanBody


def plan_table(plan: PlanBody) -> list[str]:
    """The lines of the plan: what lies in which memory, and how many bytes it takes."""
    compute = "device" if plan.has_gpu else "host"
    rows = [
        ("embedding", "host", plan.embedding_bytes, ""),
        ("head", compute, plan.head_bytes, ""),
        *_layer_rows(plan, compute),
    ]
    ways = (compute, plan.num_staging_slots, ""), ("host", plan.num_host_slots, ", on the way to the GPU")
    for home, number, text in ways:
        if number:
            rows.append(("staging", home, number * plan.staging_slot_bytes, f"{number} slots{text}"))
    experts = plan.num_expert_slots, plan.num_host_expert_slots
    way = ", on the way to the GPU" + (", or computed by the processor" if plan.shares_experts else "")
    for home, number, text in ((compute, experts[0], ""), ("host", experts[1], way)):
        if number:
            rows.append(("experts", home, number * plan.expert_slot_bytes, f"{number} slots{text}"))
    elsewhere = (plan.kv_spill_bytes, "without room on the GPU"), (plan.kv_host_bytes, "that left the GPU")
    rows += [
        ("keys and values", compute, plan.kv_bytes, _tokens_text(plan)),
        *(("keys and values", "host", num_bytes, text) for num_bytes, text in elsewhere if num_bytes),
        *_state_rows(plan, compute),
        *([("adapters", "host", plan.adapter_bytes, "")] if plan.adapter_bytes else []),
        ("activations", compute, plan.workspace_bytes, _workspace_text(plan)),
    ]
    if plan.kept_share is not None or plan.shares_experts or plan.attended_share:
        rows.append(("handover", "host", HANDOVER_BYTES, "from the card to the processor and back"))
    if plan.has_gpu:
        rows.append(("inputs", "host", INLET_BYTES, "of a step, on their way to the card"))
        rows.append(("CUDA context", "device", CUDA_CONTEXT_BYTES, "reserved"))
    width = max(16, *(len(name) for name, _, _, _ in rows))
    lines = [
        f"{name:{width}} {home:7} {gib(num_bytes):>12}  {text}".rstrip()
        for name, home, num_bytes, text in rows
    ]
    lines.append(_budget("host", plan.host_used_bytes, plan.host_budget_bytes))
    if plan.has_gpu:
        lines.append(_budget("device", plan.device_used_bytes, plan.device_budget_bytes))
    return [*lines, *plan.notes, *plan.warnings]


def served_plan_lines(plan: ServedPlanBody) -> list[str]:
    """The plan of an engine, its draft model, and all machines where several compute the layers."""
    num_bytes, on_device = plan.draft_model_bytes, plan.draft_model_device_bytes
    draft = [draft_model_line(num_bytes, on_device)] if num_bytes or on_device else []
    return [*plan_table(plan), *draft, *map(node_line, plan.nodes)]


def guess_lines(plan: ServedPlanBody) -> list[str]:
    """What drafts should bring to a single sequence."""
    return drafting_table(tuple(each for each in plan.drafting if each.num_seqs == 1))


def node_line(node: NodeBody) -> str:
    """A machine that computes some of the layers."""
    first, stop = node.layers
    where = f"layers {first} to {stop - 1}, {node.num_resident} of {stop - first} stay in memory"
    used = f"{gib(node.used_bytes)} of a budget of {gib(node.budget_bytes)}"
    others = "" if node.rounds_alike else "; it rounds otherwise than this machine"
    place = f" at {node.address}" if node.address else ""
    return f"rank {node.rank}{place} is {_state(node)}: {where}: {used}{_step(node)}{others}"


def _state(node: NodeBody) -> str:
    return node.state if node.away_s is None else f"{node.state} for {node.away_s:.0f} s"


def _step(node: NodeBody) -> str:
    return f"; {node.step_s * 1e3:.1f} ms of a step of one token" if node.step_s else ""


def _state_rows(plan: PlanBody, compute: str) -> list[tuple[str, str, int, str]]:
    if not plan.state_bytes:
        return []
    text = f"of {plan.num_state_sequences} sequences at a time"
    if num_kept := plan.num_state_slots - plan.num_state_sequences:
        text += f", and {num_kept} copies for later prompts"
    return [("recurrent states", compute, plan.state_bytes, text)]


def _tokens_text(plan: PlanBody) -> str:
    text = f"{plan.num_kv_tokens} tokens"
    place = "on the host" if plan.kv_spill_bytes else "on disk"
    return f"{text}, {plan.num_spilled_tokens} of them {place}" if plan.num_spilled_tokens else text


def _workspace_text(plan: PlanBody) -> str:
    return "at the largest step, " + ("measured" if plan.is_workspace_measured else "estimated")


def _layer_rows(plan: PlanBody, compute: str) -> list[tuple[str, str, int, str]]:
    rows: list[tuple[str, str, int, str]] = []
    end = plan.num_encoder_layers
    start = end - plan.num_cross_layers
    once, often = "streamed for each prompt", "streamed in each step"
    if plan.kept_share is not None:
        often = "streamed, or computed by the processor"
    kinds = (
        ("encoder ", "layers", plan.layers[:start], once),
        ("cross-attention ", "projections", plan.layers[start:end], once),
        ("", "layers", plan.layers[end:], often),
    )
    for name, whole, layers, streamed in kinds:
        planes = ((False, "upper planes"), (True, "lower planes"))
        if plan.kept_share is not None:
            planes = ((False, "layers, the card's share"), (True, "layers, the rest"))
        has_planes = any(layer.is_lower for layer in layers)
        for is_lower, word in planes if has_planes else ((False, whole),):
            for home in ("device", "host", "disk"):
                sizes = [each.num_bytes for each in layers if (each.home, each.is_lower) == (home, is_lower)]
                if sizes:
                    text = "resident" if home == compute else streamed
                    rows.append((f"{len(sizes)} {name}{word}", home, sum(sizes), text))
    return rows


def _budget(name: str, used: int, budget: int) -> str:
    return f"{name}: {gib(used)} of a budget of {gib(budget)}"
