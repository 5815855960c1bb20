"""`penstock worker`: this machine computes some of the layers of a model that another one serves."""

from __future__ import annotations

import logging
import signal
import threading

from penstock_server.facade.workers import worker_of
from penstock_server.settings.settings import Settings
from penstock_server.telemetry import logs

logger = logging.getLogger(__name__)


def run_worker(settings: Settings) -> int:
    """Works until a signal comes. Raises PenstockError, if the leader refuses this machine for good."""
    logs.configure(settings.log_level, settings.log_format)
    worker = worker_of(settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        # A handler runs between two instructions of this thread, which may hold a lock.
        signal.signal(number, lambda *_: threading.Thread(target=worker.stop, daemon=True).start())
    logger.info("rank %d looks for its leader at %s", settings.rank, settings.leader)
    worker.run()
    logger.info("stopped")
    return 0
