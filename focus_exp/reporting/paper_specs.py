"""The paper's tables: their columns, and where the measurements of each row are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean, geometric_mean
from typing import Any, Literal

from focus_exp.reporting.format import to_percent
from focus_exp.reporting.frame import BASE, read_yaml

HUB, GPU = "the Hub", "the Hub and a GPU"
PERPLEXITY = {"metric": "perplexity"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the paper and its measurement.

    Args:
        cells: of the measurement, of a row of its run; attribute: what is shown of it.
        scale: to the paper's unit.
        origin: the row or the column of the paper that a change is from.
        timed: the speedup of a layer.
    """

    name: str
    label: str
    cells: dict[str, Any] = field(default_factory=dict)
    attribute: str = "value"
    scale: Callable[[Any, float], float] | None = None
    digits: int = 2
    origin: str = ""
    timed: bool = False

    @property
    def key(self) -> str:
        return f"{self.name}_change" if self.origin else self.name

    @property
    def is_measured(self) -> bool:
        return bool(self.cells or self.origin or self.timed)

    def convert(self, row: Any, attribute: str) -> float | None:
        """Return a value or a bound of a measurement in the paper's unit."""
        if attribute != "value" and self.attribute != "value":
            return None  # other attributes have no bounds
        number = getattr(row, self.attribute if attribute == "value" else attribute)
        if number is None or not abs(number) < float("inf"):
            return None
        return to_percent(number) if self.origin else self.scale(row, number) if self.scale else number

    def average(self, values: list[float]) -> float:
        """Return the mean over seeds: of perplexities and their changes [%] in log space."""
        if self.origin:
            return 100 * (geometric_mean(1 + value / 100 for value in values) - 1)
        return geometric_mean(values) if self.name.startswith("ppl") else fmean(values)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A source of the measurements in a row.

    Args:
        variant: of a comparison ("base": its full attention); variants: one for each column.
        cells: of measurements that belong to no variant.
        needs: what a CPU without the Hub lacks; None: as the table.
        pick: keep the setup with the most training steps.
    """

    variant: str = ""
    variants: dict[str, str] = field(default_factory=dict)
    cells: dict[str, Any] = field(default_factory=dict)
    experiments: list[str] = field(default_factory=list)
    needs: str | None = None
    pick: Literal["", "steps"] = ""

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.variants.values(), *filter(None, [self.variant])]))


Places = str | Place | Sequence[str | Place]  # a variant of the table's experiments, or a place


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A table of the paper.

    Args:
        key: the columns of the paper that name a row.
        rows: the places of each, by its key (`join_key`); those that the paper lacks come last.
        is_shown: in the Markdown report.
    """

    id: str
    title: str
    key: list[str]
    experiments: list[str]
    columns: list[Column]
    rows: dict[str, Places]
    needs: str = ""
    note: str = ""
    is_shown: bool = True
    name: str = ""

    def places(self, key: str) -> list[Place]:
        """Return where the measurements of a row are: in the experiments of the table, if the place names none."""
        places = self.rows[key]
        listed = [places] if isinstance(places, str | Place) else places
        named = [Place(variant=place) if isinstance(place, str) else place for place in listed]
        return [
            replace(p, experiments=p.experiments or self.experiments, needs=self.needs if p.needs is None else p.needs)
            for p in named
        ]


@cache
def paper_rows(table: str) -> list[dict[str, Any]]:
    """Return the rows of a table of the paper: column -> printed cell or None."""
    content = read_yaml("paper")[table]
    return [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]


def join_key(row: dict[str, Any], names: list[str]) -> str:
    """Return the cells that name a row, those that it has, with a space between them."""
    cells = (row[name] for name in names if row.get(name) is not None)
    return " ".join(f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in cells)


def in_percent(row: Any, value: float) -> float:
    return 100 * value


def task(name: str, label: str, metric: str = "score", **options: Any) -> Column:
    """Return the column of a benchmark, in per cent."""
    cells = {"metric": metric, "task": options.pop("task", name)}
    return Column(name=name, label=label, cells=cells, scale=in_percent, digits=1, **options)


def points(name: str, label: str) -> Column:
    """Return the column of a benchmark's change in points."""
    suite = "lambada_openai" if name == "lambada" else name
    return task(f"{name}_delta", f"{label} [points]", "score_change", task=suite)


def change(name: str, origin: str, label: str = "ΔPPL [%]") -> Column:
    return Column(name=name, label=label, origin=origin)


def largest_group(name: str, label: str, trainable: str) -> Column:
    cells = {"metric": "dominance", "trainable": trainable}
    return Column(name=name, label=label, cells=cells, scale=in_percent, digits=1)


PARAMETERS = Column(
    name="trainable_params", label="parameters", cells=PERPLEXITY, attribute="trainable_params", digits=0
)
PPL = Column(name="ppl", label="PPL", cells=PERPLEXITY)
PPL_CHANGE = change("ppl", "pretrained")
PPL_FOCUS = Column(name="ppl_focus", label="PPL Focus", cells=PERPLEXITY)
PPL_FULL = Column(name="ppl_full", label="PPL full attention", cells={"metric": ["perplexity", "score"]})
HELLASWAG, ARC_EASY, PIQA = task("hellaswag", "HellaSwag"), task("arc_easy", "ARC-E"), task("piqa", "PIQA")
LAMBADA = task("lambada", "LAMBADA", task="lambada_openai")
TASKS = [HELLASWAG, ARC_EASY, PIQA, LAMBADA]
BALANCED = "balanced: this project's causal assignment in place of the non-causal Sinkhorn assignment."


# fmt: off
def table1_retrofit() -> Spec:
    longest = {"source": "rows", "kind": "hard", "num_groups": 4, "primary": True, "causal": False}
    tuned = ["longformer", "performer", "routing_transformer"]
    leak = Place(experiments=["leak"], cells=longest, pick="steps")
    focus: Places = ["focus", "focus_paper", "focus_paper_sinks", leak]
    return Spec(
        id="T1", title="Methods retrofitted onto GPT-2 124M, PG-19, 1,024 tokens", key=["method"],
        experiments=["compare", "seeds"], columns=[PARAMETERS, PPL, PPL_CHANGE, *TASKS],
        rows={"pretrained": BASE, **{n: n for n in tuned}, "full_finetune": "full_finetuning", "focus": focus},
    )


def table_dg() -> Spec:
    def scale(row: Any, value: float) -> float:
        return 100 * value / row.model_params

    share = Column(name="percent_of_model", label="of the model [%]", cells=PERPLEXITY, attribute="trainable_params",
                   scale=scale)
    return Spec(
        id="d_g", title="Width of the routing space, GPT-2 124M, PG-19, K = 4", key=["d_g"],
        experiments=["routing_dim"], columns=[PARAMETERS, share, PPL],
        rows={str(width): [f"d_{width}", f"paper_{width}"] for width in (768, 128, 32, 16)},
    )


def table2_scale() -> Spec:
    base = Column(name="ppl_pretrained", label="PPL base", attribute="reference_level",
                  cells={"metric": "nll_change", "reference": BASE})
    needs = {"gpt2_124m": HUB, "gpt2_774m": HUB, "llama2_70b": "the Hub and several GPUs"}
    names = [*needs, "mistral_7b", "qwen2_5_7b", "olmo2_7b", "llama2_13b", "gemma2_9b"]
    ours = [
        *("smollm2_135m", "smollm2_135m_paper", "smollm2_135m_topk"),
        "gemma3_270m",
        "qwen2_5_coder_0_5b",
        "books_6m",
    ]
    return Spec(
        id="T2", title="Models of all sizes, PG-19, top-2", key=["model"], experiments=["model_scale"], needs=GPU,
        note="The paper names Gemma 2 as its fifth architecture, without a row.",
        columns=[base, PPL_FOCUS, change("ppl_focus", "ppl_pretrained"), *TASKS],
        rows={**{n: [Place(variant=v, needs=needs.get(n)) for v in (n, f"{n}_paper")] for n in names},
              **{n: n for n in ours}},
    )


def table2_scale_gsm8k_8shot_cot() -> Spec:
    full = task("gsm8k_full", "full attention [%]", "score_change", task="gsm8k_cot", attribute="reference_level")
    return Spec(
        id="T2 GSM8K", title="GSM8K, 8-shot chain of thought", key=["model"], experiments=["model_scale"], needs=GPU,
        note="By this project's causal router: the paper's is non-causal and cannot generate.",
        columns=[full, task("gsm8k_focus", "Focus [%]", task="gsm8k_cot")],
        rows={n: n for n in ("mistral_7b", "smollm2_135m")},
    )


def table3_lora() -> Spec:
    def lora(rank: int) -> Place:
        return Place(experiments=["lora_124m"], cells={"kind": "trained", "lora_rank": rank})

    tasks = {"hellaswag": "HellaSwag", "arc_easy": "ARC-E", "lambada": "LAMBADA", "piqa": "PIQA"}
    return Spec(
        id="T3", title="LoRA and Focus, GPT-2 124M, PG-19", key=["method"], experiments=["compare", "seeds"],
        note="lora, ours: of the rank that is size-matched to the router; lora_r*: of experiment lora_124m.",
        columns=[PARAMETERS, PPL, *(points(name, label) for name, label in tasks.items())],
        rows={"lora_r4": ["lora", lora(4)], "lora_r16": ["lora_r16", lora(16)], "focus_dg16": ["focus", "focus_paper"]},
    )


def table4_alignment() -> Spec:
    truthful = [task("truthfulqa_mc1", "TruthfulQA MC1"), task("truthfulqa_mc2", "TruthfulQA MC2")]
    rates = {"lora_r4 1e-05": "lora_1e-5", "lora_r4 5e-05": "lora_5e-5", "lora_r4 0.0001": "lora_1e-4"}
    return Spec(
        id="T4", title="Alignment, Mistral-7B-Instruct, 2,000 steps", key=["method", "learning_rate"],
        experiments=["alignment"],
        columns=[PARAMETERS, PPL, change("ppl", "instruct"), *truthful, HELLASWAG, ARC_EASY, LAMBADA],
        rows={"instruct": BASE, "focus_k2": ["focus_k2", "paper_k2"], **rates, "lora_1e-2": "lora_1e-2"},
    )


def table5_full_training() -> Spec:
    def both(prefix: str, experiments: list[str] | None = None, needs: str | None = None) -> list[Place]:
        pairs = [{"ppl_full": f"{prefix}full", "ppl_focus": f"{prefix}{name}"} for name in ("focus", "paper")]
        if not prefix:
            pairs[1]["ppl_focus"] = "focus_paper"
        return [Place(variants=pair, experiments=experiments or [], needs=needs) for pair in pairs]

    corpora = {"gpt2_124m_wikitext103": "wikitext103_", "gpt2_124m_openwebtext": "openwebtext_"}
    models = {"gpt2_774m_pg19": "gpt2_774m_", "gpt2_xl_1_5b_pg19": "gpt2_1_5b_"}
    return Spec(
        id="T5", title="All weights trained, full attention and Focus", key=["setting"], experiments=["domains"],
        needs=GPU, note="From scratch, ours: a byte-level model of 6M parameters.",
        columns=[PPL_FULL, PPL_FOCUS, change("ppl_focus", "ppl_full")],
        rows={"gpt2_124m_pg19": [*both("", ["full_training"], ""), *both("pg19_")],
              **{name: both(prefix) for name, prefix in (models | corpora).items()},
              "mistral_shape_7b_scratch_openwebtext_2b_tokens":
                  both("", ["from_scratch"], "the Hub and weeks of GPUs"),
              **{name: both(f"{name}_") for name in ("code", "addresses")}},
    )


def table_long_context() -> Spec:
    def places(tokens: int) -> Places:
        cells, names = {"source": "benchmarks", "tokens": tokens}, ("k_{}", "k_{}_share", "paper_k_{}")
        return [
            Place(cells=cells, variants={"ppl_full": BASE, **{f"ppl_focus_k{k}": n.format(k) for k in (2, 3)}})
            for n in names
        ]

    columns = [PPL_FULL]
    for k in (2, 3):
        name = f"ppl_focus_k{k}"
        columns += [Column(name=name, label=f"PPL top-{k}", cells={"metric": "score"})]
        columns += [change(name, "ppl_full", f"ΔPPL top-{k} [%]")]
    return Spec(
        id="long context", title="Routers trained at 1,024 tokens on longer contexts, Mistral 7B", key=["tokens"],
        experiments=["long_context"], columns=columns,
        rows={str(tokens): places(tokens) for tokens in (1024, 2048, 4096, 8192)},
    )


def table6_speed() -> Spec:
    cells = {"source": "speed", "clock": "attention", "assignment": "balanced", "top_k": 1}
    lengths = [row["tokens"] for row in paper_rows("table6_speed")]
    columns = [
        Column(name=f"speedup_K{k}", label=f"speedup, K = {k}", cells={"metric": "speedup", "groups": k})
        for k in (4, 8)
    ]
    return Spec(
        id="T6", title="Speedup over FlashAttention, one layer, H100", key=["tokens"], experiments=["speed"],
        needs="a GPU", columns=columns,
        rows={str(tokens): Place(cells={**cells, "tokens": tokens}) for tokens in lengths},
    )


def table7_topk() -> Spec:
    def places(is_large: bool, top_k: int) -> Places:
        ours = {"source": "rows", "kind": "hard", "num_groups": 4, "top_k": top_k, "causal": True,
                "pair_rule": [None, "query_topk"], "requested_model": "mistral_7b" if is_large else "[!m]*"}
        both, needs = ["speed_quality", "leak"], GPU if is_large else None
        paper_router = Place(cells={**ours, "pair_rule": "share", "causal": False}, experiments=both,
                             needs=needs or "+experiment=leak", pick="" if is_large else "steps")
        return [Place(cells=ours, needs=needs), paper_router]

    speed = {"source": "speed", "kind": None, "causal": [True, False], "metric": "speedup", "clock": "attention",
             "assignment": "trained", "tokens": 8192}
    density = Column(name="pairs_retained_percent", label="far density [%]", cells=PERPLEXITY,
                     attribute="distant_density", scale=in_percent, digits=1)
    return Spec(
        id="T7", title="Top-k at inference, K = 4, PG-19", key=["model", "top_k"], experiments=["speed_quality"],
        note="The paper's speedup is K/k, not a measurement; ours is of the trained router.",
        columns=[PPL, Column(name="claimed_speedup", label="speedup", cells=speed), density],
        rows={f"{model} {k}": places(model == "mistral_7b", k) for model in ("gpt2_124m", "mistral_7b")
              for k in (1, 2, 3, 4)},
    )


def table8_dominance() -> Spec:
    blocks = [Column(name=f"blocks_{name}", label=f"blocks {name}") for name in "ABC"]
    rows = {"entropy_balance_loss": "entropy_balance", "ema_centroids": "ema", "recluster_100": "recluster"}
    return Spec(
        id="T8", title="Measures against router collapse", key=["mitigation"], experiments=["stability"], note=BALANCED,
        columns=[*blocks, largest_group("outcome", "largest group [%]", "all")],
        rows={**rows, **{n: n for n in ("stop_gradient", "balance_x5")}, "sinkhorn": ["sinkhorn", "balanced"]},
    )


def table8_dominance_two_phase_K8() -> Spec:
    def stability(name: str, label: str, trainable: str) -> Column:
        return Column(name=name, label=label, cells={"metric": "stability", "trainable": trainable}, digits=3)

    return Spec(
        id="T8 phases", title="The router alone, then all weights, K = 8", key=["method"], experiments=["stability"],
        note=BALANCED,
        columns=[largest_group("dominance_centroid", "max [%], router", "router"),
                 stability("stability_centroid", "stability, router", "router"),
                 largest_group("dominance_full_ft", "max [%], all", "all"),
                 stability("stability_full_ft", "stability, all", "all")],
        rows={"softmax_balance_loss": ["balance", "entropy_balance"], "sinkhorn": ["sinkhorn", "balanced"]},
    )


def table9_ablation() -> Spec:
    def ppl(name: str, label: str, trainable: Any) -> Column:
        cells = {**PERPLEXITY, "trainable": trainable, "kind": ["hard", "control", "trained"]}
        return Column(name=name, label=label, cells=cells)

    rows: dict[str, Places] = {"groups 8": ["paper", "balanced"], "groups 2, window 16": "K_2_w_16"}
    rows |= {f"groups {k}": f"K_{k}" for k in (4, 16, 32)} | {"window 128": "paper"}
    rows |= {"window 64": "w_sixteenth", "window 256": "w_quarter", "window 512": "w_half"}
    rows |= {f"temperature {x}": "paper" if x == 0.1 else f"tau_{x}" for x in (0.05, 0.1, 0.2, 0.5)}
    rows |= {f"sinkhorn_iterations {n}": "paper" if n == 10 else f"N_{n}" for n in (3, 5, 10, 20)}
    return Spec(
        id="T9", title="Ablation around K = 8, w = 128, tau = 0.1, N = 10", key=["parameter", "value"],
        experiments=["ablation"], rows=dict(rows),
        columns=[ppl("ppl_centroid", "PPL, router", ["router", None]), ppl("ppl_finetuned", "PPL, all", "all"),
                 largest_group("dominance_centroid", "max [%], router", "router"),
                 largest_group("dominance_full_ft", "max [%], all", "all")],
    )


def table10_token_selection() -> Spec:
    same = {"sparq": "sparq", "sparq_mean_reallocation": "sparq_mean", "magicpig": "magicpig"}
    return Spec(
        id="T10", title="Token selection, 32 tokens per query, GPT-2 124M", key=["method"],
        experiments=["compare", "seeds"], columns=[PPL, PPL_CHANGE, *TASKS],
        rows={"pretrained": BASE, **same, "focus": ["focus", "focus_paper", "focus_paper_sinks"]},
    )


def groups_section5() -> Spec:
    def places(metric: str) -> Places:
        cells = {"source": "groups", "num_groups": 8, "metric": metric}
        paper = Place(cells={**cells, "causal": False}, needs="+experiment=groups attention=focus_paper")
        return [Place(cells={**cells, "causal": True}), paper]

    def scale(row: Any, value: float) -> float:
        return value if row.metric == "group_confidence" else 100 * value

    metrics = {"mean_confidence": "group_confidence"}
    metrics |= {f"{m}_percent": m for m in ("punctuation_purity", "smallest_group", "largest_group")}
    value = Column(name="value", label="value", cells={"source": "groups"}, scale=scale)
    return Spec(
        id="section 5", title="Groups, K = 8", key=["quantity"], experiments=["groups"], columns=[value],
        note="Ours: medians over layers.",
        rows={quantity: places(metric) for quantity, metric in metrics.items()},
    )


def figure1() -> Spec:
    def top_k(k: int) -> Place:
        cells = {"source": "rows", "kind": "hard", "num_groups": 4, "requested_model": "[!m]*", "top_k": k}
        return Place(experiments=["speed_quality"], cells={**cells, "pair_rule": [None, "query_topk"]})

    rows: dict[str, Places] = {n: n for n in ("longformer", "performer", "routing_transformer", "sparq", "magicpig")}
    rows |= {"pretrained": BASE, "full_finetune": "full_finetuning", "focus": ["focus", "focus_paper"]}
    rows |= {"local window": "window", "random groups": "random_groups", "sparq_mean_reallocation": "sparq_mean"}
    rows |= {f"focus, k = {k}": top_k(k) for k in (2, 3, 4)}
    return Spec(
        id="Figure 1", title="Perplexity and speed", key=["method"], experiments=["compare", "seeds"], is_shown=False,
        columns=[PPL, PPL_CHANGE, Column(name="speed", label="speedup, one layer", timed=True)], rows=dict(rows),
    )
# fmt: on


TABLES = [
    *(table1_retrofit, table_dg, table2_scale, table2_scale_gsm8k_8shot_cot, table3_lora, table4_alignment),
    *(table5_full_training, table_long_context, table6_speed, table7_topk, table8_dominance),
    *(table8_dominance_two_phase_K8, table9_ablation, table10_token_selection, groups_section5, figure1),
]
