"""Rules for the critic's section."""

from collections.abc import Iterator

from tandem.config.experiment import TrainConfig
from tandem.config.keys import leaves
from tandem.config.parts import part_of
from tandem.config.roles import CriticConfig

SHARED = {"shared", "loss_weight", "value_clip"}
"""Keys that a critic on the actor's backbone has a use for."""


def critic_problems(config: TrainConfig) -> Iterator[str]:
    """Keys that nothing would read, and values that would leave the actor no step."""
    advantage, critic, steps = config.algorithm.advantage.name, config.critic, config.total_train_steps
    default = dict(leaves(CriticConfig()))
    changed = {name: value for name, value in leaves(critic) if value != default[name]}
    part = part_of("advantage", advantage)
    if part.known and not part.needs_critic:
        for name, value in changed.items():
            yield (
                f"critic.{name}={value} is not used, because algorithm.advantage={advantage} needs no critic; "
                "use algorithm=ppo, or leave it out"
            )
        return
    if critic.shared:
        for name in sorted(set(changed) - SHARED):
            yield (
                f"critic.{name}={changed[name]} is not used with critic.shared=true, where the critic is a head of the "
                "actor's model and learns in its steps; leave it out, or set critic.shared=false"
            )
    elif "loss_weight" in changed:
        yield (
            f"critic.loss_weight={critic.loss_weight:g} is for critic.shared=true; a critic with its own optimizer has its "
            "own learning rate, critic.optimizer.lr: leave it out"
        )
    if steps is not None and critic.warmup_steps >= steps:
        yield (
            f"critic.warmup_steps must be below total_train_steps ({steps}), got {critic.warmup_steps}; "
            "the actor would never learn"
        )
    if critic.mini_batches is not None and critic.mini_batches > config.rollout.batch_size:
        yield (
            f"critic.mini_batches must be at most rollout.batch_size ({config.rollout.batch_size}), groups are never "
            f"divided; got {critic.mini_batches}"
        )
    if critic.optimizer.schedule == "constant" and critic.optimizer.min_lr_ratio:
        yield (
            f"critic.optimizer.min_lr_ratio={critic.optimizer.min_lr_ratio:g} is not used by the constant schedule; "
            "set critic.optimizer.schedule to linear or cosine, or leave it out"
        )
