"""The core of the embedded engine: its rounds, and its weights, which are switched between two rounds.

One thread calls `EngineCore.step` and all other methods; only `stage` may run in another thread at the same time.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from tandem.api.engines import InferencePart
from tandem.api.requests import NewTokens
from tandem.api.weights import FolderSource, WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig, chunk_tokens, places
from tandem.engines.inference.decoder import FusedWeightsBuilder, NewWeights, check_stored, compute_dtype
from tandem.engines.inference.kv_cache import make_cache
from tandem.engines.inference.passes import Passes
from tandem.engines.inference.rounds import Rounds
from tandem.engines.inference.scheduler import Scheduler
from tandem.engines.inference.sequences import Slots
from tandem.engines.inference.tower import Tower
from tandem.engines.inference.watched import Grammars
from tandem.models.architecture import Architecture
from tandem.models.foreign import read_hf_config
from tandem.models.media.families import family_of
from tandem.models.tokenizer import stop_ids


class EngineCore(Rounds):
    """Rounds with the weights of a model folder at first.

    ``deterministic``: other requests change a request's numbers by rounding at most; costs memory (`Growth`).
    ``reads_late``: the host reads a step's tokens after it has launched the next step, so the device never waits.
    A sequence that has ended then draws one more token, which is dropped. Default: True on a GPU, False on a CPU.

    Example: ``core.add(0, LLMRequest((1, 2, 3), GenerationConfig()))``, then ``core.step()`` while ``core.has_work``.
    """

    def __init__(
        self,
        folder: Path,
        config: EmbeddedEngineConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        version: WeightVersion,
        deterministic: bool = False,
        reads_late: bool | None = None,
    ):
        self.device, self._dtype = device, dtype = torch.device(device), dtype
        a = Architecture.from_config(hf_config := read_hf_config(folder))
        compute, max_model_len = compute_dtype(dtype, device), config.max_model_len or a.max_position_embeddings
        if deterministic:  # must precede this process's first matrix product on CUDA
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        cache, passes = make_cache(a, config, compute, device), Passes(a, dtype, compute, device, max_model_len)
        stops = stop_ids(folder, hf_config)
        slots = Slots(places(config), a.vocab_size, stops, device, passes.decoder.kernels)
        family = family_of(folder, hf_config)
        super().__init__(
            folder,
            a,
            Scheduler(cache, slots, chunk_tokens(config, device.type), whole_rows=deterministic),
            passes,
            None if family is None else Tower(family, hf_config, compute, device),
            Grammars(folder, a.vocab_size, stops),
            max_model_len,
            version,
            device.type != "cpu" if reads_late is None else reads_late,
        )
        check_stored(folder, a, self._tower)
        self._take(self.stage(FolderSource(folder).tensors()))

    def own_name(self, name: str) -> str:
        """Returns the trainer's name of the weight that a file calls ``name``."""
        return name if self._tower is None else self._tower.family.own_name(name)

    def stage(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> NewWeights:
        """Builds a second copy of the weights from a stream of tensors under their Hugging Face names.

        May run in another thread while `step` runs. Each tensor must be valid only until the next one is requested.

        Raises:
            WeightUpdateFailed: a tensor is missing, unknown, has another shape or came twice; the message names it.
        """
        builder = FusedWeightsBuilder(self._architecture, self._dtype, self.device, self._tower)
        for name, tensor in named_tensors:
            builder.add(name, tensor)
        return builder.finish()

    @torch.inference_mode()
    def swap(self, staged: NewWeights, version: WeightVersion, keep_kv: bool = False) -> dict[str, float]:
        """Switches to staged weights between two steps.

        The cache of running requests is recomputed under the new weights, unless ``keep_kv``. Tokens drawn before keep their
        log-probabilities and versions.

        Returns:
            ``pause_s`` without the recompute, and ``recompute_s``.
        """
        began = time.perf_counter()
        self._take(staged)
        self.version = version
        scheduler = self._scheduler
        self._finished += self._read()
        if keep_kv:
            scheduler.stop_sharing()
        else:
            scheduler.prefill.restart()
        switched = time.perf_counter()
        if not keep_kv:
            for jobs in scheduler.recompute_jobs():
                while jobs:
                    self._run_jobs(jobs, "recomputed_tokens")
                    jobs = [job for job in jobs if job.done < len(job.tokens)]
        return {"pause_s": switched - began, "recompute_s": time.perf_counter() - switched}

    def _take(self, staged: NewWeights) -> None:
        self.weights = staged.weights
        if self._tower is not None:
            self._tower.load(staged.tower)

    @torch.inference_mode()
    def cancel(self, request_id: int) -> None:
        """Ends a request without a response and frees its memory. An unknown number is ignored."""
        sequence = self._scheduler.sequences.get(request_id)
        if sequence is not None:
            self._counters["cancelled"] += 1
            self._scheduler.end([sequence])

    def drawn(self, request_id: int, start: int) -> NewTokens:
        """Returns the drawn tokens from index ``start`` on; none for a request that waits or has ended."""
        sequence = self._scheduler.sequences.get(request_id)
        return NewTokens((), ()) if sequence is None or sequence.slot < 0 else self.slots.drawn_since(sequence, start)

    def flush(self) -> None:
        """Keeps later requests from sharing the prompts of running ones."""
        self._scheduler.stop_sharing()

    def sleep(self, parts: tuple[InferencePart, ...]) -> None:
        """Frees the memory of ``parts``. Raises `RuntimeError` while requests are waiting or running."""
        if self.has_work:
            raise RuntimeError(f"sleep needs an idle engine; {len(self._scheduler.sequences)} requests are under way")
        if "kv_cache" in parts:
            self.passes.forget()
            self.cache.clear()
        if "weights" in parts:
            self.weights = None
            if self._tower is not None:
                self._tower.sleep()

    def wake(self, parts: tuple[InferencePart, ...]) -> None:
        """Does nothing: the first request allocates the cache again, and `stage` and `swap` bring weights."""

    def statistics(self) -> dict[str, float]:
        scheduler, cache = self._scheduler, self.cache
        seen = {} if self._tower is None else self._tower.statistics()
        return (
            self._counters
            | seen
            | {
                "running": float(scheduler.num_running),
                "waiting": float(len(scheduler.waiting)),
                "preempted": float(scheduler.growth.preempted),
                "shared_prompt_tokens": float(scheduler.prompts.read_tokens + scheduler.prefill.copied_tokens),
                "kv_reserved_tokens": float(cache.reserved_tokens),
                "kv_budget_tokens": float(cache.budget_tokens),
                "kv_held_bytes": float(cache.held_bytes()),
            }
        )
