"""SFT data from a file of conversations to packs, compared with Hugging Face datasets and TRL's packing, in one run.

    python benchmarks/sft_data.py [--samples 1000000] [--capacity 32768] [--workers 2] [--only NAME ...]

The conversations are sentences of installed libraries' documentation, half of them with reasoning; the tokenizer is a
BPE trained on the same text. `filtered` is `nemo-ext sft_data` with its defaults and the language filter: structural,
narrative, repetition and language filters, near duplicates removed. `ours` does the same work as the peer: chat
template, tokens, mask of the assistant's tokens, packing. The peer loads the file with `datasets`, maps
`apply_chat_template(return_assistant_tokens_mask=True)` over it with the same number of processes, and packs with TRL's
best-fit-decreasing. All start from the same JSONL file and end with packs on disk.

Memory is the total of all processes, sampled ten times per second: the anonymous part, and the resident part with
shared pages counted once (PSS), which is mostly reclaimable file pages.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil

TEMPLATE = "llama_nemotron"
SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
CONTENDERS = ("filtered", "ours", "peer")


def sentences() -> list[str]:
    """Sentences of the installed libraries' documentation."""
    from nemo_ext.data.text.corpora import DocstringsSource
    from nemo_ext.data.text.documents import ReadReport

    source, report = DocstringsSource(packages=("torch", "numpy", "matplotlib", "rich")), ReadReport()
    texts = [
        document.text for part in source.parts(max_documents=1, max_size=1) for document in source.read(part, report)
    ]
    found = {" ".join(piece.split()) for text in texts for piece in text.split(". ")}
    return sorted(piece + "." for piece in found if 40 < len(piece) < 240)


def make_conversations(path: Path, count: int) -> None:
    """Write `count` conversations of one or two turns, about 1300 characters on average."""
    known = sentences()
    draw = np.random.default_rng(0)
    with path.open("w", buffering=1 << 20) as file:
        for number in range(count):
            lengths = np.maximum(1, draw.lognormal((0.6, 1.4, 1.2), (0.5, 0.8, 0.7)).astype(int))
            asked, thought, said = (
                " ".join(known[index] for index in draw.integers(0, len(known), length)) for length in lengths
            )
            trace = f"<think>\n{thought}\n</think>\n\n" if number % 2 else ""
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": trace + said}]
            record = {"id": str(number), "language": "en", "thinking": bool(number % 2), "messages": messages}
            file.write(json.dumps(record) + "\n")


def make_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE and save it with the template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from nemo_ext.chat.template import Template

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=32_000, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(sentences(), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[-1])
    made.chat_template = Template.load(TEMPLATE).source
    made.save_pretrained(folder)


def ours(folder: Path, capacity: int, workers: int, *, filtered: bool) -> None:
    """`nemo-ext sft_data` in this process."""
    conversations = folder / "conversations.jsonl"
    words = [
        *(f"output={folder / 'made'}", f"template={TEMPLATE}", f"workers={workers}", "validation_share=0"),
        f"tokenizer={{kind: huggingface, path: {folder / 'tokenizer'}, eod: '{SPECIAL[-1]}'}}",
        f"sources=[{{name: chat, path: {conversations}, language_key: language, thinking_key: thinking}}]",
        *(f"packing={{capacity: {capacity}, longer: truncate}}", "reasoning={strip: 0.0, truncate: 0.0}"),
    ]
    if filtered:
        words += ["filters.language={languages: [en]}"]
    else:
        words += [
            "filters.structural=null",
            "filters.narrative=null",
            "filters.repetition=null",
            "near_duplicates=null",
        ]
    from nemo_ext.data.sft.job import run
    from nemo_ext.job.config import compose

    run(compose("sft_data", words))


def peer(folder: Path, capacity: int, workers: int) -> None:
    """datasets and TRL."""
    import datasets
    from transformers import AutoTokenizer
    from trl import pack_dataset

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")

    def encode(record: dict) -> dict:
        # The template needs reasoning and answer separately; the file has them in one text.
        messages = []
        for message in record["messages"]:
            trace, tag, answer = message["content"].partition("\n</think>\n\n")
            if tag:
                message = {**message, "content": answer, "reasoning_content": trace.removeprefix("<think>\n")}
            messages.append(message)
        made = tokenizer.apply_chat_template(
            messages,
            enable_thinking=record["thinking"],
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return {"input_ids": made["input_ids"], "assistant_masks": made["assistant_masks"]}

    cache = str(folder / "cache")
    given = datasets.load_dataset(
        "json", data_files=str(folder / "conversations.jsonl"), split="train", cache_dir=cache
    )
    encoded = given.map(encode, num_proc=workers, remove_columns=given.column_names)
    packed = pack_dataset(encoded, capacity, strategy="bfd")
    packed.save_to_disk(str(folder / "made"))
    tokens = sum(map(sum, packed["seq_lengths"]))
    print(json.dumps({"tokens": tokens, "fill": tokens / (len(packed) * capacity)}))


def watched(command: Sequence[str]) -> tuple[str, dict[str, float]]:
    """Run a command; returns output, seconds, processor seconds and peak memory in GB of all its processes."""
    peaks, processor = {"anonymous GB": 0.0, "resident GB": 0.0}, dict[int, float]()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    done = threading.Event()

    def watch() -> None:
        top = psutil.Process(process.pid)
        while not done.wait(0.1):
            anonymous = resident = 0
            with contextlib.suppress(psutil.Error):
                for one in [top, *top.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error, OSError):
                        times = one.cpu_times()
                        processor[one.pid] = times.user + times.system
                        rollup = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
                        fields = dict(line.split(":", 1) for line in rollup.splitlines()[1:])
                        anonymous += int(fields["Pss_Anon"].split()[0])
                        resident += int(fields["Pss"].split()[0])
            peaks["anonymous GB"] = max(peaks["anonymous GB"], anonymous / 1e6)
            peaks["resident GB"] = max(peaks["resident GB"], resident / 1e6)

    watcher = threading.Thread(target=watch)
    begin = time.perf_counter()
    watcher.start()
    out, err = process.communicate()
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)}\n{err[-3000:]}")
    return out, {"seconds": seconds, "processor s": sum(processor.values()), **peaks}


def result(folder: Path, out: str) -> dict[str, float]:
    """Tokens and fill of a side's packs."""
    manifest = folder / "made" / "train.json"
    if manifest.is_file():
        facts = json.loads(manifest.read_text())
        return {"tokens": facts["tokens"], "fill": facts["tokens"] / (facts["packs"] * facts["capacity"])}
    return json.loads(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--capacity", type=int, default=32_768)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--one", nargs=2, metavar=("CONTENDER", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, folder = arguments.one[0], Path(arguments.one[1])
        run: Callable[[], None] = {
            "peer": lambda: peer(folder, arguments.capacity, arguments.workers),
            "ours": lambda: ours(folder, arguments.capacity, arguments.workers, filtered=False),
            "filtered": lambda: ours(folder, arguments.capacity, arguments.workers, filtered=True),
        }[name]
        run()
        return
    rows = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        make_tokenizer(folder / "tokenizer")
        make_conversations(folder / "conversations.jsonl", arguments.samples)
        size = (folder / "conversations.jsonl").stat().st_size
        print(f"{arguments.samples:,} conversations, {size / 1e9:.2f} GB", flush=True)
        for name in arguments.only:
            options = ["--capacity", str(arguments.capacity), "--workers", str(arguments.workers)]
            out, facts = watched([sys.executable, __file__, *options, "--one", name, directory])
            rows[name] = {**facts, **result(folder, out)}
            print(f"{name}: {rows[name]}", file=sys.stderr, flush=True)
            for made in ("made", "cache"):
                shutil.rmtree(folder / made, ignore_errors=True)
    base = rows.get("ours", next(iter(rows.values())))["seconds"]
    print(
        "| | seconds | of ours | processor s | tokens, M | fill | anonymous GB | resident GB |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name, row in rows.items():
        print(
            f"| {name} | {row['seconds']:.0f} | {row['seconds'] / base:.1f}x | {row['processor s']:.0f} | "
            f"{row['tokens'] / 1e6:.0f} | {row['fill']:.2%} | {row['anonymous GB']:.2f} | {row['resident GB']:.2f} |"
        )


if __name__ == "__main__":
    main()
