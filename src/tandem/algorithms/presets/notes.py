"""Notes on each preset beside its values: paper, use, what to watch, what it is refused with."""

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.parts import part_of


@dataclass(frozen=True)
class Note:
    """The note on one preset."""

    title: str
    """Title of the paper, authors, year; empty where there is none."""

    arxiv: str
    """Its arXiv number; empty where there is none."""

    when: str
    """When to use it, one sentence."""

    watch: Mapping[str, str]
    """Metric → what to do when it looks wrong with this algorithm."""

    refused: tuple[tuple[str, ...], ...] = ()
    """Overrides that this preset is refused with; the message is the one that the check gives."""

    run: tuple[str, ...] = ()
    """Keys that the addition example needs beside `algorithm=NAME`."""


SPREAD = (
    "Above 0.5 half of the batch teaches nothing: easier or harder prompts, more `gconfig.n_samples`, `dynamic_sampling`."
)
CLIP = "0 with one mini-batch a step is right. Above 0.3: lower the learning rate or `actor.mini_batches`."
LENGTH = "Growing without the reward growing: the length bias of this aggregation; compare with `token_mean` or `constant`."
ENTROPY = (
    "Falling towards 0 in the first tenth of the run: raise `clip_high` or the temperature, or lower the learning rate."
)
ALONE = (("gconfig.n_samples=1",),)
GROUPED: Mapping[str, str] = {"groups/without_spread": SPREAD, "clip_fraction": CLIP, "entropy": ENTROPY}

NOTES: Mapping[str, Note] = {
    "ppo": Note(
        "Proximal Policy Optimization Algorithms (Schulman et al., 2017)",
        "1707.06347",
        "Rewards along the way, several turns, or few samples a prompt: the critic tells good tokens from bad ones; "
        "it costs a second model.",
        {
            "value/explained_variance": "Below 0 after the warm-up: the critic is worse than a constant; raise its "
            "learning rate, warm it up longer.",
            "clip_fraction": CLIP,
            "entropy": ENTROPY,
        },
        run=("critic.optimizer.lr=3e-5", "critic.epochs_per_batch=2"),
    ),
    "grpo": Note(
        "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models (Shao et al., 2024)",
        "2402.03300",
        "The place to begin: answers that can be judged as a whole, and enough memory for a group of samples of each "
        "prompt.",
        {**GROUPED, "completion_length/mean": LENGTH},
        ALONE,
    ),
    "dapo": Note(
        "DAPO: An Open-Source LLM Reinforcement Learning System at Scale (Yu et al., 2025)",
        "2503.14476",
        "Long reasoning with right-or-wrong rewards, where GRPO loses entropy or most groups are all right or all wrong.",
        {
            "reward/shaped_mean": "Far below `reward/mean`: most answers meet the length penalty; allow more tokens.",
            "truncated": "Above 0.2: raise `gconfig.max_new_tokens`; the penalty begins a fifth before it.",
            "entropy": "It should stay level or rise a little, which is what the higher upper clip is for. Rising "
            "without end: lower `clip_high`.",
            "clip_fraction": CLIP,
        },
        ALONE,
    ),
    "dr_grpo": Note(
        "Understanding R1-Zero-Like Training: A Critical Perspective (Liu et al., 2025)",
        "2503.20783",
        "GRPO whose wrong answers grow longer and longer: neither the length nor the spread of the group weighs the "
        "gradient.",
        {
            **GROUPED,
            "grad_norm": "Smaller than GRPO's and proportional to the spread of rewards: the learning rate may be higher.",
            "completion_length/mean": "Wrong answers should no longer be longer than right ones.",
        },
        ALONE,
    ),
    "gspo": Note(
        "Group Sequence Policy Optimization (Zheng et al., 2025)",
        "2507.18071",
        "Mixtures of experts and long answers, where ratios of single tokens are noisy; several mini-batches a step.",
        {
            "clip_fraction": "10 to 20 % of the tokens is normal: whole sequences are clipped, at bounds a thousand "
            "times narrower than GRPO's. 0 over many mini-batches: the bounds are too wide.",
            "ratio": "1 to the third digit. Further away: fewer mini-batches.",
            "groups/without_spread": SPREAD,
        },
        (*ALONE, ("async_training=true", "algorithm.correction.level=token")),
    ),
    "luspo": Note(
        "Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length Variation in RLVR (2026)",
        "2602.05261",
        "GSPO whose answers become shorter and shorter: each sequence counts by its length.",
        {
            "completion_length/mean": "It should hold or grow. Growing up to the limit: use `gspo`, or add the "
            "`overlong` shaping.",
            "clip_fraction": "As for gspo; the bounds here are wider.",
            "grad_norm": "It grows with the length of the answers; keep `actor.optimizer.max_grad_norm`.",
        },
        (*ALONE, ("async_training=true", "algorithm.correction.level=token")),
    ),
    "rloo": Note(
        "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs (Ahmadian "
        "et al., 2024)",
        "2402.14740",
        "One optimizer step a batch and rewards of comparable size: unbiased, nothing to tune, no clipping.",
        {
            "groups/without_spread": SPREAD,
            "grad_norm": "Proportional to the rewards and to the length of the answers: scale the reward if it is far "
            "from 1.",
            "entropy": "Nothing bounds the step: falling fast, lower the learning rate or add `algorithm.kl`.",
        },
        ALONE,
    ),
    "reinforce_pp": Note(
        "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization (Hu et al., 2025)",
        "2501.03262",
        "One sample a prompt, so that a batch has many prompts; the reference keeps the policy near its beginning.",
        {
            "kl/reference": "It rises slowly. Rising fast: raise `algorithm.kl.coefficient`.",
            "clip_fraction": CLIP,
            "reward/std": "The baseline is the mean of the batch: prompts of very different difficulty make it noisy; use "
            "`reinforce_pp_baseline`.",
        },
    ),
    "reinforce_pp_baseline": Note(
        "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization (Hu et al., 2025)",
        "2501.03262",
        "Several samples a prompt and prompts of mixed difficulty: the group gives the baseline, the batch gives the scale.",
        {**GROUPED, "reward/std": "Advantages are divided by their spread over the batch: near 0 few samples decide."},
        ALONE,
    ),
    "lite_ppo": Note(
        "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning (Liu et al., 2025)",
        "2508.08221",
        "Base models, small groups: the scale of the batch is steadier than that of a group of four.",
        {**GROUPED, "reward/std": "It divides every advantage: near 0 the few deviating samples get very large ones."},
        ALONE,
    ),
    "remax": Note(
        "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning LLMs (Li et al., 2023)",
        "2310.10505",
        "One or two samples a prompt: the greedy answer is the baseline, at the cost of generating it.",
        {
            "groups/size": "One more than `gconfig.n_samples`: the greedy answer, which is not trained on.",
            "episodes/dropped/<reason>": "A prompt whose greedy answer failed is dropped.",
            "reward/mean": "The sampled answers' mean; the greedy one is usually better, so that advantages are "
            "negative on average.",
        },
    ),
    "opo": Note(
        "On-Policy RL with Optimal Reward Baseline (Hao et al., 2025)",
        "2505.23585",
        "Exactly on-policy training without clipping or KL; answers of very different length.",
        {
            "groups/without_spread": SPREAD,
            "entropy": "It should fall more slowly than GRPO's; falling fast, lower the learning rate.",
            "kl/rollout_proximal": "It must be numeric noise: the baseline is optimal for the policy that sampled, "
            "and for no other.",
        },
        (*ALONE, ("async_training=true",), ("actor.mini_batches=2",), ("rollout.replay.groups=4",)),
    ),
    "cispo": Note(
        "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention (MiniMax, 2025)",
        "2506.13585",
        "Several optimizer steps a batch on long reasoning: rare tokens keep their gradient, with a bounded weight.",
        {
            **GROUPED,
            "clip_fraction": "Clipped tokens still learn, with weight 1 + clip_high: above 0.1, lower the learning rate.",
        },
        ALONE,
    ),
    "sapo": Note(
        "Soft Adaptive Policy Optimization (Gao et al., 2025)",
        "2511.20347",
        "Several optimizer steps a batch where hard clipping loses too many tokens: the weight falls smoothly away "
        "from ρ = 1.",
        {
            "ratio": "Far from 1 the gate closes and the gradient vanishes: lower the learning rate or "
            "`actor.mini_batches`.",
            "groups/without_spread": SPREAD,
            "entropy": ENTROPY,
        },
        (*ALONE, ("async_training=true", "algorithm.correction.weight=mask", "algorithm.correction.high=5")),
    ),
    "gmpo": Note(
        "Geometric-Mean Policy Optimization (Zhao et al., 2025)",
        "2507.20673",
        "GRPO with several optimizer steps a batch and outlying ratios: the geometric mean of a sequence is not moved "
        "by one token.",
        {
            "clip_fraction": "The bounds are wide (e^±0.4) on purpose: above 0.1 the step is too large.",
            "entropy": "It should hold longer than GRPO's.",
            "groups/without_spread": SPREAD,
        },
        (*ALONE, ("async_training=true", "algorithm.correction.level=token")),
    ),
    "m2po": Note(
        "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs? (2025)",
        "2510.01161",
        "Asynchronous training with much staleness: only the few tokens that carry the variance are dropped.",
        {
            "dropped/<rule>": "A few per cent even at large staleness. Above 0.2: lower the staleness.",
            "kl/rollout_proximal": "How far the data is off-policy; the mask bounds its second moment.",
            "staleness/mean": "See how much of the bound is used.",
        },
        (*ALONE, ("async_training=true", "algorithm.correction.weight=mask", "algorithm.correction.high=5")),
    ),
    "cpgd": Note(
        "CPGD: Toward Stable Rule-based Reinforcement Learning for Language Models (Liu et al., 2025)",
        "2505.12504",
        "Runs with a ratio loss that collapse: the log-probability is clipped, the ratio never multiplies the "
        "gradient, and drift is penalised.",
        {**GROUPED, "ratio": "The drift term pulls it back to 1. Far away: raise `drift`."},
        ALONE,
    ),
    "dppo": Note(
        "Rethinking the Trust Region in LLM Reinforcement Learning (Qi et al., 2026)",
        "2602.04879",
        "Large vocabularies and engines that differ from the trainer: tokens are judged by how far probabilities "
        "moved, not by ratio.",
        {
            "dropped/<rule>": "Well below 0.05. More: lower the learning rate or the staleness.",
            "kl/rollout_proximal": "Engine and trainer must agree, because the trust region is around the sampler.",
            "entropy": ENTROPY,
        },
        ALONE,
    ),
    "vespo": Note(
        "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training (2026)",
        "2602.10693",
        "Very stale data: the weight of whole sequences is shaped smoothly, without normalising by length.",
        {
            "ratio": "The mean weight; near 0: sequences are so far off-policy that they no longer count.",
            "kl/rollout_proximal": "It is summed over the sequence in the weight: long answers feel it first.",
            "groups/without_spread": SPREAD,
        },
        (*ALONE, ("async_training=true", "algorithm.correction.weight=mask", "algorithm.correction.high=5")),
    ),
    "max_rl": Note(
        "Maximum Likelihood Reinforcement Learning (Tajwar et al., 2026)",
        "2602.02710",
        "Right-or-wrong rewards on hard prompts: the rarer success is, the more it counts, and pass@k keeps growing.",
        {
            "groups/without_spread": "Groups with no success teach nothing: more samples a prompt is what brings the "
            "likelihood nearer.",
            "grad_norm": "A single success among G samples has an advantage of G − 1: peaks are normal, and clipped.",
            "reward/mean": "Rewards must not be negative: a group whose mean is not positive is skipped.",
        },
        ALONE,
    ),
    "gdpo": Note(
        "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization (2026)",
        "2601.05242",
        "Several rewards of different size and difficulty: each is normalised before they are added, so that none drowns. "
        "Their own proportions vanish with that; `algorithm.advantage.weights` sets others.",
        {
            "rewards/<name>": "Every one should rise. One falls: raise its weight.",
            "groups/without_spread": SPREAD,
            "clip_fraction": CLIP,
        },
        (*ALONE, ("algorithm.shaping=overlong",), ("algorithm.kl.coefficient=0.01", "algorithm.kl.where=reward")),
        ("reward=gsm8k",),
    ),
    "ttrl": Note(
        "TTRL: Test-Time Reinforcement Learning (Zuo et al., 2025)",
        "2504.16084",
        "Questions without answers, on which the model is right more often than wrong in any one way: the majority is "
        "the label.",
        {
            "ttrl/majority_ratio": "Near 1 from the start: nothing left to learn; below 0.1: the vote is noise.",
            "ttrl/label_accuracy": "Where gold is known: how often the majority is right. Falling: the model agrees "
            "on wrong answers.",
            "kl/reference": "It keeps the policy from agreeing on anything at all.",
        },
        (("algorithm.update_samples=100",), ("gconfig.n_samples=1", "algorithm.update_samples=1")),
        ("gconfig.n_samples=16", "algorithm.update_samples=8", "actor.optimizer.lr=3e-5"),
    ),
    "reinforce": Note(
        "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning (Williams, 1992)",
        "",
        "As a baseline to compare with, or where rewards of single tokens exist and are centred by themselves.",
        {
            "reward/mean": "No baseline: every positive reward pushes its answer up; centre rewards with the `bias` "
            "shaping.",
            "grad_norm": "Noisy; larger batches are the only remedy.",
            "entropy": "Nothing bounds the step: falling fast, lower the learning rate.",
        },
    ),
}
"""Preset → note; a test says that every preset has one."""


def needs_of(config: AlgorithmConfig) -> tuple[str, ...]:
    """The needs of an algorithm besides the actor: critic, reference, group, several rewards, greedy answer."""
    advantage = part_of("advantage", config.advantage.name)
    needs = {
        "critic": advantage.needs_critic,
        "reference": config.kl.coefficient > 0,
        "group": advantage.needs_group,
        "several rewards": advantage.needs_named_rewards,
        "greedy answer": advantage.needs_greedy,
    }
    return tuple(name for name, needed in needs.items() if needed)
