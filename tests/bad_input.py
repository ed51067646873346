"""Settings that no run can be made of: what is added to a tiny run, and what the one error must say."""

from dataclasses import fields, is_dataclass
from typing import get_type_hints

from focus_exp.config import Config
from focus_exp.config_attention import FocusConfig


def choices_of(schema: type, prefix: str = "") -> dict[str, tuple[str, ...]]:
    """Dotted key -> what it may name, of every key that may name only some things."""
    found, hints = {}, get_type_hints(schema) | {"attention": FocusConfig}
    for item in fields(schema):
        if is_dataclass(inner := hints[item.name]):
            found |= choices_of(inner, f"{item.name}.")
        elif inner is str and (names := item.metadata.get("choices")):
            found[prefix + item.name] = names
    return found


CHOICES = choices_of(Config)

BAD_INPUT = {
    "attention.group=4": ["group", "did you mean groups"],
    "+attention.widow=4": ["attention.widow", "did you mean window"],
    "+expriment=smoke": ["expriment", "did you mean experiment"],
    "+recipe.phases.router.stepps=4": ["recipe.phases.router.stepps", "did you mean steps"],
    "attention=fokus": ["attention/fokus", "did you mean focus"],
    "+experiment=smok": ["experiment/smok", "did you mean smoke"],
    "experiment=smoke": ["+experiment=smoke"],
    "job=trian": ["job=trian", "train, evaluate"],
    "attention.groups=many": ["attention.groups", "'many'", "Integer"],
    "attention.groups=[4]": ["attention.groups", "'[4]'", "Integer"],
    "attention.groups=0": ["attention.groups=0", "1 or more"],
    "attention.top_k=3": ["attention.top_k=3", "attention.groups=2", "use 1 to 2"],
    "attention.window=-1": ["attention.window=-1", "0 or more"],
    "attention.temperature=nan": ["attention.temperature=nan", "above 0"],
    "attention.gate_threshold=7": ["attention.gate_threshold=7", "from 0 to 1"],
    "attention.backend=torch-flash": ["attention.backend=torch-flash cannot serve here", "CUDA", "use auto"],
    "attention.gate=multiplicative": ["attention.gate_threshold=0.5", "set it to 0"],
    "attention=full": ["recipe=retrofit", "attention=full", "recipe=none"],
    "eval.pair_rules=[any]": ["eval.pair_rules", "any", "query_topk, share"],
    "recipe.phases.router.learning_rate=inf": ["learning_rate=inf", "above 0"],
    "recipe.phases.router.steps=-1": ["recipe.phases.router.steps=-1", "0 or more"],
    "data.seq_len=1024": ["data.seq_len=1024", "512 positions of tiny_llama", "use 512 or less"],
    "eval.seq_len=1024": ["eval.seq_len=1024", "use 512 or less"],
    "data.files=nowhere": ["data.files=nowhere", "no such folder"],
    "data=books": ["data.files=", "add data=files"],
    "eval.top_k=[9]": ["eval.top_k=[9]", "use 1 to attention.groups=2"],
    "eval.tasks=last_word@500": ["eval.tasks is a list", "eval.tasks=[last_word@500]"],
    "data.files=???": ["data.files has no value", "data.files=..."],
    "trainer.batch_size=1000": ["less than one step of 2 x 1000", "trainer.batch_size"],
    "seed=-1": ["seed=-1", "from 0 to 4294967295"],
    "seed=4294967296": ["seed=4294967296", "from 0 to 4294967295"],
    "seed=123456789012345678901234567890": ["seed", "from 0 to 4294967295"],
    "recipe.tune.seed=4294967296": ["recipe.tune.seed=4294967296"],
    "adapter=somewhere": ["adapter=somewhere", "job=evaluate"],
    "job=evaluate": ["job=evaluate needs adapter="],
    "model.path=nowhere": ["model.path=nowhere", "no such file"],
}
