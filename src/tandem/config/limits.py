"""Bounds of single values, by key."""

from tandem.config.parts import KnobRule


def _count(low: int = 1, high: int | None = None) -> KnobRule:
    return KnobRule(None, low=low, high=high, integer=True)


SECONDS = KnobRule(None, above=0.0, high=1e8)
"""Three years: clocks and timers overflow somewhere above."""


MOST_ROWS, MOST_SAMPLES = 10**6, 2**16
"""All rows of a step, and all samples of a row, are under way at once: more would fill the memory before any is done."""

POSITIVE = KnobRule(None, above=0.0)
SHARE = KnobRule(None, low=0.0, high=1.0)
NOT_NEGATIVE = KnobRule(None, low=0.0)
DECAY = KnobRule(None, low=0.0, high=0.999999)

LIMITS: dict[str, KnobRule] = {
    "seed": _count(0, 2**32 - 1),
    "threads": _count(1, 4096),
    "total_train_steps": _count(),
    "total_train_epochs": _count(),
    "batch_size": _count(1, MOST_ROWS),
    "max_length": _count(2),
    "reward_timeout_s": SECONDS,
    "reward_workers": _count(1, 1024),
    "memory_limit_gib": POSITIVE,
    "constraint.limit": KnobRule(None),
    "constraint.step_size": NOT_NEGATIVE,
    "constraint.multiplier": NOT_NEGATIVE,
    "constraint.min_multiplier": NOT_NEGATIVE,
    "constraint.max_multiplier": NOT_NEGATIVE,
    "evaluate.every_steps": _count(),
    "evaluate.max_rows": _count(),
    "train_dataset.max_rows": _count(),
    "train_dataset.size": _count(1, 10**7),
    "valid_dataset.max_rows": _count(),
    "valid_dataset.size": _count(1, 10**7),
    "evaluate.max_new_tokens": _count(),
    "evaluate.n_samples": _count(1, MOST_SAMPLES),
    "evaluate.temperature": NOT_NEGATIVE,
    "checkpoint.every_steps": _count(),
    "checkpoint.keep_last": _count(),
    "checkpoint.keep_every": _count(),
    "recover.grace_s": KnobRule(None, low=0.0, high=86400.0),
    "recover.max_restarts": _count(0, 1000),
    "recover.stalled_after_s": KnobRule(None, low=1.0, high=1e8),
    "tracking.trajectories_per_step": _count(0),
    "tracking.trajectories_gib": POSITIVE,
    "tracking.plot_every_steps": _count(),
    "gconfig.n_samples": _count(1, MOST_SAMPLES),
    "gconfig.max_new_tokens": _count(),
    "gconfig.min_new_tokens": _count(0),
    "gconfig.temperature": KnobRule(None, low=0.001, high=1000.0),
    "gconfig.top_p": KnobRule(None, above=0.0, high=1.0),
    "gconfig.top_k": _count(0),
    "gconfig.first_token_temperature": POSITIVE,
    "curriculum.round_rows": _count(),
    "curriculum.target": SHARE,
    "curriculum.width": POSITIVE,
    "curriculum.floor": SHARE,
    "curriculum.memory": DECAY,
    "reference.refresh_every_steps": _count(),
    "actor.mini_batches": _count(),
    "actor.epochs_per_batch": _count(),
    "actor.max_tokens_per_micro_batch": _count(),
    "actor.logprob_chunk_tokens": _count(),
    "actor.optimizer.lr": NOT_NEGATIVE,
    "actor.optimizer.warmup_steps": _count(0),
    "actor.optimizer.min_lr_ratio": SHARE,
    "actor.optimizer.weight_decay": NOT_NEGATIVE,
    "actor.optimizer.beta1": DECAY,
    "actor.optimizer.beta2": DECAY,
    "actor.optimizer.eps": POSITIVE,
    "actor.optimizer.max_grad_norm": POSITIVE,
    "actor.optimizer.max_consecutive_skips": _count(),
    "actor.lora.rank": _count(),
    "actor.lora.alpha": POSITIVE,
    "actor.lora.dropout": DECAY,
    "critic.mini_batches": _count(),
    "critic.epochs_per_batch": _count(),
    "critic.max_tokens_per_micro_batch": _count(),
    "critic.value_clip": POSITIVE,
    "critic.warmup_steps": _count(0),
    "critic.loss_weight": POSITIVE,
    "rollout.batch_size": _count(1, MOST_ROWS),
    "rollout.max_concurrent": _count(),
    "rollout.max_head_offpolicyness": _count(0),
    "rollout.episode_timeout_s": SECONDS,
    "rollout.max_retries": _count(0),
    "rollout.max_data_failures": _count(),
    "rollout.min_group_size": _count(),
    "rollout.replay.groups": _count(0),
    "rollout.replay.max_age": _count(),
    "rollout.replay.max_uses": _count(),
    "rollout.oversample": KnobRule(None, low=1.0, high=100.0),
    "rollout.wait_timeout_s": SECONDS,
    "rollout.engine.max_running": _count(1, 65536),
    "rollout.engine.kv_cache_gib": KnobRule(None, above=0.0, high=2.0**20),
    "rollout.engine.prefill_chunk_tokens": _count(),
    "rollout.engine.max_model_len": _count(2),
    "rollout.engine.threads": _count(1, 4096),
    "rollout.fleet.memory_share": KnobRule(None, above=0.0, high=1.0),
    "rollout.fleet.startup_timeout_s": SECONDS,
    "rollout.fleet.probe_every_s": SECONDS,
    "rollout.fleet.suspect_after_s": SECONDS,
    "rollout.fleet.stall_timeout_s": SECONDS,
    "rollout.fleet.request_timeout_s": SECONDS,
    "rollout.fleet.max_server_retries": _count(0),
    "rollout.fleet.max_restarts": _count(0),
    "rollout.fleet.empty_timeout_s": SECONDS,
    "rollout.fleet.drain_timeout_s": SECONDS,
    "rollout.verify.every_steps": _count(),
    "rollout.verify.trajectories": _count(),
    "rollout.verify.tolerance": POSITIVE,
    "algorithm.kl.coefficient": NOT_NEGATIVE,
    "algorithm.kl.target": POSITIVE,
    "algorithm.kl.horizon": POSITIVE,
    "algorithm.entropy_coefficient": NOT_NEGATIVE,
    "algorithm.update_samples": _count(),
    "algorithm.correction.low": NOT_NEGATIVE,
    "algorithm.correction.high": POSITIVE,
}
SHARED = ("actor.optimizer.", "actor.lora.")
LIMITS |= {key.replace("actor.", "critic.", 1): rule for key, rule in LIMITS.items() if key.startswith(SHARED)}
