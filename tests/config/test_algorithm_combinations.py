"""Parts of an algorithm that do not fit together are refused with the reason and the remedy."""

import pytest

from tandem.config.algorithm import PRESETS
from tests.config.loading import assert_refused, load

PAGE = [
    "ppo",
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "luspo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "lite_ppo",
    "remax",
    "opo",
    "cispo",
    "sapo",
    "gmpo",
    "m2po",
    "cpgd",
    "dppo",
    "vespo",
    "max_rl",
    "gdpo",
    "ttrl",
]


MASKED = ["algorithm.correction.weight=mask", "algorithm.correction.high=5"]
TRUNCATED = "algorithm.correction.weight=truncate"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["algorithm=opo", "async_training=true"],
            ["algorithm.advantage=opo contradicts async_training=true", "set async_training=false"],
        ),
        (["algorithm=opo", "actor.mini_batches=2"], ["one optimizer step for each batch", "got 2 steps"]),
        (["algorithm=opo", "actor.epochs_per_batch=3"], ["set actor.mini_batches=1 and actor.epochs_per_batch=1"]),
        (["algorithm=opo", "rollout.replay.groups=2"], ["contradicts rollout.replay.groups=2"]),
        (["algorithm=sapo", *MASKED], ["contradicts algorithm.correction.weight=mask, because its gate", "weight=none"]),
        (["algorithm=m2po", TRUNCATED], ["its ratio is already relative to the policy that sampled", "weight=none"]),
        (["algorithm=vespo", TRUNCATED], ["algorithm.policy_loss=vespo contradicts"]),
        (["algorithm=gspo", TRUNCATED], ["contradicts algorithm.correction.level=token", "level=sequence"]),
        (["algorithm=luspo", TRUNCATED], ["algorithm.correction.level=sequence"]),
        (["algorithm=gmpo", TRUNCATED], ["one for the whole trajectory"]),
        (
            ["algorithm=gspo", "async_training=true", "algorithm.correction.level=token"],
            ["contradicts algorithm.correction.level=token"],
        ),
        (["algorithm=gdpo", "algorithm.shaping=[overlong]"], ["shaping[0]=overlong", "each named reward by itself"]),
        (["algorithm=gdpo", "algorithm.kl={coefficient: 0.1, where: reward}"], ["set algorithm.kl.where=loss"]),
        (["algorithm=gdpo", "algorithm.labels=majority"], ["contradicts algorithm.labels=majority", "one reward without a"]),
        (["algorithm=gdpo", "reward='math + 0.2*format'"], ["contradicts the factors of reward=", "advantage.weights"]),
        (["algorithm=gdpo", "algorithm.advantage.weights='right=x'"], ["must be NAME=NUMBER", "got 'right=x'"]),
        (["algorithm=gdpo", "algorithm.advantage.weights=right"], ["must be NAME=NUMBER", "got 'right'"]),
        (
            ["algorithm=gdpo", "reward='math + format'", "algorithm.advantage.weights='maths=1'"],
            ["names 'maths', and the rewards are format, math"],
        ),
        (
            ["algorithm.kl={coefficient: 0.1, estimator: k1}"],
            ["gradient of zero on average", "algorithm.kl.importance=true"],
        ),
        (["algorithm.kl.importance=true"], ["not used because algorithm.kl.coefficient is 0"]),
        (["algorithm.kl={coefficient: 0.1, where: reward, importance: true}"], ["which has no gradient"]),
        (["algorithm.kl={coefficient: 0.1, where: reward, estimator: k2}"], ["the reward takes k1"]),
        (["algorithm.kl.target=6"], ["0 cannot grow", "for example 0.01"]),
        (["algorithm.kl.horizon=5"], ["algorithm.kl.target is null"]),
        (["algorithm.kl={coefficient: 1, target: 0}"], ["algorithm.kl.target must be a number, above 0, got 0"]),
        (["algorithm=gspo", "algorithm.policy_loss.dual_clip=3"], ["not used by gspo; it has clip_low, clip_high"]),
        (["algorithm=dppo", "algorithm.policy_loss.divergence=js"], ["must be one of tv, kl, got js"]),
        (["algorithm=cpgd", "algorithm.advantage.weighting=1"], ["must be one of std, groups, none, got 1"]),
        (["algorithm=ppo", "algorithm.advantage.whitened=2"], ["must be true or false, got 2"]),
        (["algorithm.whitening=groups"], ["algorithm.whitening", "none, group, batch"]),
        (
            ["algorithm.whitening=group", "gconfig.n_samples=1", "algorithm=ppo"],
            ["n_samples must be at least 2 for algorithm.w"],
        ),
        (
            ["algorithm.whitening=group", "algorithm.update_samples=1", "algorithm=ppo"],
            ["update_samples must be at least 2"],
        ),
        (
            ["algorithm=ppo", "algorithm.whitening=batch"],
            ["changes nothing with algorithm.advantage=gae", "whitening=group"],
        ),
        (["algorithm=reinforce_pp", "algorithm.whitening=batch"], ["changes nothing with algorithm.advantage=reinforce_pp"]),
        (
            ["algorithm=ppo", "algorithm.whitening=group", "algorithm.advantage.whitened=false"],
            ["algorithm.advantage.whitened=false changes nothing"],
        ),
        (["actor.group_adv_norm=true"], ["use algorithm.whitening=group; see docs/coming_from.md"]),
        (["algorithm.token_filter=entropy"], ["algorithm.token_filter=entropy is not known", "top_entropy"]),
        (["algorithm.token_filter={name: top_entropy, share: 0}"], ["share must be a number, above 0, at most 1, got 0"]),
        (["algorithm.correction.reject={name: product, low: 2}"], ["reject.low must be a number, at least 0, at most 1"]),
        (["algorithm.policy_loss={name: ppo_clip, two_sided: 1}"], ["two_sided must be a number, above 1, or 0, got 1"]),
    ],
)
def test_what_makes_no_sense_is_refused(overrides, words):
    assert_refused(overrides, words)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm=gspo", "algorithm.policy_loss.clip_high=5e-4"],
        ["algorithm=gspo", TRUNCATED, "algorithm.correction.level=sequence"],
        ["algorithm=sapo", "async_training=true"],
        ["algorithm=m2po", "async_training=true"],
        ["algorithm=m2po", "algorithm.correction.reject=negative_drift"],
        ["algorithm=gdpo", "algorithm.shaping=[mask_truncated]", "algorithm.advantage.weights='right=1,short=0.5'"],
        ["algorithm=gdpo", "reward='math + format(knob=1)'", "algorithm.advantage.weights='math=1, format=.5'"],
        ["algorithm=ttrl", "algorithm.kl.where=reward"],
        ["algorithm.kl={coefficient: 0.1, estimator: k1, importance: true}"],
        ["algorithm.kl={coefficient: 0.1, target: 6, horizon: 5000}"],
        ["algorithm=cpgd", "algorithm.advantage.weighting=groups"],
        ["algorithm=ppo", "algorithm.whitening=group"],
        ["algorithm.whitening=batch"],
        ["algorithm.policy_loss={name: ppo_clip, two_sided: 4, dual_clip: 3}"],
    ],
)
def test_what_makes_sense_is_taken(overrides):
    assert load(*overrides) != load()


def test_all_presets_of_the_page_are_there():
    assert set(PRESETS) == {*PAGE, "reinforce"}
