"""From conversations to a model with a thinking toggle: the data job, a converted checkpoint, the trainer."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_ext.chat.sample import Message, Sample
from nemo_ext.chat.template import Template
from nemo_ext.data.text.tokenizers import ByteTokenizer

LETTERS = np.array(list("abcdefghij"))


def word(number: int) -> str:
    return "".join(np.random.default_rng(number).choice(LETTERS, 4))


def write_conversations(path: Path) -> None:
    with path.open("w") as file:
        for number in range(1200):
            trace = f"<think>\n{' '.join(word(number))}\n</think>\n\n"
            answer = (trace if number % 2 else "") + word(number)
            messages = [{"role": "user", "content": f"say {word(number)}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": str(number), "thinking": bool(number % 2), "messages": messages}) + "\n")


def answers(model: torch.nn.Module, thinking: bool) -> list[str]:
    """Greedy answers of the model to held-out words."""
    template, tokenizer, said = Template.load("llama_nemotron"), ByteTokenizer(), []
    for number in range(5000, 5020):
        asked = Sample(id="x", messages=(Message(role="user", content=f"say {word(number)}"),), thinking=thinking)
        prompt = template.render(asked, thinking=thinking, add_generation_prompt=True).text
        ids = torch.tensor([list(prompt.encode())])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
        said.append(tokenizer.decode(made[0, ids.shape[1] :].tolist()).split("<|eot_id|>")[0])
    return said


@pytest.mark.deep
def test_a_model_learns_the_thinking_toggle(launched: Callable[..., str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=384, num_key_value_heads=2, **sizes)).save_pretrained(tmp_path / "base")
    launched("convert", f"from={tmp_path / 'base'}", f"to={tmp_path / 'megatron'}")
    (made,) = (tmp_path / "megatron" / "model").glob("*.yaml")
    write_conversations(tmp_path / "chat.jsonl")
    launched(
        "sft_data",
        f"output={tmp_path / 'packs'}",
        "template=llama_nemotron",
        f"sources=[{{name: chat, path: {tmp_path / 'chat.jsonl'}}}]",
        "packing.capacity=512",
        "reasoning={strip: 0.0, truncate: 0.0}",
        "near_duplicates=null",
        "filters.repetition=null",
        "workers=1",
    )
    launched(
        "train",
        f"--config-dir={tmp_path / 'megatron'}",
        f"model={made.stem}",
        f"run_dir={tmp_path / 'run'}",
        "data=packed",
        f"data.packed.train={tmp_path / 'packs' / 'train'}",
        f"data.packed.valid={tmp_path / 'packs' / 'valid'}",
        f"megatron.pretrained_checkpoint={tmp_path / 'megatron'}",
        "megatron.seq_length=512",
        "megatron.max_position_embeddings=2048",
        "megatron.micro_batch_size=1",
        "megatron.global_batch_size=4",
        "megatron.eval_iters=1",
        "train.tokens=409600",
    )
    launched("convert", f"from={tmp_path / 'run'}", f"to={tmp_path / 'exported'}")

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    on, off = answers(model, True), answers(model, False)
    assert sum("<think>" in text and "</think>" in text for text in on) >= 18, on
    assert sum("think" in text for text in off) == 0, off
