"""A session: requests to one server, sent again as the policy says, with the model that they mean."""

from __future__ import annotations

import random
import time

from penstock_client._async.transport import AsyncStreamReply, AsyncTransport
from penstock_client.errors import PenstockError
from penstock_client.exchange import Reply, Request
from penstock_client.failures import checked
from penstock_client.requests import HEALTH, MODELS
from penstock_client.retries import Attempts, RetryPolicy
from penstock_client.server_info import Health, Model, only_model, parse_health, parse_models
from penstock_client.settings import AsyncSleep, Settings


class AsyncSession:
    """model: the model of requests that name none; None until it was looked up."""

    def __init__(
        self,
        settings: Settings,
        policy: RetryPolicy,
        model: str | None,
        transport: AsyncTransport,
        sleep: AsyncSleep,
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.model = model
        self.transport = transport
        self.sleep = sleep

    async def send(self, request: Request, policy: RetryPolicy | None = None) -> Reply:
        """The answer to a request. A failed request is sent again as the policy says."""
        ready, attempts = await self._with_model(request), Attempts(policy or self.policy)
        while True:
            try:
                return checked(await self.transport.send(ready), time.time())
            except PenstockError as error:
                if not await self.wait_to_retry(attempts, error):
                    raise

    async def open(self, request: Request, attempts: Attempts) -> AsyncStreamReply:
        """The beginning of a stream. A failed request is sent again while `attempts` last."""
        ready = await self._with_model(request)
        while True:
            try:
                return await self.transport.open(ready)
            except PenstockError as error:
                if not await self.wait_to_retry(attempts, error):
                    raise

    async def wait_to_retry(self, attempts: Attempts, error: PenstockError) -> bool:
        """Waits, and returns whether to try again after the error."""
        delay_s = attempts.delay_s(error, random.random())
        if delay_s is None:
            return False
        await self.sleep(delay_s)
        return True

    async def models(self) -> tuple[Model, ...]:
        return parse_models(await self.send(MODELS))

    async def health(self) -> Health:
        reply = await self.transport.send(HEALTH.with_timeout(self.settings.probe_timeout_s))
        return parse_health(reply if reply.status == 503 else checked(reply, time.time()))

    async def _with_model(self, request: Request) -> Request:
        if not request.needs_model:
            return request
        if self.model is None:
            self.model = only_model(await self.models())
        return request.with_model(self.model)
