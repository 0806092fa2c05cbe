"""Training of byte-level BPE with the `tokenizers` library, and writing of the Hugging Face folder."""

import json
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import batched
from typing import TYPE_CHECKING

from nemo_ext.chat.template import Template
from nemo_ext.data.text.byte_tokenizer import CONTROL
from nemo_ext.data.vocabulary.settings import BYTES, Settings
from nemo_ext.job.files import write_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def special_tokens(settings: Settings) -> list[str]:
    """Return the special tokens in order of id: those in the settings, then the template's control tokens.

    Raises:
        ValueError: the template does not exist, the vocabulary is too small, or `end` is not a special token.
    """
    control = CONTROL.findall(Template.load(settings.template).source) if settings.template else []
    special = list(dict.fromkeys([*settings.special_tokens, *control]))
    if settings.end not in special:
        raise ValueError(
            f"end={settings.end} is not among the special tokens ({', '.join(special) or 'none'}): add it to "
            "special_tokens"
        )
    if settings.vocab < BYTES + len(special):
        raise ValueError(
            f"vocab={settings.vocab} is too small for {BYTES} bytes and {len(special)} special tokens: set it to at "
            f"least {BYTES + len(special)}"
        )
    return special


def untrained(settings: Settings) -> "Tokenizer":
    """Return an untrained tokenizer: without merges, splitting text by `settings.split`.

    Raises:
        ValueError: the library does not accept the regular expression.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    try:
        pieces = pre_tokenizers.Split(Regex(settings.split), behavior="isolated")
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"split={settings.split} is not a valid Oniguruma regular expression ({error}): correct it"
        ) from error
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if settings.normalizer is not None:
        tokenizer.normalizer = getattr(normalizers, settings.normalizer)()
    return tokenizer


def train(settings: Settings, texts: Iterator[str]) -> "Tokenizer":
    """Train a tokenizer; it has fewer tokens than `settings.vocab` if the text runs out of pairs to merge.

    Raises:
        ValueError: a special token also became an ordinary token in training.
    """
    from tokenizers import AddedToken, pre_tokenizers, trainers

    tokenizer, special = untrained(settings), special_tokens(settings)
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=settings.min_frequency,
        max_token_length=settings.longest,
        show_progress=sys.stderr.isatty(),
    )
    with _ended_by_ctrl_c():
        tokenizer.train_from_iterator(texts, trainer)
    if ordinary := [name for name in special if tokenizer.token_to_id(name) is not None]:
        raise ValueError(
            f"special_tokens: {ordinary[0]!r} is also an ordinary token, learnt from the text; choose another name"
        )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return tokenizer


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Within this context, Ctrl-C ends the process at once; Python would handle it only when training returns."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def write(tokenizer: "Tokenizer", settings: Settings) -> None:
    """Write tokenizer.json, tokenizer_config.json and, with a template, chat_template.jinja."""
    folder = settings.folder
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": settings.end,
        "clean_up_tokenization_spaces": False,
    }
    chat = folder / "chat_template.jinja"
    chat.unlink(missing_ok=True)
    if settings.template:
        write_text(chat, Template.load(settings.template).source)
    write_text(folder / "tokenizer_config.json", json.dumps(about, indent=1) + "\n")
    write_text(folder / "tokenizer.json", tokenizer.to_str())


def longest(tokenizer: "Tokenizer", count: int) -> list[str]:
    """Return the `count` longest tokens as decoded strings, without special tokens."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    names = sorted(set(tokenizer.get_vocab()) - special, key=lambda name: (-len(name), name))[:count]
    return [tokenizer.decoder.decode([name]) for name in names]


def unused(tokenizer: "Tokenizer", texts: Iterable[str]) -> list[str]:
    """Return the decoded tokens that do not occur in the texts, except single bytes and special tokens."""
    seen: set[int] = set()
    for batch in batched(texts, 1000):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            seen.update(encoding.ids)
    left = {number: name for name, number in tokenizer.get_vocab().items()}
    for number in seen.union(tokenizer.get_added_tokens_decoder()):
        left.pop(number, None)
    return [tokenizer.decoder.decode([left[number]]) for number in sorted(left) if len(left[number]) > 1]
