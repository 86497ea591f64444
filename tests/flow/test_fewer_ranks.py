"""A model on fewer ranks than the actor: the step is the one that it would be on all, and the other ranks hold nothing."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from tandem.api.engines import Outputs
from tandem.api.failures import RankFailed
from tandem.api.team import Team
from tandem.config.arithmetic import total_steps
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.flow.opening import open_rows, open_session
from tandem.flow.process import Process, TeamEngine, form_team
from tandem.lifecycle.recovery import Progress, parts_of
from tandem.models.tokenizer import load_tokenizer
from tandem.state.tree import read_tree, write_tree
from tests.engines_train.steps import random_batch
from tests.ranks import on, on_two
from tests.tiny import tiny_model_folder

CHEAP = str(Path(__file__).parents[1] / "trainers" / "small_rewards.py") + ":even"
CLOCKS = ("time/", "tokens_per_s", "memory/", "engine/", "seconds")


def config_of(out, knobs, more):
    items = [f"run.root={out}", f"actor.path={out / 'tiny-llama-0'}", "actor.backend=fsdp:d2", "actor.dtype=float32"]
    items += ["actor.optimizer.lr=0.01", "rollout.dtype=float32", "rollout.batch_size=4", "gconfig.n_samples=4"]
    items += ["gconfig.max_new_tokens=8", "rollout.engine.kv_cache_gib=0.05", "train_dataset.path=addition"]
    items += ["evaluate.every_steps=null", "total_train_steps=3", "threads=1", "deterministic=true", "algorithm=ppo"]
    items += ["algorithm.kl.coefficient=0.1", "reference.refresh_every_steps=1"]
    items += [f"reward={CHEAP} + 0.5*model(path={out / 'judge'}{knobs})"]
    return load_config(TrainConfig, None, [*items, *more]).config


def one_step(session):
    """The batch of the update, and all metrics but those of clocks."""
    batch, metrics = session.step()
    session.rollout.end_step()
    metrics |= session.rollout.metrics()
    return dict(batch.items()), {name: value for name, value in metrics.items() if not name.startswith(CLOCKS)}


def trained(out, name, knobs, more, ranks):
    """Two steps, and whether the critic computes the same after it has taken its saved state."""
    config, process = config_of(out, knobs, more), Process("cpu", 1, dist.get_rank(), ranks)
    rows = open_rows(config)
    with open_session(config, process, rows, total_steps(config, len(rows.train)), "run") as session:
        steps = [one_step(session) for _ in range(2)]
        parts = parts_of(session, Progress(), None, None, process.device)
        state = {part: parts[part].state_dict() for part in ("reference", "critic")}
        write_tree(process.team, out / name, state)
        process.team.share(lambda: None)  # the others read what rank 0 has written
        batch = TensorDict(steps[-1][0], batch_size=[])
        before = session.critic.engine.forward(batch).scores
        session.critic.load_state_dict(read_tree(out / name)["critic"])
        session.critic.engine.save(out / f"{name}-critic")
        engines = (session.reference.engine, session.critic.engine, session.scorer.roles["model"].engine)
        return {
            "batches": [batch for batch, _ in steps],
            "metrics": [metrics for _, metrics in steps],
            "resumed": torch.equal(before, session.critic.engine.forward(batch).scores),
            "saved": (out / f"{name}-critic" / "model.safetensors").exists(),
            "here": [engine.engine is not None for engine in engines if isinstance(engine, TeamEngine)],
        }


def both_ways(out, ranks):
    torch.set_num_threads(1)
    fewer = ["reference.backend=fsdp:d1", "critic.backend=fsdp:d1"]
    return trained(out, "all", "", [], ranks), trained(out, "one", ", backend='fsdp:d1@1'", fewer, ranks)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("teams")
    config = TrainEngineConfig(path=str(tiny_model_folder(out)), dtype="float32")
    torch.manual_seed(3)
    judge = SpreadEngine(config, 1, head="scalar")
    judge.load_weights((name, torch.randn_like(x) if x.shape[0] == 1 else x) for name, x in judge.weights())
    judge.save(out / "judge")
    load_tokenizer(out / "tiny-llama-0").save_pretrained(out / "judge")
    return on_two(both_ways, out, out=out)


@pytest.mark.slow
@pytest.mark.invariant
def test_models_on_one_of_two_ranks_give_the_same_batches_and_metrics_as_on_both(runs):
    for everywhere, fewer in runs:
        assert everywhere["here"] == [] and fewer["resumed"] and fewer["saved"]
        for one, other in zip(everywhere["batches"], fewer["batches"], strict=True):
            assert one.keys() == other.keys() >= {"reference_logprobs", "values", "advantages", "rewards/model"}
            for name, column in one.items():
                close = torch.isclose(other[name].double(), column.double(), rtol=5e-3, atol=1e-5, equal_nan=True)
                assert bool(close.all()), name
        for one, other in zip(everywhere["metrics"], fewer["metrics"], strict=True):
            assert other == pytest.approx(one, rel=5e-3, abs=1e-5, nan_ok=True) and one
    assert [fewer["here"] for _, fewer in runs] == [[True, True, False], [False, False, True]]
    first, second = (fewer["batches"][-1] for _, fewer in runs)
    assert all(torch.equal(first[name].nan_to_num(), second[name].nan_to_num()) for name in first)


class RefusesEntropy:
    """A model that gives numbers of its first rank, and fails on rank 1 if it is asked for the entropy."""

    def forward(self, batch, *, entropy=False):
        if entropy and dist.get_rank() == 1:
            raise OSError("the device is gone")
        return Outputs(torch.full((3,), float(dist.get_rank())))


def on_ranks(chosen, ranks):
    """Runs on each of three ranks: a model on some of them gives its values to all, and its failure reaches all."""
    everyone = Team()
    team = form_team(chosen, everyone)
    engine = TeamEngine(RefusesEntropy() if team.member else None, everyone, min(chosen))
    logprobs = engine.forward(random_batch([3])).logprobs.tolist()
    with pytest.raises((RankFailed, OSError)) as failure:
        engine.forward(random_batch([3]), entropy=True)
    again = form_team(tuple(reversed(chosen)), everyone) is team and form_team((0, 1, 2), everyone) is everyone
    return logprobs, type(failure.value).__name__, team.main, again


@pytest.mark.parametrize("chosen", [(0, 1), (1, 2)], ids=str)
def test_a_model_on_any_of_the_ranks_gives_and_fails_to_all_of_them(tmp_path, chosen):
    outcomes = on(3, on_ranks, chosen, out=tmp_path)
    assert [logprobs for logprobs, *_ in outcomes] == [[float(chosen[0])] * 3] * 3
    assert [failure for _, failure, *_ in outcomes] == ["RankFailed", "OSError", "RankFailed"]
    assert [main for _, _, main, _ in outcomes] == [rank == chosen[0] for rank in range(3)]
    assert all(again for *_, again in outcomes)
