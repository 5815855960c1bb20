"""The web page at `/`, and its files below `/ui`. The files come with the package and need no API key.

The files (1.1 MB, half of it for formulas) are read once, when the application is made; no request
touches the disk. Browsers keep the files, and ask each time whether a file has changed (ETag), so that a
page never mixes two versions of Penstock. The page uses relative addresses only, so that it works behind
a proxy that adds a prefix.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock_server.protocol.paths import UI_PATH

#: The page loads nothing from other servers, has no inline scripts or styles, and may not stand in a frame.
#: Only the sanitizer may turn text into HTML; browsers that know trusted types enforce this.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".txt": "text/plain",
}


@dataclass(frozen=True)
class PageFile:
    body: bytes
    media_type: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'


def page_routes() -> list[Route]:
    """Routes for GET and HEAD of the page and each of its files."""
    found = read_files(files("penstock_server") / "ui")
    routes = [Route(f"{UI_PATH}/{path}", partial(_answer, file)) for path, file in found.items()]
    return [Route("/", partial(_answer, found["index.html"])), *routes]


def read_files(folder: Traversable, prefix: str = "") -> dict[str, PageFile]:
    """The files of the page by their path below `folder`. Files of other kinds are left out."""
    found: dict[str, PageFile] = {}
    for entry in folder.iterdir():
        media_type = _MEDIA_TYPES.get("." + entry.name.rpartition(".")[2])
        if entry.is_dir():
            found |= read_files(entry, f"{prefix}{entry.name}/")
        elif media_type is not None:
            found[prefix + entry.name] = PageFile(entry.read_bytes(), media_type)
    return found


async def _answer(file: PageFile, request: Request) -> Response:
    headers = _HEADERS | {"ETag": file.etag}
    asked = request.headers.get("if-none-match", "")
    # A proxy that compresses answers turns a tag into a weak one (W/).
    if file.etag in [tag.strip().removeprefix("W/") for tag in asked.split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)
