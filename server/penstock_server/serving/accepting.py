"""Accepting: takes the connections that come to a listening socket, as long as there are descriptors for
them."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger(__name__)

#: Descriptors that connections leave to files, pipes and processes.
SPARE_DESCRIPTORS = 64
#: Seconds between two looks whether a descriptor is free again.
_PAUSE_S = 0.1
#: Connections that are taken before the event loop does its other work.
_AT_ONCE = 64
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def most_descriptors() -> int:
    """The descriptors that this process may have while it takes connections. The system gives the lowest that
    is free, so that a new one's number says how many are in use."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(limit - SPARE_DESCRIPTORS, limit // 2)


async def accept(
    listener: socket.socket,
    make_protocol: Callable[[], asyncio.Protocol],
    context: ssl.SSLContext | None = None,
    most: int | None = None,
) -> None:
    """Takes connections until it is cancelled. Where there are no descriptors, connections wait in the
    system's queue, with one line in the log. (asyncio's own servers write a stack for each try, thousands of
    them in a second, and leave no descriptor to anybody else.)

    most: as most_descriptors()."""
    loop = asyncio.get_running_loop()
    most = most_descriptors() if most is None else most
    listener.setblocking(False)
    beginning: set[asyncio.Task[None]] = set()
    num_taken = 0
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                await _free_descriptor(listener, most)
            elif error.errno != errno.ECONNABORTED:  # that one: the client left before it was taken
                await asyncio.sleep(_PAUSE_S)  # the next try may fail at once, too
            continue
        task = loop.create_task(_begin(connection, make_protocol, context))
        beginning.add(task)
        task.add_done_callback(beginning.discard)
        if connection.fileno() >= most:
            await _free_descriptor(listener, most)
        num_taken += 1
        if num_taken % _AT_ONCE == 0:
            await asyncio.sleep(0)


async def _begin(
    connection: socket.socket, make_protocol: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None
) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError, asyncio.TimeoutError):  # ssl.SSLError is an OSError: the client is no such client
        connection.setblocking(False)
        await loop.connect_accepted_socket(make_protocol, connection, ssl=context)


async def _free_descriptor(listener: socket.socket, most: int) -> None:
    """Waits until a descriptor is free for a connection."""
    logger.warning(
        "new connections wait: the limit of open files leaves no more than the %d that there are; raise it "
        "(ulimit -n), or have clients close connections that they don't use",
        most,
    )
    while not _has_free(listener, most):
        await asyncio.sleep(_PAUSE_S)
    logger.info("new connections are taken again")


def _has_free(listener: socket.socket, most: int) -> bool:
    try:
        lowest = os.dup(listener.fileno())
    except OSError:
        return False
    os.close(lowest)
    return lowest < most
