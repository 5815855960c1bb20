"""How much of the engine is imported for a Llama: the modules of features that nobody asked for are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "engine" / "penstock" / "demo_model"
#: Modules of ours, packages counted: what `import penstock.engine` loads, and what is loaded when a Llama has
#: answered.
MOST_AT_IMPORT, MOST = 200, 232
#: What a Llama with a tokenizer.json does not need.
IDLE = (
    "penstock.cache.disk",
    "penstock.cache.spill",
    "penstock.cpm",
    "penstock.drafters.draft_model",
    "penstock.generation.beam_search",
    "penstock.generation.pooler",
    "penstock.kernels.cuda",
    "penstock.kv_disk",
    "penstock.kv_events",
    "penstock.model.families.gpt",
    "penstock.model.families.t5",
    "penstock.model.through_transformers",
    "penstock.nodes",
    "penstock.weights.checkpoints.torch_files",
    "penstock.weights.conversion",
    "penstock.weights.expert_lender",
    "penstock.weights.formats.planes_format",
    "penstock.weights.split.row_split",
    "transformers",
)


@pytest.mark.inner
def test_a_llama_needs_few_files() -> None:
    program = (
        "import sys; import penstock.engine; print(*sorted(sys.modules))\n"
        "from penstock import Engine, EngineConfig, SamplingParams\n"
        "with Engine.load(sys.argv[1], EngineConfig(max_model_len=64)) as engine:\n"
        "    engine.generate([[1, 70]], SamplingParams(max_tokens=2))\n"
        "print(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(DEMO)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported, modules = (line.split() for line in done.stdout.splitlines())
    at_import, ours = (
        [name for name in names if name.split(".")[0] == "penstock"] for names in (imported, modules)
    )
    assert len(at_import) <= MOST_AT_IMPORT, f"{len(at_import)}: {' '.join(at_import)}"
    assert "penstock.model.families.llama" in ours
    idle = [name for name in modules for each in IDLE if name == each or name.startswith(f"{each}.")]
    assert not idle, idle
    assert len(ours) <= MOST, f"{len(ours)}: {' '.join(ours)}"
