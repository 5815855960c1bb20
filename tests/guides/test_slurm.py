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
    'for rank in $RANKS; do SLURM_PROCID=$rank SLURM_NTASKS=$(echo $RANKS | wc -w) "$@"; done',
    "penstock": """python3 -c '
import json, os, sys
given = {name: text for name, text in os.environ.items() if name.startswith("PENSTOCK_")}
print(json.dumps([sys.argv[1:], given]))' "$@" """,
}
SLURM = {
    "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "8", "SLURM_MEM_PER_NODE": "16384",
    "SLURM_JOB_ID": "1234567", "RANKS": "0 1",
}  # fmt: skip
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
    leader, worker = (settings_of(*json.loads(node)) for node in nodes)
    assert address == f"http://n1:{leader.port}/v1"
    assert (leader.nodes, leader.rank, leader.host) == (2, 0, "0.0.0.0")
    assert worker.rank == 1 and worker.leader == leader.nodes_listen.replace("0.0.0.0", "n1")
    assert leader.nodes_secret == worker.nodes_secret and leader.api_key == ("key",)
    for node in (leader, worker):
        assert node.model == "/shared/model" and node.threads == 8
        assert node.host_memory == 16384 * 9 // 10 * 2**20


def test_one_node_serves_alone(tmp_path: Path) -> None:
    ended = run(tmp_path, GIVEN | {"RANKS": "0"})
    _, node = ended.stdout.splitlines()
    assert settings_of(*json.loads(node)).leader_config("m") is None


def test_jobs_that_share_a_node_have_ports_of_their_own(tmp_path: Path) -> None:
    """Slurm counts up to 67 million jobs. A port is not below 1024, nor one that the system gives out."""
    used = set[int]()
    for job in (1, 2, 3, 5999, 67_043_327):
        _, node, _ = run(tmp_path, GIVEN | {"SLURM_JOB_ID": str(job)}).stdout.splitlines()
        leader = settings_of(*json.loads(node))
        used |= {leader.port, int(leader.nodes_listen.split(":")[1])}
    assert len(used) == 10 and min(used) >= 1024 and max(used) < 32768
    address, *_ = run(tmp_path, GIVEN | {"PENSTOCK_PORT": "8000"}).stdout.splitlines()
    assert address == "http://n1:8000/v1", "a port that was given stays"


def settings_of(words: list[str], environ: dict[str, str]) -> Settings:
    """As `penstock` would understand it. Raises ConfigError or SystemExit for what it refuses."""
    return make_settings(vars(build_parser().parse_args(words)), environ)


@pytest.mark.parametrize("missing", [*GIVEN])
def test_what_is_needed_is_named(tmp_path: Path, missing: str) -> None:
    ended = run(tmp_path, {name: text for name, text in GIVEN.items() if name != missing})
    assert ended.returncode != 0 and missing in ended.stderr and not ended.stdout
