"""patiently() tries a call of the system again after an error that passes by itself: a signal came in between
(EINTR), or the system could not do it at this moment (EAGAIN, ENOMEM, ENOBUFS), as network file systems and
FUSE say. A step that ended for one of these would end every sequence in it."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS})
#: Seconds between one try and the next.
PAUSES_S = (0.0, 0.001, 0.01, 0.1, 1.0)

Given = ParamSpec("Given")
Found = TypeVar("Found")


def patiently(call: Callable[Given, Found], *arguments: Given.args, **named: Given.kwargs) -> Found:
    """What the call returns. Raises OSError: one that does not pass at once, and one that does not pass in
    about a second."""
    for pause_s in PAUSES_S:
        try:
            return call(*arguments, **named)
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
        time.sleep(pause_s)
    return call(*arguments, **named)
