"""Files as trainers read them; requires the trainers' libraries, which are not dependencies of this package."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_ext.chat.template import Template
from nemo_ext.data.preference import job
from tests.json_lines import write_jsonl

CALL = {"name": "python", "arguments": {"code": "1"}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Pairs, of which only a few have a trace, tools, a call, and arguments of another name."""
    folder = tmp_path_factory.mktemp("pairs")
    records: list[dict[str, Any]] = [
        {"id": n, "prompt": f"Q{n}", "chosen": "a" * 3000, "rejected": "b" * 3000} for n in range(6000)
    ]
    records.append({"prompt": "T", "chosen": "<think>t</think>a", "rejected": "<think>u</think>b"})
    python = {"type": "function", "function": {"name": "python", "parameters": {}}}
    for number, arguments in enumerate(({"code": "1"}, {"path": "x", "lines": [1, 2]})):
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": CALL | {"arguments": arguments}}]}
        records.append({"prompt": f"C{number}", "chosen": [call], "rejected": "b", "tools": [python]})
    path = write_jsonl(folder / "pairs.jsonl", records)
    job.run({"output": str(folder / "out"), "sources": {"own": {"kind": "pairs", "path": str(path)}}, "workers": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trl", "nemo_rl"])
def test_datasets_reads_every_value_unchanged(made: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets, which comes with trl")
    path = made / f"out/{kind}_train.jsonl"
    assert path.stat().st_size > 30e6, "more than datasets takes the types from"

    read = datasets.load_dataset("json", data_files=str(path), cache_dir=str(made / "cache"), split="train")

    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(read) == len(written) == 6003
    assert all(record == line for record, line in zip(read, written, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron3_nano", "domyn", "olmo3"])
def test_trl_tokenises_the_texts_of_the_template(made: Path, name: str, bpe_file: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets, which comes with trl")
    trainer = pytest.importorskip("trl.trainer.dpo_trainer", reason="needs trl")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe_file), eos_token="<|endoftext|>")
    tokenizer.chat_template = Template.load(name).source
    path = made / "out/trl_train.jsonl"
    read = datasets.load_dataset("json", data_files=str(path), cache_dir=str(made / "cache"), split="train")
    some = read.filter(lambda pair: not pair["prompt"][0]["content"].startswith("Q"))
    settings = SimpleNamespace(dataset_num_proc=None, max_length=4096, truncation_mode="keep_start")

    tokens = trainer.DPOTrainer._prepare_dataset(SimpleNamespace(_tokenizer=tokenizer), some, tokenizer, settings, "x")

    assert len(tokens) == 3
    for pair in tokens:
        prompt, chosen, rejected = (tokenizer.decode(pair[f"{side}_ids"]) for side in ("prompt", "chosen", "rejected"))
        question = pair["prompt"][0]["content"]
        assert question in prompt and ("python" in prompt) == question.startswith("C")
        assert ("t" in chosen and "a" in chosen) if question == "T" else ("python" in chosen)
        assert "None" not in chosen + rejected and '\\"' not in chosen
        assert "b" in rejected
