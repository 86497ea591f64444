"""The plan of a run: what it lists is what runs, for the loop, for the planner and for the example scripts."""

import ast
import json
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.config.errors import ConfigError
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig, training_config
from tandem.config.train_engine import CriticConfig
from tandem.flow.conductor import LocalConductor
from tandem.flow.draw import draw_plan, mermaid, text
from tandem.flow.opening import open_rows, open_session
from tandem.flow.plan import plan_run
from tandem.flow.process import start_process
from tandem.planning.job import Lengths, job_of
from tandem.trainers.loop import step
from tandem.trainers.script import open_training
from tests.matrix.cells import stages_called, step_of
from tests.tiny import tiny_model_folder
from tests.trainers.planning import HAND, round_machine

EXAMPLES = Path(__file__).parents[2] / "examples"
MOVED = ["reference.backend=fsdp:d1@1", "algorithm.kl.coefficient=0.1", "reference.refresh_every_steps=2"]
DEFAULTS = ["train_dataset.path=addition", "actor.path=smollm2-135m"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"), kind="llama")


def plan_of(*keys, kind=TrainConfig):
    return plan_run(load_config(kind, None, [*DEFAULTS, *keys]).config)


def names(items):
    return [item.name for item in items]


@pytest.mark.parametrize(
    ("keys", "residents", "passes"),
    [
        ([], ["actor", "engine"], ["advantages"]),
        (["actor.mini_batches=2"], ["actor", "engine"], ["proximal", "advantages"]),
        (["algorithm=ppo"], ["actor", "critic", "engine"], ["values", "advantages"]),
        (["algorithm=ppo", "critic.shared=true"], ["actor", "engine"], ["values", "advantages"]),
        (["algorithm.kl.coefficient=0.1"], ["actor", "reference", "engine"], ["reference", "advantages"]),
        (
            ["algorithm.kl.coefficient=0.1", "algorithm.kl.where=reward"],
            ["actor", "reference", "engine"],
            ["reference", "proximal", "advantages"],
        ),
    ],
    ids=" ".join,
)
def test_models_and_passes_are_those_that_the_algorithm_asks_for(keys, residents, passes):
    plan = plan_of(*keys)
    assert names(plan.residents) == residents and names(plan.passes) == passes
    assert {name for stage in plan.stages for name in stage.awake} <= set(residents)


def test_the_reference_beside_adapters_is_the_bare_actor_unless_it_has_a_model():
    keys = ["actor.lora.rank=8", "algorithm.kl.coefficient=0.1"]
    assert plan_of(*keys).resident("reference").base_of == "actor"
    own = plan_of(*keys, "reference.path=elsewhere").resident("reference")
    assert own.base_of is None and own.engine.path == "elsewhere" and own.engine.lora.rank is None


def test_a_shared_critic_learns_in_the_update_of_the_actor_and_has_none_of_its_own():
    assert plan_of("algorithm=ppo").stage("update values").awake == ("critic",)
    shared = plan_of("algorithm=ppo", "critic.shared=true")
    assert shared.stage("update values") is None and shared.stage("values").awake == ("actor",)


def test_each_stage_says_all_the_steps_at_which_it_runs():
    plan = plan_of("algorithm=ppo", "critic.warmup_steps=4", "evaluate.every_steps=9", "checkpoint.every_steps=5")
    assert (
        plan.stage("update").when == "the actor is not trained in the first 4 steps"
        and plan.stage("update values").when == ""
    )
    assert plan.stage("evaluate").when == "before step 1, every 9 steps, at the end"
    assert plan.stage("save").when == "every 5 steps, at the end"
    assert plan_of("checkpoint.every_steps=5", "checkpoint.at_end=false").stage("save").when == "every 5 steps"
    assert plan_of().stage("save").when == "at the end" and plan_of().stage("update").when == ""


def test_the_plan_says_how_a_batch_comes_together():
    assert plan_of("algorithm=dapo").stage("generate").when == "each step, again until enough groups pass dynamic_sampling"
    beside = plan_of("async_training=true").stage("generate").when
    assert beside == "each step, beside training, at most 1 version behind"


@pytest.mark.parametrize("keys", [["algorithm=ppo", "critic.backend=fsdp:d1@1"], MOVED])
def test_a_model_sits_where_its_layout_says_unless_its_weights_change(keys):
    kept = plan_of("actor.backend=fsdp:d4", "reference.backend=fsdp:d2@1", "algorithm.kl.coefficient=0.1")
    assert kept.resident("reference").ranks == (1, 2) and "on 2 of 4 ranks from rank 1 on" in text(kept)
    with pytest.raises(ConfigError, match="whose weights change sits on the first ranks"):
        plan_of("actor.backend=fsdp:d2", *keys)


def test_a_critic_that_nothing_asks_for_is_refused():
    with pytest.raises(ConfigError, match=r"critic\.\* is not used, because algorithm\.advantage=grpo asks for no values"):
        plan_run(TrainConfig(critic=CriticConfig(value_clip=None)))


def run_a_step(config, plan, monkeypatch):
    """The fields that each pass of a real step added, by the name of its stage."""
    gained = {}
    call = LocalConductor.call

    def recorded(self, stage, work, *handles):
        result = call(self, stage, work, *handles)
        if stage.kind in ("pass", "collect"):
            before = set(handles[0].keys()) if stage.kind == "pass" else set()
            gained[stage.name] = set(result.keys()) - before
        return result

    monkeypatch.setattr(LocalConductor, "call", recorded)
    run = training_config(config) if isinstance(config, DistillConfig) else config
    with open_session(run, start_process(run), open_rows(run), 1, "run", plan) as session:
        step(session)
    return gained


@pytest.mark.parametrize(
    "keys",
    [
        ["actor.mini_batches=2", "algorithm.kl.coefficient=0.1"],
        ["algorithm=ppo"],
        ["teacher"],
    ],
    ids=" ".join,
)
def test_a_step_runs_the_passes_of_the_plan_in_order_and_each_adds_what_it_says(model, tmp_path, monkeypatch, keys):
    kind = DistillConfig if keys == ["teacher"] else TrainConfig
    small = [
        *(f"{role}.path={model}" for role in ["actor", *(keys if kind is DistillConfig else [])]),
        f"run.root={tmp_path}",
        "train_dataset.path=addition",
        "reward=exact_number",  # the default one starts processes
        "rollout.batch_size=2",
        "gconfig.n_samples=2",
        "gconfig.max_new_tokens=4",
        "rollout.engine.kv_cache_gib=0.02",
        "threads=1",
        *([] if kind is DistillConfig else keys),
    ]
    config = load_config(kind, None, small).config
    plan = plan_run(config)

    gained = run_a_step(config, plan, monkeypatch)

    assert set(plan.stage("generate").declared.adds) <= gained.pop("generate")
    assert list(gained) == names(plan.passes)
    assert all(set(stage.added) <= gained[stage.name] for stage in plan.passes)


PAIRS = "train_dataset.path=addition_pairs"


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (SFTConfig, ["train_dataset.path=addition"]),
        *((PreferenceConfig, [PAIRS, f"loss={loss}"]) for loss in ("dpo", "kto", "simpo")),
        (RewardModelConfig, [PAIRS]),
    ],
    ids=str,
)
def test_what_learns_from_rows_runs_the_stages_that_the_planner_counts(model, tmp_path, kind, keys):
    small = [f"actor.path={model}", f"run.root={tmp_path}", "train_dataset.size=8", "batch_size=4", "threads=1", *keys]
    small += ["evaluate.every_steps=1", "evaluate.max_rows=2", "tracking.plot_every_steps=null", "device=cpu"]
    config = load_config(kind, None, small).config
    plan = plan_run(config)
    with open_training(config) as (run, session):
        called = stages_called(session.conductor)
        metrics = [step(session)[0] | run.evaluate_if_due(session, number) for number in (1, 2)]
    assert called == [*step_of(plan), plan.stage("evaluate")] * 2
    passes = [(stage.name, stage.awake[0]) for stage in plan.stages if stage.kind == "pass"]
    assert passes == [*job_of(config, round_machine(), Lengths(8, 4), lambda _: HAND).passes]
    assert all({"loss", "eval/loss", "tokens_per_s/train"} <= found.keys() for found in metrics)


REFERENCE = ["algorithm.kl.coefficient=0.1", "reference.refresh_every_steps=2", "actor.mini_batches=2"]


@pytest.mark.parametrize(
    ("script", "kind", "keys"),
    [
        ("addition_grpo.py", TrainConfig, ["actor.mini_batches=2"]),
        ("gsm8k_grpo.py", TrainConfig, REFERENCE),
        ("multi_turn.py", TrainConfig, REFERENCE),
        ("clevr_count_grpo.py", TrainConfig, []),
        ("clevr_count_sft.py", SFTConfig, []),
        ("rlhf.py", TrainConfig, ["actor.mini_batches=2"]),
        ("gsm8k_sft.py", SFTConfig, []),
        ("addition_reward.py", RewardModelConfig, []),
        ("addition_preference.py", PreferenceConfig, ["loss=kto"]),
    ],
)
def test_an_example_script_calls_the_stages_of_its_plan_in_order(script, kind, keys):
    file = {"rlhf.py": "rlhf_ppo.yaml"}.get(script, script.replace(".py", ".yaml"))
    plan = plan_run(load_config(kind, EXAMPLES / file, keys).config)
    wanted = [stage.call for stage in plan.stages if stage.kind in ("collect", "pass", "update", "deliver")]
    whole = ast.walk(ast.parse((EXAMPLES / script).read_text()))
    (steps,) = [node for node in whole if isinstance(node, ast.For) and "run.steps" in ast.unparse(node.iter)]
    called = [
        node.func.attr
        for node in sorted(
            (n for n in ast.walk(steps) if isinstance(n, ast.Call)),
            key=lambda node: (node.lineno, node.col_offset),
        )
        if isinstance(node.func, ast.Attribute) and node.func.attr in wanted
    ]
    assert called == wanted


def test_every_example_whose_loop_stands_in_the_script_is_compared_with_its_plan():
    loops = {path.name for path in EXAMPLES.glob("*.py") if "open_training(" in path.read_text()}
    (mark,) = test_an_example_script_calls_the_stages_of_its_plan_in_order.pytestmark
    assert loops == {script for script, _, _ in mark.args[1]}


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (TrainConfig, ["algorithm=ppo", "actor.mini_batches=2", *REFERENCE[:2]]),
        (TrainConfig, ["algorithm=ppo", "critic.shared=true", "deterministic=true"]),
        (DistillConfig, ["teacher.path=smollm2-135m"]),
        (SFTConfig, []),
        (RewardModelConfig, [PAIRS]),
        *((PreferenceConfig, [PAIRS, f"loss={loss}"]) for loss in ("dpo", "kto")),
    ],
    ids=str,
)
def test_every_stage_declares_what_it_reads_and_earlier_stages_have_added_that(kind, keys):
    plan, there = plan_of(*keys, kind=kind), set()
    for stage in plan.stages:
        declared = stage.declared
        assert set(declared.reads) <= there, stage.name
        there |= {*declared.adds, *declared.may_add}
    states = {stage.name: stage.declared for stage in plan.stages}
    assert all("weights" in states[name].reads_state for name in ("publish", "evaluate", "save", "verify") if name in states)


def test_the_picture_and_the_flowchart_show_where_weights_go():
    plan = plan_of("algorithm.kl.coefficient=0.1", "reference.refresh_every_steps=5")
    assert [(stage.name, receiver) for stage, receiver in plan.weights_to] == [
        ("refresh", "reference"),
        ("publish", "engine"),
    ]
    words = [text.get_text() for text in draw_plan(plan).axes[0].texts]
    assert words.count("weights") == 2 == mermaid(plan).count('==>|"weights"|')
    assert draw_plan(plan_of(kind=SFTConfig)).axes[0].texts and not list(plan_of(kind=SFTConfig).weights_to)


def test_text_and_flowchart_name_every_model_and_stage_and_the_fields_between_them():
    plan = plan_of("algorithm=ppo", "algorithm.kl.coefficient=0.1", "reference.refresh_every_steps=5")
    for shown in (text(plan), mermaid(plan)):
        assert all(name in shown for name in [*names(plan.residents), *names(plan.stages)])
        assert "reference_logprobs" in shown and "every 5 steps" in shown


def test_the_command_prints_the_plan_and_draws_a_picture(tmp_path, capsys):
    file = tmp_path / "graph.png"
    assert main(["graph", str(EXAMPLES / "addition_grpo.yaml"), "algorithm=ppo", "--png", str(file)]) == 0
    assert "critic.compute_values" in capsys.readouterr().out
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000
    for name in ("graph.foo", "graph"):
        assert main(["graph", str(EXAMPLES / "addition_grpo.yaml"), "--png", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["graph", str(EXAMPLES / "addition_grpo.yaml"), "--png", str(tmp_path / "no" / "a.png")]) == 2
    assert "--png" in capsys.readouterr().err


def test_the_command_prints_the_graph_as_data(capsys):
    assert main(["graph", str(EXAMPLES / "addition_grpo.yaml"), "algorithm=ppo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"before": "update", "after": "publish", "by": "actor.weights"} in found["edges"]
    stages = {stage["name"]: stage for stage in found["stages"]}
    assert stages["values"]["pool"] == "critic" and stages["values"]["adds"] == ["values", "bootstrap_value"]
    assert [model["name"] for model in found["models"]] == ["actor", "critic", "engine"]


def test_the_page_shows_what_the_command_prints(capsys):
    page = (EXAMPLES.parent / "docs" / "concepts.md").read_text()
    shown = page.split("\ntandem graph ")[1]
    assert main(["graph", *shown.split("\n")[0].replace("examples/", f"{EXAMPLES}/").split()]) == 0
    assert capsys.readouterr().out.strip() in page
