"""Figures of a request for its log line."""

from __future__ import annotations

from penstock_server.telemetry.request_info import AnswerTimes, RequestInfo, TimeLimits


def test_what_generated_nothing_has_no_figures() -> None:
    assert RequestInfo("r").timings() == {}


def test_several_answers_are_added_up_and_the_longest_wait_counts() -> None:
    first = AnswerTimes(arrival=10.0, started=11.0, first=13.0, last=14.0, num_output_tokens=3)
    second = AnswerTimes(arrival=10.0, started=12.0, first=12.5, last=15.0, num_output_tokens=4)
    waiting = AnswerTimes(arrival=10.0)
    info = RequestInfo("r", num_prompt_tokens=5, answers=[first, second, waiting])
    assert info.timings() == {"prompt_tokens": 5, "output_tokens": 7, "queue_s": 2.0, "first_token_s": 3.0}


def test_what_was_refused_in_the_queue_has_no_times() -> None:
    assert RequestInfo("r", answers=[AnswerTimes(arrival=10.0)]).timings() == {
        "prompt_tokens": 0,
        "output_tokens": 0,
    }


def test_time_limits_count_from_the_arrival() -> None:
    """Not from when the engine is asked: a long text is tokenized in between."""
    info = RequestInfo("r", "me", TimeLimits(10.0, 60.0), arrival=100.0)
    assert info.engine_options() == {"client": "me", "start_by": 110.0, "finish_by": 160.0}
    assert RequestInfo("r", "me").engine_options() == {"client": "me"}
