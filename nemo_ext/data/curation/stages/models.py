"""Stages that use the user's models or data: KenLM perplexity, classifiers, and decontamination with test sets."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from datatrove.data import Document
from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.data.curation.classifier import Scorer, load_scorer
from nemo_ext.data.curation.stage import Judge, Stage, language_of, shown
from nemo_ext.data.curation.stages.rules import words_for
from nemo_ext.data.sft.filters.base import Drop
from nemo_ext.data.text.test_sets import TestSets, index_of
from nemo_ext.data.text.words import Words
from nemo_ext.job.settings import STRICT, Place, Share


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Perplexity(Stage):
    """Records the perplexity per word under a KenLM model of the document's language, and drops documents by it.

    Attributes:
        models: mapping from language code to KenLM model (.bin or .arpa); documents in other languages are kept.
        sentencepiece: mapping from code to SentencePiece model, for KenLM models over its pieces; omit for word models.
        normalize: `ccnet` normalises lines as CCNet's models require: lower case, digits as 0, no accents, ASCII
            punctuation.
        least: minimum perplexity.
        most: maximum perplexity.
    """

    kind: ClassVar[str] = "perplexity"
    needs: ClassVar[tuple[str, ...]] = ("models",)
    models: dict[str, Place] = Field(min_length=1)
    sentencepiece: dict[str, Place] = Field(default_factory=dict)
    normalize: Literal["none", "ccnet"] = "none"
    least: float = 0.0
    most: float = math.inf

    def check(self) -> None:
        for key, paths in (("models", self.models), ("sentencepiece", self.sentencepiece)):
            for language, path in paths.items():
                if not Path(path).expanduser().is_file():
                    raise ValueError(f"{key}.{language}={path} does not exist: correct the path")
        for language in self.models:
            self._scorer(language)

    def reads(self) -> list[Path]:
        return [Path(path).expanduser() for path in (*self.models.values(), *self.sentencepiece.values())]

    def _scorer(self, language: str) -> Callable[[str], float]:
        try:
            import kenlm

            model: Any = kenlm.Model(str(Path(self.models[language]).expanduser()))
            pieces: Any = None
            if path := self.sentencepiece.get(language):
                import sentencepiece

                pieces = sentencepiece.SentencePieceProcessor(model_file=str(Path(path).expanduser()))
        except ImportError as error:
            raise ValueError(
                f"perplexity requires a package that is missing ({error}): pip install kenlm sentencepiece"
            ) from error
        except OSError as error:
            raise ValueError(
                f"models.{language} or sentencepiece.{language} cannot be loaded ({error}): choose another file"
            ) from error

        normal: Callable[[str], str] = str
        if self.normalize == "ccnet":
            from datatrove.utils.perplexity import KenlmModel

            normal = KenlmModel("", language).normalize  # needs none of the models that KenlmModel can download

        def perplexity(text: str) -> float:
            score, number = 0.0, 0
            for line in map(normal, text.splitlines()):
                line = line if pieces is None else " ".join(pieces.encode(line, out_type=str))
                if line.strip():
                    score += model.score(line)
                    number += len(line.split()) + 1
            return 10 ** min(300.0, -score / number) if number else 1e300

        return perplexity

    def start(self) -> Judge:
        scorers = {language: self._scorer(language) for language in self.models}

        def judge(document: Document) -> Drop | None:
            scorer = scorers.get(language_of(document) or next(iter(scorers)))
            if scorer is None:
                return None
            value = scorer(document.text)
            document.metadata["perplexity"] = round(value, 2)
            if self.least <= value <= self.most:
                return None
            return Drop("too-low" if value < self.least else "too-high", f"{value:.1f}: {shown(document.text)}")

        return judge


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Classifier(Stage):
    """Records a classifier's probability for each document, and drops documents by it.

    Attributes:
        model: folder written by `nemo-ext curate_classifier`, or a fastText model file.
        label: label of the positive class in a fastText model file, without `__label__`.
        key: document key under which to store the probability.
        least: minimum probability; `recommended` for the threshold in the classifier's folder.
        most: maximum probability, for classifiers that detect unwanted documents.
    """

    kind: ClassVar[str] = "classifier"
    needs: ClassVar[tuple[str, ...]] = ("model",)
    model: Place
    label: str | None = None
    key: str = "quality"
    least: Share | Literal["recommended"] = 0.0
    most: Share = 1.0

    def check(self) -> None:
        self._loaded()

    def reads(self) -> list[Path]:
        return self._loaded().files

    def _loaded(self) -> Scorer:
        return load_scorer(self.model, self.label)

    def start(self) -> Judge:
        scorer = self._loaded()
        least = scorer.recommended if self.least == "recommended" else float(self.least)

        def judge(document: Document) -> Drop | None:
            score = scorer.score(document.text)
            document.metadata[self.key] = round(score, 5)
            if least <= score <= self.most:
                return None
            return Drop("too-low" if score < least else "too-high", f"{score:.4f}: {shown(document.text)}")

        return judge


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sentences(Stage):
    """Removes sentences that a classifier finds unwanted, such as toxic ones (Dolma, section 5.3).

    Attributes:
        model: folder written by `nemo-ext curate_classifier`, or a fastText model file.
        label: label of unwanted sentences in a fastText model file, without `__label__`.
        threshold: probability from which a sentence is removed.
        language: code to use for documents whose language is unknown; datatrove's tokenizers find the sentences.
    """

    kind: ClassVar[str] = "sentences"
    needs: ClassVar[tuple[str, ...]] = ("model",)
    model: Place
    label: str | None = None
    threshold: Share = 0.4
    language: str = "en"

    def check(self) -> None:
        self._loaded()
        words_for(self.language, named=True)

    def reads(self) -> list[Path]:
        return self._loaded().files

    def _loaded(self) -> Scorer:
        return load_scorer(self.model, self.label)

    def start(self) -> Judge:
        scorer, tokenizer_of = self._loaded(), lru_cache(maxsize=None)(partial(words_for, named=False))

        def judge(document: Document) -> Drop | None:
            text, end, kept = document.text, 0, []
            for start, stop in tokenizer_of(language_of(document) or self.language).span_tokenize(text):
                if scorer.score(text[start:stop]) >= self.threshold:
                    kept.append(text[end:start])
                    end = stop
            document.text = "".join([*kept, text[end:]])
            return None

        return judge


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Decontamination(TestSets, Stage):
    """Drops documents that share word n-grams with test sets (`nemo_ext.data.text.test_sets`)."""

    kind: ClassVar[str] = "decontamination"
    needs: ClassVar[tuple[str, ...]] = ("test_sets",)

    def start(self) -> Judge:
        index = index_of(self)

        def judge(document: Document) -> Drop | None:
            item = index.found_in(Words([document.text]), share=self.share)
            return None if item is None else Drop("benchmark", f"{item}: {shown(document.text)}")

        return judge
