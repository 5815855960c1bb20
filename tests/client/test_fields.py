import pytest

from penstock_client import fields
from penstock_client.errors import ProtocolError

DATA = {"text": "a", "count": 3, "half": 0.5, "none": None, "ids": [1, 2], "names": ["a"], "rows": [{}]}


def test_what_is_there():
    assert fields.get(DATA, "text", str, "") == "a"
    assert fields.require(DATA, "count", int) == 3
    assert (fields.number(DATA, "count"), fields.number(DATA, "half")) == (3.0, 0.5)
    assert fields.objects(DATA, "rows") == [{}]
    assert fields.integers(DATA, "ids") == (1, 2)
    assert fields.strings(DATA, "names") == ("a",)


@pytest.mark.parametrize("name", ["none", "absent"])
def test_what_is_not_there(name):
    assert fields.get(DATA, name, str, "default") == "default"
    assert fields.number(DATA, name) is None
    assert fields.objects(DATA, name) == []
    assert fields.integers(DATA, name) is None
    assert fields.strings(DATA, name) is None
    with pytest.raises(ProtocolError, match=f"'{name}' is missing"):
        fields.require(DATA, name, str)


@pytest.mark.parametrize("name", ["text", "names"])
@pytest.mark.parametrize("read", [fields.number, fields.objects, fields.integers])
def test_what_is_of_another_type(read, name):
    with pytest.raises(ProtocolError, match=f"'{name}' should"):
        read(DATA, name)
