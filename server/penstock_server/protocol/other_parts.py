"""Parts of messages that are no text: a document that is text becomes its text, and the place of an image, a
sound or a file may get a note, so that a conversation with one in its history goes on.

Parts are read as they come in JSON, before they are validated. A part that stays as it is, is refused by its
name then."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from pydantic import ValidationInfo

#: The most parts of a list that are looked at; a longer list is refused anyway.
MAX_PARTS = 1024
#: What people call the parts of the APIs; other types are called as they are.
_NAMES = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file", "document", "container_upload"), "file"),
}
#: The end of an error about a part.
HOW_TO_GO_ON = ". Leave the part out, or start the server with --lenient, which puts a note in its place"
_MAX_TYPE_CHARS = 64
#: The longest data URL that is read without base64: reading `%41` takes seventy times its memory, and nobody
#: writes large files so.
MAX_QUOTED_CHARS = 1 << 16
#: What no text has: control characters other than tab, line feed, form feed and carriage return.
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f]")


@dataclass
class Leniency:
    """How the bodies of a server's requests are read. It is the context of the validation."""

    #: Notes stand for parts that are no text everywhere; otherwise in results of tools alone.
    is_lenient: bool = False
    #: What was left out, by its name.
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def places(self) -> list[str]:
        return [f"{number} {name} parts" if number > 1 else f"{name} part" for name, number in
                sorted(self.left_out.items())]  # fmt: skip


def leniency_of(info: ValidationInfo) -> Leniency:
    return info.context if isinstance(info.context, Leniency) else Leniency()


def note(name: str) -> str:
    return f"[{name} left out: this model reads text]"


def with_text(parts: object, known: Collection[str], text_type: str, leniency: Leniency) -> object:
    """A content in which parts of other types than `known` are parts of `text_type`, if they are text or if
    notes may stand for them. What is no list stays as it is."""
    if not isinstance(parts, list) or len(parts) > MAX_PARTS:
        return parts
    return [_with_text(part, known, text_type, leniency) for part in parts]


def always_noted(leniency: Leniency) -> Leniency:
    """For the results of tools, which the client's programs make: nobody could leave their images out."""
    return Leniency(True, leniency.left_out)


def _with_text(part: object, known: Collection[str], text_type: str, leniency: Leniency) -> object:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or not 0 < len(kind) <= _MAX_TYPE_CHARS:
        return part
    if kind in known:
        return part
    text = "\n".join(_texts(part, kind))
    if not text and leniency.is_lenient:
        name = _NAMES.get(kind, kind)
        leniency.left_out[name] += 1
        text = note(name)
    return {"type": text_type, "text": text} if text else part


def _texts(part: dict[str, Any], kind: str) -> Iterator[str]:
    """The lines of a document or file that is text; none for anything else."""
    match kind, part:
        case "file", {"file": dict() as file}:
            found, head = _decoded(file.get("file_data")), [file.get("filename")]
        case "input_file", _:
            found, head = _decoded(part.get("file_data")), [part.get("filename")]
        case "document", {"source": dict() as source}:
            found, head = _text_of_source(source), [part.get("title"), part.get("context")]
        case "compaction", _:  # the summary of what Anthropic's servers took out of a long conversation
            found, head = _text_of_blocks(part.get("content")), []
        case "search_result", _:
            found, head = _text_of_blocks(part.get("content")), [part.get("title"), part.get("source")]
        case _:
            return
    if found is not None:
        yield from (each for each in head if each and isinstance(each, str))
        yield found


def _text_of_source(source: dict[str, Any]) -> str | None:
    match source:
        case {"type": "text", "data": str(text)}:
            return text
        case {"type": "content", "content": content}:
            return _text_of_blocks(content)
        case {"type": "base64", "data": data}:
            return _decoded(data)
    return None


def _text_of_blocks(content: object) -> str | None:
    """The texts of a document's blocks, with notes for its images."""
    if isinstance(content, str) or not isinstance(content, list):
        return content if isinstance(content, str) else None
    found = with_text(content, ("text",), "text", Leniency(True))
    texts = [part.get("text") if isinstance(part, dict) else None for part in found]  # type: ignore[attr-defined]
    return "\n".join(text for text in texts if isinstance(text, str))


def _decoded(data: object) -> str | None:
    """The text of a file in base64 or of a data URL; None for a file that is no text."""
    if not isinstance(data, str) or not data:
        return None
    head, comma, rest = data.partition(",")
    is_url = head.startswith("data:") and comma
    if is_url and not head.endswith(";base64"):
        return unquote(rest) if len(rest) <= MAX_QUOTED_CHARS else None
    try:
        text = base64.b64decode(rest if is_url else data, validate=True).decode("utf-8-sig")
    except ValueError:
        return None
    is_text = not text.startswith("%PDF") and _CONTROL.search(text) is None
    return text if is_text and text else None
