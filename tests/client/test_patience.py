import pytest

from penstock_client.errors import (
    BadRequest,
    ConnectionFailed,
    ServerBusy,
    StreamError,
    StreamInterrupted,
    Timeout,
)
from penstock_client.patience import Patience, Tries

REFUSED = ConnectionFailed("refused", is_retryable=True)
BROKE = StreamInterrupted("broke", is_retryable=True)
SILENT = Timeout("silent")


def test_it_ends_when_the_server_is_away_for_too_long():
    patience, tries = Patience(60.0), Tries()
    assert patience.delay_s(tries, REFUSED, 100.0, 1.0) == 0.5
    assert patience.delay_s(tries, REFUSED, 159.0, 1.0) == 1.0
    assert patience.delay_s(tries, REFUSED, 160.0, 1.0) is None


def test_an_answer_begins_it_anew():
    patience = Patience(60.0)
    patience.delay_s(Tries(), REFUSED, 100.0, 1.0)
    patience.answered()
    assert patience.delay_s(Tries(), REFUSED, 200.0, 1.0) is not None
    assert patience.delay_s(Tries(), REFUSED, 259.0, 1.0) is not None


def test_without_a_limit_it_never_ends():
    patience, tries = Patience(None), Tries()
    delays = [patience.delay_s(tries, REFUSED, 1e6 * number, 1.0) for number in range(6)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize("error", [BROKE, SILENT, StreamError("bye", is_retryable=True)])
def test_interruptions_are_counted(error):
    patience, tries = Patience(None), Tries()
    delays = []
    for _ in range(6):
        patience.answered()
        delays.append(patience.delay_s(tries, error, 0.0, 1.0))
    assert None not in delays[:5] and delays[5] is None


def test_what_no_retry_helps():
    assert Patience(None).delay_s(Tries(), BadRequest("no", status=400), 0.0, 1.0) is None
    assert Patience(None).delay_s(Tries(), StreamError("no"), 0.0, 1.0) is None


def test_retry_after_is_honoured_up_to_the_limit():
    def busy(seconds: float) -> ServerBusy:
        return ServerBusy("busy", status=503, retry_after=seconds, is_retryable=True)

    assert Patience(300.0).delay_s(Tries(), busy(300.0), 0.0, 1.0) == 300.0
    assert Patience(300.0).delay_s(Tries(), busy(301.0), 0.0, 1.0) is None
    assert Patience(None).delay_s(Tries(), busy(3000.0), 0.0, 1.0) == 3000.0


def test_negative_patience_is_refused():
    with pytest.raises(ValueError, match="patience"):
        Patience(-1.0)
