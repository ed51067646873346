"""The paper's tables: their columns, and where the measurements of each row are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean, geometric_mean
from typing import Any

from focus_exp.reporting.format import to_percent
from focus_exp.reporting.frame import BASE, read_yaml

HUB, GPU = "the Hub", "the Hub and a GPU"
PERPLEXITY = {"metric": "perplexity"}


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Place:
    """A source of the measurements in a row.

    Args:
        variant: of a comparison ("base": its full attention); variants: one for each column.
        cells: of measurements that belong to no variant.
        experiments, needs: in place of those of the table.
        is_longest: keep the setup with the most training steps.
    """

    variant: str = ""
    variants: dict[str, str] = field(default_factory=dict)
    cells: dict[str, Any] = field(default_factory=dict)
    experiments: Sequence[str] = ()
    needs: str | None = None
    is_longest: bool = False

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.variants.values(), *filter(None, [self.variant])]))


Places = str | Place | Sequence[str | Place]  # a variant of the table's experiments, or a place
Table = tuple[list[Column], Mapping[str, Places]]  # the places of each row by its key, else the variant of that name


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A table of the paper: its head in paper.yaml, its columns, and the places of its rows.

    Args:
        key: the columns of the paper that name a row.
        needs: what a CPU without the Hub lacks.
        rows: by their key (`join_key`); those that the paper lacks come last.
        is_shown: in the Markdown report.
    """

    name: str
    id: str
    title: str
    key: list[str]
    experiments: list[str]
    columns: list[Column]
    rows: Mapping[str, Places]
    needs: str = ""
    note: str = ""
    is_shown: bool = True

    def places(self, key: str) -> list[Place]:
        """Return where the measurements of a row are."""
        places = self.rows.get(key, key)
        listed = [places] if isinstance(places, str | Place) else places
        named = [Place(place) if isinstance(place, str) else place for place in listed]
        return [
            replace(p, experiments=p.experiments or self.experiments, needs=self.needs if p.needs is None else p.needs)
            for p in named
        ]


def read_specs() -> list[Spec]:
    """Return the tables in the order of the report."""
    made = {make.__name__: make() for make in TABLES}
    heads = {name: read_yaml("paper")[name]["head"] for name in made}
    return [Spec(name=name, columns=made[name][0], rows=made[name][1], **heads[name]) for name in made]


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


def percent(name: str, label: str, attribute: str = "value", **cells: Any) -> Column:
    """Return the column of a fraction, in per cent."""
    return Column(name, label, cells, attribute, in_percent, digits=1)


def score(name: str, label: str, task: str = "") -> Column:
    """Return the column of a benchmark."""
    return percent(name, label, metric="score", task=task or name)


def change(name: str, origin: str, label: str = "ΔPPL [%]") -> Column:
    return Column(name, label, origin=origin)


def largest_group(name: str, label: str, trainable: str) -> Column:
    return percent(name, label, metric="dominance", trainable=trainable)


PARAMETERS = Column("trainable_params", "parameters", PERPLEXITY, "trainable_params", digits=0)
PPL, PPL_FOCUS = Column("ppl", "PPL", PERPLEXITY), Column("ppl_focus", "PPL Focus", PERPLEXITY)
PPL_CHANGE = change("ppl", "pretrained")
PPL_FULL = Column("ppl_full", "PPL full attention", {"metric": ["perplexity", "score"]})
HELLASWAG, ARC_EASY, PIQA = score("hellaswag", "HellaSwag"), score("arc_easy", "ARC-E"), score("piqa", "PIQA")
LAMBADA = score("lambada", "LAMBADA", "lambada_openai")
TASKS = [HELLASWAG, ARC_EASY, PIQA, LAMBADA]
FOCUS: list[str | Place] = ["focus", "focus_paper", "focus_paper_sinks"]


def table1_retrofit() -> Table:
    cells = {"source": "rows", "kind": "hard", "num_groups": 4, "primary": True, "causal": False}
    leak = Place(cells=cells, experiments=["leak"], is_longest=True)
    focus = [*FOCUS, leak]
    rows: dict[str, Places] = {"pretrained": BASE, "full_finetune": "full_finetuning", "focus": focus}
    return [PARAMETERS, PPL, PPL_CHANGE, *TASKS], rows


def table_dg() -> Table:
    def scale(row: Any, value: float) -> float:
        return 100 * value / row.model_params

    fraction = Column("percent_of_model", "of the model [%]", PERPLEXITY, "trainable_params", scale)
    return [PARAMETERS, fraction, PPL], {str(n): [f"d_{n}", f"paper_{n}"] for n in (768, 128, 32, 16)}


def table2_scale() -> Table:
    base = Column("ppl_pretrained", "PPL base", {"metric": "nll_change", "reference": BASE}, "reference_level")
    needs = {"gpt2_124m": HUB, "gpt2_774m": HUB, "llama2_70b": "the Hub and several GPUs"}
    papers = [row["model"] for row in paper_rows("table2_scale")]
    rows: dict[str, Places] = {n: [Place(v, needs=needs.get(n)) for v in (n, f"{n}_paper")] for n in papers}
    embedded = ["smollm2_135m", "smollm2_135m_paper", "smollm2_135m_topk", "gemma3_270m", "qwen2_5_coder_0_5b"]
    rows |= {variant: variant for variant in [*embedded, "books_6m"]}
    return [base, PPL_FOCUS, change("ppl_focus", "ppl_pretrained"), *TASKS], rows


def table2_scale_gsm8k_8shot_cot() -> Table:
    cells = {"metric": "score_change", "task": "gsm8k_cot"}
    full = percent("gsm8k_full", "full attention [%]", "reference_level", **cells)
    return [full, score("gsm8k_focus", "Focus [%]", "gsm8k_cot")], {"smollm2_135m": "smollm2_135m"}


def table3_lora() -> Table:
    def lora(rank: int) -> Place:
        return Place(cells={"kind": "trained", "lora_rank": rank}, experiments=["lora_124m"])

    points = [
        percent(f"{c.name}_delta", f"{c.label} [points]", metric="score_change", task=c.cells["task"])
        for c in (HELLASWAG, ARC_EASY, LAMBADA, PIQA)
    ]
    rows: dict[str, Places] = {
        "lora_r4": ["lora", lora(4)],
        "lora_r16": ["lora_r16", lora(16)],
        "focus_dg16": ["focus", "focus_paper"],
    }
    return [PARAMETERS, PPL, *points], rows


def table4_alignment() -> Table:
    truthful = [score("truthfulqa_mc1", "TruthfulQA MC1"), score("truthfulqa_mc2", "TruthfulQA MC2")]
    rows: dict[str, Places] = {"instruct": BASE, "focus_k2": ["focus_k2", "paper_k2"], "lora_1e-2": "lora_1e-2"}
    rows |= {"lora_r4 1e-05": "lora_1e-5", "lora_r4 5e-05": "lora_5e-5", "lora_r4 0.0001": "lora_1e-4"}
    return [PARAMETERS, PPL, change("ppl", "instruct"), *truthful, HELLASWAG, ARC_EASY, LAMBADA], rows


def table5_full_training() -> Table:
    def both(prefix: str, paper: str = "paper", **options: Any) -> list[Place]:
        full = f"{prefix}full"
        return [Place(variants={"ppl_full": full, "ppl_focus": prefix + v}, **options) for v in ("focus", paper)]

    prefixes = {"gpt2_774m_pg19": "gpt2_774m", "gpt2_xl_1_5b_pg19": "gpt2_1_5b", "code": "code"}
    prefixes |= {f"gpt2_124m_{corpus}": corpus for corpus in ("wikitext103", "openwebtext")}
    rows = {row: both(f"{prefix}_") for row, prefix in (prefixes | {"addresses": "addresses"}).items()}
    retrofit = both("", "focus_paper", experiments=["full_training"], needs="")
    scratch = both("", "focus_paper", experiments=["from_scratch"], needs="the Hub and weeks of GPUs")
    rows |= {"gpt2_124m_pg19": [*retrofit, *both("pg19_")], "mistral_shape_7b_scratch_openwebtext_2b_tokens": scratch}
    return [PPL_FULL, PPL_FOCUS, change("ppl_focus", "ppl_full")], rows


def table_long_context() -> Table:
    def place(tokens: int, name: str) -> Place:
        variants = {"ppl_full": BASE} | {f"ppl_focus_k{k}": name.format(k) for k in (2, 3)}
        return Place(variants=variants, cells={"source": "benchmarks", "tokens": tokens})

    columns = [PPL_FULL]
    for k in (2, 3):
        focus = Column(f"ppl_focus_k{k}", f"PPL top-{k}", {"metric": "score"})
        columns += [focus, change(focus.name, "ppl_full", f"ΔPPL top-{k} [%]")]
    names = ("k_{}", "k_{}_share", "paper_k_{}")
    return columns, {str(tokens): [place(tokens, name) for name in names] for tokens in (1024, 2048, 4096, 8192)}


def table6_speed() -> Table:
    cells = {"source": "speed", "clock": "attention", "assignment": "balanced", "top_k": 1}
    columns = [Column(f"speedup_K{k}", f"speedup, K = {k}", {"metric": "speedup", "groups": k}) for k in (4, 8)]
    lengths = [row["tokens"] for row in paper_rows("table6_speed")]
    return columns, {str(tokens): Place(cells={**cells, "tokens": tokens}) for tokens in lengths}


def table7_topk() -> Table:
    def places(is_large: bool, top_k: int) -> Places:
        cells = {"source": "rows", "kind": "hard", "num_groups": 4, "top_k": top_k}
        cells["requested_model"] = "mistral_7b" if is_large else "[!m]*"
        ours = {**cells, "causal": True, "pair_rule": [None, "query_topk"]}
        paper, both = {**cells, "causal": False, "pair_rule": "share"}, ["speed_quality", "leak"]
        if is_large:
            return [Place(cells=ours, needs=GPU), Place(cells=paper, experiments=both, needs=GPU)]
        return [Place(cells=ours), Place(cells=paper, experiments=both, needs="+experiment=leak", is_longest=True)]

    speed = {"source": "speed", "kind": None, "causal": [True, False], "metric": "speedup", "clock": "attention"}
    timed = Column("claimed_speedup", "speedup", {**speed, "assignment": "trained", "tokens": 8192})
    columns = [PPL, timed, percent("pairs_retained_percent", "far density [%]", "distant_density", **PERPLEXITY)]
    models = {"gpt2_124m": False, "mistral_7b": True}
    return columns, {f"{model} {k}": places(is_large, k) for model, is_large in models.items() for k in (1, 2, 3, 4)}


def table8_dominance() -> Table:
    blocks = [Column(f"blocks_{name}", f"blocks {name}") for name in "ABC"]
    rows: dict[str, Places] = {"entropy_balance_loss": "entropy_balance", "ema_centroids": "ema"}
    rows |= {"recluster_100": "recluster", "sinkhorn": ["sinkhorn", "balanced"]}
    return [*blocks, largest_group("outcome", "largest group [%]", "all")], rows


def table8_dominance_two_phase_K8() -> Table:
    columns = []
    for name, label, trainable in (("centroid", "router", "router"), ("full_ft", "all", "all")):
        same = {"metric": "stability", "trainable": trainable}
        columns.append(largest_group(f"dominance_{name}", f"max [%], {label}", trainable))
        columns.append(Column(f"stability_{name}", f"stability, {label}", same, digits=3))
    return columns, {"softmax_balance_loss": ["balance", "entropy_balance"], "sinkhorn": ["sinkhorn", "balanced"]}


def table9_ablation() -> Table:
    cells = {**PERPLEXITY, "kind": ["hard", "control", "trained"]}
    columns = [
        Column("ppl_centroid", "PPL, router", {**cells, "trainable": ["router", None]}),
        Column("ppl_finetuned", "PPL, all", {**cells, "trainable": "all"}),
        largest_group("dominance_centroid", "max [%], router", "router"),
        largest_group("dominance_full_ft", "max [%], all", "all"),
    ]
    rows: dict[str, Places] = {"groups 8": ["paper", "balanced"], "groups 2, window 16": "K_2_w_16"}
    rows |= {f"groups {k}": f"K_{k}" for k in (4, 16, 32)} | {"window 128": "paper"}
    rows |= {"window 64": "w_sixteenth", "window 256": "w_quarter", "window 512": "w_half"}
    rows |= {f"temperature {x}": "paper" if x == 0.1 else f"tau_{x}" for x in (0.05, 0.1, 0.2, 0.5)}
    return columns, rows | {f"sinkhorn_iterations {n}": "paper" if n == 10 else f"N_{n}" for n in (3, 5, 10, 20)}


def table10_token_selection() -> Table:
    rows = {"pretrained": BASE, "sparq_mean_reallocation": "sparq_mean", "focus": FOCUS}
    return [PPL, PPL_CHANGE, *TASKS], rows


def groups_section5() -> Table:
    def places(metric: str) -> Places:
        cells = {"source": "groups", "num_groups": 8, "metric": metric}
        paper = Place(cells={**cells, "causal": False}, needs="+experiment=groups attention=focus_paper")
        return [Place(cells={**cells, "causal": True}), paper]

    def scale(row: Any, value: float) -> float:
        return value if row.metric == "group_confidence" else 100 * value

    rows = {f"{m}_percent": places(m) for m in ("punctuation_purity", "smallest_group", "largest_group")}
    rows["mean_confidence"] = places("group_confidence")
    return [Column("value", "value", {"source": "groups"}, scale=scale)], rows


def figure1() -> Table:
    def top_k(k: int) -> Place:
        cells = {"source": "rows", "kind": "hard", "num_groups": 4, "requested_model": "[!m]*", "top_k": k}
        return Place(cells={**cells, "pair_rule": [None, "query_topk"]}, experiments=["speed_quality"])

    rows: dict[str, Places] = {"pretrained": BASE, "full_finetune": "full_finetuning", "focus": FOCUS[:2]}
    rows |= {"local window": "window", "random groups": "random_groups", "sparq_mean_reallocation": "sparq_mean"}
    columns = [PPL, PPL_CHANGE, Column("speed", "speedup, one layer", timed=True)]
    return columns, rows | {f"focus, k = {k}": top_k(k) for k in (2, 3, 4)}


TABLES: list[Callable[[], Table]] = [
    *(table1_retrofit, table_dg, table2_scale, table2_scale_gsm8k_8shot_cot, table3_lora, table4_alignment),
    *(table5_full_training, table_long_context, table6_speed, table7_topk, table8_dominance),
    *(table8_dominance_two_phase_K8, table9_ablation, table10_token_selection, groups_section5, figure1),
]
