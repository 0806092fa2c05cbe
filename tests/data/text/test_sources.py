import json

import pytest

from nemo_ext.data.text.sources import load_source


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "jsonnl", "path": "a"}, "unknown source kind 'jsonnl': did you mean 'jsonl'"),
        ({"path": "a"}, "unknown source kind None"),
        (
            {"kind": "jsonl", "path": "a", "text_kee": "x"},
            "unknown key 'text_kee': did you mean 'text_key'",
        ),
        ({"kind": "jsonl"}, "jsonl source: the key 'path' is missing"),
        ({"kind": "jsonl", "path": 3}, "path must be a string or a list of strings, not 3"),
        ({"kind": "jsonl", "path": ["a", 3]}, "path must be a string or a list of strings"),
        ({"kind": "jsonl", "path": "a", "max_bad_share": 2}, "max_bad_share must be a share from 0 to 1, not 2"),
        ({"kind": "tree", "path": "a", "max_bytes": 0}, "max_bytes must be a whole number of at least 1, not 0"),
        ({"kind": "tree", "path": "a", "deduplicate": "no"}, "deduplicate must be true or false, not 'no'"),
        ({"kind": "tree", "path": ""}, "path must be a text"),
    ],
)
def test_a_wrong_config_is_an_error_that_names_the_key(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_source(config)


def test_describe_gives_the_source_back() -> None:
    source = load_source({"kind": "tree", "path": "src", "include": ["*.py"], "max_bytes": 10})

    assert load_source(source.describe()) == source
    assert load_source(json.loads(json.dumps(source.describe()))) == source
