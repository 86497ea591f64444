"""Terms of a reward are normalised over the whole batch: two ranks do what one does."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForTokenClassification

from tandem.config.arithmetic import total_steps
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.flow.opening import open_rows, open_session
from tandem.flow.process import Process, TeamEngine
from tandem.models.tokenizer import load_tokenizer
from tests.ranks import alone_and_on_two
from tests.tiny import tiny_config, tiny_model_folder
from tests.trainers.colocated import judge_folder

MINE = Path(__file__).parents[1] / "trainers" / "small_rewards.py"


def collected(out, ranks):
    """The rewards of two batches, and the means that stay."""
    judge = f"model(path={out / 'judge'}, normalise=running, clip=[-1, 1], gate='even > 0.4')"
    items = [f"run.root={out}", f"actor.path={out / 'tiny-llama-0'}", f"actor.backend=fsdp:d{ranks}", "actor.dtype=float32"]
    items += ["rollout.dtype=float32", "rollout.batch_size=4", "gconfig.n_samples=4", "gconfig.max_new_tokens=8"]
    items += ["rollout.engine.kv_cache_gib=0.05", "train_dataset.path=addition", "evaluate.every_steps=null"]
    items += ["total_train_steps=2", "threads=1", "deterministic=true"]
    steps = f"model(path={out / 'steps'}, name=steps, steps='e', aggregate=none, normalise=running)"
    items += ["algorithm=ppo", f"reward={MINE}:even + 0.5*{judge} + {MINE}:points(normalise=group) + {steps}"]
    config = load_config(TrainConfig, None, items).config
    process, rows = Process("cpu", 1, dist.get_rank() if ranks > 1 else 0, ranks), open_rows(config)
    batches = []
    with open_session(config, process, rows, total_steps(config, len(rows.train)), "run") as session:
        for _ in range(2):
            batches.append(session.rollout.prepare_batch(session.loader, session.workflow))
            session.rollout.end_step()
        names = ("reward", "rewards/even", "rewards/model", "rewards/points", "token_rewards", "loss_mask")
        return [{name: batch[name] for name in names} for batch in batches], session.episodes.reward.state_dict()


def judged(out, ranks):
    """The rewards of a batch that judges of the run wrote, and what they wrote."""
    items = [f"run.root={out}", f"actor.path={out / 'tiny-llama-0'}", f"actor.backend=fsdp:d{ranks}", "actor.dtype=float32"]
    items += ["rollout.dtype=float32", "rollout.batch_size=4", "gconfig.n_samples=4", "gconfig.max_new_tokens=8"]
    items += ["rollout.engine.kv_cache_gib=0.05", "train_dataset.path=addition", "evaluate.every_steps=null"]
    items += ["total_train_steps=1", "threads=1", "deterministic=true"]
    alone = f"judge(model={out / 'alone' / 'tiny-llama-5'}, max_tokens=16, gate='even > 0.5')"
    pairs = f"compare(model={out / 'pairs' / 'tiny-llama-5'}, max_tokens=16, gate='even > 0.6')"
    config = load_config(TrainConfig, None, [*items, f"reward={MINE}:even + {alone} + {pairs}"]).config
    process, rows = Process("cpu", 1, dist.get_rank() if ranks > 1 else 0, ranks), open_rows(config)
    with open_session(config, process, rows, total_steps(config, len(rows.train)), "run") as session:
        batch = session.rollout.prepare_batch(session.loader, session.workflow)
        asked = [session.scorer.roles[name].written.client.issued for name in ("judge", "compare")]
        return {name: batch[name] for name in ("reward", "rewards/even", "rewards/judge", "rewards/compare")}, asked


def awaited(out, ranks):
    """The rewards of a batch whose episodes asked a reward model, and whether this rank has one of its own."""
    items = [f"run.root={out}", f"actor.path={out / 'tiny-llama-0'}", f"actor.backend=fsdp:d{ranks}", "actor.dtype=float32"]
    items += ["rollout.dtype=float32", "rollout.batch_size=4", "gconfig.n_samples=4", "gconfig.max_new_tokens=8"]
    items += ["rollout.engine.kv_cache_gib=0.05", "train_dataset.path=addition", "evaluate.every_steps=null"]
    items += ["total_train_steps=1", "threads=1", "deterministic=true", "workflow=multi_turn", "workflow_args.max_turns=2"]
    config = load_config(TrainConfig, None, [*items, f"reward={MINE}:even + 0.5*model(path={out / 'judge'})"]).config
    process, rows = Process("cpu", 1, dist.get_rank() if ranks > 1 else 0, ranks), open_rows(config)
    with open_session(config, process, rows, total_steps(config, len(rows.train)), "run") as session:
        batch = session.rollout.prepare_batch(session.loader, session.workflow)
        own = not isinstance(session.scorer.roles["model"].engine, TeamEngine)
        return {name: batch[name] for name in ("reward", "rewards/even", "rewards/model")}, own


@pytest.mark.slow
def test_episodes_of_two_ranks_await_their_own_copy_of_a_model_and_all_is_as_on_one(tmp_path):
    folder = tiny_model_folder(tmp_path)
    torch.manual_seed(3)
    judge = SpreadEngine(TrainEngineConfig(path=str(folder), dtype="float32"), 1, head="scalar")
    judge.load_weights((name, torch.randn_like(x) if x.shape[0] == 1 else x) for name, x in judge.weights())
    judge.save(tmp_path / "judge")
    load_tokenizer(folder).save_pretrained(tmp_path / "judge")
    (alone, one), ((first, own), (second, other)) = alone_and_on_two(awaited, tmp_path, out=tmp_path)
    assert one and own and other and len(alone["rewards/model"].unique()) > 8
    assert all(torch.equal(x, first[name]) and torch.equal(x, second[name]) for name, x in alone.items())


@pytest.mark.slow
def test_each_of_two_ranks_judges_its_share_and_all_is_as_on_one(tmp_path):
    tiny_model_folder(tmp_path)
    judge_folder(tmp_path / "alone", says="Score: 7")
    judge_folder(tmp_path / "pairs", says="Verdict: A")
    (alone, asked), ((first, of_first), (second, of_second)) = alone_and_on_two(judged, tmp_path, out=tmp_path)
    assert all(one and two and one + two == all_ for one, two, all_ in zip(of_first, of_second, asked, strict=True))
    for name, values in alone.items():
        assert torch.equal(values, first[name]) and torch.equal(first[name], second[name])
        assert len(values.unique()) > 1  # the gates are open for some samples only, so a mixed-up place would show
    assert alone["rewards/judge"].max() == pytest.approx(6 / 9) and alone["rewards/compare"].max() == 0.5


@pytest.mark.slow
@pytest.mark.invariant
def test_two_ranks_normalise_over_the_same_batch_as_one(tmp_path):
    folder = tiny_model_folder(tmp_path)
    torch.manual_seed(3)
    judge = SpreadEngine(TrainEngineConfig(path=str(folder), dtype="float32"), 1, head="scalar")
    judge.load_weights((name, torch.randn_like(x) if x.shape[0] == 1 else x) for name, x in judge.weights())
    judge.save(tmp_path / "judge")
    load_tokenizer(folder).save_pretrained(tmp_path / "judge")
    steps = AutoModelForTokenClassification.from_config(tiny_config(pad_token_id=0, num_labels=2))
    torch.nn.init.normal_(steps.score.bias)
    steps.save_pretrained(tmp_path / "steps")
    load_tokenizer(folder).save_pretrained(tmp_path / "steps")
    (alone, means), ((first, on_two), (second, _)) = alone_and_on_two(collected, tmp_path, out=tmp_path)
    count, mean, squares = means["spreads"]["model"]
    assert count < 32 and on_two["spreads"]["model"] == [count, pytest.approx(mean), pytest.approx(squares)]
    for one, two, three in zip(alone, first, second, strict=True):
        assert one["token_rewards"].count_nonzero() > 16 and not one["token_rewards"][~one["loss_mask"]].any()
        for name, values in one.items():
            assert torch.allclose(values, two[name], rtol=1e-4, atol=1e-5) and torch.equal(two[name], three[name])
