"""Every model, blend and recipe on disk composes, has the published sizes, and passes Megatron's own checks.

The cases are the files found, so a new one is tested as soon as it is there; a full-size model needs a line in
`PUBLISHED`.
"""

import argparse
import importlib.util
import json
import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import DictConfig, OmegaConf

import hydra_conf
from nemo_ext.architecture.block_configs import from_block_configs, to_block_configs
from nemo_ext.architecture.cost import active_params, per_gpu, per_stage, total_params
from nemo_ext.architecture.layout import Layout
from nemo_ext.architecture.layout import check_layout as check_blocks
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import parse
from nemo_ext.architecture.pipeline import idle_share
from nemo_ext.checkpoint.pickles import METADATA
from nemo_ext.data.blends.hierarchy import Group
from nemo_ext.data.blends.plan import plan_blend
from nemo_ext.data.phases import Phase, Plan, plan_of, segments
from nemo_ext.job.config import compose
from nemo_ext.launch import not_reproduced
from nemo_ext.rehearsal.settings import rehearsed

CONFIGS = Path(hydra_conf.__file__).parent
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))
TINY = [name for name in MODELS if name.endswith("_tiny")]
FULL_SIZE = [name for name in MODELS if name not in TINY]
BLENDS = sorted(path.stem for path in (CONFIGS / "data").glob("*.yaml") if path.stem not in ("mock", "packed"))
RECIPES = sorted(
    str(path.relative_to(CONFIGS / "recipe").with_suffix(""))
    for path in CONFIGS.glob("recipe/*/*.yaml")
    if path.parent.name not in ("puzzle", "smollm2")  # small models as they are: tests/puzzle, and a real one
)
REHEARSED = json.loads(Path(__file__).with_name("rehearsal").joinpath("recipes.json").read_text())
"""What rehearsals of the recipes found: tests/rehearsal/recipes.py."""
WITH_PHASES = (
    *("domyn_small/foundation", "nemotron3_nano/pretrain", "nemotron3_nano/quickstart_phases", "olmo1/7b"),
    "nemotron3_nano/pretrain_leonardo",
    *("nemotron3_super/pretrain", "nemotron3_super/long_context", "nemotron3_ultra/pretrain"),
    "nemotron35_lightning/pretrain",
)
ONE_EACH = {recipe.split("/")[0]: recipe for recipe in RECIPES}.values()
"""A recipe of each family."""

PUBLISHED = {
    "smollm2_135m": 134.5e6,  # the published checkpoint
    "nemotron3_nano_30b": 31.6e9,  # paper, section 2.1
    # published checkpoints and configurations, to the last parameter in tests/architecture/test_cost.py
    "nemotron35_lightning_30b": 32.91e9,
    "nemotron3_super_120b": 123.61e9,
    "nemotron3_ultra_550b": 560.5e9,
    "nemotron3_puzzle_75b": 78.3e9,
    "nemotronh_8b": 8.1e9,
    "nemotronh_47b": 46.79e9,
    "nemotronh_56b": 56.32e9,
    "nemotron_nano_12b_v2": 12.31e9,
    "nemotron_nano_9b_v2": 8.89e9,
    "domyn_small_10b": 9.8e9,  # paper, table 1: about 10 B; its sizes give 9.8
    "llama_nemotron_nano_8b": 8.03e9,  # Llama 3.1 8B
    "llama_nemotron_parent_70b": 70.55e9,  # Llama 3.3 70B
    "llama_nemotron_parent_405b": 405.85e9,  # Llama 3.1 405B
    "llama_nemotron_super_49b": 49.87e9,  # the published checkpoint
    "llama_nemotron_ultra_253b": 253.4e9,  # the published checkpoint
    "olmo1_1b": 1.18e9,  # the published checkpoint
    "olmo1_7b": 6.89e9,  # the published checkpoint
    "olmo3_30m": 54.75e6,  # OLMo-core, olmo2_30M: 29.1 M without the input embedding
    "olmo3_7b": 7.30e9,  # the published checkpoint
    "olmo3_32b": 32.23e9,  # the published checkpoint
}
"""Parameters of the full-size models."""

TWINS = {
    **dict.fromkeys(("nemotron3_ultra", "nemotron3_puzzle", "nemotron35_lightning"), "nemotron3_super"),
    **dict.fromkeys(("nemotronh", "nemotron_nano"), "nemotron3_nano"),
}
"""Families without a tiny model of their own, and the family whose tiny model has their blocks."""

PUZZLE = {"llama_nemotron_super_49b": 28672, "llama_nemotron_ultra_253b": 53248}
"""Models whose blocks are a published JSON, and the FFN width of their parent."""


@cache
def composed(*overrides: str) -> dict[str, Any]:
    """A composed training config; shared between tests, so not to be changed."""
    return compose("train", overrides)


def twin(recipe: str) -> str:
    """The tiny model of a recipe's family: the recipe's folder says which."""
    family = recipe.split("/")[0]
    return f"{TWINS.get(family, family)}_tiny"


def teacher_of(recipe: str) -> str | None:
    """Full-size model that runs beside a recipe's, or None."""
    teacher = (composed(f"recipe={recipe}").get("distillation") or {}).get("teacher")
    return None if teacher is None else Path(teacher).name


def model_file(name: str) -> DictConfig:
    """A model's file, merged with the files in its defaults."""
    file = OmegaConf.load(CONFIGS / "model" / f"{name}.yaml")
    assert isinstance(file, DictConfig)
    bases = [model_file(base) for base in file.pop("defaults", []) if base != "_self_"]
    return cast(DictConfig, OmegaConf.merge(*bases, file))


def taught(config: dict[str, Any], recipe: str, model: str | None, folder: Path) -> dict[str, Any]:
    """A copy of the config with what its recipe learns from: a model, put into the folder, or saved logits."""
    made = deepcopy(config)
    if composed(f"recipe={recipe}")["megatron"].get("logits_load_dir"):
        made["megatron"]["logits_load_dir"] = "s3://saved"  # whose files only the ranks open
    elif teacher_of(recipe) is not None:
        (folder / "model").mkdir()
        (folder / METADATA).touch()
        OmegaConf.save(model_file(str(model)), folder / "model" / f"{model}.yaml")
        made["distillation"]["teacher"] = str(folder)
    return made


def shrunk(recipe: str) -> dict[str, Any]:
    """A recipe as a laptop runs it."""
    return composed(f"recipe={recipe}", f"model={twin(recipe)}", "data=local_text", "scale=laptop")


def accepted(config: dict[str, Any]) -> argparse.Namespace:
    """Megatron's validated arguments, after its own model config was made from them too."""
    from nemo_ext.megatron.arguments import pattern_with_cuts
    from nemo_ext.megatron.check import check
    from nemo_ext.megatron.cpu import patches
    from nemo_ext.megatron.model import model_config

    arguments = check(config)
    with patches.applied():
        model = model_config(config["model"], pattern_with_cuts(config), arguments)
    assert model.transformer.hidden_size == config["megatron"]["hidden_size"]
    return arguments


# Models


@pytest.mark.parametrize("name", MODELS)
def test_a_model_composes_into_an_architecture(name: str) -> None:
    config = composed(f"model={name}")

    architecture = Architecture.from_config(config)

    assert config["model"]["name"] == name
    assert name.startswith(config["model"]["family"])
    assert len(architecture.sizes) == len(architecture.pattern.blocks)


@pytest.mark.parametrize("name", FULL_SIZE)
def test_a_full_size_model_has_the_published_number_of_parameters(name: str) -> None:
    architecture = Architecture.from_config(composed(f"model={name}"))

    assert total_params(architecture) == pytest.approx(PUBLISHED[name], rel=3e-3)


def test_nemotron_3_nano_activates_what_the_paper_says() -> None:
    architecture = Architecture.from_config(composed("model=nemotron3_nano_30b"))

    assert active_params(architecture) == pytest.approx(3.2e9, rel=0.01)
    assert active_params(architecture, with_embedding=True) == pytest.approx(3.6e9, rel=0.01)
    kinds = [block.kind for block in architecture.pattern.blocks]
    assert {kind: kinds.count(kind) for kind in kinds} == {"M": 23, "E": 23, "*": 6}


@pytest.mark.parametrize("name", PUZZLE)
def test_a_puzzle_model_is_its_published_json(name: str) -> None:
    published = json.loads((CONFIGS / "model" / "block_configs" / f"{name}.json").read_text())
    config = composed(f"model={name}")
    megatron = config["megatron"]

    blocks = from_block_configs(published, num_query_groups=8, ffn_hidden_size=PUZZLE[name])

    assert parse(config["model"]["pattern"]) == blocks
    assert megatron["ffn_hidden_size"] == PUZZLE[name]
    assert megatron["hidden_size"] == published["hidden_size"]
    assert megatron["num_attention_heads"] == published["num_attention_heads"]
    assert megatron["padded_vocab_size"] == published["vocab_size"]
    assert megatron["rotary_base"] == published["rope_theta"]
    assert megatron["rope_scaling_factor"] == published["rope_scaling"]["factor"]
    assert megatron["norm_epsilon"] == published["rms_norm_eps"]


@pytest.mark.parametrize(("name", "layers"), [("olmo3_7b", 32), ("olmo3_32b", 64), ("olmo3_tiny", 4)])
def test_olmo_3_sees_everything_in_every_fourth_attention_and_in_the_last(name: str, layers: int) -> None:
    architecture = Architecture.from_config(composed(f"model={name}"))

    windows = [block.size("window") for block in architecture.sizes if block.kind == "*"]

    assert len(windows) == layers
    assert [number for number, window in enumerate(windows, start=1) if not window] == list(range(4, layers + 1, 4))


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_is_small_and_divides_by_two(name: str) -> None:
    config = composed(f"model={name}")
    architecture = Architecture.from_config(config)

    check_blocks(architecture, Layout(tensor_parallel=2, expert_parallel=2, data_parallel=2))

    assert 4 <= len(architecture.pattern.blocks) <= 8
    assert 3e5 < total_params(architecture) < 3e6
    assert all(block.size("kv") % 2 == 0 for block in architecture.sizes if block.kind == "*" and not block.is_linear)


@pytest.mark.parametrize("name", [name for name in FULL_SIZE if not name.startswith("smollm2")])  # small by itself
def test_a_tiny_model_has_every_kind_of_block_and_every_switch_of_its_family(name: str) -> None:
    full = composed(f"model={name}")
    family = full["model"]["family"]
    tiny = composed(f"model={TWINS.get(family, family)}_tiny")
    switches = {key for key, value in full["megatron"].items() if isinstance(value, bool) and key != "bf16"}
    switches |= {"normalization", "position_embedding_type", "rotary_percent"}
    switches |= {"moe_router_score_function"} if "num_experts" in full["megatron"] else set()
    # tied embeddings differ inside OLMo 1, grouped queries inside OLMo 3
    switches -= {"untie_embeddings_and_output_weights", "group_query_attention"}

    def kinds(config: dict[str, Any]) -> set[str]:
        return {block.kind for block in parse(config["model"]["pattern"]).blocks}

    assert kinds(full) <= kinds(tiny)
    assert {key: tiny["megatron"].get(key) for key in switches} == {key: full["megatron"].get(key) for key in switches}
    for key in ("norm_affine", "norm_placement", "qk_norm_scope"):
        assert tiny["model"].get(key) == full["model"].get(key)


def test_the_tiny_puzzle_model_has_every_choice_of_the_search() -> None:
    config = composed("model=llama_nemotron_tiny")
    megatron = config["megatron"]

    layers = to_block_configs(
        parse(config["model"]["pattern"]),
        hidden_size=megatron["hidden_size"],
        num_attention_heads=megatron["num_attention_heads"],
        num_query_groups=megatron["num_query_groups"],
        ffn_hidden_size=megatron["ffn_hidden_size"],
    )

    assert {layer["attention"].get("n_heads_in_group") for layer in layers} == {2, 4, None}
    assert len({layer["ffn"].get("ffn_mult") for layer in layers} - {None}) == 2
    for part in ("attention", "ffn"):
        assert [layer for layer in layers if layer[part].get("no_op")]
        assert [layer for layer in layers if layer[part].get("replace_with_linear")]


# Blends


@pytest.mark.parametrize("name", BLENDS)
def test_a_blend_has_distinct_streams_whose_shares_sum_to_one(name: str) -> None:
    data = composed(f"data={name}")["data"]
    plan = plan_blend(data)

    assert sum(plan.shares.values()) == 1
    assert all(share > 0 for share in plan.shares.values())
    for leaf in plan.root.leaves():
        assert leaf.prefix == Path(data["directory"]) / leaf.name


def shares(blend: str, *path: str) -> dict[str, float]:
    """Shares of the children of a blend's root, or of the group at a path of keys."""
    plan = plan_blend(composed(f"data={blend}")["data"])
    group = plan.part(*path).node
    assert isinstance(group, Group)
    return {child.key: float(plan.part(*path, child.key).share) for child in group.children}


def test_nemotron_3_nano_has_fifteen_categories_in_both_phases_and_79_percent_of_the_second_later() -> None:
    first, second = shares("nemotron3_nano_phase1"), shares("nemotron3_nano_phase2", "phase2")
    later, others = shares("nemotron3_nano_long_context", "phase2"), shares("nemotron3_nano_long_context")

    assert len(first) == 15
    assert first.keys() == second.keys()
    assert sum(second.values()) == pytest.approx(1)
    assert later == pytest.approx({name: 0.79 * share for name, share in second.items()})
    assert (others["document_qa"], others["synthetic_retrieval"]) == (0.20, 0.01)


@pytest.mark.parametrize("path", [("nemotron3_nano_phase1",), ("nemotron3_nano_phase2", "phase2")])
def test_nemotron_3_nano_has_nineteen_languages(path: tuple[str, ...]) -> None:
    assert len(shares(*path, "multilingual")) == 19


def test_domyn_blends_are_the_papers() -> None:
    cpt, tiers = shares("domyn_cpt"), shares("domyn_cpt", "multilingual")
    languages = {tier: shares("domyn_cpt", "multilingual", tier) for tier in tiers}

    assert shares("domyn_foundation") == {"english": 0.60, "multilingual": 0.15, "math": 0.05, "code": 0.20}
    assert (cpt["sft_style"], cpt["web"], cpt["code"]) == (0.25, 0.19, 0.19)
    assert languages["A"] == pytest.approx(dict.fromkeys(("spa", "ita", "fra", "deu"), 0.1 * cpt["multilingual"]))
    assert sum(map(len, languages.values())) == 56
    each = [max(tier.values()) for tier in languages.values()]
    assert each == sorted(each, reverse=True)


@pytest.mark.parametrize(
    ("blend", "billions"),
    [
        ("olmo1_dolma", [2180, 342, 80, 57, 5.2, 3.7]),
        ("olmo3_dolma3", [4510, 805, 409, 152, 50.8, 2.51]),
        ("olmo3_longmino", [33.0, 8.93, 8.02]),
    ],
)
def test_olmo_blends_have_the_shares_of_the_token_counts(blend: str, billions: list[float]) -> None:
    assert list(shares(blend).values()) == pytest.approx([b / sum(billions) for b in billions], abs=0.005)


# Recipes at full size


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_under_its_own_name(recipe: str) -> None:
    config = composed(f"recipe={recipe}")

    assert config["recipe"] == recipe
    assert bool(config.get("phases")) == (recipe in WITH_PHASES)
    assert config["run_dir"] == f"runs/{recipe}-{config['model']['name']}"
    assert twin(recipe) in TINY
    assert config["model"]["family"] == recipe.split("/")[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_megatron_accepts_a_recipe_at_full_size(recipe: str, tmp_path: Path) -> None:
    config = taught(composed(f"recipe={recipe}"), recipe, teacher_of(recipe), tmp_path)
    config["model"]["backend"] = "local" if recipe.endswith("/quickstart") else "transformer_engine"
    if importlib.util.find_spec("transformer_engine") is None:
        config["megatron"]["no_rope_fusion"] = True  # the one kernel that Megatron looks for in its model config

    arguments = accepted(config)

    assert arguments.train_iters > arguments.lr_warmup_iters
    assert arguments.lr >= arguments.min_lr
    assert arguments.global_batch_size % (arguments.micro_batch_size * arguments.data_parallel_size) == 0


@pytest.mark.parametrize(
    ("words", "aside"),
    [
        (
            (
                "moe_token_dispatcher_type=flex",
                "moe_flex_dispatcher_backend=hybridep",
                "moe_flex_dispatcher_num_sms=16",
            ),
            1,
        ),
        (("cuda_graph_impl=transformer_engine", "cuda_graph_modules=[attn,mamba]", "te_rng_tracker=true"), 3),
        (("grad_reduce_in_bf16=true",), 0),
    ],
)
def test_throughput_flags_that_recipes_do_not_take_are_accepted(words: tuple[str, ...], aside: int) -> None:
    """Those of docs/throughput.md, by Megatron's checks and by a rehearsal, which names the kernels it sets aside."""
    config = deepcopy(composed("recipe=nemotron3_nano/pretrain", *(f"megatron.{word}" for word in words)))
    plain = rehearsed(composed("recipe=nemotron3_nano/pretrain"))[1]
    config["model"]["backend"] = "transformer_engine"
    if importlib.util.find_spec("transformer_engine") is None:
        config["megatron"]["no_rope_fusion"] = True
    accepted(config)
    changed, found = rehearsed(config)
    assert len(found) == len(plain) + aside
    config["model"]["backend"] = "local"
    accepted({**config, "megatron": changed["megatron"]})


@cache
def laid_out(recipe: str) -> tuple[dict[str, Any], Layout]:
    """A recipe as it is rehearsed, with pipeline cuts, and its layout; shared between tests, so not to be changed."""
    from nemo_ext.megatron.arguments import pattern_with_cuts, world_size

    config = deepcopy(rehearsed(composed(f"recipe={recipe}"))[0])
    config["model"]["pattern"] = pattern_with_cuts(config)
    return config, Layout.from_config(config, world_size=world_size(config))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fits_its_gpus(recipe: str) -> None:
    config, layout = laid_out(recipe)
    leonardo = recipe.startswith("domyn_small/") or recipe.endswith("_leonardo")
    memory = 64e9 if leonardo else 80e9  # A100-64GB of Leonardo, else H100

    gpus = per_gpu(Architecture.from_config(config), layout)
    beside = 0
    if teacher := teacher_of(recipe):
        beside = per_gpu(Architecture.from_config(composed(f"model={teacher}")), layout)[0].weight_bytes

    # 15 % are left to what the estimate does not know: communication buffers, the allocator, the CUDA context.
    assert max(gpu.total_bytes for gpu in gpus) + beside < 0.85 * memory
    for rank in REHEARSED.get(recipe, {"ranks": []})["ranks"]:
        assert rank["peak_bytes"] < 0.85 * memory
        # Ultra's last stage has its peak in the optimizer's step, which the cost model does not look at; the workspaces
        # of matrix products matter for tiny models.
        assert gpus[rank["stage"]].total_bytes + beside == pytest.approx(rank["peak_bytes"], rel=0.12, abs=192 * 2**20)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_does_not_leave_gpus_idle_or_their_kernels_unaligned(recipe: str) -> None:
    config, layout = laid_out(recipe)

    stages = per_stage(Architecture.from_config(config), layout)
    idle = idle_share([stage.forward_flops_per_token for stage in stages], layout)
    assert idle is not None
    reason = re.search(r"# idles for (\d+) % of a step: ", (CONFIGS / "recipe" / f"{recipe}.yaml").read_text())
    if reason is None:
        assert idle <= 0.08, "level the stages, or write `# idles for N % of a step: ` and the reason into the recipe"
    else:
        assert idle > 0.08 and int(reason[1]) == round(100 * idle)
    rows = int(config["megatron"]["padded_vocab_size"])
    # Llama 3.1's are 32 x 501 with TP8. Those runs start from published weights, where zero rows would be added to
    # every softmax, and to those of Puzzle's parents and of teachers.
    aligned = 32 if rows == 128_256 else 64
    assert rows % (aligned * layout.tensor_parallel) == 0


def steps(recipe: str, *overrides: str) -> dict[str, Any]:
    """The `megatron` part of a recipe, and tokens a step."""
    megatron = composed(f"recipe={recipe}", *overrides)["megatron"]
    return {**megatron, "tokens_per_step": megatron["seq_length"] * megatron["global_batch_size"]}


def planned(recipe: str) -> Plan:
    plan = plan_of(composed(f"recipe={recipe}"))
    assert plan is not None
    return plan


def phases(recipe: str) -> tuple[Phase, ...]:
    return planned(recipe).phases


def test_nemotron_3_nano_pretraining_arithmetic() -> None:
    run = steps("nemotron3_nano/pretrain")

    assert run["tokens_per_step"] == pytest.approx(25.17e6, rel=1e-3)
    assert run["train_iters"] == 993_411  # 25 T tokens
    assert run["lr_warmup_iters"] * run["tokens_per_step"] == pytest.approx(8.4e9, rel=1e-2)
    assert run["lr_wsd_decay_iters"] * run["tokens_per_step"] == pytest.approx(5e12, rel=1e-5)
    diverse, high_quality = phases("nemotron3_nano/pretrain")
    assert diverse.steps * run["tokens_per_step"] == pytest.approx(23.5e12, rel=1e-5)
    assert diverse.steps > run["train_iters"] - run["lr_wsd_decay_iters"]  # the switch is inside the decay
    assert high_quality.last_step == run["train_iters"] and high_quality.data is not None


def test_nemotron_3_nano_long_context_arithmetic() -> None:
    run = steps("nemotron3_nano/long_context")

    assert run["train_iters"] * run["tokens_per_step"] == pytest.approx(121e9, rel=1e-4)
    assert run["seq_length"] == 512 * 1024
    assert run["lr"] == run["min_lr"] == 1e-5


@pytest.mark.parametrize(
    ("recipe", "published_steps", "warmup", "decay", "switch"),
    [  # train_iters, lr_warmup_iters and lr_wsd_decay_iters of super3's phase1.yaml and ultra3's default.yaml
        ("nemotron3_super/pretrain", 993_404, 7949, 198_682, 794_723),
        ("nemotron3_ultra/pretrain", 794_728, 7947, 198_682, 794_728 - 198_682),
    ],
)
def test_super_and_ultra_take_the_published_steps(
    recipe: str, published_steps: int, warmup: int, decay: int, switch: int
) -> None:
    run = steps(recipe)
    diverse, high_quality = phases(recipe)

    assert run["train_iters"] == pytest.approx(published_steps, abs=10)
    assert run["lr_warmup_iters"] == pytest.approx(warmup, abs=3)
    assert run["lr_wsd_decay_iters"] == pytest.approx(decay, abs=1)
    assert diverse.steps == pytest.approx(switch, abs=10)
    assert high_quality.data is not None
    assert run["mtp_use_repeated_layer"] is True


def test_supers_long_context_takes_the_published_steps() -> None:
    long, mixed = phases("nemotron3_super/long_context")

    # train_iters of super3/stage0_pretrain/config/long_context_1m.yaml and long_context_mixed.yaml
    assert long.steps == pytest.approx(2027, abs=1)
    assert mixed.steps == pytest.approx(1014, abs=1)
    assert mixed.data is not None and mixed.data["mixed_lengths"]["short"] == 4096


@pytest.mark.parametrize(
    ("recipe", "depths", "weight"), [("super", 2, 0.3), ("ultra", 2, 0.1), ("35_lightning", 2, 0.3)]
)
def test_hybrids_train_depths_with_one_set_of_weights(recipe: str, depths: int, weight: float) -> None:
    for path in (CONFIGS / "recipe").glob(f"nemotron3*{recipe}/[!q]*.yaml"):
        if path.stem == "puzzle_kd":  # the published child has one depth
            continue
        config = composed(f"recipe={path.parent.name}/{path.stem}")
        architecture = Architecture.from_config(config)

        assert (architecture.pattern.depths, architecture.mtp_repeated) == (depths, True)
        assert config["megatron"]["mtp_loss_scaling_factor"] == weight


def test_super_has_the_published_shares_and_80_percent_of_the_second_phase_later() -> None:
    first, second = shares("nemotron3_super_phase1"), shares("nemotron3_super_phase2", "phase2")
    later = shares("nemotron3_super_long_context", "phase2")

    assert len(first) == 16
    assert second.keys() == first.keys() - {"crawl_medium", "crawl_plus_plus"}
    assert sum(first.values()) == pytest.approx(1) and sum(second.values()) == pytest.approx(1)
    assert later == pytest.approx({name: 0.8 * share for name, share in second.items()})


def test_domyns_foundation_grows_its_sequences() -> None:
    found = phases("domyn_small/foundation")

    assert [phase.seq_length for phase in found] == [4096, 8192, 16384]
    assert len({phase.tokens_per_step for phase in found}) == 1
    assert found[0].steps * found[0].tokens_per_step == pytest.approx(6e12, rel=1e-5)
    assert sum(phase.steps * phase.tokens_per_step for phase in found) == pytest.approx(9e12, rel=1e-5)


@pytest.mark.parametrize("recipe", WITH_PHASES)
def test_every_segment_passes_megatrons_checks(recipe: str) -> None:
    for segment in segments(composed(f"recipe={recipe}"), planned(recipe), {}):
        assert accepted(segment).train_iters == segment["megatron"]["train_iters"]


@pytest.mark.parametrize(
    ("recipe", "steps_", "warmup"),
    [
        ("nemotron3_nano/sft", 13_000, 800),  # paper, section 3.1.6
        ("nemotron3_ultra/sft", 3200, 150),  # ultra3/stage1_sft/config/default.yaml
        ("nemotron35_lightning/sft", 100, 10),  # nemotron_3_5_lightning.py of Megatron-Bridge
        ("domyn_small/sft", 3311, 1000),  # section 4.1: 1.13 epochs of 12.29 B tokens at 4.19 M a step
        ("domyn_small/annealing", 3000, 1000),
    ],
)
def test_sft_takes_the_stated_steps(recipe: str, steps_: int, warmup: int) -> None:
    megatron = steps(recipe)

    assert (megatron["train_iters"], megatron["lr_warmup_iters"]) == (steps_, warmup)


def test_domyn_arithmetic() -> None:
    run = steps("domyn_small/cpt")

    assert run["tokens_per_step"] == pytest.approx(4.19e6, rel=2e-3)
    assert (run["train_iters"], run["lr_warmup_iters"]) == (120_000, 500)
    assert run["train_iters"] * run["tokens_per_step"] == pytest.approx(503e9, rel=1e-3)
    short, long = steps("domyn_small/foundation"), steps("domyn_small/foundation", "megatron.seq_length=16384")
    assert long["global_batch_size"] * 4 == short["global_batch_size"]
    for key in ("train_iters", "lr_warmup_iters", "tokens_per_step"):
        assert short[key] == long[key]


@pytest.mark.parametrize(
    ("recipe", "billions"),
    [("llama_nemotron/super_kd", 40), ("llama_nemotron/ultra_kd", 65), ("llama_nemotron/ultra_cpt", 88)],
)
def test_llama_nemotron_arithmetic(recipe: str, billions: int) -> None:
    run = steps(recipe)

    assert run["train_iters"] * run["tokens_per_step"] == pytest.approx(billions * 1e9, rel=1e-4)


def test_llama_nemotron_is_distilled_on_another_blend_than_it_is_trained_on_further() -> None:
    distilled, further = (composed(f"recipe=llama_nemotron/ultra_{stage}") for stage in ("kd", "cpt"))

    assert distilled["data"]["directory"] != further["data"]["directory"]
    assert distilled["megatron"]["logits_load_dir"] and not further["megatron"].get("logits_load_dir")
    assert further["megatron"]["pretrained_checkpoint"] == f"{distilled['run_dir']}/checkpoints"
    assert teacher_of("llama_nemotron/super_kd") == "llama_nemotron_parent_70b"


def test_olmo_7b_ends_with_a_thousand_steps_to_zero() -> None:
    before, last = phases("olmo1/7b")
    run = steps("olmo1/7b")

    assert (last.steps, last.last_step) == (1000, run["train_iters"])
    assert last.lr is not None and (last.lr.start, last.lr.end) == (pytest.approx(3e-5), 0.0)
    assert before.lr is None


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.startswith("olmo3/")])
def test_olmo_3_has_its_z_loss_and_says_what_it_lacks(recipe: str) -> None:
    config = composed(f"recipe={recipe}")
    sft = recipe.endswith("_sft")

    assert config["stability"] == {"z_loss": 0.0 if sft else 1e-5, "decay_embedding": sft, "skip_beyond": 6.0}
    said = not_reproduced(config)
    assert [line for line in said if "outlying losses" in line]
    assert any("documents" in line for line in said) == recipe.endswith("long_context")


@pytest.mark.parametrize(
    ("recipe", "published_step", "difference"),
    [
        ("olmo3/7b_pretrain", 1_413_814, 20),  # the step of the last stage 1 checkpoint
        ("olmo3/32b_pretrain", 656_000, 500),  # likewise; the slides round it to 5.5 T tokens
        ("olmo3/7b_midtrain", 47_684, 0),  # the step of the last stage 2 checkpoint
        ("olmo3/32b_midtrain", 23_842, 0),  # the step of both ingredients
    ],
)
def test_olmo_3_ends_at_the_step_of_the_published_checkpoint(recipe: str, published_step: int, difference: int) -> None:
    assert abs(steps(recipe)["train_iters"] - published_step) <= difference


@pytest.mark.parametrize(
    ("recipe", "warmup", "tokens_per_step"),
    [
        ("olmo1/1b", 2000, 4e6),
        ("olmo1/7b", 5000, 4e6),
        ("olmo3/7b_pretrain", 2000, 4e6),
        ("olmo3/7b_long_context", 200, 4e6),
        ("olmo3/32b_pretrain", 2000, 8e6),
        ("olmo3/32b_long_context", 200, 8e6),
    ],
)
def test_olmo_warms_up_for_the_stated_steps(recipe: str, warmup: int, tokens_per_step: float) -> None:
    run = steps(recipe)

    assert run["lr_warmup_iters"] == warmup
    assert run["tokens_per_step"] == pytest.approx(tokens_per_step, rel=0.05)


def test_olmo_3_32b_stops_before_its_cosine_ends() -> None:
    run = steps("olmo3/32b_pretrain")

    assert run["train_iters"] / run["lr_decay_iters"] == pytest.approx(5.5 / 5.93, rel=1e-4)


# Recipes on a laptop


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in ONE_EACH else pytest.mark.slow) for name in RECIPES]
)
def test_a_recipe_shrinks_to_a_laptop(recipe: str, tmp_path: Path) -> None:
    arguments = accepted(taught(shrunk(recipe), recipe, twin(recipe), tmp_path))

    assert (arguments.world_size, arguments.train_iters, arguments.lr_warmup_iters) == (1, 256, 13)
    assert arguments.transformer_impl == "local"
    # what only a cluster, an earlier stage or the whole length has must not come along
    assert not (arguments.bf16 or arguments.use_distributed_optimizer or arguments.overlap_grad_reduce)
    assert not (arguments.moe_grouped_gemm or arguments.recompute_granularity)
    assert arguments.moe_token_dispatcher_type == "allgather"
    assert arguments.exit_interval is None
    assert arguments.lr_decay_iters is None
    assert arguments.pretrained_checkpoint is None
    assert arguments.tokenizer_model is None


@pytest.mark.parametrize("recipe", ["olmo3/7b_long_context", "olmo3/32b_long_context"])
def test_olmo_3_long_context_keeps_yarn_on_the_full_attention_blocks_when_it_shrinks(recipe: str) -> None:
    config = shrunk(recipe)

    arguments = accepted(config)

    assert config["model"]["yarn_on_windowed"] is False
    assert arguments.position_embedding_type == "yarn"
    assert (arguments.rotary_scaling_factor, arguments.yarn_original_max_position_embeddings) == (8.0, 8192)
