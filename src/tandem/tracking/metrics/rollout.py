"""What the samples of a batch are: rewards, groups, lengths, and how old their tokens are."""

from tandem.tracking.metrics.metric import Metric, Section

REWARD: Section = {
    "reward/mean": Metric(
        "reward",
        "Mean over the samples of the batch, before shaping.",
        "It should rise, with noise. Flat from the start: read `trajectories/`; the prompt may be too hard (see "
        "`groups/without_spread`), the answer may not be found in the text, or `actor.optimizer.lr` is too low. "
        "Rising, then falling: lower the learning rate, add KL.",
    ),
    "reward/std": Metric(
        "reward",
        "Standard deviation over all samples of the batch.",
        "Near 0: all samples are judged alike and there is little to learn from; use a reward with more steps, or"
        " other prompts.",
    ),
    "reward/shaped_mean": Metric(
        "reward",
        "Mean after `algorithm.shaping`; absent without shaping.",
        "Far below `reward/mean`: the penalties outweigh the reward.",
    ),
    "reward/<source>": Metric(
        "reward",
        "Mean reward of one data set of a mixture.",
        "One source falls while the others rise: give it more weight in `train_dataset.sources`.",
    ),
    "rewards/<name>": Metric(
        "reward",
        "Mean of one named part of the reward.",
        "Only the easy part (format, length) rises: it is being exploited; lower its weight.",
    ),
    "accuracy": Metric(
        "share",
        "Mean accuracy of the samples, where right and wrong are defined; of pairs, judged completions and steps: the "
        "share that is ranked or judged right.",
        "Reward rises and accuracy does not: the reward is rewarding something else.",
    ),
    "extracted": Metric(
        "share",
        "Samples in which the reward found an answer to judge, where it looks for one.",
        "Below 0.9: the model does not write its answer as the reward expects it; say in the prompt how, or see "
        "`truncated`.",
    ),
    "groups/without_spread": Metric(
        "share",
        "Groups whose samples all have the same reward; their advantages are 0 and they teach nothing.",
        "Above 0.5: prompts are too hard or too easy. Choose others, raise `gconfig.n_samples` or the "
        "temperature, or use `algorithm.filter=dynamic_sampling`. At 1 the step changes nothing and says so.",
    ),
}

GROUPS: Section = {
    "ttrl/majority_ratio": Metric(
        "share",
        "Samples of a group that gave its majority's answer, of all of them (`algorithm.labels=majority`).",
        "Near 1 from the start: the model is sure of everything and there is nothing to learn. Below 0.1: the vote is "
        "noise; take easier prompts.",
    ),
    "ttrl/label_accuracy": Metric(
        "share",
        "Groups whose majority is the expected answer, where that is known. It is measured, never trained on.",
        "Falling while `reward/mean` rises: the model agrees on wrong answers; stop earlier, raise "
        "`algorithm.kl.coefficient`.",
    ),
    "ttrl/reward_accuracy": Metric(
        "share",
        "Samples whose reward by the vote is the one that the expected answer would give, where that is known.",
        "High at a low label accuracy is normal: wrong answers differ from each other. Below 0.5: the vote misleads.",
    ),
    "ttrl/pass@<k>": Metric(
        "share",
        "Groups with the expected answer among their k samples, where it is known.",
        "What the vote could reach at best. Falling: the samples become too alike; raise the temperature.",
    ),
    "ttrl/undecided": Metric(
        "comparisons",
        "Comparisons of two answers in a group that failed (time-out); the answers were taken for different.",
        "Often above 0: raise `reward_timeout_s`.",
    ),
    "replay/groups": Metric(
        "groups",
        "Groups of earlier batches in this batch (`rollout.replay.groups`).",
        "Below `rollout.replay.groups` after the first steps: `rollout.replay.max_age` or `max_uses` leaves too few.",
    ),
    "replay/reused": Metric("groups", "Replays since the start.", "It grows by `rollout.replay.groups` a step."),
    "replay/age_max": Metric(
        "versions",
        "Age of the oldest trained token among the replayed groups.",
        "It is never above `rollout.replay.max_age`. `correction/ess` below 0.5: lower that.",
    ),
    "replay/kept": Metric(
        "groups", "Groups that wait to be replayed.", "They are held in memory; it stays near batch size × `max_age`."
    ),
    "curriculum/measured": Metric(
        "share",
        "Rows of the data set that were tried at least once (`curriculum.round_rows`).",
        "It rises to 1; until then untried rows come first.",
    ),
    "curriculum/success": Metric(
        "share",
        "Mean success rate of the measured rows, as the curriculum remembers it.",
        "Near 1 or 0: the data set is too easy or too hard for any choice among its rows.",
    ),
    "curriculum/round": Metric("rounds", "Rounds of the curriculum that are over.", "—"),
}

COMPLETIONS: Section = {
    "completion_length/mean": Metric(
        "tokens",
        "Mean trained tokens of a sample.",
        "Growing up to `gconfig.max_new_tokens`: the model does not stop; see `truncated`. Collapsing: the reward"
        " favours short answers.",
    ),
    "completion_length/max": Metric(
        "tokens",
        "The longest sample of the batch.",
        "Always at `gconfig.max_new_tokens`: see `truncated`.",
    ),
    "truncated": Metric(
        "share",
        "Samples that were cut by `gconfig.max_new_tokens` or the context.",
        "Above 0.2: allow more tokens, or use the `overlong` shaping.",
    ),
    "groups/size": Metric(
        "samples",
        "Mean samples of a group.",
        "Below `gconfig.n_samples`: samples failed; see `episodes/dropped/<reason>` and the log.",
    ),
}

STALENESS: Section = {
    "staleness/mean": Metric(
        "versions",
        "Mean over the trained tokens of the trainer's version minus the version that made the token.",
        "0 when synchronous. When asynchronous it should be below `rollout.max_head_offpolicyness`; exactly 0 "
        "means that nothing overlaps.",
    ),
    "staleness/max": Metric(
        "versions",
        "The largest of them.",
        "It is never above `rollout.max_head_offpolicyness`; if it is, please report it, with `tandem doctor`.",
    ),
    "expired": Metric(
        "share",
        "Tokens that were too old and left the loss (`rollout.on_expiry=mask`).",
        "Above 0.1: generation wastes work. Shorten the answers, use `on_expiry=wait`, or raise `max_head_offpolicyness`.",
    ),
    "gap/mean": Metric(
        "nats",
        "Mean absolute difference between the engine's and the trainer's log-probability of the same token under "
        "the same weights. Absent where the batch has no token of the current weights (asynchronous training).",
        "About 0.01 in bfloat16, 0.0001 in float32. Larger: set `rollout.dtype=float32` to see whether it is "
        "numeric; if it stays, please report it.",
    ),
    "gap/max": Metric(
        "nats",
        "The largest difference in the batch.",
        "Peaks up to about 1 are normal in bfloat16 for improbable tokens.",
    ),
}
