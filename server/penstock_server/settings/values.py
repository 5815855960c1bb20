"""Functions that read the text of a flag or variable. Each raises ValueError, which says what is wrong."""

from __future__ import annotations

import math
import re

from penstock.config import card_number
from penstock.errors import ConfigError
from penstock.kernel_tuning import KernelTuning


def parse_bytes(text: str) -> int:
    """Bytes from "2GiB", "512M" (binary, as Docker's and Java's), "1.5GB" (decimal) or "4096"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?b)?|b)?", text.strip().lower())
    if not match:
        raise ValueError(f"{text!r} is no size; write for example 2GiB, 512MiB or 4096")
    number, letter, suffix = match.groups()
    base = 1000 if suffix == "b" else 1024
    return int(float(number) * base ** (" kmgt".index(letter) if letter else 0))


def parse_bytes_or_share(text: str) -> int | float:
    """Bytes as parse_bytes() reads them, or from "20%" a float between 0 and 1."""
    number = text.strip().removesuffix("%")
    if number == text.strip():
        return parse_bytes(text)
    try:
        share = float(number) / 100
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ValueError(f"{text!r} is no share; write for example 20%")
    return share


def parse_tuning(text: str) -> KernelTuning:
    try:
        return KernelTuning.parse(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def parse_device(text: str) -> str:
    try:
        card_number(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return text


def parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def parse_list(text: str) -> tuple[str, ...]:
    """The words between commas. An empty text is most likely an unset variable of a shell, and with an empty
    --api-key a server would run without a key. Raises ValueError for an empty text."""
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise ValueError("the value is empty")
    return words


def parse_pair(text: str) -> tuple[str, ...]:
    """Two words with a comma between them. Raises ValueError for anything else."""
    words = tuple(word.strip() for word in text.split(","))
    if len(words) != 2 or not all(words):
        raise ValueError(f"{text!r} is no pair of words; write for example no,yes")
    return words


def parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number") from None


def parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number of seconds") from None
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{text!r} is no number of seconds")
    return seconds


#: The units of a duration as Go writes it, and Ollama with it, in seconds.
_DURATION_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def parse_keep_alive(text: str) -> float:
    """Seconds from "5m", "1h30m", "90" or "0"; infinity from what is below 0, as Ollama has it."""
    word = text.strip()
    number = word.lstrip("+-")
    if re.fullmatch(r"\d+(\.\d+)?", number):
        seconds = float(number)
    elif number and not _DURATION.sub("", number):
        seconds = sum(float(count) * _DURATION_UNITS[unit] for count, unit in _DURATION.findall(number))
    else:
        raise ValueError(f"{text!r} is no duration; write for example 5m, 1h30m, 90, 0 or -1")
    return math.inf if word.startswith("-") and seconds else seconds


def parse_prefix(text: str) -> str:
    """A path without its last slash: "/llm" from "/llm/". Raises ValueError for a text that is no path."""
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*/?", text):
        raise ValueError(f"{text!r} can't stand in front of paths; write something like /llm")
    return text.rstrip("/")
