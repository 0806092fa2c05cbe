"""The `nemo-ext blend` job: audits the blends in a config."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass
from rich.console import Console

from nemo_ext.data.blends.blend import tokens_of_run
from nemo_ext.data.blends.hierarchy import Leaf
from nemo_ext.data.blends.plan import BlendPlan, plan_blend
from nemo_ext.data.blends.report import print_table, write_blend
from nemo_ext.data.phases import sections_of
from nemo_ext.job.settings import STRICT, Place, checked

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """Settings of `nemo-ext blend` other than the recipe and its data; hydra_conf/blend.yaml describes them."""

    tokens: Positive | None
    output: Place | None
    max_epochs: Positive | None
    refuse_epochs: Positive | None
    require_files: bool


def audit(config: Mapping[str, Any]) -> None:
    """Print the share of every stream, and warnings; with `output`, also write the report and blend files.

    Phases with separate data are separate blends, each with its own folder in `output`.

    Raises:
        ValueError: The blend is missing or invalid, or a stream is read more than `refuse_epochs` times.
    """
    settings = checked(Settings, {field.name: config[field.name] for field in fields(Settings)}, strict=True)
    data = config.get("data")
    if data is not None and data.get("packed") is not None:
        raise ValueError(
            "data.packed is set, so there is no blend to show: see the shares in report.md of `nemo-ext sft_data`"
        )
    if data is None or (data.get("blend") is None and data.get("streams") is None):
        raise ValueError("no blend to show: set data=NAME or recipe=NAME, or define data.blend or data.streams")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # no need to fit a terminal
    limits = {"max_epochs": settings.max_epochs, "refuse_epochs": settings.refuse_epochs}
    limits = {key: limit for key, limit in limits.items() if limit is not None}
    plans = []
    for name, section, tokens in _blends(config, settings.tokens):
        try:
            plans.append((name, plan_blend({**section, **limits}, tokens)))
        except ValueError as error:
            raise ValueError(str(error) if section is data else f"phases.{name}: {error}") from error
    for name, plan in plans:
        if settings.require_files:
            _check_files(plan)
        words = (config.get("recipe"), name or Path(str(data["directory"])).name)
        title = f"Blend of {', '.join(str(word) for word in words if word)}"
        _show(plan, console, title)
        if settings.output is not None:
            folder = Path(settings.output) / (name if len(plans) > 1 else "")
            try:
                report = write_blend(plan, folder, title=title)
            except OSError as error:
                raise ValueError(
                    f"output={settings.output} cannot be written ({error.strerror}): choose another directory"
                ) from error
            console.print(f"report: {report}", soft_wrap=True)
    if often := _often_in_total([plan for _, plan in plans]):
        console.print(
            f"warning: some streams are read more than max_epochs times over all phases together: {often}; "
            "add text or lower their shares",
            style="red",
            soft_wrap=True,
        )


def _blends(config: Mapping[str, Any], tokens: float | None) -> Iterator[tuple[str, Mapping[str, Any], int | None]]:
    """Yield the name, `data` section and number of tokens of each blend: the run's, and those of phases with data.

    If `tokens` overrides the length of the run, phases are scaled in proportion.
    """
    phases = sections_of(config)
    shared = [name for name, phase in phases.items() if phase.data is None]
    if len(shared) == len(phases):
        yield "", config["data"], tokens_of_run(config) if tokens is None else round(tokens)
        return
    scale = 1.0 if tokens is None else tokens / sum(phase.tokens for phase in phases.values())
    if shared:
        yield "+".join(shared), config["data"], round(scale * sum(phases[name].tokens for name in shared))
    for name, phase in phases.items():
        if phase.data is not None:
            yield name, phase.data, round(scale * phase.tokens)


def _show(plan: BlendPlan, console: Console, title: str) -> None:
    length = "" if plan.tokens is None else f" ({plan.tokens:,} tokens)"
    console.print(title + length, style="italic", soft_wrap=True)
    print_table(plan, console)
    if warning := plan.warning():
        console.print(f"warning: {warning}", style="red", soft_wrap=True)
    for note in plan.notes():
        console.print(f"note: {note}", soft_wrap=True)
    if plan.tokens is None:
        console.print("note: epochs require the length of the run: set tokens=... or recipe=...", soft_wrap=True)


def _check_files(plan: BlendPlan) -> None:
    counted = {name for name, size in plan.sizes.items() if size.known == "files"}
    missing = [leaf for leaf in plan.root.leaves() if leaf.name not in counted]
    if missing:
        raise ValueError(
            f"{missing[0].where}: {missing[0].prefix}_train.idx does not exist"
            + (f", nor do the files of {len(missing) - 1} other streams" if len(missing) > 1 else "")
            + ": tokenise the streams first, or set require_files=false to plan without files"
        )


def _often_in_total(plans: Sequence[BlendPlan]) -> str:
    """List the streams that are read more than `max_epochs` times in all blends together, but not in any single one.

    Returns:
        Names and epochs on one line, for a warning; "" if there are none.
    """
    total: dict[Path, float] = {}
    alone: set[Path] = set()
    for plan in plans:
        for part in plan.parts:
            if isinstance(part.node, Leaf) and part.epochs is not None:
                total[part.node.prefix] = total.get(part.node.prefix, 0) + part.epochs
                if plan.too_often(part):
                    alone.add(part.node.prefix)
    most = plans[0].max_epochs
    return ", ".join(
        f"{prefix.name} {epochs:.3g} times" for prefix, epochs in total.items() if epochs > most and prefix not in alone
    )
