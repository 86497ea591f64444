"""DeepSpeed's ZeRO as a `Holder`, the contract of the other backends.

Each rank has a part of the float32 masters and of AdamW's moments (stage 1), also of the gradients (stage 2), and of the
parameters (stage 3); see arXiv:1910.02054. DeepSpeed gathers parameters, reduces gradients and updates the masters.
`SpreadEngine` and `Optimizer` do the rest of a step (loss, norm, clipping, schedule, skipping), as for every backend.

DeepSpeed is imported without its output and its changes to the process.
"""

import contextlib
import copy
import importlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

from tandem.api.state import Parted, TensorPart
from tandem.config.errors import ConfigError, install_extra
from tandem.config.train_engine import Layout
from tandem.engines.train.holders import Holder, form_group, gather_rows

_BUCKET = 50_000_000
"""Maximum number of elements of gradients, or of parameters, in one communication."""


def settings_of(stage: int, dtype: torch.dtype, total: int) -> dict[str, Any]:
    """Returns DeepSpeed's configuration. ``total``: number of elements of all parameters."""
    bucket = min(total, _BUCKET) // 2 * 2 + 2
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": False,
        "memory_efficient_linear": False,  # otherwise torch.nn.functional.linear is replaced for the whole process
    }
    if stage == 3:
        # shard small parameters too, and do not keep any gathered for the backward pass
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    else:
        zero |= {"compute_grad_norm": False}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": zero,
    }


def import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed without its output.

    Raises:
        ConfigError: it is not installed, or is set up for another kind of device in this process.
    """
    with quiet(device):
        try:
            deepspeed = importlib.import_module("deepspeed")
        except ImportError as error:
            raise ConfigError(
                f"actor.backend=deepspeed needs DeepSpeed ({error}): {install_extra('deepspeed')} --no-build-isolation, "
                "without a GPU put DS_ACCELERATOR=cpu before this command"
            ) from error
    kind = deepspeed.accelerator.get_accelerator().device_name()
    if kind != device.type:  # another library has imported it before
        raise ConfigError(
            f"DeepSpeed computes on {kind!r} in this process, not on {device.type!r}: set "
            f"DS_ACCELERATOR={device.type} in the environment of the command"
        )
    if device.type == "cpu":
        # otherwise it would compile a communication operator, at the first start of each user
        deepspeed.ops.__compatible_ops__ = {}
    # it calls functions that newer versions of torch deprecate, a thousand times per step
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    log = logging.getLogger("DeepSpeed")  # it writes to stdout, which must have only one object with `--json`
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.ERROR)
    return deepspeed


@contextlib.contextmanager
def quiet(device: torch.device) -> Iterator[None]:
    """A block without output and warnings, with the environment variables that DeepSpeed needs; they are removed after
    it."""
    before = dict(os.environ)
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        with local_rank(device), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def local_rank(device: torch.device) -> Iterator[None]:
    """A block with the variable ``LOCAL_RANK``, by which DeepSpeed finds its device, also if no launcher has set it."""
    if "LOCAL_RANK" in os.environ:
        yield
        return
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]


LOG = logging.getLogger("tandem.train")

# In float32, DeepSpeed's masters are moved into the memory of the model's parameters. Both have the same values in the same
# order, but DeepSpeed allocates them separately and copies masters to parameters after a step: stages 1 and 2 always; stage
# 3 too, because its check compares a device with a device name, which are never equal.


def share(zero: Any, stage: int, rank: int, masters: Sequence[torch.Tensor]) -> bool:
    """Puts float32 masters into the memory of the parameters; returns False, with a warning, if their layouts differ.
    ``zero``: DeepSpeed's optimizer. ``masters``: this rank's part, one flat tensor per group."""
    try:
        difference = _difference(zero, stage, masters, _working(zero, stage, rank))
    except (AttributeError, RuntimeError) as error:  # another version of DeepSpeed with other attributes
        difference = f"it is unknown where both are ({error})"
    if difference is not None:
        LOG.warning(
            "DeepSpeed keeps float32 masters beside the float32 parameters, 4 bytes more for each number of a rank's part: "
            "in this version %s",
            difference,
        )
        return False
    lay(zero, stage, rank, masters)
    return True


def lay(zero: Any, stage: int, rank: int, masters: Sequence[torch.Tensor]) -> None:
    """Points masters to the memory of the parameters, which have equal values. Call it again whenever parameters move."""
    for master, working in zip(masters, _working(zero, stage, rank), strict=True):
        master.data = working
    if stage < 3:
        zero._link_all_hp_params()  # otherwise DeepSpeed would keep using the old memory as each parameter's master


def _working(zero: Any, stage: int, rank: int) -> list[torch.Tensor]:
    """Returns this rank's part of the parameters as views of their memory, cut as the masters are."""
    if stage == 3:
        return list(zero.lp_param_buffer.detach().split(zero.fp16_partitioned_groups_flat_numel))
    flats = zip(zero.bit16_groups_flat, zero.partition_size, strict=True)
    return [flat.detach().narrow(0, size * rank, size) for flat, size in flats]


def _difference(zero: Any, stage: int, masters: Sequence[torch.Tensor], working: Sequence[torch.Tensor]) -> str | None:
    """Says how the layouts of masters and parameters differ; None if they are equal."""
    if [_form(master) for master in masters] != [_form(piece) for piece in working]:
        return "masters and parameters are cut differently"
    if not all(torch.equal(master, piece) for master, piece in zip(masters, working, strict=True)):
        return "masters and parameters have different values"
    for group, (master, piece) in enumerate(zip(masters, working, strict=True)):
        for one, other in _pairs(zero, stage, group):
            if one.data_ptr() - master.data_ptr() != other.data_ptr() - piece.data_ptr() or one.numel() != other.numel():
                return "masters and parameters have different orders"
    return None


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()


def _pairs(zero: Any, stage: int, group: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields, for each parameter of a group, this rank's part of its master and of the parameter itself."""
    if stage == 3:
        for parameter in zero.fp16_groups[group]:
            yield zero.get_local_fp32_param(parameter), parameter.ds_tensor
    else:
        parts = (parameter._hp_mapping for parameter in zero.bit16_groups[group])
        yield from ((part.hp_fragment, part.lp_fragment) for part in parts if part is not None)


_MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroHolder(Holder):
    """A model that DeepSpeed shards over ranks. `masters` has the model's parameters by name; the float32 values themselves
    are in flat tensors, one piece per rank."""

    def __init__(
        self,
        model: nn.Module,
        layers: nn.ModuleList,
        dtype: torch.dtype,
        layout: Layout,
        device: torch.device,
        fill: Callable[[nn.Module], None],
    ):
        """``fill``: loads a module's float32 weights. Under stage 3, layers are loaded and sharded one after another, so
        that no rank ever has the whole model. Collective.

        Raises:
            ConfigError: DeepSpeed is not installed.
        """
        self.stage = layout.zero or 0
        self.model, self._dtype, self._device, self._ranks = model, dtype, device, layout.data
        self._deepspeed = import_deepspeed(device)
        form_group(device)
        self.rank = dist.get_rank()
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        total = sum(shape.numel() for shape in self._shapes.values())
        self._settings = settings_of(self.stage, dtype, total)
        self._exact: dict[str, torch.Tensor] = {}
        for module in (*layers, model) if self.stage == 3 else (model,):
            fill(module)
            self._divide(module)
        self.masters, self.frozen = dict(model.named_parameters()), {}
        self._changed = False

    def _divide(self, module: nn.Module) -> None:
        """Rounds the module's parameters to the compute dtype and keeps their exact values for the masters. Under stage 3,
        also shards them over the ranks."""
        if self._dtype != torch.float32:
            for name, parameter in self.model.named_parameters():
                if not parameter.is_meta and name not in self._exact:
                    whole = parameter.detach()
                    self._exact[name] = self._part(whole).clone() if self.stage == 3 else whole
                    parameter.data = whole.to(self._dtype)
        if self.stage == 3:
            with quiet(self._device):
                self._deepspeed.zero.Init(module=module, config_dict_or_path=copy.deepcopy(self._settings))

    def adamw(self, groups: list[dict[str, Any]], **settings: Any) -> "_ZeroAdamW":
        """Initialises DeepSpeed's engine with torch's AdamW over the flat pieces; see `Holder.adamw`."""
        adamw = torch.optim.AdamW([group for group in groups if group["params"]], fused=True, **settings)
        with quiet(self._device):
            self._engine, self.zero, *_ = self._deepspeed.initialize(
                model=self.model, optimizer=adamw, config=copy.deepcopy(self._settings)
            )
        rounded = self._dtype != torch.float32
        self.shared = not rounded and share(self.zero, self.stage, self.rank, self.local_masters())
        for name in list(self._exact):
            self._set(name, self._exact.pop(name))
        self.publish()
        return _ZeroAdamW(self, adamw)

    def compute(self, *arguments: Any) -> Any:
        with local_rank(self._device):
            return self._engine(*arguments)

    def accumulate(self, *, last: bool) -> None:
        """Prepares the next backward pass. Stage 1 sums gradients over ranks after the last pass of a step, other stages
        after each pass."""
        self._engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: torch.Tensor) -> None:
        with local_rank(self._device):
            self._engine.backward(loss)

    def step(self) -> None:
        """Updates the masters with the current gradients, and the model's parameters from the masters."""
        with local_rank(self._device):
            self._engine.step()

    def drop_gradients(self) -> None:
        """Drops all gradients, also those of an unfinished step, as DeepSpeed does when a gradient overflows."""
        zero = self.zero
        zero.zero_grad(set_to_none=True)
        zero._epilogue_ran_this_backward = False  # otherwise the next backward pass would add to dropped gradients
        if self.stage == 3:
            zero.averaged_gradients, zero.micro_step_id = {}, 0
            # otherwise parameters outside of a step's loss would keep the gradient of an earlier step
            zero.grad_partitions_flat_buffer.zero_()
        else:
            zero.averaged_gradients, zero.all_grad_tensors = {}, {}
            zero.micro_step_id = -1

    def named_local_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (number of the parameter group, piece of its gradient) of this rank. No piece is on two ranks."""
        for group, pieces in self.zero.averaged_gradients.items():
            for piece in pieces or ():
                yield str(group), piece

    def publish(self) -> None:
        """Updates the model's parameters after masters were overwritten. After a step DeepSpeed has done so already."""
        if not self._changed:
            return
        if self.stage < 3:
            self.zero.update_lp_params()
        else:
            self.zero.parameter_offload.partition_all_parameters()  # frees gathered parameters, which are outdated
            for group in range(len(self.zero.fp16_groups)):
                self.zero._reassign_or_swap_out_partitioned_parameters(group)
        self._changed = False

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def state_of(self, name: str, tensor: torch.Tensor) -> Parted:
        """Returns a master in the form that a saved state has, a `Parted`."""
        return Parted(name, lambda: [self._own_part(name)])

    def _gather(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        parameter, dtype = self.masters[name], dtype or torch.float32
        if self.stage == 3:
            part = self._deepspeed.utils.safe_get_local_fp32_param(parameter).flatten().to(dtype)
            shape = self._shapes[name]
            (whole,) = gather_rows([part], [torch.Size((shape.numel(),))], dist.group.WORLD)
            return whole.view(shape)
        if self._dtype in (dtype, torch.float32):
            return parameter.detach().to(dtype)  # whole on each rank: equal to the master, or the master rounded to dtype
        return self._deepspeed.utils.safe_get_full_fp32_param(parameter).to(dtype)

    @torch.no_grad()
    def _put(self, name: str, value: torch.Tensor) -> None:
        whole = value.to(self._device, torch.float32)
        self._set(name, self._part(whole) if self.stage == 3 else whole)

    def _set(self, name: str, value: torch.Tensor, moment: str | None = None) -> None:
        """Overwrites a master, or its moment ``moment``. ``value``: this rank's part under stage 3, otherwise the whole
        tensor."""
        parameter, utils = self.masters[name], self._deepspeed.utils
        if moment is None:
            set_it = utils.safe_set_local_fp32_param if self.stage == 3 else utils.safe_set_full_fp32_param
            set_it(parameter, value)
            self._changed = True
        else:
            set_it = utils.safe_set_local_optimizer_state if self.stage == 3 else utils.safe_set_full_optimizer_state
            set_it(parameter, value, moment)

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a parameter under stage 3, flat; all parts are of equal size, padded with zeros."""
        size = -(-whole.numel() // self._ranks)
        return pad(whole.flatten(), (0, size * self._ranks - whole.numel()))[size * self.rank : size * (self.rank + 1)]

    def local_masters(self) -> list[torch.Tensor]:
        """Returns this rank's part of the masters, float32, one flat tensor per group."""
        return self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups

    def moments(self, adamw: "_ZeroAdamW") -> dict[str, dict[str, Any]]:
        """Implements `Holder.moments`. Under DeepSpeed all masters have the same number of steps."""
        if not adamw.state:
            return {}
        self._link_moments()
        steps = adamw.state[self.local_masters()[0]]["step"]
        return {name: {"step": steps} | {what: self._moment(name, what) for what in _MOMENTS} for name in self.masters}

    def _moment(self, name: str, what: str) -> Parted:
        return Parted(name, lambda: [self._own_part(name, what)])

    def _own_part(self, name: str, moment: str | None = None) -> TensorPart:
        """Returns this rank's slice of the flattened master, or of its moment ``moment``."""
        parameter: Any = self.masters[name]  # DeepSpeed adds attributes
        shape, utils = self._shapes[name], self._deepspeed.utils
        if self.stage == 3:
            state, master = utils.safe_get_local_optimizer_state, utils.safe_get_local_fp32_param
            values = master(parameter) if moment is None else state(parameter, moment)
            start = -(-shape.numel() // self._ranks) * self.rank
            values = values.flatten()[: max(0, shape.numel() - start)]  # without padding
        else:
            fragment = parameter._hp_mapping  # None if the whole parameter is on other ranks
            start = 0 if fragment is None else fragment.lp_fragment_address.start
            values = torch.empty(0) if fragment is None else fragment.get_hp_fragment(moment)
        return TensorPart(values, (start,), tuple(shape), flat=True)

    def _link_moments(self) -> None:
        """Makes DeepSpeed map each master's moments to the flat ones, which it otherwise does only at its first step."""
        if self.stage < 3:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    @torch.no_grad()
    def take_moments(self, adamw: "_ZeroAdamW", moments: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Loads moments, see `Holder.take_moments`.

        Raises:
            ConfigError: the masters have different numbers of steps. Checked before anything is changed.
        """
        steps = {float(tensors["step"]) for tensors in moments.values()}
        if moments and (len(steps) > 1 or moments.keys() != self.masters.keys()):
            raise ConfigError(
                "the saved optimizer moved some parameters more often than others, and DeepSpeed counts the steps of all "
                "together: resume with actor.backend=fsdp:dN, or begin another run from these weights with actor.path"
            )
        adamw.state.clear()
        if not moments:
            return
        (count,) = steps
        for piece in self.local_masters():
            zeros = {what: torch.zeros_like(piece) for what in _MOMENTS}
            adamw.state[piece] = {"step": torch.tensor(count, device=piece.device)} | zeros
        self._link_moments()
        for name, tensors in moments.items():
            for what in _MOMENTS:
                whole = tensors[what].to(self._device, torch.float32)
                self._set(name, self._part(whole) if self.stage == 3 else whole, what)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        before = [piece.detach().clone() for piece in self.local_masters()]
        try:
            yield
        finally:
            with torch.no_grad():
                for piece, value in zip(self.local_masters(), before, strict=True):
                    piece.copy_(value)
            self._changed = True
            self.publish()

    def move(self, device: torch.device | str) -> None:
        """Moves parameters and masters to ``cpu``, or back to their device."""
        self.leave() if torch.device(device).type == "cpu" else self.come_back()

    def leave(self) -> None:
        """Moves parameters and masters to host memory."""
        states = self._deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum
        kinds = [states.lp_params, states.hp_params]
        if self.stage == 3:  # DeepSpeed moves only the masters of its own Adam
            kinds = [states.lp_params, states.contiguous_grad_buffer]
            for piece in self.local_masters():
                piece.data = piece.data.to("cpu")
        self._engine.offload_states(include=kinds, pin_memory=False)
        self._lay_together()

    def come_back(self) -> None:
        """Moves parameters and masters back to the device after `leave`."""
        self._engine.reload_states()
        if self.stage == 3 and not self.shared:
            for piece in self.local_masters():
                piece.data = piece.data.to(self._device)
        self._lay_together()

    def _lay_together(self) -> None:
        """Makes masters share the parameters' memory again, after parameters were moved."""
        if self.shared:
            lay(self.zero, self.stage, self.rank, self.local_masters())


class _ZeroAdamW:
    """DeepSpeed's optimizer behind the interface of torch's AdamW, which `Optimizer` uses."""

    def __init__(self, holder: ZeroHolder, adamw: torch.optim.AdamW):
        self._holder, self._adamw = holder, adamw

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, each with its learning rate."""
        return self._adamw.param_groups

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Moments of this rank's flat pieces."""
        return self._adamw.state

    def step(self) -> None:
        """Updates the masters."""
        self._holder.step()

    def zero_grad(self) -> None:
        """Frees the gradients."""
        self._holder.drop_gradients()
