"""Every metric: its unit, what it is, and what to do when it looks wrong. docs/metrics.md is made from this table.

A name may hold one part in angle brackets, which stands for any text: ``episodes/dropped/<reason>``.
"""

import re
from typing import NamedTuple


class Metric(NamedTuple):
    """One row of the table."""

    unit: str
    meaning: str
    advice: str


SECTIONS: dict[str, dict[str, Metric]] = {
    "Reward": {
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
    },
    "Optimization": {
        "loss": Metric(
            "—",
            "What was minimised. In reinforcement learning it hovers around 0 and its height says nothing; in SFT it "
            "is the mean negative log-probability.",
            "In reinforcement learning look at the reward instead. In SFT it should fall; if it rises, lower the "
            "learning rate.",
        ),
        "grad_norm": Metric(
            "—",
            "Global norm of the gradient before clipping at `actor.optimizer.max_grad_norm`.",
            "Single peaks are clipped and harmless. Growing over many steps: lower the learning rate. Exactly 0: no "
            "group had spread.",
        ),
        "step_without_signal": Metric(
            "0 or 1",
            "1 when no sample had an advantage and there is neither KL nor entropy in the loss: weights stay as they are.",
            "Often 1: see `groups/without_spread`.",
        ),
        "lr": Metric(
            "—",
            "Learning rate of the last optimizer step.",
            "Not what was expected: see `actor.optimizer.schedule` and `warmup_steps`.",
        ),
        "skipped": Metric(
            "steps",
            "Optimizer steps not taken because loss or gradient was not finite.",
            "Above 0 now and then is survivable. Several in a row end the run: lower the learning rate, or use "
            "`actor.dtype=float32`.",
        ),
        "entropy": Metric(
            "nats",
            "Mean entropy of the policy at the trained tokens.",
            "Falling to 0 early: exploration has ended; raise `algorithm.entropy_coefficient`, `clip_high` or the "
            "temperature, lower the learning rate. Rising without end: the policy is dissolving; lower the learning "
            "rate.",
        ),
        "clip_fraction": Metric(
            "share",
            "Trained tokens whose ratio left the clipping range.",
            "0 with one mini-batch a step is right (every ratio is 1). Above 0.3: the steps are too large; lower the "
            "learning rate or `actor.mini_batches`.",
        ),
        "ratio": Metric(
            "—",
            "Mean of exp(policy − proximal) over the trained tokens.",
            "It stays near 1; far from it the policy moves too far within one batch.",
        ),
        "kl/rollout_proximal": Metric(
            "nats",
            "How far the trainer's policy is from the one that sampled (k3 estimate, mean over trained tokens).",
            "At staleness 0 it is numeric noise, below 0.01. Larger: the engine and the trainer disagree (see "
            "`gap/mean`). Growing with staleness: lower `rollout.max_head_offpolicyness` or use "
            "`algorithm.correction`.",
        ),
        "kl/reference": Metric(
            "nats",
            "How far the policy is from the reference, where one is used.",
            "It rises slowly. Rising fast: raise `algorithm.kl.coefficient` or lower the learning rate.",
        ),
        "kl/sample": Metric(
            "nats",
            "Distance to the reference summed over a sample's trained tokens (k1 estimate, mean over the samples), where "
            "`algorithm.kl.target` is set.",
            "It settles near the target. Far above for long: begin with a larger `algorithm.kl.coefficient`, or lower "
            "`algorithm.kl.horizon`.",
        ),
        "kl/coefficient": Metric(
            "—",
            "Weight of the KL penalty in this step, where `algorithm.kl.target` moves it.",
            "Growing without end: the target is smaller than what the learning rate allows.",
        ),
        "correction/mean": Metric(
            "—",
            "Mean weight of the behaviour correction; without one, mean of w = exp(proximal − rollout), as it would be.",
            "Near 1. Far below: many tokens are off-policy; lower the staleness.",
        ),
        "correction/max": Metric(
            "—",
            "The largest exp(proximal − rollout), before it is capped.",
            "Single large ones are what the cap is for. Large at staleness 0: see `gap/max`.",
        ),
        "correction/dropped": Metric(
            "share",
            "Trained tokens that the correction gave weight 0.",
            "Above 0.2: work is thrown away; lower the staleness, or raise `algorithm.correction.high`.",
        ),
        "correction/ess": Metric(
            "share",
            "Effective sample size of those weights, (Σw)² / (n·Σw²).",
            "1 is ideal. Below 0.5: a few tokens decide the step; lower the staleness.",
        ),
        "dropped/shaping": Metric(
            "share",
            "Trained tokens of samples that `algorithm.shaping` takes out of the loss, such as truncated ones.",
            "Above 0.3: allow longer answers.",
        ),
        "dropped/token_filter": Metric(
            "share",
            "Trained tokens that `algorithm.token_filter` takes out of the loss.",
            "It is what was asked for: 0.8 with `top_entropy` at its default.",
        ),
        "dropped/<rule>": Metric(
            "share",
            "Trained tokens that a rule gave weight 0, of those left: the rule of `algorithm.correction.reject`, or "
            "the policy loss itself (`m2po`, `dppo`, `clip_cov`). Expired ones are in `expired`.",
            "Above 0.2: work is thrown away; lower the staleness or the learning rate, or widen the rule's bounds.",
        ),
    },
    "Critic": {
        "value/loss": Metric(
            "reward²",
            "Half the squared distance of values and returns, mean over the trained tokens.",
            "It falls while the critic learns, and rises for a while when the policy finds something new.",
        ),
        "value/explained_variance": Metric(
            "share",
            "1 − Var(return − value)/Var(return) over the trained tokens, by the values of before the update; absent where "
            "all returns are equal. With `algorithm.advantage.lam` below 1 returns contain values, which flatters it.",
            "0: as good as a constant. Below 0 after the warm-up: raise `critic.optimizer.lr` or `critic.warmup_steps`. It "
            "falls again when almost all answers are right: little variance is left to explain.",
        ),
        "value/clip_fraction": Metric(
            "share",
            "Trained tokens whose value moved past `critic.value_clip` within the batch.",
            "0 with one optimizer step a batch is right. Above 0.3: raise `critic.value_clip`, which holds the critic back.",
        ),
        "value/mean": Metric(
            "reward",
            "Mean value of the trained tokens, before the update.",
            "It follows `returns/mean`. A lasting gap: the critic learns too slowly.",
        ),
        "returns/mean": Metric(
            "reward",
            "Mean return of the trained tokens, which the values learn.",
            "As `reward/mean`, weighted by the length of the samples.",
        ),
        "value/grad_norm": Metric(
            "—",
            "Global norm of the critic's gradient before clipping at `critic.optimizer.max_grad_norm`.",
            "As `grad_norm`. Large in the first steps is normal: the head begins at 0.",
        ),
        "value/lr": Metric("—", "Learning rate of the critic's last optimizer step.", "See `critic.optimizer`."),
        "value/skipped": Metric(
            "steps",
            "Optimizer steps of the critic not taken because loss or gradient was not finite.",
            "As `skipped`.",
        ),
        "actor/rests": Metric(
            "0 or 1",
            "1 in the steps of `critic.warmup_steps`, in which only the critic learns.",
            "Still 1 where it should not be: lower `critic.warmup_steps`.",
        ),
    },
    "Groups": {
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
    },
    "Preferences": {
        "margin": Metric(
            "—",
            "Mean difference of the scores of the better and of the worse side. The score is β times the log-ratio to the "
            "reference (`dpo`, `kto`; `ipo`: its mean a token), β times the mean log-probability (`simpo`), the log odds "
            "(`orpo`), or the reward model's.",
            "It should rise, on `valid_dataset` too (`eval/margin`). Rising in training alone: over-fitting; stop earlier.",
        ),
        "score/chosen": Metric(
            "—",
            "Mean score of the better sides (or desirable completions).",
            "Falling together with `score/rejected`, as with `dpo` it often does: the policy moves away from both. Raise "
            "`loss.beta`, lower the learning rate, or take `orpo`, which holds the better side's likelihood up.",
        ),
        "score/rejected": Metric("—", "Mean score of the worse sides (or undesirable completions).", "See `score/chosen`."),
        "baseline": Metric(
            "nats",
            "KTO's z: mean log-ratio to the reference of completions behind other rows' prompts, at least 0.",
            "Large: the policy has moved far from the reference whatever the prompt; lower the learning rate. Noisy: raise "
            "`batch_size`.",
        ),
        "kl/teacher": Metric(
            "nats",
            "Distillation: mean of the student's minus the teacher's log-probability of the student's tokens, an estimate "
            "of KL(student ‖ teacher) a token.",
            "It should fall. Flat: raise `actor.optimizer.lr`.",
        ),
        "kl/teacher_k3": Metric(
            "nats", "The same by the k3 estimate: never negative, of less variance.", "As `kl/teacher`."
        ),
    },
    "Completions": {
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
    },
    "Staleness and the gap": {
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
            "Above 0.1: generation wastes work. Shorten the answers, use `on_expiry=wait`, or raise "
            "`max_head_offpolicyness`.",
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
        "gap/verified": Metric(
            "share",
            "Trained tokens of the batch that were scored again under the weights of their versions, where this step was "
            "verified (`rollout.verify`).",
            "0: no version that the batch names was kept. For more, raise `rollout.verify.trajectories`.",
        ),
        "gap/unknown": Metric(
            "share",
            "Tokens chosen for it that could not be verified: their version is not kept (expired ones, replay), or "
            "keys and values were kept over an update.",
            "Large in asynchronous training: see `expired`.",
        ),
        "gap/numeric": Metric(
            "nats",
            "Of the verified tokens, mean absolute difference between the engine's log-probability and the trainer's under "
            "the same version: what is left when age and tokens are right.",
            "As `gap/mean`. Above `rollout.verify.tolerance` the run ends with the likely cause.",
        ),
        "gap/stale": Metric(
            "nats",
            "Of the verified tokens, mean absolute difference between the trainer's log-probability under their version and "
            "under the newest: what their age does.",
            "0 when synchronous. Growing: the steps are large for this staleness; lower the learning rate or "
            "`rollout.max_head_offpolicyness`.",
        ),
        "gap/tokenisation": Metric(
            "nats",
            "Of the verified tokens, the part of the difference that goes away when the prompt is tokenised otherwise.",
            "Always 0 where servers take token ids. Above: a server reads text and cuts it into other tokens.",
        ),
        "gap/missing_update": Metric(
            "share",
            "How much of the last update before a token's version the engine seems to lack (regression over the verified "
            "tokens): 0 none, 1 all of it. Sees also what is smaller than numeric noise.",
            "Near 0. Noise where updates are tiny; lastingly near 1 or above 0.5 for sure ends the run.",
        ),
    },
    "Time": {
        "time/step_s": Metric(
            "s",
            "The whole step.",
            "See which of its parts grew.",
        ),
        "time/generate_s": Metric(
            "s",
            "From asking for a batch to having it: generating when synchronous, waiting when asynchronous.",
            "Most of the step when synchronous: see `tokens_per_s/generate`, or train asynchronously.",
        ),
        "time/train_s": Metric(
            "s",
            "Log-probabilities, advantages and optimizer steps.",
            "Large: raise `actor.max_tokens_per_micro_batch` while memory allows.",
        ),
        "time/update_weights_s": Metric(
            "s",
            "Publishing the new weights to the inference engine.",
            "More than a tenth of the step: the machine is short of memory bandwidth.",
        ),
        "time/evaluate_s": Metric(
            "s",
            "Evaluation, where this step had one.",
            "Large: lower `evaluate.max_rows` or evaluate less often.",
        ),
        "time/verify_s": Metric(
            "s",
            "Scoring trajectories again as a proof of delivery, where this step did.",
            "Large: lower `rollout.verify.trajectories`, or raise `rollout.verify.every_steps`.",
        ),
        "time/save_s": Metric(
            "s",
            "Saving, where this step saved.",
            "Large: save less often, or on a faster disk.",
        ),
        "time/overlap": Metric(
            "share",
            "Part of the training time during which the engine was generating.",
            "0 when synchronous. Below 0.3 when asynchronous: generation is not the bottleneck, or "
            "`rollout.max_head_offpolicyness` is too small.",
        ),
        "time/prepare_s": Metric(
            "s",
            "Bringing the new weights to the engine and verifying their digests, while it generates.",
            "Large: another program takes the cores, or memory is short.",
        ),
        "time/pause_s": Metric(
            "s",
            "How long generation stood still for new weights.",
            "See `time/recompute_s`, which is not part of it.",
        ),
        "time/recompute_s": Metric(
            "s",
            "Recomputing keys and values of running requests under new weights.",
            "Large: `rollout.engine.keep_kv_on_update=true` spares it; watch the gap then.",
        ),
        "tokens_per_s/generate": Metric(
            "tokens/s",
            "Generated tokens per second of generation.",
            "Low: raise `rollout.batch_size` or `gconfig.n_samples` (more sequences decoded together), check "
            "`threads` and `tandem doctor` for bfloat16.",
        ),
        "tokens_per_s/train": Metric(
            "tokens/s",
            "Prompt and completion tokens per second of training.",
            "Low: the same; and `gradient_checkpointing` costs a third.",
        ),
    },
    "Episodes and resources": {
        "episodes/trained": Metric(
            "episodes",
            "Prompts trained on since the start.",
            "It grows by `rollout.batch_size` a step.",
        ),
        "episodes/dropped/<reason>": Metric(
            "episodes",
            "Prompts dropped since the start, by reason, such as `prompt_too_long`, `reward_timeout`, `deadline`, "
            "`filter/<reason>`.",
            "Read the first such warning in `log.txt`: it has the cause. Too many in a row end the run "
            "(`rollout.max_data_failures`).",
        ),
        "rows/dropped/<reason>": Metric(
            "rows",
            "SFT, preferences, reward models: rows left out since the start, by reason: `too_long`, `prompt_too_long`, "
            "`empty_completion`, `equal_sides`, `no_answer`, `template_rewrites`, `template_refuses`.",
            "Many: raise `max_length`, or look at the rows.",
        ),
        "episodes/running": Metric(
            "episodes",
            "Under way when the batch was taken.",
            "0 in asynchronous training: nothing is generated during training.",
        ),
        "episodes/waiting": Metric(
            "episodes",
            "Finished and not yet consumed.",
            "Large: training is the bottleneck.",
        ),
        "memory/kept_versions_gib": Metric(
            "GiB",
            "Earlier versions of the weights, kept to score again what they made; 0 where they lie on a disk.",
            "At most max(1, η) times the weights, around verified steps. Too much: `rollout.weights.channel=disk`, or "
            "`rollout.verify.every_steps=null`.",
        ),
        "memory/peak_gib": Metric(
            "GiB",
            "Sum of the largest resident sizes of this process and its children; shared pages count in each, so it is"
            " an upper bound.",
            "Near the machine's memory: lower `actor.max_tokens_per_micro_batch`, `rollout.engine.kv_cache_gib` or "
            "`rollout.engine.max_running`.",
        ),
    },
    "Fleet": {
        "fleet/servers": Metric(
            "servers",
            "Those that the fleet knows now, whatever their state; `fleet.jsonl` in the run folder says more. Only where "
            "`rollout.backend` is a fleet.",
            "Fewer than were started: some were retired, see `fleet.jsonl`.",
        ),
        "fleet/healthy": Metric(
            "servers",
            "Those that are given requests: current weights, and a token not long ago.",
            "Below `fleet/servers` for several steps: `tandem fleet list RUN` says why.",
        ),
        "fleet/fenced": Metric(
            "count",
            "Servers given up since the start: their requests moved, and late answers of theirs are thrown away.",
            "Growing: `fleet.jsonl` names the server and the cause.",
        ),
        "fleet/restarts": Metric(
            "count",
            "Servers that the run started and had to start again.",
            "Growing: `rollout.fleet.max_restarts` within an hour retires a server.",
        ),
        "fleet/moved": Metric(
            "count",
            "Requests that were asked anew of another server, because theirs failed or was given up; no answer is lost by "
            "it.",
            "Growing while nothing is fenced: servers refuse requests, see `fleet.jsonl` and their logs.",
        ),
        "fleet/late_answers": Metric(
            "count",
            "Answers of servers that had been given up; thrown away.",
            "Growing: servers stall and come back; raise `rollout.fleet.stall_timeout_s` if they are merely slow.",
        ),
        "fleet/interrupted": Metric(
            "count",
            "With `rollout.fleet.finish_before_update`: requests that had not ended within `rollout.fleet.drain_timeout_s` "
            "and were interrupted by an update.",
            "Above 0: raise `rollout.fleet.drain_timeout_s`, or allow interruption.",
        ),
        "fleet/work_spread": Metric(
            "ratio",
            "Work under way at the busiest healthy server, over the mean of all of them; 1 is even.",
            "Lastingly above 2: few groups, or long chats that stay with their server.",
        ),
    },
    "Evaluation": {
        "eval/accuracy": Metric(
            "share",
            "Mean accuracy of the samples on `valid_dataset`, greedy unless `evaluate.n_samples` is above 1; a sample whose "
            "episode failed counts as wrong.",
            "Falls while `reward/mean` rises: the model is over-fitting the training prompts or exploiting the reward.",
        ),
        "eval/reward": Metric(
            "reward",
            "Their mean reward, failed ones left out.",
            "As `eval/accuracy`.",
        ),
        "eval/completion_length": Metric(
            "tokens",
            "Their mean length.",
            "As `completion_length/mean`.",
        ),
        "eval/truncated": Metric(
            "share",
            "Those cut by their length.",
            "Above 0.2: raise `evaluate.max_new_tokens`.",
        ),
        "eval/failed": Metric(
            "rows",
            "Rows without an answer because their episode failed.",
            "Above 0: see `log.txt`.",
        ),
        "eval/extraction_failed": Metric(
            "share",
            "Samples in which the reward found no answer, where it looks for one.",
            "Above 0.1: the model does not write its answer as the reward expects it, or is cut before it.",
        ),
        "eval/pass@<k>": Metric(
            "share",
            "Unbiased estimate of the share of rows that have a correct answer among k samples (`evaluate.n_samples`).",
            "Falls while `eval/accuracy` rises: the policy is losing the diversity that it could learn from.",
        ),
        "eval/maj@<k>": Metric(
            "share",
            "Unbiased estimate of the share of rows that a vote of k samples gets right.",
            "As `eval/accuracy`.",
        ),
        "eval/accuracy/<source>": Metric(
            "share",
            "Accuracy on one data set, where `valid_dataset` has several.",
            "As `eval/accuracy`.",
        ),
        "eval/<name>": Metric(
            "—",
            "Any other metric, measured on the validation rows.",
            "As the metric of training with that name.",
        ),
        "eval/loss": Metric(
            "nats",
            "SFT: mean negative log-probability of the validation answers.",
            "Rising while `loss` falls: over-fitting; stop earlier.",
        ),
    },
}

METRICS: dict[str, Metric] = {name: metric for section in SECTIONS.values() for name, metric in section.items()}


def explain(name: str) -> Metric | None:
    """The row for a metric's name; None where the table has none (a workflow's own metrics, for example)."""
    if name in METRICS:
        return METRICS[name]
    for pattern, metric in METRICS.items():
        literal = re.sub(r"\\?<\w+\\?>", ".+", re.escape(pattern))
        if "<" in pattern and re.fullmatch(literal, name):
            return metric
    return None


def markdown() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "<!-- Made by `python -m tandem.tracking.catalog`; edit src/tandem/tracking/catalog.py instead. -->",
        "",
        "Each step is one line of `metrics.jsonl`, with `step`, `time` (seconds since 1970) and the values below;",
        "one that is not finite is `null`.",
        "`reward.png` and `curves.png` show most of them, and the line on the terminal the most important ones.",
        "Metrics that do not apply (staleness of a run of SFT, for example) are absent. A workflow's own metrics",
        "appear under its own names.",
    ]
    for section, metrics in SECTIONS.items():
        lines += ["", f"## {section}", "", "| name | unit | what it is | when it looks wrong |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {metric.unit} | {metric.meaning} | {metric.advice} |" for name, metric in metrics.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
