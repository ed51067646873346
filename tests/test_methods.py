"""Options that methods declare, and a method from outside: one Python file and one YAML file."""

import sys
from dataclasses import MISSING, fields

import pytest
from builders import scored
from hypothesis import given
from hypothesis import strategies as st
from running import fitting, record_of, run, tiny

from focus_exp import UserError, attach, config, load_adapter, save_adapter
from focus_exp.attention.base import BACKENDS
from focus_exp.attention.options import FocusOptions, validate_options
from focus_exp.attention.registry import METHODS, find
from focus_exp.config import AttentionConfig, FitConfig, RouterConfig, find_schema

OPTIONS = [*(method.options for method in METHODS.values()), FitConfig, RouterConfig]

PYTHON = '''
from dataclasses import dataclass

import torch

from focus_exp.attention.base import AttentionMethod
from focus_exp.attention.options import Fraction, Options


@dataclass
class MeanOptions(Options):
    share: Fraction = 0.5


class Mean(AttentionMethod, options=MeanOptions):
    """A window of 128 tokens, mixed with the mean of all values before."""

    def __init__(self, shape, options):
        super().__init__(shape)
        self.share = options.share

    def attend(self, q, k, v, selection, sequence, args):
        near = super().attend(q, k, v, selection, sequence, args)
        steps = torch.arange(1, v.shape[2] + 1, device=v.device)[:, None]
        mean = (v.cumsum(2) / steps).repeat_interleave(q.shape[1] // v.shape[1], 1)
        return (1 - self.share) * near + self.share * mean
'''
YAML = "# Mine\nname: mine\nmethod: my_methods.Mean\nwindow: 128\nbackend: auto\nshare: 0.25  # Fraction of the mean.\n"


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A folder outside of the package with a method and its configuration."""
    (tmp_path / "my_methods.py").write_text(PYTHON)
    (tmp_path / "conf" / "attention").mkdir(parents=True)
    (tmp_path / "conf" / "attention" / "mine.yaml").write_text(YAML)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_methods", None)
    find_schema.cache_clear()


def mine(folder, *more):
    return [f"--config-dir={folder / 'conf'}", *fitting(*tiny(folder), "attention=full"), "attention=mine", *more]


def test_a_method_from_outside_is_a_python_file_and_a_yaml_file(outside):
    result = run(*mine(outside, "recipe=none"))
    assert result.code == 0, result.err
    record = record_of(outside)
    base, row = scored(record.measurements)
    assert (record.status, row.method, row.error) == ("finished", "my_methods.Mean", None) and row.nll != base.nll
    assert record.config["attention"] == {
        **{"name": "mine", "method": "my_methods.Mean", "window": 8, "backend": "auto", "share": 0.25}
    }


@pytest.mark.parametrize("setting", ["attention.shares=1", "attention.groups=2", "attention.share=2"])
def test_outside_method_invalid_option_raises(outside, setting):
    result = run(*mine(outside, "recipe=none", setting))
    assert (result.code, result.out) == (2, "") and result.err.startswith(f"error: {setting.partition('=')[0]} ")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("my_methods.Median", "'my_methods.Median' not importable"),
        ("no_methods.Mean", "Put no_methods on PYTHONPATH"),
        ("my_methods.MeanOptions", "'my_methods.MeanOptions' must be a subclass"),
    ],
)
def test_outside_method_unimportable_raises(outside, path, said):
    (outside / "conf" / "attention" / "mine.yaml").write_text(YAML.replace("my_methods.Mean", path))
    result = run(*mine(outside, "recipe=none"))
    assert result.code == 2 and result.err.startswith("error: ") and said in result.err


def test_load_adapter_never_imports_modules(outside, tiny_model):
    model = attach(tiny_model("llama"), "my_methods.Mean", share=1.0)
    save_adapter(model, outside / "adapter")
    loaded = load_adapter(tiny_model("llama"), outside / "adapter")
    assert loaded.focus_attachment.options == {"share": 1.0}
    del sys.modules["my_methods"]
    with pytest.raises(UserError, match="'my_methods.Mean' is not part of focus_exp. Import my_methods"):
        load_adapter(tiny_model("llama"), outside / "adapter")


def test_options_defaults_are_valid():
    for options in (*OPTIONS, AttentionConfig):
        for item in fields(options):
            assert item.default is not MISSING
        validate_options(options())


def test_backend_choices_equal_kernels():
    assert config.BACKENDS == BACKENDS


@given(groups=st.integers(-2, 20), top_k=st.integers(-2, 20))
def test_option_bound_by_another_is_checked(groups, top_k):
    allowed = 1 <= top_k <= groups
    try:
        options = FocusOptions.create(groups=groups, top_k=top_k)
    except ValueError as error:
        assert not allowed and str(error).startswith(("groups must", "top_k must"))
    else:
        assert allowed and (options.groups, options.top_k) == (groups, top_k)


@given(value=st.floats() | st.integers())
def test_option_range_is_checked(value):
    try:
        FocusOptions.create(gate_threshold=value)
    except ValueError as error:
        assert not 0 <= value <= 1 and str(error).startswith("gate_threshold must be")
    else:
        assert 0 <= value <= 1


def test_find_dotted_path_equals_name():
    assert find("sparq") is find("focus_exp.attention.baselines.sparq.SparQ")
