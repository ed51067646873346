"""--cfg job prints the configuration that runs, and runs nothing."""

import pytest
import yaml
from builders import write_variants
from running import fitting, only_run, records_of, run, succeed, tiny, without_attention

UNTRAINED = ("attention=window", "recipe=none")


def printed(*arguments):
    return list(yaml.safe_load_all(succeed(*arguments, "--cfg", "job").out))


def written(path):
    return yaml.safe_load((path / "config.yaml").read_text())


def test_show_variant_is_what_its_run_writes(tmp_path):
    variants = write_variants(tmp_path / "conf", {"narrow": [*UNTRAINED, "attention.window=4", "eval.limit=7"]})
    command = [*fitting(*tiny(tmp_path), *UNTRAINED), "job=compare", *variants, "+variant=adhoc/narrow"]
    (shown,) = printed(*command)
    assert not (tmp_path / "runs").exists()
    assert (shown["job"], shown["eval"]["limit"]) == ("train", 7)
    assert shown["attention"]["window"] == 8  # that of the command, not of the variant
    succeed(*command)
    assert shown == written(only_run(tmp_path))


def test_show_comparison_has_what_its_variants_change(tmp_path):
    variants = write_variants(tmp_path / "conf", {"one": ["recipe.steps=2"], "two": [*UNTRAINED]})
    shared, one, two = printed(*tiny(tmp_path), "job=compare", *variants)
    assert (shared["job"], shared["variants"]) == ("compare", ["adhoc/one", "adhoc/two"])
    assert one == {"recipe": {"steps": 2, "phases": {"router": {"steps": 2}}}}
    assert (two["attention"]["method"], two["recipe"]["phases"]) == ("window", {})


@pytest.mark.parametrize("launcher", [(), ("hydra/launcher=slurm", "hydra.launcher.partition=gpu")])
def test_show_sweep_has_every_job_and_writes_nothing(tmp_path, monkeypatch, launcher):
    monkeypatch.chdir(tmp_path)
    command = ["-m", *fitting(*tiny(tmp_path), *UNTRAINED), "seed=3,4"]
    jobs = printed(*command, *launcher)
    assert [job["seed"] for job in jobs] == [3, 4]
    assert not (tmp_path / "runs").exists()
    if not launcher:
        succeed(*command)
        assert sorted(record.seed for record in records_of(tmp_path)) == [3, 4]
        assert jobs == [written(record.path.parent) for record in sorted(records_of(tmp_path), key=lambda r: r.seed)]


def test_show_adapter_replaces_the_method_of_the_command(tmp_path):
    succeed(*tiny(tmp_path / "router"), "recipe.steps=1")
    adapter = only_run(tmp_path / "router") / "adapter"
    command = [*without_attention(tiny(tmp_path / "again")), "job=evaluate", f"adapter={adapter}"]
    (shown,) = printed(*command)
    succeed(*command)
    assert shown == written(only_run(tmp_path / "again")) and shown["recipe"]["name"] == "none"


def test_show_part_and_what_no_command_can_run(tmp_path):
    assert succeed(*tiny(tmp_path), "--cfg", "job", "-p", "model.name").out.splitlines()[-1] == "tiny_llama"
    assert run(*tiny(tmp_path), "--cfg", "job", "-p", "model.nome").code == 2
    assert run(*tiny(tmp_path), "--cfg", "job", "attention.groups=0").code == 2
    assert run("-m", *tiny(tmp_path), "--cfg", "hydra").code == 2
