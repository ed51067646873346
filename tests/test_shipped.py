"""What a file of conf/ says of its own weights or text is not taken for what is true of the user's."""

from dataclasses import replace

import pytest
from hydra import compose, initialize_config_dir

from focus_exp.checks import drop_file_fields, parse
from focus_exp.config import conf_dir, is_shipped, register_schemas, shipped
from focus_exp.errors import UserError
from focus_exp.jobs.compose import needs_base


def composed(*overrides):
    register_schemas()
    with initialize_config_dir(conf_dir(), version_base="1.3"):
        return parse(compose("config", list(overrides)))


def test_a_files_own_place_keeps_everything():
    gpt2 = composed("model=gpt2_124m").model
    assert gpt2.revision == shipped("model")["gpt2_124m"]["revision"] and gpt2.architecture["n_layer"] == 12
    assert drop_file_fields("model", gpt2) is gpt2
    assert needs_base(composed("model=books_6m")) and composed("model=tiny_llama").model.architecture


@pytest.mark.parametrize("place", ["model.hub_id=owner/mine", "model.path=weights"])
@pytest.mark.parametrize("model", ["gpt2_124m", "books_6m", "tiny_llama"])
def test_weights_of_the_users_own_have_neither_revision_nor_architecture_of_the_file(model, place):
    config = composed(f"model={model}", place, "model.name=mine")
    assert config.model.revision is None and config.model.architecture == {} and not needs_base(config)
    assert composed(f"model={model}", place, "model.revision=v2").model.revision == "v2"


@pytest.mark.parametrize("place", ["model=gpt2_124m", "model.path=my/weights"])
def test_weights_that_are_there_are_not_given_another_architecture(place):
    """Which was ignored, and yet told two runs apart."""
    with pytest.raises(UserError, match="model.architecture.n_layer"):
        composed(place, "model.architecture.n_layer=6")
    for fine in ("++model.architecture.attn_pdrop=0", "recipe=scratch", "job=plan"):
        layers = [] if "pdrop" in fine else ["model.architecture.n_layer=6"]
        assert composed(place, fine, *layers).model.architecture
    assert composed("model=tiny_gpt2", "model.architecture.n_layer=3").model.architecture["n_layer"] == 3


def test_what_is_the_users_own_is_not_called_by_a_files_name():
    assert composed("model.hub_id=owner/mine").model.name == "mine"
    assert composed("model.hub_id=owner/mine", "model.path=my/weights/").model.name == "weights"
    assert composed("model.path=my/weights", "model.name=ours").model.name == "ours"
    assert composed("data=pg19", "data.hub_id=owner/text").data.name == "text"
    assert composed("model=gpt2_124m").model.name == "gpt2_124m"
    assert composed("data=files", "data.files=texts").data.name == "files"


def test_a_text_of_the_users_own_has_no_revision_of_the_file():
    assert composed("data=pg19").data.revision
    assert composed("data=pg19", "data.hub_id=owner/text").data.revision is None
    wiki = composed("data=wikitext103").data
    assert wiki.subset and drop_file_fields("data", replace(wiki, hub_id="owner/text")).subset is None


def test_what_stands_in_unasked_is_known():
    assert is_shipped("model", "openai-community/gpt2") and is_shipped("data", "emozilla/pg19")
    assert not is_shipped("model", "owner/mine")
