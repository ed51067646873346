"""Configurations that are parsed: what a YAML file says of its own weights or text, and impossible combinations."""

from dataclasses import fields, replace

import pytest
from builders import make_config

from focus_exp.checks import drop_file_fields
from focus_exp.config import DataConfig, ModelConfig, shipped
from focus_exp.errors import UserError
from focus_exp.runs.compose import needs_base


def load_file(group, file, /, **changes):
    schema = {"model": ModelConfig, "data": DataConfig}[group]
    names = {item.name for item in fields(schema)}
    return replace(schema(**{key: v for key, v in shipped(group)[file].items() if key in names}), **changes)


@pytest.mark.parametrize(("group", "name"), [("model", "gpt2_124m"), ("model", "books_6m"), ("data", "pg19")])
def test_drop_file_fields_keeps_the_files_place(group, name):
    part = load_file(group, name)
    assert drop_file_fields(group, part) is part


@pytest.mark.parametrize("place", [{"hub_id": "owner/mine"}, {"path": "my/mine/"}])
@pytest.mark.parametrize("name", ["gpt2_124m", "books_6m", "tiny_llama"])
def test_drop_file_fields_of_a_model_at_another_place(name, place):
    model = drop_file_fields("model", load_file("model", name, **place))
    assert (model.name, model.revision, model.architecture, model.base_run) == ("mine", None, {}, [])
    named = drop_file_fields("model", load_file("model", name, **place, name="ours", revision="v2"))
    assert (named.name, named.revision) == ("ours", "v2")


def test_drop_file_fields_of_a_text_at_another_place():
    text = drop_file_fields("data", load_file("data", "pg19", hub_id="owner/text"))
    assert (text.name, text.revision) == ("text", None)
    assert drop_file_fields("data", load_file("data", "wikitext103", hub_id="owner/text")).subset is None


def test_parse_base_run_is_needed_without_other_weights():
    assert needs_base(make_config("model=books_6m"))
    assert not needs_base(make_config("model=books_6m", "model.hub_id=owner/mine"))


@pytest.mark.parametrize("place", ["model=gpt2_124m", "model.path=my/weights"])
def test_parse_architecture_of_existing_weights_cannot_change(place):
    with pytest.raises(UserError, match=r"model\.architecture\.n_layer"):
        make_config(place, "model.architecture.n_layer=6")
    assert make_config(place, "++model.architecture.attn_pdrop=0").model.architecture
    assert make_config(place, "recipe=scratch", "model.architecture.n_layer=6").model.architecture["n_layer"] == 6
