"""--kv-events-config: vLLM's object becomes ours, or is refused with a reason."""

from __future__ import annotations

import pytest

from penstock.config import KVEventsConfig
from penstock.errors import ConfigError
from penstock_server.models.each_model import each_model
from penstock_server.settings.kv_events import parse_kv_events
from penstock_server.settings.settings import Settings


def test_vllms_object_is_honoured() -> None:
    text = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv@pod", '
        '"replay_endpoint": "tcp://*:5558", "buffer_steps": 9, "hwm": 8, "max_queue_size": 7}'
    )
    expected = KVEventsConfig("tcp://*:5557", "tcp://*:5558", 9, 8, 7, "kv@pod")
    assert parse_kv_events(text) == expected
    assert parse_kv_events('{"enable_kv_cache_events": true}') == KVEventsConfig()
    for off in (
        "{}",
        '{"enable_kv_cache_events": false}',
        '{"enable_kv_cache_events": true, "publisher": "null"}',
    ):
        assert parse_kv_events(off) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no JSON|not JSON"),
        ("[]", "no JSON object"),
        ('{"enable_kv_cache_events": 1}', "true or false"),
        ('{"publisher": "kafka"}', "zmq or null"),
        ('{"enable_kv_cache_events": true, "port": 1}', "port is no key"),
        ('{"enable_kv_cache_events": true, "hwm": -1}', "hwm is -1"),
    ],
)
def test_what_can_not_be_honoured_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_kv_events(text)


def test_several_models_have_no_one_endpoint() -> None:
    with pytest.raises(ConfigError, match="--kv-events-config is about one model"):
        each_model(Settings(models=("a", "b"), kv_events_config=KVEventsConfig()))
