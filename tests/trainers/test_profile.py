"""`tandem profile`: what its trace and its table say, and that nothing of the run is another because of it."""

import gzip
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.api.activity import is_profiled, span
from tandem.cli.main import main
from tandem.cli.profile import quiet
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.plan import plan_run
from tandem.tracking.profile import BETWEEN, ELSEWHERE, Piece, Profiler, Use, covered, innermost, tabulate
from tandem.trainers.loop import train

MEASURED = ("time/", "tokens_per_s/", "memory/", "threads/", "time")
"""Metrics that are other in each run."""


def rows(summary):
    return [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]


def trace_of(file: Path):
    with gzip.open(file) as packed:
        return json.load(packed)


def spans(trace, kind):
    """(start, end, name, thread) of the spans of a kind."""
    marked = [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation" and e["name"].startswith(f"{kind}: ")]
    return [(e["ts"], e["ts"] + e["dur"], e["name"].partition(": ")[2], (e["pid"], e["tid"])) for e in marked]


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """The same four steps without a profile and with one; the profiler; the configuration."""
    keys = {
        "actor.path": model,
        "actor.optimizer.lr": 0.01,
        "actor.dtype": "float32",
        "rollout.dtype": "float32",
        "rollout.batch_size": 4,
        "rollout.engine.kv_cache_gib": 0.05,
        "gconfig.n_samples": 4,
        "gconfig.max_new_tokens": 8,
        "train_dataset.path": "addition",
        "total_train_steps": 4,
        "tracking.plot_every_steps": "null",
        "reward": f"{Path(__file__).parent / 'small_rewards.py'}:even",
        "rollout.verify.every_steps": "null",
        "deterministic": "true",
        "threads": 1,
    }
    words, profiler = [f"{key}={value}" for key, value in keys.items()], Profiler("rank 0")
    done = [
        train(load_config(TrainConfig, None, [*words, f"run.root={tmp_path_factory.mktemp(name)}"]), **how)
        for name, how in {"plain": {}, "profiled": {"watch": lambda numbers, session: profiler.steps(numbers)}}.items()
    ]
    torch.use_deterministic_algorithms(False)
    return *done, profiler, words


@pytest.mark.invariant
def test_a_profile_changes_no_bit_of_metrics_and_weights(runs):
    plain, profiled, profiler, _ = runs
    own = [[{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows(run)] for run in (plain, profiled)]
    assert own[0] == own[1] and len(own[0]) == 4 and "loss" in own[0][0]
    weights = [load_file(run.checkpoint / "model.safetensors") for run in (plain, profiled)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert profiler.recorded == [3, 4] and profiler.plain == 2 and sorted(profiler.steps_s) == [1, 2, 3, 4]


def test_each_recorded_step_has_each_stage_once_with_its_operators_inside(runs):
    trace = json.loads(json.dumps(runs[2].trace, allow_nan=False))
    plan = plan_run(load_config(TrainConfig, None, runs[3]).config)
    steps, stages = spans(trace, "step"), spans(trace, "stage")
    main_thread = steps[0][3]
    assert [name for _, _, name, _ in steps] == ["3", "4"] and {thread for *_, thread in stages} == {main_thread}
    expected = [stage.name for stage in plan.stages if not stage.when]
    for start, end, _, _ in steps:
        assert [name for a, b, name, _ in sorted(stages) if start <= a <= b <= end and name in expected] == expected
    operators = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op" and (e["pid"], e["tid"]) == main_thread]
    inside = Counter()
    for operator in operators:
        a, b = operator["ts"], operator["ts"] + operator["dur"]
        for start, end, name, _ in stages:
            assert b <= start or end <= a or start <= a <= b <= end, (operator, name)  # inside or outside, never across
            inside[name, operator["name"]] += start <= a <= b <= end
    assert inside["update", "aten::mm"] > 0 and inside["publish", "aten::copy_"] > 0


def test_generation_is_recorded_in_its_own_thread_within_its_stage(runs):
    decodes, generates = spans(runs[2].trace, "engine"), spans(runs[2].trace, "stage")
    assert {name for _, _, name, _ in decodes} == {"prefill", "decode"}
    threads = {e["tid"]: e["args"]["name"] for e in runs[2].trace["traceEvents"] if e["name"] == "thread_name"}
    assert {threads[thread] for *_, (_, thread) in decodes} == {"embedded-engine"}
    within = [(start, end) for start, end, name, _ in generates if name == "generate"]
    assert all(any(a <= start and end <= b for a, b in within) for start, end, _, _ in decodes)


def test_the_stages_add_up_to_the_step_and_agree_with_the_metrics(runs):
    profiler = runs[2]
    table = tabulate(profiler.trace, profiler.uses, 1.0, {"publish": 12.0})
    stages = {stage.name: stage for stage in table.stages}
    recorded = [row for row in rows(runs[1]) if row["step"] in profiler.recorded]

    def mean(name):
        return sum(row[name] for row in recorded) / len(recorded)

    assert sum(stage.seconds for stage in table.stages) == pytest.approx(table.step_s, rel=1e-6)
    assert table.step_s == pytest.approx(sum(profiler.steps_s[step] for step in profiler.recorded) / 2, rel=0.1, abs=0.05)
    assert table.step_s == pytest.approx(mean("time/step_s"), rel=0.3, abs=0.1)  # which begins where the step before ends
    for name, metric in {"generate": "time/generate_s", "publish": "time/update_weights_s"}.items():
        assert stages[name].seconds == pytest.approx(mean(metric), rel=0.1, abs=0.05)
    assert stages["publish"].moved == 12.0 and 0 < stages["generate"].waits_s <= stages["generate"].seconds * 1.001
    for stage in table.stages:
        assert 0 <= stage.idle <= 1 and stage.memory > 0 and stage.silent_s <= stage.seconds * 1.001
        assert sum(operator.self_s for operator in stage.operators) > 0


def test_without_a_profile_a_span_is_nothing(runs):
    assert not is_profiled() and isinstance(span("stage: update"), nullcontext)


def test_a_time_belongs_to_the_innermost_span():
    nested = [(0, 10, "a"), (2, 5, "b"), (2, 3, "c"), (5, 6, "d"), (12, 13, "e")]
    expected = [(0, 2, "a"), (2, 3, "c"), (3, 5, "b"), (5, 6, "d"), (6, 10, "a"), (12, 13, "e")]
    assert innermost(nested) == [Piece(*piece) for piece in expected]


def test_intervals_that_overlap_cover_a_piece_once():
    pieces = [Piece(0, 10, ""), Piece(10, 20, ""), Piece(20, 30, "")]
    assert covered([(1, 4), (2, 6), (3, 5), (8, 12), (30, 40)], pieces).tolist() == [7, 2, 0]


def test_a_kernel_belongs_to_the_stage_that_asked_for_it_and_idle_is_that_of_the_gpu():
    def event(cat, name, ts, dur, **args):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": args}

    on_gpu = [  # both are asked for in the first stage, and the second of them runs in the other one
        event("kernel", "gemm", 1e6, 3e6, correlation=1) | {"pid": 0, "tid": 7},
        event("gpu_memcpy", "Memcpy HtoD", 4e6, 1e6, correlation=2, bytes=2048) | {"pid": 0, "tid": 7},
    ]
    trace = {
        "baseTimeNanoseconds": 0,
        "traceEvents": [
            *(event("user_annotation", name, ts, dur) for name, ts, dur in
              [("step: 3", 0, 10e6), ("stage: update", 0, 4e6), ("stage: publish", 4e6, 4e6)]),
            *(event("cuda_runtime", "cudaLaunchKernel", ts, 10, correlation=n) for n, ts in [(1, 5e5), (2, 6e5)]),
            event("cpu_op", "aten::mm", 4e5, 3e5),
            *on_gpu,
        ],
    }  # fmt: skip
    table = tabulate(trace, [Use(0, 0.0, 100, 5), Use(6e6, 2.0, 300, 7), Use(10e6, 2.0, 200, 6)], 2.0, {})

    update, publish, between = table.stages
    assert [stage.name for stage in table.stages] == ["update", "publish", BETWEEN] and table.step_s == 10
    assert [operator[:2] for operator in update.operators] == [("gemm", 3.0), ("Memcpy HtoD", 1.0)]
    assert publish.operators == [] and (update.moved, publish.moved) == (2048, 0)
    assert (update.idle, publish.idle, between.idle) == (0.25, 0.75, 1.0)
    assert (update.gpu_memory, publish.gpu_memory) == (7, 7) and update.silent_s == pytest.approx(3.7)


# ------------------------------------------------------------------ the command


def profiled(tmp_path, keys, *words):
    """Runs the command as a user would, with a run of his own in the same root; gives the traces."""
    assert main(["profile", *keys, *words, "--into", str(tmp_path / "traces")]) == 0
    return sorted((tmp_path / "traces").iterdir())


def test_the_command_prints_the_table_and_leaves_the_own_run_alone(overrides, tmp_path, capsys):
    run = tmp_path / "tandem" / "trial"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("of a run that is there already")

    files = profiled(tmp_path, overrides, "total_train_steps=3", "--steps", "1")

    assert [file.name for file in files] == ["rank0.json.gz"]
    assert [path.name for path in run.iterdir()] == ["config.yaml"]
    said = capsys.readouterr().out
    heads = said[said.index("stage ") :].splitlines()[0].split()
    assert heads == ["stage", "calls", "s/step", "share", "idle", "waits", "s", "memory", "moved"]
    for words in ("Step 3. Idle", "step 2 took", "engine: decode", "aten::", BETWEEN, "100.0%", "ui.perfetto.dev"):
        assert words in said
    assert {name for _, _, name, _ in spans(trace_of(files[0]), "step")} == {"3"}


def test_a_run_of_one_step_is_refused(overrides, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    assert main(["profile", *overrides, "total_train_steps=1", "--into", str(tmp_path / "mine/deep/traces")]) == 2
    assert "a profile needs two steps" in capsys.readouterr().err
    assert [*(tmp_path / "mine").iterdir()] == []  # only what it made goes


def test_what_goes_with_saves_sinks_and_verification_in_a_file_is_no_obstacle(overrides, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(
        "checkpoint: {every_steps: 2, keep_last: 3, keep_best: eval/accuracy}\nevaluate: {every_steps: 2}\n"
        "rollout: {verify: {every_steps: 2, tolerance: 0.5}}\ntracking: {sinks: [wandb], project: mine}\n"
    )
    words = [word for word in overrides if not word.startswith(("evaluate.", "rollout.verify."))]
    for more in ([], ["checkpoint.keep_last=5"], ["checkpoint.every_steps=1"]):
        besides = {word.partition("=")[0] for word in more}
        load_config(TrainConfig, file, [*words, *more, *quiet(TrainConfig(), besides)])
    into = tmp_path / "traces"
    assert main(["profile", str(file), *words, "total_train_steps=1", "--into", str(into)]) == 2
    assert "a profile needs two steps" in capsys.readouterr().err and not into.exists()


def test_the_reward_of_a_run_that_votes_is_left_out_with_its_evaluation(overrides):
    words = [word for word in overrides if not word.startswith(("evaluate.", "gconfig.n_samples"))]
    words += ["algorithm=ttrl", "evaluate.every_steps=2"]
    written = load_config(TrainConfig, None, words).config
    measured = load_config(TrainConfig, None, [*words, *quiet(written)]).config
    assert written.reward != measured.reward == TrainConfig.reward and measured.evaluate.every_steps is None


def test_a_run_on_ray_is_refused(overrides, capsys):
    assert main(["profile", *overrides, "runner=ray"]) == 2
    assert "use runner=local" in capsys.readouterr().err


@pytest.mark.slow
def test_asynchronous_generation_is_recorded_in_the_process_of_the_engine(overrides, tmp_path, capsys):
    (file,) = profiled(tmp_path, overrides, "async_training=true", "rollout.max_head_offpolicyness=2", "total_train_steps=6")

    trace = trace_of(file)
    (here,) = {thread[0] for *_, thread in spans(trace, "step")}
    (engine,) = {thread[0] for *_, thread in spans(trace, "engine")}
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name" and "args" in e}
    assert names[engine] == "inference engine" and names[here] == "rank 0"
    first, last = min(spans(trace, "step"))[0], max(spans(trace, "step"))[1]
    assert any(first <= start <= end <= last for start, end, name, _ in spans(trace, "engine") if name == "decode")
    assert ELSEWHERE in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "data"), [("sft", "addition"), ("preference", "addition_pairs"), ("reward", "addition_pairs")]
)
def test_what_learns_from_rows_is_profiled_too(kind, data, model, tmp_path, capsys):
    keys = [f"actor.path={model}", f"train_dataset.path={data}", "batch_size=4", "total_train_steps=4", "threads=1"]
    (file,) = profiled(tmp_path, keys, "--for", kind)

    assert {name for _, _, name, _ in spans(trace_of(file), "train")} == {"forward", "backward", "optimizer"}
    assert "rows" in {name for _, _, name, _ in spans(trace_of(file), "stage")}


@pytest.mark.slow
def test_each_rank_writes_its_trace_and_the_table_is_that_of_the_first(overrides, tmp_path, capfd):
    files = profiled(tmp_path, overrides, "actor.backend=fsdp:d2", "total_train_steps=3", "--steps", "1")

    assert [file.name for file in files] == ["rank0.json.gz", "rank1.json.gz"]
    assert {name for _, _, name, _ in spans(trace_of(files[1]), "step")} == {"3"}
    assert "on rank 0 (of 2; the other ranks have their own traces)" in capfd.readouterr().out
