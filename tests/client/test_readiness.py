import pytest

from penstock_client.errors import AuthenticationFailed, ConnectionFailed, ServerError, Timeout
from penstock_client.readiness import Readiness
from penstock_client.server_info import Health

REFUSED = ConnectionFailed("refused")
READY = Health("ok", True)


def loading(progress: float) -> Health:
    return Health("loading", False, progress)


def test_a_server_that_is_ready():
    seen = []
    assert Readiness(10.0, seen.append, 0.0).judge(READY, 0.0) is READY
    assert seen == [READY]
    assert Readiness(10.0, None, 0.0).judge(READY, 0.0) is READY


def test_each_change_is_told_once():
    seen = []
    readiness = Readiness(10.0, seen.append, 0.0)
    for answer in (REFUSED, loading(0.0), loading(0.0), loading(0.5), REFUSED, loading(0.5), READY):
        readiness.judge(answer, 0.0)
    assert seen == [loading(0.0), loading(0.5), loading(0.5), READY]


def test_the_limit_is_on_time_without_a_change():
    readiness = Readiness(10.0, None, 0.0)
    for step in range(100):
        assert readiness.judge(loading(step / 100), 9.0 * step) is None
    assert readiness.judge(loading(0.99), 9.0 * 99 + 9.9) is None
    with pytest.raises(Timeout, match="10 seconds: the server says 'loading', 99% loaded$"):
        readiness.judge(loading(0.99), 9.0 * 99 + 10.0)


@pytest.mark.parametrize("absent", [REFUSED, Timeout("silent"), ServerError("bad gateway", status=502)])
def test_a_server_that_is_not_there(absent):
    readiness = Readiness(10.0, None, 5.0)
    assert readiness.judge(absent, 14.0) is None
    with pytest.raises(Timeout, match=absent.message):
        readiness.judge(absent, 15.0)
    assert Readiness(None, None, 0.0).judge(absent, 1e9) is None


def test_what_waiting_does_not_help():
    error = AuthenticationFailed("no key", status=401)
    with pytest.raises(AuthenticationFailed):
        Readiness(10.0, None, 0.0).judge(error, 0.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_limit_is_positive(seconds):
    with pytest.raises(ValueError, match="timeout"):
        Readiness(seconds, None, 0.0)
