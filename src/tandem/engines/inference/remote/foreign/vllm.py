"""vLLM: ``/inference/v1/generate`` for tokens, the development routes for control."""

import os
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tandem.api.engines import InferencePart
from tandem.api.failures import ServerFailed
from tandem.config.errors import ConfigError
from tandem.config.rollout import cache_gib
from tandem.engines.inference.remote.foreign.in_server.tandem_vllm_worker import mapped
from tandem.engines.inference.remote.foreign.protocol import (
    CONTROL_TIMEOUT_S,
    RELOAD_TIMEOUT_S,
    TIMEOUT_S,
    Draw,
    Facts,
    MediaFile,
    ServerProtocol,
    ServerReply,
    WeightGroup,
    labels_of,
)
from tandem.engines.inference.remote.foreign.server import IN_SERVER, ForeignServer, StartTerms
from tandem.engines.inference.remote.launch import CALM_S

_EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""SHA-256 of no bytes: on a CPU the server keeps its matrices in a layout of its own, and empty tensors in their place."""

_EXTENSION, _LOCK = "tandem_vllm_worker.TandemWorker", "tandem_key.RequireKey"
"""The classes that a server loads from `IN_SERVER`."""


class VllmProtocol(ServerProtocol):
    """The interface of vLLM 0.32."""

    maker = "vLLM"
    generate_path = "/inference/v1/generate"
    routes = frozenset(
        {
            "/inference/v1/generate",
            "/inference/v1/abort_requests",
            "/pause",
            "/resume",
            "/is_paused",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/reset_encoder_cache",
            "/update_weight_version",
            "/weight_info",
            "/weight_checker",
            "/server_info",
        }
    )
    remedy = (
        "start it with VLLM_SERVER_DEV_MODE=1 in its environment and --enable-scale-out --logprobs-mode processed_logprobs "
        "(version 0.32 or later)"
    )

    counters = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
    counting_remedy = "start it without --disable-log-stats"
    whole_remedy = (
        f"let the run start it (rollout.backend=vllm:dN), start it with PYTHONPATH={IN_SERVER} and --worker-extension-cls "
        f"{_EXTENSION}, leave that setting out, or use another backend"
    )

    sleep_routes = frozenset({"/sleep", "/wake_up", "/release_kv_cache_memory"})
    sleep_remedy = (
        "start it on a GPU with VLLM_SERVER_DEV_MODE=1 in its environment and --enable-sleep-mode (version 0.32 or later)"
    )

    extension_remedy = (
        f"let the run start it (rollout.backend=vllm:dN), or start it with PYTHONPATH={IN_SERVER} and "
        f"--worker-extension-cls {_EXTENSION}"
    )
    _extended = False
    _takes_seeds = False
    """False on a CPU, where a request with a seed whose prompt is computed in pieces ends the server (seen with 0.32.0)."""

    def body(self, number: str, ids: Sequence[int], draw: Draw, media: Sequence[MediaFile] = ()) -> dict[str, Any]:
        """Returns the body of a request. Only our end tokens count, because the server's own set may differ."""
        params: dict[str, Any] = {
            "temperature": 0.0 if draw.greedy else draw.temperature,
            "top_p": draw.top_p,
            "top_k": draw.top_k,
            "max_tokens": draw.max_tokens,
            "min_tokens": draw.min_tokens,
            "ignore_eos": True,
            "stop_token_ids": list(draw.stop_ids),
            "logprobs": draw.top_logprobs,
            "detokenize": bool(draw.stop),
        }
        if draw.stop:
            params["stop"] = list(draw.stop)
        if self.keeps_kv:  # its prefix cache outlives updates, so a waiting request would begin with old keys
            params["skip_reading_prefix_cache"] = True
        if draw.seed is not None and self._takes_seeds:
            params["seed"] = draw.seed
        body: dict[str, Any] = {"request_id": number, "token_ids": list(ids), "sampling_params": params}
        if media:
            names = {"image": "image_url", "audio": "audio_url"}
            parts = [{"type": names[medium.kind], "url": medium.url} for medium in media]
            body |= {"content_parts": parts, "return_token_ids": True}
        return body

    def piece(self, answer: Any) -> ServerReply:
        (choice,) = answer["choices"]
        tokens = tuple(int(token) for token in choice["token_ids"] or ())
        content = (choice.get("logprobs") or {}).get("content") or ()
        logprobs = tuple(float(entry["logprob"]) for entry in content)
        if len(logprobs) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens and {len(logprobs)} log-probabilities")
        return ServerReply(tokens, logprobs, labels_of(choice.get("weight_versions") or (), len(tokens)))

    def top(self, answer: Any) -> dict[int, float]:
        first = answer["choices"][0]["logprobs"]["content"][0]
        return {int(entry["token_id"]): float(entry["logprob"]) for entry in first["top_logprobs"]}

    async def abort(self, number: str) -> None:
        """Ends a request. The server puts a prefix before the name that it was given."""
        body = {"request_ids": [f"generate-tokens-{number}"]}
        await self.http.post("/inference/v1/abort_requests", body, deadline_s=CONTROL_TIMEOUT_S)

    def abort_all(self) -> None:
        """Ends all requests, with a route of the development mode."""
        self.call("/abort_requests", {}, timeout_s=CALM_S)

    def facts(self) -> Facts:
        version = self.call("/version")["version"]
        name = f"{self.maker} {version}"
        self.check_routes(name)
        model = self.call("/v1/models")["data"][0]
        config = self.call("/server_info?config_format=json")["vllm_config"]
        parallel = config["parallel_config"]
        self.reads_memory = self._extended = parallel.get("worker_extension_cls") == _EXTENSION
        self.ranks = int(parallel.get("tensor_parallel_size") or 1) * int(parallel.get("pipeline_parallel_size") or 1)
        self._takes_seeds = "cpu" not in str(config.get("device_config"))
        if not self._takes_seeds and not self.reads_memory:
            raise ConfigError(
                f"{name} at {self.http.base_url} runs on a CPU, where an update leaves an output layer that shares the "
                "embedding's matrix as it was; let the run start it (rollout.backend=vllm:dN), or start it with "
                f"PYTHONPATH={IN_SERVER} and --worker-extension-cls {_EXTENSION}"
            )
        self.sleep_on = bool(config["model_config"].get("enable_sleep_mode"))
        return Facts(name, int(model["max_model_len"]), str(config["model_config"]["dtype"]).removeprefix("torch."))

    def give_whole_logprobs(self) -> None:
        """Makes the server report log-probabilities before top-p, top-k and suppressed stop tokens, if it has Tandem's
        worker extension."""
        if self.reads_memory:
            with suppress(ServerFailed):  # an older extension cannot, which `try_logprobs` will see
                self.call("/collective_rpc", {"method": "tandem_whole_logprobs"})

    def is_paused(self) -> bool:
        return bool(self.call("/is_paused")["is_paused"])

    def pause(self) -> None:
        self.call("/pause?mode=keep&clear_cache=false", {})

    def resume(self) -> None:
        self.call("/resume", {})

    def sleep(self, parts: Set[InferencePart]) -> None:
        """Frees memory. Level 2 drops the weights, which a delivery brings again; level 1 would copy them to host memory."""
        if "weights" in parts:
            self.call("/sleep?level=2&mode=keep", {}, timeout_s=RELOAD_TIMEOUT_S)
            return
        self.call("/pause?mode=keep&clear_cache=true", {})  # else it refuses
        self.call("/release_kv_cache_memory", {}, timeout_s=RELOAD_TIMEOUT_S)

    def wake(self, part: InferencePart) -> None:
        self.call(f"/wake_up?tags={part}", {}, timeout_s=RELOAD_TIMEOUT_S)

    def reload(self, place: Mapping[str, Any], label: str) -> None:
        """Loads weights. Running requests lose their keys and values, and recompute them later, unless `keeps_kv`."""
        if "memory" in place and self.by_group is not None:
            with self._failing():
                self.by_group.send(self._joined, lambda group: self._by_group(group, place))
        elif self._extended:
            self._rpc("tandem_load", {"place": place}, RELOAD_TIMEOUT_S)
        else:
            self._rpc("reload_weights", {"weights_path": place["folder"]}, RELOAD_TIMEOUT_S)
        if not self.keeps_kv:
            if not self.call("/reset_prefix_cache?reset_running_requests=true", {})["success"]:
                raise ServerFailed("the server did not drop the keys and values of the old weights", url=self.http.base_url)
            # The workers have dropped the features of media; the scheduler still counts on them, and would end.
            self.call("/reset_encoder_cache", {})
        self.set_label(label)

    def lacks_to_join(self) -> str | None:
        """Returns the remedy if the server lacks Tandem's worker extension, else None. vLLM's own routes take pickled data,
        which no server of a run may read."""
        return None if self._extended else f"was started without Tandem's worker extension; {self.extension_remedy}"

    def lacks_to_open(self) -> str | None:
        """Returns the remedy if the server lacks Tandem's worker extension, else None. vLLM's own route takes pickled
        data."""
        return self.lacks_to_join()

    def gpu(self) -> str:
        """Returns the GPU's identifier, from Tandem's worker extension."""
        return str(self._rpc("tandem_gpu", {}, CONTROL_TIMEOUT_S)["results"][0])

    def _joined(self) -> WeightGroup:
        assert self.by_group is not None
        way, size = self.by_group.way, 1 + self.ranks

        def join(host: str, port: int, name: str) -> None:
            terms = {"host": host, "port": port, "size": size, "backend": way.backend, "timeout_s": TIMEOUT_S}
            self._rpc("tandem_join", terms, TIMEOUT_S)

        return WeightGroup(way, size, join)

    def _by_group(self, group: WeightGroup, place: Mapping[str, Any]) -> None:
        plan = [entry[:3] for entry in place["tensors"]]
        with ThreadPoolExecutor(1, "weight-group") as pool:
            receipt = pool.submit(self._rpc, "tandem_receive", {"plan": plan}, RELOAD_TIMEOUT_S)
            for _, tensor in mapped(place["memory"], place["tensors"]):
                if tensor.numel():
                    group.broadcast(tensor.reshape(-1).view(torch.uint8), receipt)
            receipt.result()

    def _tell_to_leave(self, name: str) -> None:
        self._rpc("tandem_leave", {}, CONTROL_TIMEOUT_S)

    def _rpc(self, method: str, terms: Mapping[str, Any], timeout_s: float) -> Any:
        """Calls a method of all the server's workers."""
        return self.call("/collective_rpc", {"method": method, "kwargs": dict(terms)}, timeout_s=timeout_s)

    def set_label(self, label: str) -> None:
        self.call("/update_weight_version", {"new_version": label})

    def label(self) -> str:
        return str(self.call("/weight_info")["weight_version"])

    def checksums(self) -> dict[str, str]:
        """Returns checksums, without those of empty tensors. Names begin with the rank if there are several ranks."""
        sums = self.call("/weight_checker", {"action": "checksum"}, timeout_s=RELOAD_TIMEOUT_S)["checksums"]
        held = {name: digest for name, digest in sums.items() if digest != _EMPTY}
        ranks = {name.rpartition(":")[0] for name in held}
        return {name.rpartition(":")[2] if len(ranks) == 1 else name: digest for name, digest in held.items()}


class VllmServer(ForeignServer):
    """A vLLM server as an inference engine; made by `attach` or `start`."""

    protocol = VllmProtocol

    @classmethod
    def command(cls, terms: StartTerms, port: int) -> tuple[list[str], dict[str, str]]:
        settings = terms.settings
        words = [terms.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(terms.folder)]
        words += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port), "--dtype", terms.dtype]
        words += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
        if settings.max_running is not None:
            words += ["--max-num-seqs", str(settings.max_running)]
        # auto: the cache must hold one sequence of this length, and may be too small for the model's whole context
        words += ["--max-model-len", str(settings.max_model_len or "auto")]
        words += ["--worker-extension-cls", _EXTENSION, "--middleware", _LOCK]
        words += ["--seed", str(port)]  # two servers must not draw alike
        if terms.media:  # torchvision would make other pixels than the trainer's
            words += ["--mm-processor-kwargs", '{"use_fast": false}']  # "backend" would reach the one for videos too
        environment = {
            "PYTHONPATH": str(IN_SERVER),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_API_KEY": "",  # the user's own key would be required beside ours
            "HF_HUB_OFFLINE": "1",
        }
        if terms.seat is not None:
            words += ["--tensor-parallel-size", str(len(terms.seat.devices))]
            words += ["--gpu-memory-utilization", str(terms.seat.memory_share)]
        if terms.sleeps:
            words += ["--enable-sleep-mode"]
        environment |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if terms.device == "cpu":
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(cache_gib(settings, terms.device))))
            # By default vLLM keeps one core free, which is half of two.
            environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(cpu) for cpu in terms.cpus)
            environment |= _preload(terms.python)
        return words, environment


def _preload(python: str) -> dict[str, str]:
    """Returns ``LD_PRELOAD`` with the faster allocator and OpenMP, if they are installed and the variable is not set."""
    openmp = Path(python).parent.parent / "lib/libiomp5.so"
    allocators = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    libraries = [str(file) for file in (*allocators[:1], openmp) if file.is_file()]
    return {"LD_PRELOAD": ":".join(libraries)} if libraries and "LD_PRELOAD" not in os.environ else {}
