"""Every table of the paper with ours beside: where numbers come from, what stands in a cell that nothing fills."""

import csv
import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_compare import compared, comparison_of, row

from focus_exp.errors import UserError
from focus_exp.records.benchmarks import BenchmarkRow
from focus_exp.records.record import Record
from focus_exp.records.rows import Arm, ProbeRow, Row
from focus_exp.records.speed import MethodSpeedRow, SpeedRow
from focus_exp.reporting.entries import Value, mean
from focus_exp.reporting.figure1 import front, points, printed, write_pareto
from focus_exp.reporting.formats import NOT_HERE, NOT_RUN, difference_word
from focus_exp.reporting.gather import Runs, gather, run_of, setup
from focus_exp.reporting.paper import Column, paper_map, paper_rows, paper_tables
from focus_exp.reporting.paper_report import beside, paper_report
from focus_exp.reporting.specs import checked, read_yaml
from focus_exp.reporting.subjects import ITSELF
from focus_exp.reporting.trust import seeds_table, traps_table

RECORDS = Path(__file__).parent.parent / "runs" / "records"
CONFIG = {
    "model": {"name": "gpt2_124m"},
    "attention": {"method": "focus", "groups": 4, "top_k": 1, "window": 128, "pair_rule": "query_topk", "gate": "log"},
    "eval": {"window": 1024},
}


@pytest.fixture(scope="module")
def committed():
    return gather(RECORDS)


def runs_of(*records):
    return Runs([(Path(str(number)), record) for number, record in enumerate(records)])


def named(experiment, *rows, seed=0, **changes):
    found = comparison_of(*rows, benchmarks=changes.pop("benchmarks", ()))
    values = {"config": CONFIG, "command": f"run {experiment} seed={seed}", "commit": f"{seed}abcdef0", **changes}
    return replace(found, experiment=experiment, seed=seed, **values)


def table(name, *records):
    return beside(paper_tables()[name], runs_of(*records))


def lines(shown):
    return [dict(zip(shown.columns, cells, strict=True)) for cells in shown.rows]


def compare(seed=0, experiment="compare", **changes):
    focus = row("focus", kind="hard", nll=3.1, delta_nll=0.1 + seed / 100, delta_low=0.05, delta_high=0.15)
    return named(
        experiment, focus, row("longformer", method="longformer", nll=2.9, delta_nll=-0.1), seed=seed, **changes
    )


def test_every_table_row_and_column_of_the_paper_has_its_place():
    outer = read_yaml("paper_tables")
    inner = [f"{name}.{key}" for name, part in outer.items() for key in part if key not in ("columns", "rows")]
    assert set(paper_tables()) == {*outer, *inner}
    for found in paper_tables().values():
        assert list(found.paper.values()) == paper_rows(found.name)
        assert all(found.places(name) for name in found.paper)
        assert [one.source for one in found.columns if not one.origin] == [
            name for name in paper_rows(found.name)[0] if name not in found.key
        ]


def test_a_column_says_what_it_may_not_say():
    columns = paper_map()["columns"]
    with pytest.raises(UserError, match="paper_map.yaml: columns: ppl: selects: Unexpected"):
        checked("paper_map.yaml: columns", columns | {"ppl": columns["ppl"] | {"selects": {}}}, dict[str, Column])


def test_what_no_measurement_has_is_not_selected():
    found = paper_tables()["table_dg"]
    with pytest.raises(UserError, match="paper_map.yaml: table_dg: select: measurements have no column mesure"):
        beside(replace(found, columns=(replace(found.columns[0], select={"mesure": "nll"}),)), Runs())


def test_changes_are_from_full_attention(monkeypatch):
    tables = paper_map()["tables"]
    wrong = tables["table_dg"] | {"changes": {"ppl": {"from": "768", "heading": "PPL vs 768"}}}
    changed = paper_map() | {"tables": tables | {"table_dg": wrong}}
    monkeypatch.setattr("focus_exp.reporting.paper.paper_map", lambda: changed)
    with pytest.raises(UserError, match="table_dg: changes: ppl: 768 is not full attention"):
        paper_tables.__wrapped__()


def test_proposed_experiments_are_there():
    there = {path.stem for path in (RECORDS.parent.parent / "conf" / "experiment").glob("*.yaml")}
    places = [place for found in paper_tables().values() for place in found.everywhere]
    assert {place.experiments[0] for place in places} <= there


def test_without_records_every_cell_says_why():
    for shown, found in zip(paper_report(Runs()), paper_tables().values(), strict=True):
        assert len(shown.rows) == len(found.paper)
        for line in lines(shown):
            here = {cell for name, cell in line.items() if name.endswith(": here")}
            assert here <= {NOT_RUN} or here <= {NOT_HERE}
            assert "python -m focus_exp +experiment=" in line["made by"]
            assert line["made by"].startswith("needs ") == (here == {NOT_HERE})


def test_the_papers_cells_are_the_data_files():
    shown = table("table9_ablation")
    for line, paper in zip(lines(shown), paper_rows("table9_ablation"), strict=True):
        assert float(line["PPL, router trained: paper"]) == paper["ppl_centroid"]
        assert float(line["largest group [%], all trained: paper"]) == paper["dominance_full_ft"]
    parsed = list(csv.DictReader(io.StringIO(table("table1_retrofit").to_csv())))
    assert [float(line["paper_ppl"]) for line in parsed] == [row["ppl"] for row in paper_rows("table1_retrofit")]
    assert float(parsed[-1]["paper_ppl_change"]) == pytest.approx(100 * (36.2 / 42.8 - 1))
    assert [line["PPL full attention: paper"] for line in lines(table("table_long_context"))][-1] == "6.10"


def test_a_line_names_its_run_and_its_marks():
    scored = BenchmarkRow(
        attention="focus", kind="hard", task="hellaswag", metric="acc_norm", value=0.3, stderr=0.1, n=20,
        pairs_removed=0.01, difference=0.0, difference_low=-0.1, difference_high=0.1,
    )  # fmt: skip
    record = compare(
        benchmarks=[scored, replace(scored, metric="acc", value=0.9)],
        model={"name": "small", "substitution": "small stands in for gpt2."},
    )
    future = row("routing_transformer", causal=False, pairs_removed=0.01)
    record = replace(record, rows=[*record.rows, future], arms=[*record.arms, replace(record.arms[0], name=future.arm)])
    found = {line["method"]: line for line in lines(table("table1_retrofit", record))}
    focus = found["focus"]
    assert focus["PPL: paper"] == "36.2" and focus["PPL: here"] == f"{math.exp(3.1):.2f}"
    assert focus["PPL vs pretrained: paper"] == "-15.42 %" and focus["PPL vs pretrained: here"].startswith("+10.52 % [")
    assert focus["HellaSwag: here"] == "30.0 ± 10.0 (not engaged)" and focus["PIQA: here"] == NOT_RUN
    assert focus["made by"] == "run compare seed=0 arm=focus, 0abcdef" and focus["seeds"] == "1 (0)"
    assert "small (SUBSTITUTE)" in focus["model and text"] and "w = 128, K = 4" in focus["model and text"]
    routing = found["routing_transformer"]
    assert "(reads the future)" in routing["run"] and "(not engaged)" in routing["pairs removed"]
    assert found["performer"]["PPL: here"] == NOT_RUN
    notes = table("table1_retrofit", record).notes
    assert "SUBSTITUTE: small stands in for gpt2." in notes and any(
        note.startswith("1 of the 3 seeds") for note in notes
    )


def test_a_failed_arm_says_so_in_its_cells():
    record = compare()
    arms = [replace(record.arms[0]), replace(record.arms[1], status="failed", error="no memory")]
    record = replace(record, arms=arms, rows=[r for r in record.rows if r.arm != "longformer"])
    found = {line["method"]: line for line in lines(table("table1_retrofit", record))}
    assert found["longformer"]["PPL: here"] == "failed: no memory"


def test_seeds_of_one_set_up_are_one_line_and_others_are_their_own():
    records = [compare(0), compare(1, "seeds"), compare(2, "seeds")]
    (focus,) = [line for line in lines(table("table1_retrofit", *records)) if line["method"] == "focus"]
    assert focus["seeds"] == "3 (0, 1, 2)"
    assert focus["PPL vs pretrained: here"] == "+11.63 % (+10.52 to +12.75)"
    assert focus["made by"].count("arm=focus") == 3
    assert not any("seeds that" in note for note in table("table1_retrofit", *records).notes)
    other = replace(compare(1), model={"name": "other", "fingerprint": "x"})
    both = [line for line in lines(table("table1_retrofit", compare(0), other)) if line["method"] == "focus"]
    assert [line["seeds"] for line in both] == ["1 (0)", "1 (1)"]
    again = replace(compare(0), rows=[replace(r, perplexity=7.0) for r in compare(0).rows])
    (latest,) = [line for line in lines(table("table1_retrofit", compare(0), again)) if line["method"] == "focus"]
    assert latest["PPL: here"] == "7.00"


def test_two_arms_of_a_line_are_compared_in_pairs():
    focus, full = row("focus", kind="hard"), row("full", kind="trained", method="full", **compared(-0.1))
    (line,) = [
        x for x in lines(table("table5_full_training", named("full_training", focus, full))) if x["seeds"] != "-"
    ]
    assert line["setting"] == "gpt2_124m_pg19" and line["run"] == "full_training: full / focus"
    assert line["PPL Focus vs full attention: here"] == "+10.52 % [+9.42, +11.63]"
    code = [row("code_focus", kind="hard"), row("code_full", kind="trained", **compared(-0.1))]
    extra = lines(table("table5_full_training", named("domains", *code)))[-1]
    assert extra["setting"] == "code (not in the paper)" and extra["PPL Focus: paper"] == "-"
    assert extra["PPL Focus vs full attention: here"].startswith("+10.52 %")


def test_models_that_the_paper_does_not_have_are_lines_of_their_own():
    record = named(
        "model_scale", row("smollm2_135m", kind="hard", nll=3.2, delta_nll=0.2), row("mistral_7b", kind="hard")
    )
    found = {line["model"]: line for line in lines(table("table2_scale", record))}
    assert found["mistral_7b"]["PPL Focus: here"] != NOT_HERE and found["llama2_70b"]["PPL Focus: here"] == NOT_HERE
    ours = found["smollm2_135m (not in the paper)"]
    assert ours["PPL pretrained: here"] == f"{math.exp(3.0):.2f}" and ours["PPL Focus: paper"] == "-"


def test_a_router_alone_and_everything_trained_are_not_mixed():
    router, everything = {"train": "router"}, {"train": "all"}
    both = {"router": router, "everything": everything}
    for phases, alone, trained in (({"router": router}, "90.0", NOT_RUN), (both, "40.0", "90.0")):
        record = named("ablation", row("K_4", kind="hard"), config=CONFIG | {"regime": {"phases": phases}})
        record.probes = [probe(name, 0.9 if name == list(phases)[-1] else 0.4) for name in phases]
        line = lines(table("table9_ablation", record))[0]
        assert line["largest group [%], router trained: here"] == alone
        assert line["largest group [%], all trained: here"] == trained


def probe(phase, dominance):
    return ProbeRow(
        arm="K_4", phase=phase, step=9, dominance=dominance, dominance_worst=dominance, dead_groups=0.0,
        dead_groups_worst=0, stability=None, stability_renamed=None, confidence=0.5, entropy=1.0,
    )  # fmt: skip


def test_a_model_that_is_not_the_papers_stands_in_for_it_by_its_name():
    local = {"name": "runs/there/model", "source": "local"}
    found = named("ablation", row("K_4", kind="hard"), model=local, config=CONFIG | {"model": {"name": "small"}})
    shown = table("table9_ablation", found)
    assert lines(shown)[0]["model and text"].startswith("small (SUBSTITUTE) on ")
    assert shown.notes[0] == "SUBSTITUTE: small stands in for the paper's gpt2_124m"


def test_what_is_said_with_a_number_is_said_once():
    everything = {"phases": {"all": {"train": "all"}}}
    records = [named("stability", row("K_4", kind="hard"), seed=seed, config=CONFIG | {"regime": everything})
               for seed in range(2)]  # fmt: skip
    for record, dominance in zip(records, (0.25, 0.75), strict=True):
        record.probes = [probe("all", dominance)]
        record.arms[0].name = record.rows[1].arm = record.probes[0].arm = "ema"
    found = {line["mitigation"]: line for line in lines(table("table8_dominance", *records))}
    assert found["ema_centroids"]["outcome: here"] == "largest group 50.0 % (25.0 to 75.0)"


def test_long_texts_come_from_tasks_at_that_length():
    def at(attention, kind, tokens, value, difference=None, removed=0.5):
        return BenchmarkRow(
            attention=attention, kind=kind, task=f"perplexity@{tokens}", metric="perplexity", value=value, n=4,
            difference=difference, method="focus" if kind == "hard" else "full", pairs_removed=removed,
        )  # fmt: skip

    rows = [
        at("base, full attention", "base", 2048, 20.0),
        at("k_2", "hard", 2048, 22.0, 0.095),
        at("k_3", "hard", 2048, 20.0, 0.0, 0.0),
    ]
    record = named("long_context", row("k_2", kind="hard"), row("k_3", kind="hard"), benchmarks=rows)
    line = lines(table("table_long_context", record))[1]
    assert (line["PPL full attention: here"], line["PPL k=2: here"]) == ("20.00", "22.00")
    assert line["PPL k=2 vs full attention: here"] == "+9.97 %" and "(not engaged)" in line["PPL k=3: here"]
    assert line["pairs removed"] == "50.0 % / 0.0 % (not engaged)"


def timed(tokens, ratio, groups=4, top_k=1, assignment="balanced"):
    return SpeedRow(
        clock="attention", tokens=tokens, groups=groups, assignment=assignment, top_k=top_k, pairs_kept=0.25,
        full_seconds=ratio, focus_seconds=1.0,
    )  # fmt: skip


def method_timed(method, tokens, ratio):
    return MethodSpeedRow(
        method=method, tokens=tokens, layer="", dtype="bf16", path="cpu-flash", full_seconds=ratio, seconds=1.0
    )


def test_speeds_stand_at_their_lengths_and_k():
    speed = Record(
        status="finished", experiment="speed", seed=0, config=CONFIG, speed=[timed(4096, 1.5), timed(8192, 9.0)]
    )
    found = {line["tokens"]: line for line in lines(table("table6_speed", speed))}
    assert found["4096"]["K=4: here"] == "1.50" and found["4096"]["K=8: here"] == NOT_RUN
    assert found["4096"]["pairs removed"] == "75.0 %" and found["1048576"]["K=4: here"] == NOT_HERE
    hard = [
        Row(name=f"k={k}", kind="hard", method="focus", causal=True, top_k=k, pair_rule="query_topk", nll=3.0 + k / 10,
            perplexity=20.0 + k, delta_nll=k / 10, distant_pairs_kept=k / 4, pairs_removed=1 - k / 4)
        for k in (1, 2)
    ]  # fmt: skip
    by_k = [timed(8192, 2.4, assignment="trained"), timed(8192, 1.1, top_k=2, assignment="trained")]
    quality = Record(status="finished", experiment="speed_quality", seed=0, config=CONFIG, rows=hard, speed=by_k)
    shown = [line for line in lines(table("table7_topk", quality)) if line["seeds"] != "-"]
    assert [(line["top_k"], line["speed: paper"], line["speed: here"]) for line in shown] == [
        ("1", "4.0", "2.40 (at 8,192 tokens)"), ("2", "2.0", "1.10 (at 8,192 tokens)"),
    ]  # fmt: skip
    eight = replace(quality, config=CONFIG | {"attention": CONFIG["attention"] | {"groups": 8}})
    assert all(line["seeds"] == "-" for line in lines(table("table7_topk", eight)))


@pytest.mark.parametrize(
    ("deltas", "word"),
    [
        ((0.2, 0.3, 0.25), "worse than"),
        ((-0.2, -0.3, -0.25), "better than"),
        ((0.0, 0.005, 0.0), "indistinguishable from"),
        ((0.2, 0.3, 0.0), "indistinguishable from"),
        ((0.2, -0.3, 0.2), "indistinguishable from"),
        ((0.2, 0.21), "worse than, by 2 of 3 seeds"),
        ((0.2, 0.3), "indistinguishable from, by 2 of 3 seeds"),
    ],
)
def test_a_difference_is_one_if_text_and_seeds_together_say_so(deltas, word):
    records = [
        named("seeds", row("focus", kind="hard"), row("lora", kind="trained", **compared(delta)), seed=seed)
        for seed, delta in enumerate(deltas)
    ]
    (line,) = [line for line in lines(seeds_table(runs_of(*records))) if line["against"] == "focus"]
    assert line["in words"] == word and line["what"] == "lora"
    assert line["each seed"].count(": ") == len(deltas) and "[" in line["mean change [95 %]"]


def test_every_line_of_the_seeds_is_told_from_the_others(committed):
    shown = [tuple(line[:5]) for line in seeds_table(committed).rows]
    assert len(shown) == len(set(shown)) > 50 and {line[1] for line in shown} > {"4", "8"}


def test_a_causal_twin_is_compared_with_itself():
    rows = [row(None, kind="hard", top_k=1), row(None, kind="twin", name="twin", top_k=1, **compared(0.3))]
    found = lines(seeds_table(runs_of(*(replace(trapped(*rows, experiment="leak"), seed=seed) for seed in range(3)))))
    assert {line["against"] for line in found if line["what"] == "twin"} == {"base", ITSELF}


def test_an_arm_is_the_same_whatever_benchmarks_it_ran():
    both = ["seed=1", "eval.tasks=[piqa]", "eval.limit=3"], ["seed=1"]
    arms = [Arm(name="focus", settings=settings) for settings in both]
    assert run_of(arms[0]) == run_of(arms[1]) != run_of(replace(arms[0], settings=["attention.groups=8"]))


def test_an_arm_of_one_name_is_what_its_settings_came_to():
    arm = Arm(name="lora", settings=["regime=lora"])
    own = [replace(trapped(), config=CONFIG | {"regime": {"lora": {"rank": rank}}}) for rank in (2, 2, 8)]
    assert run_of(arm, own[0]) == run_of(arm, own[1]) != run_of(arm, own[2])


def test_adapters_of_other_trainings_are_no_seeds_of_one():
    def measured(seed, steps):
        method = {"name": "focus", "trained": {"steps": steps, "tokens": 1024 * steps, "seed": seed}}
        return trapped(method=method)

    assert setup(measured(0, 60)) == setup(measured(1, 60)) != setup(measured(0, 4000))


def test_an_arm_that_is_run_again_is_not_taken_for_the_older(tmp_path):
    for top, started in (("records", "2026-01-01"), ("again", "2026-02-02")):
        own = trapped(config_hash="one", started=started, commit=top)
        own.config = CONFIG | {"arm": "focus"}
        arm = Arm(name="focus", settings=[], folder="focus/seed=0-one", config_hash="one", started=started)
        whole = Record(status="finished", experiment="retrofit_124m", config=CONFIG, arms=[arm], started=started)
        for place, record in (("focus/seed=0-one", own), ("compare/seed=0-two", whole)):
            (tmp_path / top / place).mkdir(parents=True)
            record.save(tmp_path / top / place / "record.json")
    runs = gather(tmp_path)
    assert [runs.own(record.arms[0]).commit for record in runs.records] == ["records", "again"]
    assert len(runs.named) == 4


def test_what_failed_under_some_seeds_is_said_beside_the_mean_of_the_others():
    def found(failing):
        records = [compare(seed) for seed in range(3)]
        for record in records[:failing]:
            lost = {"nll": None, "perplexity": None, "delta_nll": None, "error": "a loss is not finite"}
            record.rows[-1] = replace(record.rows[-1], **lost)
        return next(line for line in lines(table("table1_retrofit", *records)) if line["method"] == "longformer")

    assert "of 3 seeds" not in found(0)["PPL: here"]
    assert "1 of 3 seeds, others failed: a loss is not finite" in found(2)["PPL: here"]
    assert found(3)["PPL: here"] == "failed: a loss is not finite"


def test_weights_that_the_seed_draws_are_one_set_up():
    def started(source, seed):
        return trapped(model={"name": "tiny", "source": source, "fingerprint": f"{seed}"})

    assert setup(started("random", 1)) == setup(started("random", 2))
    assert setup(started("hub", 1)) != setup(started("hub", 2))


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"regime": {"phases": {"router": {"learning_rate": 0.1}}}}, False),
        ({"eval": {"split": "validation"}}, False),
        ({"eval": {"stride": 8}}, False),
        ({"trainer": {"batch_size": 4}}, False),
        ({"attention": {"method": "focus", "pair_rule": "shared_group"}}, False),
        ({"attention": {"method": "focus", "budget": [[1, 2]]}}, False),
        ({"attention": {"method": "focus", "rank": 3}}, False),
        ({"every_arm": ["regime.steps=9"]}, False),
        ({"trainer": {"batch_size": 1}, "eval": {"stride": None}}, True),
        ({"experiment": "seeds", "seed": 3, "runs_dir": "there", "assets": "embedded", "arms": {"a": ["b=c"]}}, True),
        ({"eval": {"tasks": ["piqa"], "top_k": [1, 2], "adapters": ["runs/seed=3/adapter"]}}, True),
        ({"every_arm": ["eval.tasks=[piqa]"], "trainer": {"precision": "bf16", "progress": False}}, True),
        ({"adapter": "runs/seed=3/adapter", "attention": {"method": "focus", "budget": [[1, 2]]}}, True),
    ],
)
def test_runs_of_other_settings_are_no_seeds_of_one(settings, same):
    plain = Record(status="finished", experiment="compare", config={"attention": {"method": "focus"}})
    assert (setup(plain) == setup(replace(plain, config=plain.config | settings))) is same


@pytest.mark.parametrize(("lay", "told"), [(("a", "a"), ["base", "focus"]), (("a", "b"), [])])
def test_two_models_under_one_path_are_not_one_set_up(lay, told):
    def comparison(seed, fingerprint):
        found = named("model_scale", row("focus", kind="hard"), row("local", kind="hard", **compared(0.2)), seed=seed)
        for arm in found.arms:
            arm.config_hash = f"{arm.name}-{seed}"
        model = {"name": "runs/there/model", "source": "local", "fingerprint": fingerprint}
        return found, {(f"local-{seed}", ""): replace(trapped(model=model), status="failed")}

    pairs = [comparison(seed, fingerprint) for seed, fingerprint in enumerate(lay)]
    runs = Runs(runs_of(*(record for record, _ in pairs)).found, pairs[0][1] | pairs[1][1])
    assert [line["against"] for line in lines(seeds_table(runs)) if line["what"] == "local"] == told


def test_of_a_run_made_again_the_older_is_no_lonely_seed():
    records = [compare(seed) for seed in (1, 2, 1, 2)]
    assert not [note for note in seeds_table(runs_of(*records)).notes if "one seed" in note]


def test_seeds_in_other_number_formats_are_said_to_be():
    devices = ["cpu, 2 threads, float32 (no native bfloat16 on this cpu)", "cpu, 2 threads, bfloat16"]
    alike = [compare(seed, device=devices[0]) for seed in range(2)]
    mixed = [compare(seed, device=device) for seed, device in enumerate(devices)]
    said = "seeds were computed in bfloat16 or float32: see the device of each record"
    assert said in seeds_table(runs_of(*mixed)).notes and said not in seeds_table(runs_of(*alike)).notes
    texts = [
        next(line for line in lines(table("table1_retrofit", *records)) if line["method"] == "focus")["model and text"]
        for records in (alike, mixed)
    ]
    assert [text.rpartition(", ")[2] for text in texts] == ["float32", "float32 / bfloat16"]


def test_rounding_is_no_difference():
    assert difference_word(4e-8, 1e-8, 6e-8, ("better than", "worse than")) == "indistinguishable from"
    assert difference_word(4e-4, 1e-4, 6e-4, ("better than", "worse than")) == "worse than"


def test_one_seed_is_said_to_be_one():
    shown = seeds_table(runs_of(compare()))
    assert shown.rows == [] and "compare: one seed (0)" in shown.notes[0] and "seed=0,1,2" in shown.notes[0]
    future = [named("seeds", row("sinkhorn", causal=False, kind="hard"), seed=seed) for seed in range(3)]
    assert all(
        "reads the future" not in line["in words"] for line in lines(seeds_table(runs_of(compare(), compare(1))))
    )
    assert seeds_table(Runs()) is None
    with_bounds = [replace(r, rows=[replace(x, delta_low=0.1, delta_high=0.3) for x in r.rows]) for r in future]
    assert all("reads the future" in line["in words"] for line in lines(seeds_table(runs_of(*with_bounds))))


def trapped(*rows, experiment="retrofit_124m", **changes):
    base = row(None, kind="base", name="base", method="full", pairs_removed=0.0)
    return Record(status="finished", experiment=experiment, seed=0, config=CONFIG, rows=[base, *rows], **changes)


def test_each_trap_has_its_line():
    empty = lines(traps_table(Runs()))
    assert len(empty) == 4 and all(line["what was measured"] == NOT_RUN for line in empty)
    soft = row(None, kind="soft", nll=3.0)
    hard = row(None, kind="hard", name="hard k=1", top_k=1, nll=3.2)
    full = row(None, kind="hard", name="k=3", top_k=3, pair_rule="share", distant_pairs_kept=1.0, delta_nll=0.0)
    twin = row(None, kind="twin", name="same router, causal", top_k=1, nll=3.5, **compared(0.3))
    scores = [
        BenchmarkRow(attention="hard k=1", kind="hard", task=task, method="focus", metric="acc", value=0.5, n=9,
                     pairs_removed=share)
        for task, share in (("short", 0.0), ("long", 0.5))
    ]  # fmt: skip
    record = trapped(soft, hard, full, twin, benchmarks=scores)
    found = lines(traps_table(runs_of(record)))
    leak, gap, identity, short, long = found
    assert leak["difference [95 %]"].startswith("+34.99 % [") and "worse than" in leak["in words"]
    assert gap["value"] == f"{math.exp(3.0):.2f} to {math.exp(3.2):.2f}" and "log gate" in gap["what was measured"]
    assert gap["difference [95 %]"] == "+22.14 %"
    assert identity["in words"] == "it is the base model"
    assert short["in words"].startswith("not engaged") and long["in words"].startswith("engaged")
    pruned = trapped(row(None, kind="hard", top_k=3, pair_rule="share", distant_pairs_kept=0.9, delta_nll=0.1))
    (other,) = [x for x in lines(traps_table(runs_of(pruned))) if "share" in x["trap"]]
    assert other["in words"] == "it is not the base model"


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(-50, 50)), min_size=1, max_size=12))
def test_the_front_is_what_nothing_beats(found):
    best = front(found)
    for ratio, cost in found:
        beaten = any((r >= ratio and c <= cost) and (r, c) != (ratio, cost) for r, c in found)
        assert ((ratio, cost) in best) == (not beaten)


@pytest.mark.parametrize(("full", "said"), [(0.5, "the score says something"), (0.0, "nothing that could be lost")])
def test_a_score_that_full_attention_does_not_have_cannot_be_lost(full, said):
    kinds = [("base, full attention", "base", full, {}), ("hard k=1", "hard", 0.0, {"difference": -full})]
    scores = [
        BenchmarkRow(attention=name, kind=kind, task="gsm8k", method="focus", metric="acc", value=value, n=9,
                     pairs_removed=0.5, **changes)
        for name, kind, value, changes in kinds
    ]  # fmt: skip
    (found,) = [x for x in lines(traps_table(runs_of(trapped(benchmarks=scores)))) if "gsm8k" in x["what was measured"]]
    assert found["in words"].startswith("engaged") and found["in words"].endswith(said)


def test_seeds_are_averaged_as_in_the_ledger():
    """Perplexities and their changes by their logarithms, scores as they are."""
    table = paper_tables()["table1_retrofit"]
    change = next(column for column in table.columns if column.origin)
    for column, numbers, middle in (
        (table.column("ppl"), (100, 400), 200), (change, (0, 300), 100), (table.column("piqa"), (40, 60), 50),
    ):  # fmt: skip
        assert mean(column, list(map(Value, numbers))) == pytest.approx(middle)


def test_a_note_of_a_table_quotes_the_papers_own_rows():
    notes = {table.name: " ".join(table.notes) for table in paper_report(Runs([]))}
    four = "it prints 36.2 here, 34.2 in T2 and T3, 34.5 under d_g and 41.3 in T7 (k = 2)"
    assert four in notes["paper_table1_retrofit"] and "{{" not in " ".join(notes.values())


def test_arms_that_the_paper_does_not_have_are_named_too():
    arms = [row("focus_k2", kind="hard"), row("lora_1e-5", kind="trained"), row("lora_1e-2", kind="trained")]
    runs = [line["run"] for line in lines(table("table4_alignment", named("alignment", *arms))) if line["run"] != "-"]
    assert {run.split(": ")[-1] for run in runs} == {"base", "focus_k2", "lora_1e-5", "lora_1e-2"}


def test_figure_1_takes_the_mean_of_seeds_as_its_table_does():
    low, high = math.log(7.2304), math.log(5.2215)
    records = [
        named("compare", row("performer", method="performer", nll=3.0 + delta, delta_nll=delta), seed=seed)
        for seed, delta in enumerate((low, high))
    ]
    (point,) = (point for point in points(runs_of(*records)) if point.name == "performer")
    assert point.change == pytest.approx(100 * (math.sqrt(7.2304 * 5.2215) - 1))


def test_figure_1_needs_both_quality_and_speed(tmp_path):
    fingerprint = {"name": "small", "fingerprint": "1"}
    record = compare(model=fingerprint)
    speed = Record(
        status="finished", experiment="speed", seed=0, config=CONFIG, model=fingerprint,
        speed=[timed(4096, 1.5), timed(65_536, 3.7), timed(65_536, 6.9, groups=8)],
    )  # fmt: skip
    shown = {line["method"]: line for line in lines(table("figure1", record, speed))}
    assert shown["focus"]["speed: here"].startswith("3.70 (65,536 tokens, K=4, balanced groups, ")
    assert shown["focus"]["speed: paper"] == "3"
    # where other methods were timed, Focus is taken at the same length
    others = replace(speed, experiment="speed_methods", speed=[], method_speed=[method_timed("longformer", 4096, 2.2)])
    beside = {line["method"]: line for line in lines(table("figure1", record, speed, others))}
    assert beside["longformer"]["speed: here"].startswith("2.20 (4,096 tokens, by cpu-flash, ")
    assert beside["focus"]["speed: here"].startswith("1.50 (4,096 tokens, ")
    assert shown["longformer"]["speed: here"] == "not timed here" and shown["performer"]["run"] == "-"
    assert shown["pretrained"]["speed: here"] == "1.00 (the same attention as the base)"
    other = lines(table("figure1", record, replace(speed, model={"fingerprint": "2"})))
    assert {line["method"]: line for line in other}["focus"]["speed: here"] == "not timed here"
    assert sorted(path.name for path in write_pareto(points(runs_of(record, speed)), tmp_path).values()) == [
        "figure1.png"
    ]
    assert (tmp_path / "figure1.svg").exists() and write_pareto(points(Runs()), tmp_path) == {}


def test_figure_1_takes_the_papers_numbers_from_its_tables():
    costs = {row["method"]: row["ppl"] for row in paper_rows("table1_retrofit")}
    assert {row["method"]: row["ppl"] for row in paper_rows("figure1") if row["ppl"]} == costs
    speeds = {row["tokens"]: row["speedup_K4"] for row in paper_rows("table6_speed")}
    assert (speeds[65_536], pytest.approx(100 * (36.2 / 42.8 - 1))) in printed()


def test_ledger_table_and_figure_quote_one_speed_of_k():
    """Table and figure: the trained router's, at the longest length that all k share. The ledger: balanced groups, of
    which K/k is a count, at the paper's longest."""
    claims, seven, figure = (
        list(csv.DictReader((RECORDS / "report" / f"{name}.csv").open(encoding="utf-8")))
        for name in ("claims", "paper_table7_topk", "paper_figure1")
    )
    table = {line["top_k"]: line["here_claimed_speedup"] for line in seven if line["model"] == "gpt2_124m"}
    drawn = {line["method"]: line["here_speed"] for line in figure}
    said = [line["here"] for line in claims if line["table"] == "T7"]
    assert len(said) == 3 and all("with balanced groups at 65,536 tokens" in here for here in said)
    assert [drawn[f"focus, k = {k}"] for k in "23"] == [table[k] for k in "23"]


def test_the_committed_records_fill_the_tables_they_should(committed):
    runs = committed
    filled = {shown.name: [line["seeds"] != "-" for line in lines(shown)] for shown in paper_report(runs)}
    for name in ("table1_retrofit", "table_dg", "table3_lora", "table10_token_selection"):
        assert all(filled[f"paper_{name}"]), name
    assert sum(filled["paper_table6_speed"]) == 5 + 7 and sum(filled["paper_table7_topk"]) == 4
    assert runs.seconds(next(record for record in runs.records if record.experiment == "compare")) > 600
    assert any("it is the base model" in line["in words"] for line in lines(traps_table(runs)))
