"""Adapters on the Hub: uploaded, fetched, and refused offline."""

import pytest
from huggingface_hub import ModelCard
from running import run, tiny, without_attention

from focus_exp import UserError, attach, load_adapter, push_to_hub, save_adapter
from focus_exp.models import adapter
from focus_exp.models.adapter import ADAPTER_FILES, CARD, DESCRIPTION

REPO = "someone/focus-tiny"


def test_push_to_hub_uploads_the_adapter_and_its_card_alone(tiny_model, tmp_path, monkeypatch):
    folder = save_adapter(attach(tiny_model("llama"), groups=4), tmp_path / "adapter")
    calls = {}
    monkeypatch.setattr(adapter.HfApi, "create_repo", lambda self, name, **options: calls.update(options, name=name))
    monkeypatch.setattr(adapter.HfApi, "upload_folder", lambda self, **options: calls.update(options) or "url")
    assert push_to_hub(folder, REPO, private=True, token="hf_x") == "url"
    assert (calls["name"], calls["private"], calls["repo_id"], calls["folder_path"]) == (REPO, True, REPO, folder)
    assert calls["allow_patterns"] == [*ADAPTER_FILES]


def test_push_to_hub_offline_raises_user_error(tiny_model, tmp_path, monkeypatch):
    folder = save_adapter(attach(tiny_model("llama"), groups=4), tmp_path / "adapter")

    def refuse(*_, **__):
        raise adapter.HTTP_ERROR("nobody listens")

    monkeypatch.setattr(adapter.HfApi, "create_repo", refuse)
    with pytest.raises(UserError, match=f"{folder} was not uploaded to {REPO} .HTTPError: nobody listens"):
        push_to_hub(folder, REPO)


def test_load_adapter_from_hub_offline_raises_user_error(tiny_model):
    with pytest.raises(UserError, match="adapter no/such-adapter.* not found"):
        load_adapter(tiny_model("llama"), "no/such-adapter@v2")


def test_evaluate_adapter_from_hub_is_fetched(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: fetched.append(name) or tmp_path)
    result = run(*without_attention(tiny(tmp_path)), "job=evaluate", f"adapter={REPO}@v1")
    assert fetched == [REPO] and DESCRIPTION in result.err and result.code == 2


def test_train_writes_a_card_with_the_adapter(finished_run):
    card = ModelCard.load(next(finished_run.rglob(f"adapter/{CARD}")))
    assert card.data.library_name == "focus_exp" and card.data.base_model is None  # which no hub has
    assert "| focus_hard |" in card.text and '"groups": 2' in card.text
