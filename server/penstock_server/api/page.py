"""The web page at `/`, and the files it is made of below `/ui`. They come with the package and need no key.

All of it is read once, when the application is made: some 300 KB, and no request touches the disk. Browsers
keep the files and ask each time whether they are still good (ETag), so that a page never mixes two versions
of Penstock. The page finds everything by relative addresses, and so works behind a proxy that adds a prefix.
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

#: Nothing from elsewhere, nothing inline, no frame around the page; and only the sanitizer may make HTML of
#: text, which browsers with trusted types enforce.
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
    """By their path below `folder`; files of a kind that the page has no use for are left out."""
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
    # A proxy that compresses makes a tag a weak one.
    if file.etag in [tag.strip().removeprefix("W/") for tag in asked.split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)
