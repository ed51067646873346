"""The paper's claims, each judged by the records that test it: what is printed there, what was measured here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from focus_exp.records.record import Record
from focus_exp.reporting.gather import is_quick
from focus_exp.reporting.groups_claims import groups_claims
from focus_exp.reporting.other_verdicts import costs_at_most, far_costs_at_most, on_other_texts
from focus_exp.reporting.printed import paper_rows, paper_speedups
from focus_exp.reporting.stability_claims import stability_claims
from focus_exp.reporting.verdicts import (
    LONG,
    LONGEST,
    NOT_HERE,
    NOT_RUN,
    RAN,
    UNDECIDED,
    Claim,
    Verdict,
    as_fast_as,
    as_good_as,
    better_than,
    fast,
    fast_at,
    lora_degrades,
    lora_is_lower,
    lowers_perplexity,
    no_degradation,
)


def judged(records: list[Record]) -> list[tuple[Claim, Verdict]]:
    """Every claim with its verdict, from the finished records alone; seeds and settings have to agree on it."""
    finished = [record for record in records if record.status == "finished"]
    found = []
    for claim in claims():
        if claim.judge is None:
            found.append((claim, Verdict(NOT_HERE, why=claim.out_of_reach)))
            continue
        own = [claim.judge(record) for record in finished if record.experiment in claim.experiments]
        missing = Verdict(NOT_RUN, why=f"python -m focus_exp +experiment={claim.experiments[0]}")
        verdict = together(own) if own else missing
        if verdict.word != NOT_RUN and any(map(is_quick, verdict.records)):
            verdict = replace(verdict, word=RAN)
        found.append((claim, verdict))
    return found


def together(verdicts: list[Verdict]) -> Verdict:
    """One verdict for several records: theirs if those that say anything agree."""
    telling = [verdict for verdict in verdicts if verdict.word not in (NOT_RUN, NOT_HERE)] or verdicts[:1]
    words = {verdict.word for verdict in telling}
    several = len({record.seed for verdict in telling for record in verdict.records}) > 1
    return Verdict(
        telling[0].word if len(words) == 1 else UNDECIDED,
        "; ".join(dict.fromkeys(_named(verdict) if several else verdict.ours for verdict in telling if verdict.ours)),
        "; ".join(dict.fromkeys(verdict.why for verdict in telling if verdict.why)),
        [record for verdict in telling for record in verdict.records],
    )


def _named(verdict: Verdict) -> str:
    seeds = sorted({record.seed for record in verdict.records if record.seed is not None})
    return f"seed {', '.join(map(str, seeds))}: {verdict.ours}" if seeds else verdict.ours


def claims() -> list[Claim]:
    """In the order of the paper's tables."""
    t1 = {row["method"]: row for row in paper_rows("table1_retrofit")}
    t3 = {row["method"]: row for row in paper_rows("table3_lora")}
    t10 = {row["method"]: row for row in paper_rows("table10_token_selection")}
    t5 = next(row for row in paper_rows("table5_full_training") if row["setting"] == "gpt2_124m_pg19")
    dg = {row["d_g"]: row["ppl"] for row in paper_rows("table_dg")}
    focus, base = t1["focus"]["ppl"], t1["pretrained"]["ppl"]
    rivals = [("longformer", "longformer"), ("performer", "performer"), ("routing_transformer", "routing_transformer")]
    selections = [("sparq", "sparq"), ("sparq_mean_reallocation", "sparq_mean"), ("magicpig", "magicpig")]
    return [
        Claim(
            "T1", "a retrofitted router lowers the perplexity of its frozen base", f"{base} to {focus}",
            ("retrofit_124m",), lowers_perplexity,
        ),
        Claim("T1", "benchmarks stay as they are", "changes of 0.0", SEEDED, no_degradation),
        *(
            Claim(
                "T1", f"Focus has the lower perplexity than {arm} with all weights fine-tuned",
                f"{focus} against {t1[method]['ppl']}", SEEDED, better_than(arm),
            )
            for method, arm in [*rivals, ("full_finetune", "full_finetuning")]
        ),
        Claim(
            "T3", "LoRA of as many parameters has the lower perplexity",
            f"{t3['lora_r4']['ppl']} against {t3['focus_dg16']['ppl']}", SEEDED, lora_is_lower,
        ),
        Claim("T3", "LoRA loses on benchmarks", _lora_losses(t3["lora_r4"]), ("compare",), lora_degrades),
        *(
            Claim(
                "T10", f"Focus has the lower perplexity than {arm} with 32 tokens a query",
                f"{t10['focus']['ppl']} against {t10[method]['ppl']}", SEEDED, better_than(arm),
            )
            for method, arm in selections
        ),
        Claim(
            "T5", "with everything trained, Focus has the lower perplexity than full attention",
            f"{t5['ppl_focus']} against {t5['ppl_full']}", ("full_training",), better_than("full"),
        ),
        Claim(
            "d_g", "routers of 16 dimensions are as good as those of 768", f"{dg[16]} against {dg[768]}",
            ("routing_dim",), as_good_as("d_768"),
        ),
        *(
            Claim("T6", f"times as fast as full attention, up to {LONG:,} tokens", _printed(k, LONG), SPEED, fast(k))
            for k in (4, 8)
        ),
        *(
            Claim("T6", f"and at {LONGEST:,} tokens", _printed(k, LONGEST), SPEED, fast_at(k, LONGEST))
            for k in (4, 8)
        ),
        *(
            Claim(
                "T7", f"{row['top_k']} of 4 groups a query is {row['claimed_speedup']} times as fast",
                f"{row['claimed_speedup']}x (K/k)", ("speed_quality",), as_fast_as(row),
            )
            for row in paper_rows("table7_topk")
            if row["model"] == "gpt2_124m" and row["top_k"] != 4
        ),
        *stability_claims(),
        *groups_claims(),
        *_at_other_sizes(),
        *(Claim(table, says, paper, (), None, why) for table, says, paper, why in ELSEWHERE),
    ]  # fmt: skip


def _at_other_sizes() -> list[Claim]:
    """What the paper shows on large models, tested on those there are."""
    t2 = paper_rows("table2_scale")
    worst: Any = max(t2, key=lambda row: row["ppl_focus"] / row["ppl_pretrained"])  # type: ignore[operator]
    t4 = {(row["method"], row["learning_rate"]): row for row in paper_rows("table4_alignment")}
    t5 = next(row for row in paper_rows("table5_full_training") if "scratch" in str(row["setting"]))
    web = next(row for row in paper_rows("table5_full_training") if "openwebtext" in str(row["setting"]))
    longest: Any = paper_rows("table_long_context")[-1]
    cost, far = worst["ppl_focus"] / worst["ppl_pretrained"], longest["ppl_focus_k2"] / longest["ppl_full"]
    alignment, lora = t4["focus_k2", None], t4["lora_r4", 1.0e-4]
    return [
        Claim(
            "T2", "two of four groups a query cost no model more than the worst of the paper's",
            f"{worst['ppl_pretrained']} to {worst['ppl_focus']} ({worst['model']})", ("model_scale",),
            costs_at_most(cost),
        ),
        Claim(
            "T4", "alignment survives a router", f"MC1 {alignment['truthfulqa_mc1']}, the rest unchanged",
            ("alignment",), no_degradation,
        ),
        Claim(
            "T4", "LoRA loses what alignment taught", f"MC1 {lora['truthfulqa_mc1']} at the highest rate",
            ("alignment",), lora_degrades,
        ),
        Claim(
            "T5", "from scratch Focus is as good as full attention", f"{t5['ppl_focus']} against {t5['ppl_full']} (7B)",
            ("from_scratch",), as_good_as("full", of="focus"),
        ),
        Claim(
            "T5", "on other texts too, everything trained",
            f"{web['ppl_focus']} against {web['ppl_full']} (OpenWebText)", ("domains",), on_other_texts,
        ),
        Claim(
            "long", f"trained at 1,024 tokens, two groups cost little at {longest['tokens']:,}",
            f"{longest['ppl_full']} to {longest['ppl_focus_k2']}", ("long_context",), far_costs_at_most(far),
        ),
    ]  # fmt: skip


SEEDED, SPEED = ("compare", "seeds"), ("speed",)
ELSEWHERE = [
    ("T2", "the same holds to 70B parameters", "7.6 to 8.3 (LLaMA-2 70B)", "needs the hub and several GPUs"),
    ("T4", "alignment survives, which LoRA costs", "MC1 40.0 against 28.5 to 40.1", "needs Mistral-7B-Instruct"),
    ("T5", "from scratch at 7B it equals full attention", "13.82 against 13.89", "needs weeks of GPUs"),
]


def _printed(groups: int, tokens: int) -> str:
    return f"K = {groups}: {paper_speedups(groups)[tokens]}x on an H100"


def _lora_losses(row: dict[str, Any]) -> str:
    return ", ".join(f"{key.removesuffix('_delta')} {row[key]:+}" for key in row if key.endswith("_delta"))
