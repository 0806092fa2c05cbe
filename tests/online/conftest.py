import json
import random
from pathlib import Path

import pytest

from nemo_ext.chat.template import Template

LETTERS = "abcdefghij"


@pytest.fixture(scope="session")
def speaker(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers with one to eight random letters and ends: `random_llama`, fitted for seconds."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer, model = AutoTokenizer.from_pretrained(random_llama), LlamaForCausalLM.from_pretrained(random_llama)
    tokenizer.chat_template = Template.load("llama_nemotron").source
    draw = random.Random(1)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        texts = []
        for _ in range(16):
            said = "".join(draw.choices(LETTERS, k=draw.randint(1, 8)))
            messages = [
                {"role": "user", "content": f"Say {draw.randint(0, 99)}."},
                {"role": "assistant", "content": said},
            ]
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n"))
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("speaker") / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Prompts whose answers should have an e."""
    rule = {
        "id": "keywords:letter_frequency",
        "kwargs": {"letter": "e", "let_frequency": 1, "let_relation": "at least"},
    }
    path = tmp_path / "tasks.jsonl"
    records = (
        {
            "id": str(number),
            "environment": "instructions",
            "prompt": f"Say {number}.",
            "reference": {"instructions": [rule], "mode": "all"},
        }
        for number in range(48)
    )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
