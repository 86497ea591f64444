"""What the roles measure while they learn: the actor, the critic, and what learns from preferences."""

from tandem.tracking.metrics.metric import Metric, Section

OPTIMIZATION: Section = {
    "loss": Metric(
        "—",
        "What was minimised. In reinforcement learning it hovers around 0 and its height says nothing; in SFT it "
        "is the mean negative log-probability.",
        "In reinforcement learning look at the reward instead. In SFT it should fall; if it rises, lower the learning rate.",
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
}

CRITIC: Section = {
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
}

PREFERENCES: Section = {
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
    "kl/teacher_k3": Metric("nats", "The same by the k3 estimate: never negative, of less variance.", "As `kl/teacher`."),
}
