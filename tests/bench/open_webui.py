"""Open WebUI's backend in front of Penstock: list of models, chats whole and streamed, titles, tags and
questions that follow, through OpenAI's API and through Ollama's. Needs an environment of its own (`pip
install open-webui`, 2.4 GB with a torch for the CPU) and a model with a context of 4096 tokens, since Open
WebUI asks for titles of up to 1000 tokens:

    penstock serve MODEL --port 8000
    OFFLINE_MODE=true HF_HUB_OFFLINE=1 OPENAI_API_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none \\
        OLLAMA_BASE_URL=http://127.0.0.1:8000 open-webui serve --host 127.0.0.1 --port 8080
    python tests/bench/open_webui.py http://127.0.0.1:8080 http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import json
import secrets
import urllib.request
from typing import Any

TASKS = ("title", "tags", "follow_up", "queries")
HISTORY = [
    {"role": "user", "content": "Tell me a story about a fox."},
    {"role": "assistant", "content": "Once there was a fox."},
]


class OpenWebUI:
    def __init__(self, url: str) -> None:
        self.url, self.headers = url, {"Content-Type": "application/json"}
        name = secrets.token_hex(4)
        account = {"name": name, "email": f"{name}@example.org", "password": f"Secret-1234-{name}"}
        self.headers["Authorization"] = f"Bearer {self.post('/api/v1/auths/signup', account)['token']}"

    def _text(self, path: str, body: dict[str, Any] | None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        with urllib.request.urlopen(request, timeout=600) as answer:  # raises for a status of 400 and more
            text: str = answer.read().decode()
            return text

    def get(self, path: str) -> Any:
        return json.loads(self._text(path, None))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return json.loads(self._text(path, body))

    def use_ollama(self, is_used: bool, address: str) -> None:
        config = {"ENABLE_OLLAMA_API": is_used, "OLLAMA_BASE_URLS": [address], "OLLAMA_API_CONFIGS": {}}
        self.post("/ollama/config/update", config)

    def models(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/api/models?refresh=true")["data"]
        return found

    def streamed(self, model: str, text: str) -> str:
        body = {"model": model, "stream": True, "messages": [{"role": "user", "content": text}]}
        *lines, end = self._text("/api/chat/completions", body).split("data: ")
        assert end.strip() == "[DONE]", end
        chunks = [json.loads(line) for line in lines if line.strip()]
        choices = [chunk["choices"][0] for chunk in chunks if chunk.get("choices")]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


def answer_of(body: dict[str, Any]) -> str:
    text: str = body["choices"][0]["message"]["content"]
    return text


def walk(webui: OpenWebUI, owner: str) -> None:
    """Everything with each model that Open WebUI lists. owner: "openai" or "ollama"."""
    models = [model["id"] for model in webui.models() if model["owned_by"] == owner]
    assert models, f"Open WebUI lists no model of {owner}"
    for model in models:
        question = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}]}
        print(f"{owner} {model}: {answer_of(webui.post('/api/chat/completions', question))!r}")
        print(f"  streamed: {webui.streamed(model, 'What is 7 plus 5?')!r}")
        for task in TASKS:
            body = {"model": model, "chat_id": "walk", "messages": HISTORY, "type": "web_search"}
            print(f"  {task}: {answer_of(webui.post(f'/api/v1/tasks/{task}/completions', body))[:60]!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("webui", help="address of a fresh Open WebUI, whose first account this makes")
    parser.add_argument("penstock", help="address of the server")
    options = parser.parse_args()
    webui = OpenWebUI(options.webui)
    for owner in ("ollama", "openai"):  # a model that both list is the one of Ollama
        webui.use_ollama(owner == "ollama", options.penstock)
        walk(webui, owner)


if __name__ == "__main__":
    main()
