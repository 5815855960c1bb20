"""clients/ray with Ray itself: the extra `ray` (`make test EXTRAS=dev,ray`). The server is a few lines."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

ray = pytest.importorskip("ray", reason="needs the extra ray: make test EXTRAS=dev,ray")


class Server(ThreadingHTTPServer):
    """Answers each prompt with its length; refuses empty prompts; is gone for rows from `ends_at` on."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.prompts: list[str] = []
        self.ends_at = 30


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:  # the name is http.server's
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        self.server.prompts.append(prompt)
        if prompt and int(prompt) >= self.server.ends_at:
            return self.reply(401, {"error": {"message": "the key has expired"}})
        if not prompt:
            return self.reply(400, {"error": {"message": "the prompt is empty"}})
        self.reply(200, {"choices": [{"text": str(2 * int(prompt)), "finish_reason": "stop"}]})

    def reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def test_a_job_goes_on_where_it_ended(ray_folder: Path, server: Server, tmp_path: Path) -> None:
    rows = [{"id": f"r{row}", "prompt": str(row) if row != 3 else ""} for row in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def job() -> subprocess.CompletedProcess[str]:
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        words = ["prompts.jsonl", "answers", "--url", url, "--batch-size", "5"]
        environ = os.environ | {"RAY_AUTH_MODE": "disabled"}
        return subprocess.run(
            [sys.executable, str(ray_folder / "dataset.py"), *words],
            cwd=tmp_path, env=environ, capture_output=True, text=True,
        )  # fmt: skip

    ended = job()
    assert ended.returncode == 1 and "the key has expired" in ended.stderr.splitlines()[-2]
    assert "the same command" in ended.stderr.splitlines()[-1].lower()
    server.ends_at, first = 1000, set(server.prompts)
    server.prompts.clear()
    assert job().returncode == 0
    from pyarrow import parquet

    found = {row["id"]: row for row in parquet.read_table(tmp_path / "answers").to_pylist()}
    assert parquet.read_table(tmp_path / "answers").num_rows == len(found) == 40
    assert found["r3"]["error"] == "the prompt is empty" and found["r3"]["answer"] == ""
    assert all(row["answer"] == str(2 * int(row["prompt"])) for name, row in found.items() if name != "r3")
    # Each of the 40 rows was sent; those that were written at first were not sent again.
    assert first | set(server.prompts) == {row["prompt"] for row in rows} and len(server.prompts) < 40


def test_the_rayservice_starts_the_application(ray_folder: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    service = yaml.safe_load((ray_folder / "rayservice.yaml").read_text())
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    [application] = config.applications
    replicas = importlib.import_module("replicas")
    assert application.import_path == "replicas:app"
    args = replicas.ReplicaArgs(**application.args)
    [workers] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert workers["replicas"] * int(limits["cpu"]) >= args.num_replicas * args.num_cpus
    assert int(limits["memory"].removesuffix("Gi")) * 2**30 > args.memory


@pytest.mark.parametrize("settings", [{"port": 80}, {"log_level": "warning"}])
def test_replicas_refuse_settings_that_hide_their_process(ray_folder: Path, settings: dict[str, str]) -> None:
    replicas = importlib.import_module("replicas")
    assert replicas.ReplicaArgs(settings={"max_num_seqs": 8}).settings == {"max-num-seqs": 8}
    with pytest.raises(ValueError, match=next(iter(settings)).replace("_", "-")):
        replicas.ReplicaArgs(settings=settings)
