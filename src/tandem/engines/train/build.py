"""From a configuration to a training engine."""

from collections.abc import Callable

import torch

from tandem.api.engines import TrainEngine
from tandem.api.extensions import OwnClass
from tandem.api.team import Team
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.engines.train.spread import Head
from tandem.models.adapter_beside import AdapterBeside
from tandem.models.heads import ClassLabel

__all__ = ["Head", "build_train_engine"]


def build_train_engine(
    config: TrainEngineConfig,
    total_steps: int,
    device: str | torch.device = "cpu",
    head: Head = "lm",
    key: str = "actor.backend",
    trained: bool = True,
    team: Team | None = None,
    adapter: AdapterBeside | None = None,
    trunk: TrainEngine | None = None,
    class_label: ClassLabel | None = None,
    own: OwnClass | None = None,
) -> TrainEngine:
    """The engine of ``config.backend``, over the ranks of ``team``; None: all processes of torch.distributed
    where it is initialised.

    ``head``: ``lm`` gives log-probabilities, ``scalar`` one number a token (critics, reward models), ``both`` both.
    ``key``: where ``config.backend`` was written, for errors. ``trained``: False for a model that only computes `forward`:
    it has no float32 masters, and neither steps nor states; then ``adapter`` lies beside its weights. ``trunk``: an engine
    of this function with the same frozen weights but for heads and adapters, whose memory it shares. ``class_label``: the
    name or number of the class whose log-odds are the number a token, of a frozen classifier with several. ``own``: the
    user's class, which is given what `SpreadEngine` takes.

    Raises:
        ConfigError: another backend than is there, or another number of ranks than it says.
        WeightsChanged: the trunk has other numbers.
    """
    assert trunk is None or isinstance(trunk, SpreadEngine), "only frozen models share a trunk"
    make: Callable[..., TrainEngine] = own or SpreadEngine
    return make(
        config=config,
        total_steps=total_steps,
        device=device,
        process_group=None if team is None else team.group,
        head=head,
        key=key,
        trained=trained,
        adapter=adapter,
        trunk=trunk,
        label=class_label,
    )
