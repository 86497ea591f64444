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
    "code/passed_cases": Metric(
        "share",
        "Reward `code`: tests that the answers judged since the last line passed, of all their tests.",
        "Above 0 while `accuracy` stays 0: `code(credit=share)` rewards it.",
    ),
    "code/retried": Metric(
        "per answer",
        "Reward `code`: judgements that were begun again because their sandbox was lost.",
        "Above 0: the machine is short of memory or processes; see `samples/failed/sandbox_lost`.",
    ),
    "code/<reason>": Metric(
        "share",
        "Reward `code`: answers that failed for this reason: `wrong`, `error`, `timeout`, `memory`, `output`, `exit`, "
        "`signal`, `protocol`, `no_code` (docs/code.md).",
        "`no_code` or `error`: the form is not learnt yet, show it in the prompt. `timeout`: raise `code(seconds=…)`. "
        "`protocol` or `exit`: the policy attacks the judge; nothing is gained by it.",
    ),
    "groups/without_spread": Metric(
        "share",
        "Groups whose samples all have the same reward; in group-relative algorithms their advantages are 0 and they teach "
        "nothing. With one sample a prompt it is 1, and says nothing.",
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
        "Below `gconfig.n_samples`: samples failed; see `samples/failed/<reason>` and the log.",
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
    "gap/update_sigmas": Metric(
        "standard errors",
        "How clearly the verified tokens show that the engine had the last update when it sampled them. Above 5: it had it. "
        "Below −5: the update is missing. In between nothing can be said, because the update is too small compared with "
        "rounding; then the tokens of the next verification are added to these.",
        "Above 5, or near 0 if updates are tiny (`gap/undecided`). Below −5 in two results in a row ends the run.",
    ),
    "gap/undecided": Metric(
        "share",
        "1 if this verification could not tell whether the last update arrived, else 0.",
        "Often 1 in bfloat16 with a small learning rate: digests still prove what was delivered. For more evidence raise "
        "`rollout.verify.trajectories`.",
    ),
    "gap/missing_update": Metric(
        "share",
        "The part of the last update that the engine lacks (regression over the verified tokens): 0 none, 1 all of it. Only "
        "if `gap/undecided` is 0, and the trainer can score in float32 (one process, or training in float32).",
        "Near 0. Above 0.5 in two results in a row ends the run.",
    ),
    "gap/adapter_surviving": Metric(
        "share",
        "With LoRA and an engine that serves bfloat16: how much of the adapter is left in the merged weights once they are "
        "rounded (1 all of it, 0 nothing), over four matrices.",
        "Below 0.5 sampling lags behind training: set `rollout.dtype=float32`, or a larger learning rate or "
        "`actor.lora.alpha`. It grows with the adapter.",
    ),
}

FLEET: Section = {
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
        "Requests that were asked anew of another server, because theirs failed or was given up; no answer is lost by it.",
        "Growing while nothing is fenced: servers refuse requests, see `fleet.jsonl` and their logs.",
    ),
    "fleet/late_answers": Metric(
        "count",
        "Answers of servers that had been given up; thrown away.",
        "Growing: servers stall and come back; raise `rollout.fleet.stall_timeout_s` if they are merely slow.",
    ),
    "fleet/interrupted": Metric(
        "count",
        "With `rollout.fleet.finish_before_update`: requests that had not ended within `rollout.fleet.drain_timeout_s` and "
        "were interrupted by an update.",
        "Above 0: raise `rollout.fleet.drain_timeout_s`, or allow interruption.",
    ),
    "fleet/work_spread": Metric(
        "ratio",
        "Work under way at the busiest healthy server, over the mean of all of them; 1 is even.",
        "Lastingly above 2: few groups, or long chats that stay with their server.",
    ),
}
