"""What the loops measure: time, episodes, memory, and evaluation."""

from tandem.tracking.metrics.metric import Metric, Section

TIME: Section = {
    "time/step_s": Metric(
        "s",
        "The whole step.",
        "See which of its parts grew.",
    ),
    "time/generate_s": Metric(
        "s",
        "From asking for a batch to having it, less `time/score_s`: generating when synchronous, waiting when asynchronous.",
        "Most of the step when synchronous: see `tokens_per_s/generate`, or train asynchronously.",
    ),
    "time/train_s": Metric(
        "s",
        "Log-probabilities, advantages and optimizer steps.",
        "Large: raise `actor.max_tokens_per_micro_batch` while memory allows.",
    ),
    "time/judge_s": Metric(
        "s",
        "Mean time that a sample waited for its reward, in the queue before the judges and while it was judged; over those "
        "judged since the last line, by an evaluation too. Episodes wait side by side.",
        "Longer than your reward takes: samples queue for workers. Raise `reward_workers`, make the reward faster, or an "
        "`async def` if it waits for a server. In asynchronous training it costs nothing until the engine idles.",
    ),
    "time/judge_max_s": Metric(
        "s",
        "The longest of them.",
        "Near `reward_timeout_s`: see `samples/failed/reward_timeout`.",
    ),
    "time/score_s": Metric(
        "s",
        "Rewards that need a model: their forward passes, between the end of the episodes and the update.",
        "Large: a smaller model, a larger `actor.max_tokens_per_micro_batch`, or shorter answers.",
    ),
    "time/update_weights_s": Metric(
        "s",
        "Publishing the new weights to the inference engine.",
        "More than a tenth of the step: the machine is short of memory bandwidth.",
    ),
    "time/switch_s": Metric(
        "s",
        "Waking models for their stages and putting others to sleep, with `memory_limit_gib`; not part of the other times.",
        "Above a twentieth of the step: raise `memory_limit_gib`. `tandem graph` shows what moves, stage by stage.",
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
        "Saving, where the step before saved: the copy of the state, or the whole save where training waits for it.",
        "Large: save less often, or on a faster disk.",
    ),
    "time/save_wait_s": Metric(
        "s",
        "Part of `time/save_s`: waiting for the save before, which was still being written.",
        "Above 0: save less often, or on a faster disk.",
    ),
    "time/save_background_s": Metric(
        "s",
        "Writing of checkpoints that ended since the last line, while training went on.",
        "Longer than the time between two saves: save less often, or on a faster disk.",
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
}

EPISODES: Section = {
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
    "samples/failed/<reason>": Metric(
        "samples",
        "Samples that failed since the start, by reason, and are missing in their groups; those of dropped groups too. A "
        "sample counts when its group enters a batch or is dropped.",
        "Growing: read the first such warning in `log.txt`, which has the cause. A policy may learn to write what its judge "
        "cannot read in time (`reward_timeout`): raise `reward_timeout_s`, or mend the judge. Episodes in a row that lose "
        "most of their samples end the run (`rollout.max_data_failures`).",
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
    "memory/moved_gib": Metric(
        "GiB",
        "Weights and optimizer state that were read, written or moved to wake models and to put them to sleep, with "
        "`memory_limit_gib`.",
        "Much: raise `memory_limit_gib` until `tandem plan` says that less moves.",
    ),
    "memory/peak_gib": Metric(
        "GiB",
        "Sum of the largest resident sizes of this process and its children; shared pages count in each, so it is"
        " an upper bound.",
        "Near the machine's memory: lower `actor.max_tokens_per_micro_batch`, `rollout.engine.kv_cache_gib` or "
        "`rollout.engine.max_running`.",
    ),
    "recover/restarts": Metric(
        "restarts",
        "How often the command has started the ranks again; where `recover.max_restarts` is above 0.",
        "Grows: `run.json` has the cause of each.",
    ),
    "checkpoint/failed": Metric(
        "checkpoints",
        "Those that the disk refused since the command began, with `checkpoint.on_error=continue`.",
        "Above 0: free some space; until then a kill loses everything after the last checkpoint.",
    ),
}

EVALUATION: Section = {
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
}
