"""What only the asynchronous client has; what both have is in test_client.py."""

import asyncio
import inspect

from penstock_client import AsyncClient, Client

from . import samples
from .fake_server import PATIENCE_S, Answer, Events


def public_methods(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(value)
        for name, value in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_it_is_the_twin_of_the_other():
    ours, theirs = public_methods(AsyncClient), public_methods(Client)
    ours["close"] = ours.pop("aclose")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].parameters == theirs[name].parameters
        assert ours[name].return_annotation.removeprefix("Async") == theirs[name].return_annotation
    defaults = [
        {
            name: parameter.default
            for name, parameter in inspect.signature(kind).parameters.items()
            if name != "sleep"
        }
        for kind in (AsyncClient, Client)
    ]
    assert defaults[0] == defaults[1]


def test_many_requests_at_once(server):
    server.fallback = lambda received: Answer.json(samples.completion(received.body["prompt"]))

    async def main() -> list[str]:
        async with AsyncClient(server.url, model="tiny") as client:
            answers = await asyncio.gather(*(client.complete(str(i)) for i in range(20)))
            return [answer.text for answer in answers]

    assert asyncio.run(main()) == [str(i) for i in range(20)]


def test_cancelling_a_task_closes_its_connection(server):
    server.script.append(Events([samples.completion_event("a")], ending="hold"))

    async def main() -> None:
        has_begun = asyncio.Event()

        async def read(client: AsyncClient) -> None:
            async for _ in client.stream_complete("Once"):
                has_begun.set()

        async with AsyncClient(server.url, model="tiny") as client:
            task = asyncio.create_task(read(client))
            await has_begun.wait()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert await asyncio.to_thread(server.client_gone.wait, PATIENCE_S)

    asyncio.run(main())


def test_a_dropped_stream_closes_its_connection(server):
    server.script.append(Events([samples.completion_event("a")], ending="hold"))

    async def main() -> None:
        async with AsyncClient(server.url, model="tiny") as client:
            async for chunk in client.stream_complete("Once"):
                assert chunk.text == "a"
                break
            assert await asyncio.to_thread(server.client_gone.wait, PATIENCE_S)

    asyncio.run(main())


def test_leaving_the_client_closes_it(server):
    async def main() -> AsyncClient:
        async with AsyncClient(server.url, model="tiny") as client:
            return client

    assert asyncio.run(main())._session.transport._http.is_closed
