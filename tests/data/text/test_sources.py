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
        ({"kind": "jsonl", "path": 3}, "jsonl source: path=3"),
        ({"kind": "jsonl", "path": ["a", 3]}, r"jsonl source: path\.1=3"),
        ({"kind": "jsonl", "path": "a", "max_bad_share": 2}, "max_bad_share=2"),
        ({"kind": "tree", "path": "a", "max_bytes": 0}, "max_bytes=0"),
        ({"kind": "tree", "path": "a", "deduplicate": "no"}, "deduplicate='no'"),
        ({"kind": "tree", "path": ""}, "tree source: path=''"),
    ],
)
def test_an_invalid_config_is_an_error_that_names_the_key(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_source(config)


def test_describe_gives_the_source_back() -> None:
    source = load_source({"kind": "tree", "path": "src", "include": ["*.py"], "max_bytes": 10})

    assert load_source(source.describe()) == source
    assert load_source(json.loads(json.dumps(source.describe()))) == source
