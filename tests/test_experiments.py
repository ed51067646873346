"""Every file under conf/ composes, and every experiment runs, on a tiny random model."""

from itertools import zip_longest
from pathlib import Path

import pytest
from builders import compose_config, make_config
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from running import fitting, records_of, succeed, tiny

from focus_exp.checks import parse
from focus_exp.config import GROUPS, shipped
from focus_exp.results.run_dir import name_experiment
from focus_exp.runs.compose import compose_variant, variant_name
from focus_exp.training.phases import tokens_per_step

CONF = Path(__file__).parent.parent / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
OPTIONS = sorted(
    (group, path.stem)
    for group in [*GROUPS, "budget"]
    for path in (CONF / group).glob("*.yaml")
    if path.stem not in ("base", "auto")  # budget=auto is another one
)


def has_variants(name):
    return "job: compare" in (CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")


def is_large(name):
    variants = OmegaConf.to_container(OmegaConf.load(CONF / "experiment" / f"{name}.yaml")).get("variants", [])
    return isinstance(variants, str) or len(variants) > 2  # a scale names those of some


# `make test-all` runs them
LARGE = [name for name in EXPERIMENTS if is_large(name) or name == "speed_quality"]


def choices():
    """Every option once, those of different groups in one command; a recipe alone, a method in test_baselines.py."""
    of_group = {group: [name for other, name in OPTIONS if other == group] for group in [*GROUPS, "budget"]}
    del of_group["attention"]
    for name in of_group.pop("recipe"):
        yield {"recipe": name}
    for row in zip_longest(*of_group.values()):
        yield {group: name for group, name in zip(of_group, row, strict=True) if name}


@pytest.mark.parametrize("chosen", choices(), ids=lambda chosen: "-".join(chosen.values()))
def test_conf_choices_fit_their_schemas(chosen):
    # what they cannot do without
    others = {"files": ["data.files=texts"], "hub": ["data.hub_id=owner/text"]}.get(chosen.get("data"), [])
    config = compose_config(*(f"{group}={name}" for group, name in chosen.items()), *others)
    assert {group: config[group].name for group in chosen} == chosen
    parse(config)


def compose_all(name, *overrides):
    """Compose an experiment and its variants."""
    settings = [f"+experiment={name}", *overrides]
    config = make_config(*settings)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return config, {name: compose_variant(config, name, settings) for name in map(variant_name, config.variants)}


# comparisons of what was trained differently; alignment's rates and budgets are those of the paper's rows, and
# *_same_steps have as many steps in place of as many tokens
ALIKE = ("compare", "full_training", "from_scratch")


def slow_if_large(names):
    return [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in names]


@pytest.mark.parametrize("name", slow_if_large(EXPERIMENTS))
def test_experiment_and_variants_compose_with_budget_paper(name):
    config, variants = compose_all(name, "budget=paper")
    assert config.budget["name"] == "paper"
    assert all(variant.budget["name"] == "paper" and not variant.variants for variant in variants.values())


def test_typed_setting_wins_over_a_variant_and_one_that_it_includes():
    settings = ["+experiment=frontier", "recipe.fit.steps=7", "attention.window=64", "attention.top_k=2"]
    config = make_config(*settings)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        own, shared = (compose_variant(config, name, settings) for name in ("dual_20_fast", "shared/two_encoders"))
        without_fit = compose_variant(config, "window", settings)
    assert own.attention == shared.attention
    assert own.recipe.fit.steps == 7 and own.attention.window == without_fit.attention.window == 64


def test_method_chooses_how_it_is_made():
    paper, typed, fitted = (
        make_config(f"attention={name}", *settings).recipe
        for name, *settings in (
            ("focus_paper",),
            ("focus_paper", "recipe.router.balance_sequences=3"),
            ("focus_dual", "recipe=none"),
        )
    )
    assert (paper.router.warm_start_sequences, paper.router.balance_sequences, paper.fit) == (0, 0, None)
    assert (typed.router.warm_start_sequences, typed.router.balance_sequences) == (0, 3)
    assert fitted.router is None and fitted.fit.sequences > fitted.fit.validation_sequences


def test_hidden_facts_go_with_any_text():
    settings = ["+experiment=frontier", "data=files", "data.files=mine", "data.hidden_facts=true"]
    config = make_config(*settings)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        own = compose_variant(config, "dual_20_fast_facts", settings)
        plain = compose_variant(config, "dual_20_fast_facts", settings[:-1])
        other = compose_variant(config, "transfer/fitted_on_code", [settings[0], settings[-1]])
    assert own.data == plain.data and own.data.files == "mine" and own.data.hidden_facts
    assert other.data.hidden_facts and other.data.name == "code"


@pytest.mark.parametrize("budget", ["paper", "embedded"])
@pytest.mark.parametrize("name", slow_if_large(ALIKE))
def test_experiment_trained_variants_see_the_same_tokens(name, budget):
    least, *_, most = tokens_by_variant(compose_all(name, f"budget={budget}")[1])
    assert least > 0.995 * most


def test_training_7b_from_scratch_takes_at_most_a_twentieth_for_trials():
    for variant in compose_all("from_scratch", "budget=paper")[1].values():
        (_, phase), tune = variant.phases[-1], variant.recipe.tune
        assert variant.model.name == "mistral_7b" and phase.steps * tokens_per_step(variant) > 1.99e9
        assert len(tune.factors) * phase.steps <= 0.05 * phase.steps
        assert phase.learning_rate <= 3e-4 and phase.warmup_steps >= 1000


def tokens_by_variant(variants):
    """Tokens, the fewest first, of those that are trained by more than a fit and on as many tokens."""
    trained = {name: variant for name, variant in variants.items() if any(phase.steps for _, phase in variant.phases)}
    return sorted(tokens_read(variant) for name, variant in trained.items() if not name.endswith("_same_steps"))


def tokens_read(config):
    phases = config.phases
    steps = sum(phase.steps for _, phase in phases) * tokens_per_step(config)
    router = config.recipe.router
    blocks = router.warm_start_sequences + router.balance_sequences if router else 0
    return steps + blocks * config.data.seq_len


def command(folder, name, model="tiny_llama"):
    """The experiment in small; benchmarks have tests of their own."""
    plain = compose_config(f"+experiment={name}")
    small = [
        *tiny(folder),
        f"model={model}",
        "attention.groups=4",
        "recipe.steps=2",
        "eval.tasks=[]",
        "recipe.tune.factors=[]",
        "eval.data=null",
    ]
    if plain.variants:
        small = tiny_variants(folder, plain, small)
    return [f"+experiment={name}", *fitting(*small, f"attention={plain.attention.name}")[:-1]]


# of many variants on one of the families, the others on both
@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param(name, model, marks=pytest.mark.slow if name in LARGE or model == "tiny_gpt2" else ())
        for name in EXPERIMENTS
        for model in ("tiny_llama", *(() if has_variants(name) else ("tiny_gpt2",)))
    ],
)
def test_experiment_runs_on_a_tiny_model(tmp_path, name, model):
    plain = compose_config(f"+experiment={name}")
    succeed(*command(tmp_path, name, model))
    records = records_of(tmp_path)
    assert {record.path.relative_to(tmp_path / "runs").parts[0] for record in records} == {name_experiment(name)}
    assert len(records) == 1 + len(plain.variants)
    for record in records:
        assert (record.status, record.experiment) == ("finished", name)
        assert record.variants or record.measurements
        assert not any(m.settings.get("error") for m in record.measurements)
        assert all(variant.status == "finished" for variant in record.variants)
    if not plain.variants:
        assert records[0].steps == 2 * len(plain.recipe.phases)


def tiny_variants(folder, plain, small):
    """Copy an experiment's variants with the small settings of attention.*; returns the command's arguments for them.

    Without model and data of their own, which are typed. Their limits keep those apart that differ in nothing else.
    """
    attention = [setting for setting in small if setting.startswith("attention.")]
    for number, path in enumerate(plain.variants):
        experiment, _, name = path.rpartition("/")
        overlay = OmegaConf.create(shipped("variant")[experiment or plain.experiment][name])
        defaults = overlay.get("defaults", [])
        choices = {key: value for item in defaults if isinstance(item, DictConfig) for key, value in item.items()}
        overlay.defaults = [item for item in defaults if not {"override /model", "override /data"} & {*item}]
        method = choices.get("override /attention", plain.attention.name)
        own = [*fitting(*attention, f"attention={method}")[:-1], f"variant={name}"]
        limit = {"eval": {"limit": number + 1}}
        overlay = OmegaConf.merge(OmegaConf.from_dotlist(own), overlay, limit)
        target = folder / "conf" / "variant" / "tiny" / f"{name}.yaml"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("# @package _global_\n" + OmegaConf.to_yaml(overlay), encoding="utf-8")
    names = ",".join(f"tiny/{variant_name(path)}" for path in plain.variants)
    typed = [setting for setting in small if setting not in attention]
    return [*typed, "--config-dir", str(folder / "conf"), f"variants=[{names}]"]
