"""`penstock worker`: this machine computes some of the layers of a model that another one serves."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

from penstock_server.facade.workers import worker_of
from penstock_server.models.served_models import STOP_S
from penstock_server.settings.settings import Settings
from penstock_server.telemetry import logs

logger = logging.getLogger(__name__)


def run_worker(settings: Settings) -> int:
    """Works until a signal comes. Raises PenstockError, if the leader refuses this machine for good."""
    logs.configure(settings.log_level, settings.log_format)
    worker, has_ended, is_leaving = worker_of(settings), threading.Event(), threading.Event()

    def leave() -> None:
        worker.stop()
        if not has_ended.wait(STOP_S):
            logger.error("the step that is computed does not end in %g s: a read hangs", STOP_S)
            logging.shutdown()
            os._exit(1)

    def handle(number: int, frame: FrameType | None) -> None:
        if is_leaving.is_set():
            os._exit(128 + number)  # a second signal means: don't wait
        is_leaving.set()
        # A handler runs between two instructions of this thread, which may hold a lock.
        threading.Thread(target=leave, daemon=True).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    logger.info("rank %d looks for its leader at %s", settings.rank, settings.leader)
    try:
        worker.run()
    finally:
        has_ended.set()
    logger.info("stopped")
    return 0
