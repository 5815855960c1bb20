"""A dataset through a Penstock server with Ray Data: rows in, rows with answers out.

    python clients/ray/dataset.py prompts.jsonl answers --url http://127.0.0.1:8000/v1 --max-tokens 64

Each row of INPUT has an `id` of its own and a `prompt`, or `messages` for a chat. OUTPUT is a folder of
Parquet files: the rows with `answer`, `finish_reason`, `prompt_tokens`, `completion_tokens`, and `error`,
which says why a row has no answer, or is empty. The same command again goes on where a job ended: rows that
were written are not sent again.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
from pathlib import Path
from typing import Any

import ray
from ray.data.checkpoint import CheckpointConfig
from ray.data.llm import HttpRequestProcessorConfig, build_processor

from patient_session import PatientSession

Row = dict[str, Any]


def request(row: Row, fields: Row) -> Row:
    """The body of a row's request: a chat if the row has messages."""
    if "messages" in row:
        asked: Row = {"messages": [dict(message) for message in row["messages"]]}
    else:
        asked = {"prompt": row["prompt"]}
    return {"payload": asked | fields}


def answered(row: Row) -> Row:
    """The row as it is written: its own columns, and those that `columns_of` made of the answer."""
    columns: Row = row.pop("http_response")
    del row["payload"]
    return row | columns


def run(input_path: str, output: str, url: str, fields: Row, batch_size: int, patience_s: float) -> None:
    """Raises what ended the job: `patient_session.JobRefused`, within Ray's own error."""
    output = output if "://" in output else str(Path(output).absolute())
    route = "chat/completions" if "messages" in read(input_path).schema().names else "completions"
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=f"{output}.done", delete_checkpoint_on_success=False
    )
    key = os.environ.get("PENSTOCK_API_KEY")
    config = HttpRequestProcessorConfig(
        url=f"{url.rstrip('/')}/{route}",
        headers={"Authorization": f"Bearer {key}"} if key else None,
        batch_size=batch_size,
        # The stage waits for the server. If it reserved a CPU, a job that goes on would wait for ever on a
        # machine with two: Ray's filter of rows that are done reserves one, and a task that reads needs one.
        http_request_stage={"num_cpus": 0},
        session_factory=functools.partial(PatientSession, patience_s),
    )
    processor = build_processor(
        config, preprocess=functools.partial(request, fields=fields), postprocess=answered
    )
    # A block is what is lost and computed again when a job ends: one batch, not a whole file of rows.
    rows = read(input_path).repartition(target_num_rows_per_block=batch_size)
    processor(rows).write_parquet(output)


def read(path: str) -> ray.data.Dataset:
    """The rows of a file or folder of JSON lines, Parquet or CSV."""
    first = next(iter(sorted(Path(path).iterdir()))) if Path(path).is_dir() else Path(path)
    readers = {".parquet": ray.data.read_parquet, ".csv": ray.data.read_csv}
    return readers.get(first.suffix, ray.data.read_json)(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "input", help="a file or folder of JSON lines, Parquet or CSV, with id and prompt or messages"
    )
    parser.add_argument("output", help="a folder for the answers, beside which OUTPUT.done says what is done")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="its name at the server; needed where a server has several")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch-size", type=int, default=64, help="rows that are sent at once")
    parser.add_argument(
        "--patience", type=float, default=3600, help="longest silence of the server, in seconds"
    )
    given = parser.parse_args()
    fields: Row = {"max_tokens": given.max_tokens, "temperature": given.temperature}
    if given.model:
        fields["model"] = given.model
    try:
        run(given.input, given.output, given.url, fields, given.batch_size, given.patience)
    except ray.exceptions.RayTaskError as error:
        # Ray has the reason in the text of its own error alone.
        if refused := re.search(r"JobRefused: (.*)", str(error)):
            raise SystemExit(
                f"the job ended: {refused[1]}\nThe same command goes on with the other rows."
            ) from None
        raise


if __name__ == "__main__":
    main()
