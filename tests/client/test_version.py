import re

from penstock_client.version import USER_AGENT, __version__


def test_version_is_one_that_packaging_tools_accept():
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", __version__)


def test_user_agent_names_the_version():
    assert USER_AGENT.endswith(f"/{__version__}")
