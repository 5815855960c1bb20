"""docker/slurm/penstock.sbatch with programs of a few lines in the places of srun, scontrol and penstock."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock_server.commands.command_line import build_parser
from penstock_server.settings.settings import Settings
from penstock_server.settings.sources import make_settings

from .conftest import ROOT

SCRIPT = ROOT / "docker" / "slurm" / "penstock.sbatch"
PROGRAMS = {
    "scontrol": '[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"',
    # Slurm's options are left out; the command runs once for each node, with its rank.
    # Without --cpus-per-task a step has one processor for each task, whatever the job has.
    "srun": 'case "$*" in --cpus-per-task=8\\ *) ;; *) exit 9; esac\n'
    'while [ "${1#--}" != "$1" ]; do shift; done\n'
    'for rank in 0 1; do SLURM_PROCID=$rank SLURM_NTASKS=2 "$@"; done',
    "penstock": """python3 -c '
import json, os, sys
given = {name: text for name, text in os.environ.items() if name.startswith("PENSTOCK_")}
print(json.dumps([sys.argv[1:], given]))' "$@" """,
}
SLURM = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "8", "SLURM_MEM_PER_NODE": "16384"}
GIVEN = {"MODEL": "/shared/model", "PENSTOCK_API_KEY": "key"}

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


def run(folder: Path, given: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    environ = SLURM | given | {"PATH": f"{folder}:/usr/bin:/bin:{Path(shutil.which('python3') or '').parent}"}
    return subprocess.run(["bash", str(SCRIPT)], env=environ, capture_output=True, text=True)


def test_the_first_node_serves_and_the_others_work(tmp_path: Path) -> None:
    ended = run(tmp_path, GIVEN)
    assert ended.returncode == 0, ended.stderr
    address, *nodes = ended.stdout.splitlines()
    assert address == "http://n1:8000/v1"
    leader, worker = (settings_of(*json.loads(node)) for node in nodes)
    assert (leader.nodes, leader.rank, leader.host) == (2, 0, "0.0.0.0")
    assert worker.rank == 1 and worker.leader.split(":")[0] == "n1"
    assert leader.nodes_secret == worker.nodes_secret and leader.api_key == ("key",)
    for node in (leader, worker):
        assert node.model == "/shared/model" and node.threads == 8
        assert node.host_memory == 16384 * 9 // 10 * 2**20


def settings_of(words: list[str], environ: dict[str, str]) -> Settings:
    """As `penstock` would understand it. Raises ConfigError or SystemExit for what it refuses."""
    return make_settings(vars(build_parser().parse_args(words)), environ)


@pytest.mark.parametrize("missing", [*GIVEN])
def test_what_is_needed_is_named(tmp_path: Path, missing: str) -> None:
    ended = run(tmp_path, {name: text for name, text in GIVEN.items() if name != missing})
    assert ended.returncode != 0 and missing in ended.stderr and not ended.stdout
