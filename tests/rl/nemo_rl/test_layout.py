"""Layouts of papers, computed and refused ones; with a checkout also NeMo-RL's own setup."""

import importlib.util
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nemo_ext.checkpoint.description import Description, from_config
from nemo_ext.job.config import compose
from nemo_ext.rl.algorithms import load
from nemo_ext.rl.nemo_rl import layout
from nemo_ext.rl.nemo_rl.checkout import Checkout
from nemo_ext.rl.nemo_rl.draft import section_of
from nemo_ext.rl.nemo_rl.layout import Stated, plan, stated
from nemo_ext.rl.nemo_rl.rehearsal import rehearse
from nemo_ext.slurm.preflight import findings
from nemo_ext.slurm.submit import planned as planned_submission


@cache
def model(name: str) -> Description:
    return from_config(compose("describe", [f"model={name}"]))


def planned(preset: str, name: str, backend: str, wanted: Stated, **more: Any) -> layout.Plan:
    return plan(load(preset), model(name), wanted, backend=backend, micro_batch=8, **more)


def cluster(nodes: int, gpus: int = 8, memory: float = 80, **more: Any) -> Stated:
    return Stated(nodes=nodes, gpus_per_node=gpus, gpu_memory_gib=memory, **more)


def sizes(found: layout.Plan) -> tuple[int, int, int, int]:
    how = found.training.layout
    return how.tensor_parallel, how.pipeline_parallel, how.context_parallel, how.data_parallel


def test_layouts_of_the_papers() -> None:
    domyn = planned(
        "domyn_multi_env_grpo", "domyn_small_10b", "dtensor", stated("domyn_multi_env_grpo", {}, "dtensor", None)
    )
    ultra = stated("llama_nemotron_grpo", {}, "megatron", None)
    found = planned("llama_nemotron_grpo", "llama_nemotron_ultra_253b", "megatron", ultra, generation_bytes=1)

    assert sizes(domyn) == (1, 1, 2, 128)
    assert domyn.generation is not None and (domyn.generation.nodes, domyn.generation.gpus) == (16, 4)
    assert sizes(found) == (8, 18, 2, 2)
    assert found.generation is not None and (found.generation.nodes, found.generation.tensor_parallel) == (None, 8)
    assert all(layout.load(name).source for name in layout.names())


def test_a_30b_model_at_49_k_tokens_is_sharded_and_recomputed() -> None:
    found = planned("nemotron3_rlvr", "nemotron3_nano_30b", "megatron", cluster(16))

    how = found.training.layout
    assert how.expert_parallel == 8 and how.recompute == "full" and found.training.micro_batch == 1
    assert found.training.bytes <= layout.TRAINING_SHARE * 80 * layout.GIB
    with pytest.raises(
        ValueError, match=r"does not fit on 8 GPUs of 60 GiB in any layout; the smallest, .*needs about \d+ GiB"
    ):
        planned("nemotron3_rlvr", "nemotron3_nano_30b", "megatron", cluster(1, memory=60))


def test_less_memory_shards_the_model_further() -> None:
    parts = [
        sizes(planned("think_dpo", "olmo3_7b", "megatron", cluster(4, memory=memory)))[:2] for memory in (40, 80, 400)
    ]

    assert [a * b for a, b in parts] == sorted((a * b for a, b in parts), reverse=True) and parts[0] != parts[-1]


def test_stated_sizes_are_kept_and_others_computed() -> None:
    wanted = stated(None, {"cluster.num_nodes": 4, "cluster.gpus_per_node": 8,
                           "policy.megatron_cfg.tensor_model_parallel_size": 4,
                           "policy.generation.colocated.resources.num_nodes": 2}, "megatron", 80)  # fmt: skip
    found = planned("rl_zero", "olmo3_7b", "megatron", wanted)

    assert sizes(found)[0] == 4 and sizes(found)[3] == 4
    assert found.generation is not None and found.generation.nodes == 2


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (cluster(1, gpus=1), "no GPU is left for training, because the run has one node with 1 GPU and"),
        (cluster(4, generation_nodes=4), "no GPU is left for training, because the run has 4 nodes with 8 GPUs"),
        (
            cluster(4, generation_nodes=1, generation_gpus=4),
            "must be 8 or null, because with several nodes, whole nodes generate",
        ),
        (cluster(1, generation_nodes=2), "the cluster has one node"),
        (cluster(3, gpus=7, generation_nodes=1), "batch=512 is not a multiple of data parallel 14"),
    ],
)
def test_impossible_layouts_are_refused(wanted: Stated, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned("domyn_multi_env_grpo", "domyn_small_10b", "dtensor", wanted)


@pytest.mark.parametrize(
    ("name", "given", "backend", "message"),
    [
        ("domyn", {}, "dtensor", "unknown nemo_rl.layout=domyn: known: domyn_math_grpo"),
        ("dpo_delta", {}, "megatron", "requires nemo_rl.backend=dtensor, not megatron"),
        (
            "dpo_delta",
            {"cluster.num_nodes": 4},
            "dtensor",
            r"requires nodes=8, but nemo_rl\.set\.cluster\.num_nodes is 4",
        ),
        (None, {"cluster.num_nodes": 0}, "dtensor", r"sizes of the layout in nemo_rl\.set: nodes=0"),
    ],
)
def test_a_layout_that_contradicts_the_settings(
    name: str | None, given: dict[str, Any], backend: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stated(name, given, backend, None)


def table() -> ModuleType:
    """Module that writes the table of the page."""
    spec = importlib.util.spec_from_file_location("layouts", Path(__file__).with_name("layouts.py"))
    assert spec is not None and spec.loader is not None
    made = sys.modules["layouts"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_page_has_every_preset_and_says_no_only_where_nothing_fits() -> None:
    made = table()

    rows = made.on_page()
    assert set(rows) == {(preset, backend) for preset in made.presets() for backend in made.BACKENDS}
    assert all(said in ("yes", "") or (said == "no" and line.startswith("none fits"))
               for line, versions in rows.values() for said in versions.values())  # fmt: skip


@pytest.mark.nemo_rl
@pytest.mark.slow
def test_the_page_is_true_of_this_version(nemo_rl: ModuleType, tmp_path: Path) -> None:
    made = table()
    checkout = Checkout(Path(nemo_rl.__file__).parents[2])
    column = made.version(checkout)

    told = {key: (line, versions[column]) for key, (line, versions) in made.on_page().items()}
    assert made.outcomes(checkout, tmp_path) == told


@pytest.mark.nemo_rl
@pytest.mark.parametrize(
    ("preset", "change", "message"),
    [
        ("domyn_multi_env_grpo", {"policy.generation.colocated.resources.num_nodes": None}, "TypeError"),
        ("domyn_multi_env_grpo", {"policy.train_global_batch_size": 500}, "AssertionError"),
        ("dpo_delta", {"policy.sequence_packing.enabled": True}, "SequencePackingConfig"),
        ("dpo_delta", {"policy.dtensor_cfg.context_parallel_size": 3}, "must be divisible by"),
        ("dpo_delta", {"dpo.val_global_batch_size": 8}, "AssertionError"),
    ],
)
def test_a_rehearsal_refuses_what_setup_refuses(
    preset: str, change: dict[str, Any], message: str, nemo_rl: ModuleType, tmp_path: Path
) -> None:
    made = table()
    config, algorithm = made.rendered(Checkout(Path(nemo_rl.__file__).parents[2]), preset, "dtensor", tmp_path)
    for path, value in change.items():
        *above, last = path.split(".")
        section = config
        for word in above:
            section = section[word]
        section[last] = value

    with pytest.raises(ValueError, match=message):
        rehearse(config, section_of(algorithm))


def test_an_unknown_model_is_not_sharded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert layout.description_of(str(tmp_path)) is None
    assert "the layout is not computed" in capsys.readouterr().err
    found = plan(load("rl_zero"), None, cluster(2, generation_nodes=1), backend="megatron", micro_batch=8)
    assert sizes(found) == (1, 1, 1, 8) and replace(found.training, bytes=0) == found.training


@pytest.mark.nemo_rl
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ((), "note", "NeMo-RL's own setup accepts the config"),
        (("nemo_rl.set.grpo.batch_multiplier=2",), "error", "batch_multiplier>1 can only be used"),
    ],
)
def test_preflight_runs_setup_of_the_checkout(
    words: tuple[str, ...], kind: str, said: str, nemo_rl: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NEMO_RL_ROOT", str(Path(nemo_rl.__file__).parents[2]))
    folder = table().folder("domyn_small_10b", tmp_path)
    (tmp_path / "tasks.jsonl").touch()
    submission = planned_submission(
        [
            *("job=rl", "cluster=leonardo", "slurm.nodes=8", "engine=nemo_rl", "preset=domyn_math_grpo"),
            *(f"model={folder}", f"tasks.train.path={tmp_path / 'tasks.jsonl'}", f"run_dir={tmp_path / 'run'}", *words),
        ]
    )

    found = findings(submission.config, submission.settings)

    assert any(one.kind == kind and said in one.text for one in found), found
