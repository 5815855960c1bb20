"""The image's HEALTHCHECK. The exit code is 0 while /health/live says that no restart is needed, also while a
model loads and while requests drain. The PENSTOCK_* variables give the server's address."""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request
from collections.abc import Mapping

TIMEOUT_S = 4  # the Dockerfile's timeout for this check is 5 s


def live_url(environ: Mapping[str, str]) -> str:
    scheme = "https" if environ.get("PENSTOCK_SSL_CERTFILE") else "http"
    return f"{scheme}://127.0.0.1:{environ.get('PENSTOCK_PORT', '8000')}/health/live"


def complaint(url: str) -> str | None:
    """The error; None if the server is alive."""
    context = ssl.create_default_context()
    # The certificate is not checked: it has the name that clients use, not 127.0.0.1.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        urllib.request.build_opener(*handlers).open(url, timeout=TIMEOUT_S).close()
    except OSError as error:
        return f"{url}: {error}"
    return None


if __name__ == "__main__":
    sys.exit(complaint(live_url(os.environ)))
