"""Chain of a job's filters, applied in order; dropped samples are counted by filter and reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.data.sft.filters.base import Filter, Texts
from nemo_ext.data.sft.filters.decontamination import Decontamination
from nemo_ext.data.sft.filters.language import Language
from nemo_ext.data.sft.filters.length import Length
from nemo_ext.data.sft.filters.narrative import Narrative
from nemo_ext.data.sft.filters.repetition import Repetition
from nemo_ext.data.sft.filters.structural import Structural
from nemo_ext.data.sft.sources import Located
from nemo_ext.data.text.documents import ReadReport
from nemo_ext.job.settings import checked, nearest

# In the order of application: cheap and reliable filters first.
FILTERS: tuple[type[Filter], ...] = (Structural, Length, Narrative, Repetition, Decontamination, Language)


@dataclass(frozen=True)
class Screen:
    """Chain of filters, which can be pickled and sent to workers."""

    filters: tuple[Filter, ...]

    def check(self) -> None:
        """Raise ValueError if a filter is unusable, for example because of a missing file or an unknown language."""
        for judge in self.filters:
            judge.check()

    def reads(self) -> list[Path]:
        """Return the paths of the files whose content affects the filters' decisions."""
        return [path for judge in self.filters for path in judge.reads()]

    def kept(self, located: Located, report: ReadReport) -> Texts | None:
        """Return the sample's texts if it passes all filters; otherwise count the first reason, and return None."""
        report.records += 1
        texts = Texts(located.sample)
        for judge in self.filters:
            dropped = judge.drop(texts)
            if dropped is not None:
                detail = f": {dropped.detail}" if dropped.detail else ""
                report.skip(f"{judge.name}/{dropped.reason}", f"{located.where} ({located.sample.id}){detail}")
                return None
        return texts


def load_filters(config: Mapping[str, Any]) -> Screen:
    """Build filters from a mapping of names to settings (null disables a filter), in the order of `FILTERS`.

    Raises:
        ValueError: a filter or key is unknown or invalid; the message suggests the nearest known name.
    """
    kinds = {kind.name: kind for kind in FILTERS}
    for name in config:
        if name not in kinds:
            raise ValueError(f"filters: unknown filter {name!r}; {nearest(str(name), kinds)}")
    return Screen(
        tuple(
            checked(kind, config[name], where=f"filters.{name}")
            for name, kind in kinds.items()
            if config.get(name) is not None
        )
    )
