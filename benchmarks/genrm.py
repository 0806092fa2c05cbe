"""A generative reward model on one machine, end to end: trained, served, and used as judge of RLHF with length control.

    python benchmarks/genrm.py [--folder DIR] [--steps 16]

The models are tiny Llamas. Answers are runs of one letter, "gggg" or "bb"; an answer of g's is good, whatever its
length. The reward model is first fitted to the format of judgements that are right in three of four cases, then trained
by `nemo-ext rl preset=genrm_training` on labelled comparisons, and served by `nemo-ext serve`. The policy is trained by
`preset=nemotron3_rlhf` with that endpoint as judge, with the paper's length control and without. Reported: the judge's
agreement before and after training, and the fraction of good answers and their length in the policy's first and last
steps, with 95 % bootstrap intervals over answers.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from grpo import nemo_ext

from nemo_ext.chat.sample import Message
from nemo_ext.job.statistics import bootstrap
from nemo_ext.rl.rewards.genrm import instructed_messages

SPECIAL = ("<|begin|>", "<|role|>", "<|text|>", "<|end|>", "<|pad|>")
TEMPLATE = (
    "<|begin|>{% for message in messages %}<|role|>{{ message.role }}<|text|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant<|text|>{% endif %}"
)
LONGEST = 12
SAMPLING = "{temperature: 0.0, max_tokens: 40}"
CONTROLS = {"without": "{thinking: 0, answer: 0, thinking_bonus: 0, answer_bonus: 0}", "with": "{}"}
draw = random.Random(1)


def said() -> str:
    """Answer of a random letter and length."""
    return draw.choice("gb") * draw.randint(1, LONGEST)


def judgement(first: str, second: str) -> str:
    """Correct judgement of two answers."""
    scores = [5 if answer[0] == "g" else 1 for answer in (first, second)]
    ranking = 3 if scores[0] == scores[1] else 1 if scores[0] > scores[1] else 6
    return json.dumps({"score_1": scores[0], "score_2": scores[1], "ranking": ranking})


def compared() -> tuple[str, str, str]:
    """Random comparison: a prompt and two answers."""
    return f"Say {draw.randint(0, 99)}.", said(), said()


def labelled() -> list[dict]:
    """Comparison with a judgement that is right in three of four cases."""
    prompt, *answers = compared()
    shown = answers if draw.random() < 0.75 else [said(), said()]
    asked = instructed_messages((Message(role="user", content=prompt),), *answers)
    return [*asked, {"role": "assistant", "content": judgement(*shown)}]


def conversation() -> list[dict]:
    """Conversation of a prompt and an answer."""
    return [{"role": "user", "content": f"Say {draw.randint(0, 99)}."}, {"role": "assistant", "content": said()}]


def fit(folder: Path, make: Callable[[], list[dict]], steps: int, vocabulary: int) -> None:
    """Train a tiny model and a tokenizer on conversations."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator((message["content"] for _ in range(300) for message in make()), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[3], pad_token=SPECIAL[4])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=4, eos_token_id=3, pad_token_id=4, **sizes)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        texts = [make() for _ in range(32)]
        whole = [tokenizer.apply_chat_template(one, return_dict=False) for one in texts]
        prompts = [
            len(tokenizer.apply_chat_template(one[:-1], add_generation_prompt=True, return_dict=False)) for one in texts
        ]
        longest = max(map(len, whole))
        ids = torch.tensor([one + [4] * (longest - len(one)) for one in whole])
        labels = ids.masked_fill(ids == 4, -100)
        for row, length in enumerate(prompts):
            labels[row, :length] = -100
        loss = model(input_ids=ids, attention_mask=(ids != 4).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"  fit, step {step + 1}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_judge(folder: Path, steps: int) -> None:
    """Train the reward model by GRPO on comparisons with true labels."""
    records, tasks = folder / "comparisons.jsonl", folder / "comparisons_tasks.jsonl"
    lines = []
    for number in range(800):
        contents = compared()
        roles = ("user", "response_1", "response_2")
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        label = json.loads(judgement(*contents[1:]))
        lines.append(json.dumps({"id": str(number), "messages": messages, **label}) + "\n")
    records.write_text("".join(lines))
    nemo_ext("rl_tasks", f"records={records}", "environment=genrm", f"output={tasks}")
    nemo_ext(
        *("rl", "preset=genrm_training", f"model={folder / 'judge'}", f"tasks.train.path={tasks}"),
        *("rl.prompts_per_step=8", "rl.generations_per_prompt=8", "rl.batch=64", "micro_batch=64"),
        *("rl.lengths={prompt: 512, response: 40}", "rl.validation.every=null", f"rl.schedule.steps={steps}"),
        *("rl.optimizer.learning_rate=1e-3", "on_inexpressible=warn", f"run_dir={folder / 'genrm'}"),
    )


def train_policy(folder: Path, run_dir: Path, steps: int, control: str) -> None:
    """Train the policy by RLHF with the served judge."""
    tasks = folder / "chat.jsonl"
    records = ({"id": str(n), "environment": "chat", "prompt": f"Say {n}."} for n in range(100))
    tasks.write_text("".join(json.dumps(record) + "\n" for record in records))
    endpoint = json.loads((folder / "serve" / "endpoint.json").read_text())
    os.environ["JUDGE_KEY"] = endpoint["key"] or ""
    judge = f"{{endpoint: '{endpoint['url']}', model: judge, key_variable: JUDGE_KEY, sampling: {SAMPLING}}}"
    nemo_ext(
        *("rl", "preset=nemotron3_rlhf", f"model={folder / 'policy'}", f"tasks.train.path={tasks}"),
        *("rl.prompts_per_step=4", "rl.generations_per_prompt=8", "rl.batch=32", "micro_batch=32"),
        *("rl.lengths={response: 16, total: 256}", "rl.validation.every=null", f"rl.schedule.steps={steps}"),
        *("rl.optimizer.learning_rate=1e-3", "on_inexpressible=warn", f"run_dir={run_dir}"),
        f"rl.group={{judge: {judge}, show: instructed, length_control: {control}}}",
    )


def steps_of(run_dir: Path, first: int, last: int) -> list[dict]:
    """Rollouts of a range of steps."""
    found = map(json.loads, (run_dir / "rollouts.jsonl").read_text().splitlines())
    return [line for line in found if first <= line["step"] <= last]


def interval(values: list[float]) -> str:
    """The mean with its 95 % interval."""
    low, high = bootstrap(np.array(values, dtype=float), seed=1)
    return f"{np.mean(values):.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder for all files; existing ones are reused")
    parser.add_argument("--steps", type=int, default=16, help="steps of each run")
    parser.add_argument("--fit", type=int, default=250, help="steps for fitting the judge")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, steps = arguments.folder or Path(temporary), arguments.steps
        folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        for name, make, count, vocabulary in (
            ("judge", labelled, arguments.fit, 1200),
            ("policy", conversation, 100, 261),
        ):
            if not (folder / name / "config.json").is_file():
                fit(folder / name, make, count, vocabulary)
        train_judge(folder, steps)
        print(f"judge: {time.perf_counter() - began:.0f} s", flush=True)
        for label, first, last in (("before", 1, 3), ("after", steps - 2, steps)):
            agreed = [float(line["score"]) for line in steps_of(folder / "genrm", first, last)]
            print(f"judge prefers the right answer, {label}: {interval(agreed)}", flush=True)
        words = [f"model={folder / 'genrm' / 'model'}", "serving.name=judge", "serving.device=cpu"]
        command = [sys.executable, "-m", "nemo_ext.cli", "serve", *words, "port=0", f"run_dir={folder / 'serve'}"]
        (folder / "serve" / "endpoint.json").unlink(missing_ok=True)
        with open(folder / "serve.log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
            try:
                while not (folder / "serve" / "endpoint.json").is_file():
                    if server.poll() is not None:
                        sys.exit((folder / "serve.log").read_text()[-2000:])
                    time.sleep(0.2)
                for name, control in CONTROLS.items():
                    train_policy(folder, folder / name, steps, control)
                    for label, first, last in (("before", 1, 3), ("after", steps - 2, steps)):
                        lines = steps_of(folder / name, first, last)
                        good = [float(line["response"].startswith("g")) for line in lines]
                        lengths = [float(line["tokens"]) for line in lines]
                        told = f"good {interval(good)}, tokens {interval(lengths)}"
                        print(f"{name} length control, {label}: {told}", flush=True)
            finally:
                server.terminate()
        print(f"all: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
