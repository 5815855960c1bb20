"""/v1/fill: texts go in with blanks and come back without."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock_server.answers.fill_format import FillFormat, SpanReader
from penstock_server.prompts.filling import read_fill
from penstock_server.prompts.inputs import refuse_long_text
from penstock_server.protocol.fill_bodies import FillAnswer, FillChunk, FillRequest
from penstock_server.routing.body_route import BodyRoute
from penstock_server.routing.descriptions import ERRORS, event_stream_of
from penstock_server.routing.generation_routes import GenerationRoutes


class FillRoutes(GenerationRoutes):
    def router(self) -> APIRouter:
        router = APIRouter(tags=["penstock"], responses=ERRORS, route_class=BodyRoute)
        router.post(
            "/fill",
            response_model=FillAnswer,
            responses={200: event_stream_of(FillChunk.__name__)},
        )(self.fill)
        return router

    async def fill(self, body: FillRequest, request: Request) -> Response:
        used = await self._use(body.model, request)
        model = used.model
        refuse_long_text(model, len(body.prompt))
        asked = await self._texts.run(lambda: read_fill(model, body))
        form = FillFormat(
            body.request_id or request.state.request_id,
            used.name,
            asked.text,
            SpanReader(model.tokenizer, asked.form.closers, body.max_tokens_per_blank),
        )
        return await self._responder.respond(used, request, body, form, self._cut(model, asked.question))
