"""Models from folders, single files, GGUF and the Hub; errors name what was found and what to type."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from builders import make_config
from conftest import build
from gguf_files import plain_qwen2, write_gguf
from running import only_run, record_of, router_steps, run, tiny, without_attention
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertModel, LlamaConfig, LlamaForSequenceClassification

from focus_exp.config import ModelConfig
from focus_exp.errors import UserError
from focus_exp.models import load as load_module
from focus_exp.models.files import find_local_model, hash_model
from focus_exp.models.gguf import choose_file
from focus_exp.models.load import load_model
from focus_exp.models.random import byte_tokenizer

TOKENS = torch.arange(40)[None]


def load(path, cache, **options):
    cfg = ModelConfig(name="mine", path=str(path), **options)
    return load_model(cfg, assets="auto", cache=cache, seed=0, dtype=torch.float32)


@pytest.fixture
def folder(tmp_path):
    """Write a model with save_pretrained."""
    place = tmp_path / "model"
    build("tiny_llama").save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place


def change_config(place: Path, **values):
    path = place / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_load_model_gguf_equals_its_source(tmp_path):
    model = plain_qwen2()
    loaded = load(write_gguf(model, tmp_path / "mine.gguf"), tmp_path / "cache")
    assert torch.equal(loaded.model(TOKENS).logits, model(TOKENS).logits)
    assert loaded.tokenizer("the cat")["input_ids"][0] == 257 and loaded.tokenizer.eos_token_id == 256
    assert loaded.provenance.source == "local" and len(loaded.provenance.revision) == 12


def test_load_model_gguf_is_converted_once_and_again_when_changed(tmp_path):
    def conversions() -> dict[Path, int]:
        load(file, tmp_path / "cache")
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "models").iterdir()}

    file = write_gguf(plain_qwen2(), tmp_path / "mine.gguf")
    first = conversions()
    assert len(first) == 1 and conversions() == first
    write_gguf(plain_qwen2(), file, "Q8_0")
    both = conversions()
    assert len(both) == 2 and first.items() <= both.items()


def test_run_gguf_is_trained_and_recorded(tmp_path):
    file = write_gguf(plain_qwen2(), tmp_path / "mine.gguf", "Q8_0")
    command = [*tiny(tmp_path), f"model.path={file}", router_steps(2)]
    result = run(*command)
    assert result.code == 0, result.err
    record = record_of(tmp_path)
    assert record.model["revision"] == hash_model(str(file)) and record.model["used"] == str(file)
    assert run(*command).code == 0  # finished, of the same file


@pytest.mark.parametrize("keep", [3, 0.5, 0.95])
def test_load_model_gguf_truncated_raises(tmp_path, keep):
    file = write_gguf(plain_qwen2(), tmp_path / "mine.gguf")
    content = file.read_bytes()
    file.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(UserError, match=r"mine\.gguf"):
        load(file, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "models").glob("mine*"))


def test_load_model_gguf_unknown_architecture_raises(tmp_path):
    file = write_gguf(plain_qwen2(), tmp_path / "mine.gguf", arch="rwkv7")
    with pytest.raises(UserError, match="rwkv7"):
        load(file, tmp_path / "cache")


@pytest.mark.parametrize(
    ("file", "typed", "words"),
    [
        ("mine-00001-of-00002.gguf", "mine-00001-of-00002.gguf", ["llama-gguf-split --merge"]),
        ("mine.gguf", "", ["no config.json", "model.path=PLACE/mine.gguf"]),
        ("mine.safetensors", "mine.safetensors", ["no config.json", "save_pretrained"]),
        ("mine.bin", "mine.bin", ["must be .safetensors or .gguf", "mine.bin"]),
        ("mine.bin", "yours", ["no such file"]),
    ],
)
def test_find_local_model_unfit_path_raises(tmp_path, file, typed, words):
    (tmp_path / file).touch()
    with pytest.raises(UserError) as error:
        find_local_model(str(tmp_path / typed))
    message = str(error.value).replace(str(tmp_path), "PLACE")
    assert all(word in message for word in words), message


def test_load_model_safetensors_file_equals_its_folder(folder, tmp_path):
    loaded = load(folder / "model.safetensors", tmp_path / "cache")
    assert torch.equal(loaded.model(TOKENS).logits, load(folder, tmp_path / "cache").model(TOKENS).logits)
    assert loaded.provenance.revision == load(folder, tmp_path / "cache").provenance.revision


def test_load_model_safetensors_other_name_is_read(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 2
    save_file(tensors, folder / "step_9.safetensors", metadata={"format": "pt"})
    loaded, usual = load(folder / "step_9.safetensors", tmp_path), load(folder, tmp_path)
    assert torch.equal(loaded.model.lm_head.weight, 2 * usual.model.lm_head.weight)
    assert loaded.provenance.revision != usual.provenance.revision
    assert "transformers_weights" not in loaded.model.config.to_dict()


# what is there -> words of the error

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def bert(place, kind=BertForMaskedLM):
    kind(BertConfig(vocab_size=300, **SMALL)).save_pretrained(place)


def custom_code(place):
    change_config(place, model_type="mine", auto_map={"AutoConfig": "configuration.Mine"})
    (place / "configuration.py").write_text("raise SystemExit('code of the model was run')")


def custom_tokenizer(place):
    path = place / "tokenizer_config.json"
    values = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    path.write_text(json.dumps(values | {"tokenizer_class": "Mine"}))


def change_weight(change):
    """Return how to change one matrix of the saved weights; None drops it."""

    def damage(place):
        tensors = load_file(place / "model.safetensors")
        matrix = tensors.pop("model.layers.1.mlp.up_proj.weight")
        if (changed := change(matrix)) is not None:
            tensors["model.layers.1.mlp.up_proj.weight"] = changed
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})

    return damage


def cut(name, kept):
    return lambda place: (place / name).write_bytes((place / name).read_bytes()[:kept])


FOLDERS = {
    "a masked language model": (bert, ["BertForMaskedLM", "does not predict the next token"]),
    "an encoder": (lambda place: bert(place, BertModel), ["BertModel", "without the head"]),
    "a classifier": (
        lambda place: LlamaForSequenceClassification(LlamaConfig(vocab_size=300, **SMALL)).save_pretrained(place),
        ["LlamaForSequenceClassification", "does not predict the next token"],
    ),
    "custom code": (custom_code, ["config", "custom code"]),
    "a tokenizer with custom code": (custom_tokenizer, ["tokenizer", "custom code"]),
    "an unknown architecture": (lambda place: change_config(place, model_type="future"), ["future", "Transformers"]),
    "no model_type": (lambda place: change_config(place, model_type=None), ["model type"]),
    "no weights": (lambda place: (place / "model.safetensors").unlink(), ["its weights cannot be read"]),
    "a missing matrix": (change_weight(lambda x: None), ["up_proj.weight"]),
    "a matrix of another shape": (change_weight(lambda x: x[:8, :8].contiguous()), ["shape"]),
    "fewer layers in its config": (
        lambda place: change_config(place, num_hidden_layers=1),
        ["weights have 2 layers", "num_hidden_layers=1"],
    ),
    "half of its weights": (cut("model.safetensors", -100), ["weights"]),
    "half of its config": (cut("config.json", 40), ["config"]),
    "half of its tokenizer": (cut("tokenizer.json", 40), ["tokenizer"]),
    "no tokenizer": (lambda place: (place / "tokenizer.json").unlink(), ["tokenizer.json"]),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_load_model_unfit_folder_raises_its_reason(folder, tmp_path, monkeypatch, what):
    def prompt(*_):
        raise AssertionError("asked at the terminal")

    monkeypatch.setattr("builtins.input", prompt)
    change, words = FOLDERS[what]
    change(folder)
    with pytest.raises(UserError) as error:
        load(folder, tmp_path)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_parse_hub_id_with_revision_is_split():
    model = make_config("model.hub_id=owner/name@v1.0").model
    assert (model.hub_id, model.revision, model.name) == ("owner/name", "v1.0", "name")
    shipped = make_config("model=gpt2_124m", "model.hub_id=openai-community/gpt2@main").model
    assert (shipped.name, shipped.revision) == ("gpt2_124m", "main")


FILES = ["README.md", "mine-Q4_K_M.gguf", "mine-Q8_0.gguf", "big-00001-of-00002.gguf", "mmproj-mine-F16.gguf"]


def test_choose_file_takes_variant_name_or_only_file():
    assert choose_file(FILES, "o/n", "q8_0") == "mine-Q8_0.gguf"
    assert choose_file(FILES, "o/n", "mine-Q4_K_M.gguf") == "mine-Q4_K_M.gguf"
    assert choose_file(["a/only.gguf"], "o/n", "") == "a/only.gguf"


@pytest.mark.parametrize(
    ("variant", "words"), [("", ["o/n:mine-Q4_K_M", "o/n:mine-Q8_0"]), ("Q2_K", ["o/n:mine-Q8_0"])]
)
def test_choose_file_ambiguous_raises_with_choices(variant, words):
    with pytest.raises(UserError) as error:
        choose_file(FILES, "o/n", variant)
    assert all(word in str(error.value) for word in words)


@pytest.fixture
def gguf_hub(monkeypatch, tmp_path):
    """Fake a Hub with one GGUF repository of two files; yields its downloads."""
    asked = []

    def download(repo_id, name, **options):
        asked.append((repo_id, name, options["revision"], options["local_files_only"]))
        return write_gguf(plain_qwen2(), tmp_path / name)

    siblings = [SimpleNamespace(rfilename=name) for name in ("mine-Q4_K_M.gguf", "mine-Q8_0.gguf")]
    info = SimpleNamespace(sha="c0ffee", siblings=siblings, card_data=None)
    monkeypatch.setattr(load_module, "hub_reachable", lambda: True)
    monkeypatch.setattr(load_module, "model_info", lambda hub_id, revision=None: info)
    monkeypatch.setattr(load_module, "hf_hub_download", download)
    return asked


def test_load_model_hub_gguf_downloads_the_named_file(gguf_hub, tmp_path):
    cfg = ModelConfig(name="mine", hub_id="owner/name-GGUF:Q8_0")
    loaded = load_model(cfg, assets="auto", cache=tmp_path / "cache", seed=0, dtype=torch.float32)
    assert gguf_hub == [("owner/name-GGUF", "mine-Q8_0.gguf", "c0ffee", False)]
    assert torch.equal(loaded.model(TOKENS).logits, plain_qwen2()(TOKENS).logits)
    assert (loaded.provenance.used, loaded.provenance.revision) == ("owner/name-GGUF/mine-Q8_0.gguf", "c0ffee")


def test_load_model_hub_gguf_loads_from_cache(monkeypatch, tmp_path):
    snapshot = tmp_path / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    write_gguf(plain_qwen2(), snapshot / "mine.gguf")
    monkeypatch.setattr(load_module, "hub_reachable", lambda: False)
    monkeypatch.setattr(load_module, "snapshot_download", lambda *_, **__: str(snapshot))
    monkeypatch.setattr(load_module, "hf_hub_download", lambda repo_id, name, **_: str(snapshot / name))
    cfg = ModelConfig(name="mine", hub_id="owner/name-GGUF")
    loaded = load_model(cfg, assets="auto", cache=tmp_path / "cache", seed=0, dtype=torch.float32)
    assert (loaded.provenance.source, loaded.provenance.revision) == ("hub", "c0ffee")


def test_evaluate_check_base_false_uses_another_base(tmp_path):
    bases = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        bases.append(tmp_path / f"base-{seed}")
        build("tiny_llama").save_pretrained(bases[-1])
        byte_tokenizer().save_pretrained(bases[-1])
    assert run(*tiny(tmp_path, "trained"), f"model.path={bases[0]}", router_steps(2)).code == 0
    adapter = only_run(tmp_path / "trained") / "adapter"
    options = ["job=evaluate", f"adapter={adapter}", "eval.max_sequences=2", f"model.path={bases[1]}"]
    refused = run(*without_attention(tiny(tmp_path, "refused")), *options)
    assert refused.code == 2 and "check_base=false" in refused.err
    assert run(*without_attention(tiny(tmp_path, "other")), *options, "check_base=false").code == 0
    assert any("check_base" in warning for warning in record_of(tmp_path / "other").warnings)
