import pytest

from penstock_client.settings import Settings


def resolve(base_url=None, api_key=None, timeout=600.0, connect_timeout=5.0, **environ):
    return Settings.resolve(base_url, api_key, timeout, connect_timeout, environ)


def test_defaults():
    assert resolve() == Settings("http://127.0.0.1:8000", None, 600.0, 5.0)


def test_environment_then_arguments():
    environ = {"PENSTOCK_BASE_URL": "http://env:1", "PENSTOCK_API_KEY": "env-key"}
    settings = resolve(**environ)
    assert (settings.base_url, settings.api_key) == ("http://env:1", "env-key")
    settings = resolve("http://arg:2", "arg-key", **environ)
    assert (settings.base_url, settings.api_key) == ("http://arg:2", "arg-key")


def test_empty_variables_count_as_unset():
    assert resolve(PENSTOCK_BASE_URL="", PENSTOCK_API_KEY="") == resolve()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_url_may_end_as_users_of_other_clients_write_it(suffix):
    assert resolve("https://host:8000/models" + suffix).base_url == "https://host:8000/models"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "host",
        "ftp://host",
        "http://",
        "http:///v1",
        "http://h/?a=1",
        "http://[::1",
        "http://h:99999",
    ],
)
def test_unusable_url_is_refused(url):
    with pytest.raises(ValueError, match="base_url"):
        resolve(url)


def test_key_loses_the_newline_of_its_file():
    assert resolve(api_key="secret\n").api_key == "secret"


@pytest.mark.parametrize("key", ["sec\nret", "sécret", "se\x00cret"])
def test_unusable_key_is_refused_but_not_shown(key):
    with pytest.raises(ValueError, match="API key") as caught:
        resolve(api_key=key)
    assert key not in str(caught.value)


def test_key_is_not_shown():
    assert "secret" not in repr(resolve(api_key="secret"))


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_unusable_limits_are_refused(seconds):
    with pytest.raises(ValueError, match="^timeout"):
        resolve(timeout=seconds)
    with pytest.raises(ValueError, match="^connect_timeout"):
        resolve(connect_timeout=seconds)


def test_no_limit():
    settings = resolve(timeout=None, connect_timeout=None)
    assert (settings.timeout_s, settings.connect_timeout_s) == (None, None)
