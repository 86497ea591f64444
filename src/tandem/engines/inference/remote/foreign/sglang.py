"""SGLang: its native ``/generate`` for tokens, ``/update_weights_from_disk`` and its neighbours for control."""

import base64
import io
import itertools
import pickle
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from tandem.api.engines import InferencePart
from tandem.api.failures import ServerFailed
from tandem.api.weights import in_groups
from tandem.engines.inference.remote.foreign.in_server.tandem_sglang import MEMORY_SHARE
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

BUCKET_BYTES = 64 << 20
"""Bytes of tensors that are announced in one call."""

_DTYPES = {"half": "float16", "float": "float32"}


class SGLangProtocol(ServerProtocol):
    """The interface of SGLang 0.5.23."""

    maker = "SGLang"
    generate_path = "/generate"
    says_paused = False
    routes = frozenset(
        {
            "/generate",
            "/abort_request",
            "/pause_generation",
            "/continue_generation",
            "/update_weights_from_disk",
            "/update_weight_version",
            "/weights_checker",
            "/model_info",
            "/server_info",
        }
    )
    counters = ("sglang:realtime_tokens_total",)
    counting_remedy = "start it with --enable-metrics"
    whole_remedy = "leave that setting out, or use another backend"
    remedy = "use version 0.5.23 or later, without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment"

    handle_routes = frozenset({"/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"})
    group_routes = frozenset(
        {
            "/init_weights_update_group",
            "/begin_weight_update",
            "/update_weights_from_distributed",
            "/end_weight_update",
            "/destroy_weights_update_group",
        }
    )
    sleep_routes = frozenset({"/release_memory_occupation", "/resume_memory_occupation"})
    sleep_remedy = "start it on a GPU with --enable-memory-saver, which needs the package torch_memory_saver there"

    def seed(self, stream: int, position: int) -> int:
        """Returns the stream itself. This server's noise is already a function of seed and position if it was started with
        `--enable-deterministic-inference`; otherwise it ignores the seed."""
        return stream

    def body(self, number: str, ids: Sequence[int], draw: Draw, media: Sequence[MediaFile] = ()) -> dict[str, Any]:
        """Returns a request's body. The server also stops at its tokenizer's end token; no setting turns off only this."""
        params: dict[str, Any] = {
            "temperature": 0.0 if draw.greedy else draw.temperature,
            "top_p": draw.top_p,
            "top_k": draw.top_k or -1,
            "max_new_tokens": draw.max_tokens,
            "min_new_tokens": draw.min_tokens,
            "stop_token_ids": list(draw.stop_ids),
            "no_stop_trim": True,
        }
        if draw.stop:
            params["stop"] = list(draw.stop)
        if draw.seed is not None:
            params["sampling_seed"] = draw.seed
        body: dict[str, Any] = {"rid": number, "input_ids": list(ids), "sampling_params": params, "return_logprob": True}
        if draw.top_logprobs:
            body["top_logprobs_num"] = draw.top_logprobs
        if media:
            body["return_prompt_token_ids"] = True
            for medium in media:
                body.setdefault(f"{medium.kind}_data", []).append(medium.url)
        return body

    def piece(self, answer: Any) -> ServerReply:
        facts = answer["meta_info"]
        tokens = tuple(int(token) for token in answer["output_ids"] or ())
        entries = facts.get("output_token_logprobs") or ()
        if tuple(int(entry[1]) for entry in entries) != tokens:
            raise ValueError(f"the {len(tokens)} tokens are not those of the {len(entries)} log-probabilities")
        logprobs = tuple(float(entry[0]) for entry in entries)
        return ServerReply(tokens, logprobs, labels_of(facts["weight_versions"], len(tokens)) if tokens else ())

    def top(self, answer: Any) -> dict[int, float]:
        first = answer["meta_info"]["output_top_logprobs"][0]
        return {int(entry[1]): float(entry[0]) for entry in first}

    async def abort(self, number: str) -> None:
        await self.http.post("/abort_request", {"rid": number}, deadline_s=CONTROL_TIMEOUT_S, admin=True)

    def abort_all(self) -> None:
        self.call("/abort_request", {"abort_all": True}, timeout_s=CALM_S)

    def facts(self) -> Facts:
        info = self.call("/server_info")
        name = f"{self.maker} {info['version']}"
        self.check_routes(name)
        self.bytes_are_hashed = info.get("device") == "cpu"
        self.ranks = int(info.get("tp_size") or 1)
        self.sleep_on = bool(info.get("enable_memory_saver"))
        dtype = str(info["dtype"]).removeprefix("torch.")
        # Some tokens less than the context: beyond that, the server would silently cut a completion short.
        return Facts(name, int(info["max_req_input_len"]), _DTYPES.get(dtype, dtype))

    def is_paused(self) -> bool:
        """Always True: the server does not tell, and resuming a server that is not paused changes nothing."""
        return True

    def pause(self) -> None:
        """Pauses the server. Running requests go back to its queue with the tokens that they have."""
        self.call("/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        self.call("/continue_generation", {"torch_empty_cache": False})

    def sleep(self, parts: Set[InferencePart]) -> None:
        self.call("/release_memory_occupation", {"tags": sorted(parts)}, timeout_s=RELOAD_TIMEOUT_S)

    def wake(self, part: InferencePart) -> None:
        self.call("/resume_memory_occupation", {"tags": [part]}, timeout_s=RELOAD_TIMEOUT_S)

    def reload(self, place: Mapping[str, Any], label: str) -> None:
        """Loads weights from a GPU's memory by handles, through a process group if there is one, or from a folder."""
        if "handles" in place:
            self._by_handles(place, label)
            return
        if "memory" in place and self.by_group is not None:
            with self._failing():
                self.by_group.send(self._joined, lambda group: self._by_group(group, place, label))
            return
        body = {"model_path": place["folder"], "weight_version": label, "flush_cache": True}
        answer = self.call("/update_weights_from_disk", body, timeout_s=RELOAD_TIMEOUT_S)
        if not answer["success"]:
            raise ServerFailed(f"the server did not load {place['folder']}: {answer['message']}", url=self.http.base_url)

    def _joined(self) -> WeightGroup:
        """Makes both ends of a group; the server makes its end with torch's own helper."""
        assert self.by_group is not None
        way, size = self.by_group.way, 1 + self.ranks

        def join(host: str, port: int, name: str) -> None:
            body = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": size}
            body |= {"backend": way.backend, "group_name": name}
            self.call("/init_weights_update_group", body, timeout_s=TIMEOUT_S)

        return WeightGroup(way, size, join, prefixes=True)

    def _tell_to_leave(self, name: str) -> None:
        self.call("/destroy_weights_update_group", {"group_name": name})

    def _by_group(self, group: WeightGroup, place: Mapping[str, Any], label: str) -> None:
        remaining = len(place["tensors"])
        with ThreadPoolExecutor(1, "weight-group") as pool:
            self.call("/begin_weight_update", {})
            for bucket in in_groups(mapped(place["memory"], place["tensors"]), BUCKET_BYTES):
                remaining -= len(bucket)
                body = {
                    "names": list(bucket),
                    "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
                    "shapes": [list(tensor.shape) for tensor in bucket.values()],
                    "flush_cache": not remaining,
                    "weight_version": None if remaining else label,
                    "group_name": group.name,
                }
                receipt = pool.submit(self.call, "/update_weights_from_distributed", body, timeout_s=TIMEOUT_S)
                for tensor in bucket.values():
                    group.broadcast(tensor, receipt)
                receipt.result()
            self.call("/end_weight_update", {})

    def _by_handles(self, place: Mapping[str, Any], label: str) -> None:
        self.call("/begin_weight_update", {})
        payloads = handle_payloads(place["handles"], place["tensors"])
        for number, payload in enumerate(payloads, 1):
            last = number == len(payloads)
            body = {"serialized_named_tensors": [payload] * self.ranks, "flush_cache": last}
            body |= {"weight_version": label if last else None}
            self.call("/update_weights_from_tensor", body, timeout_s=RELOAD_TIMEOUT_S)
        self.call("/end_weight_update", {})

    def set_label(self, label: str) -> None:
        self.call("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    def label(self) -> str:
        return str(self.call("/model_info")["weight_version"])

    def checksums(self) -> dict[str, str]:
        """Returns checksums: the first 16 digits of SHA-256 on a CPU, those of another function on a GPU."""
        ranks = self.call("/weights_checker", {"action": "checksum"}, timeout_s=RELOAD_TIMEOUT_S)["ranks"]
        if len(ranks) == 1:
            return dict(ranks[0]["checksums"])
        return {f"{rank}:{name}": value for rank, sums in enumerate(ranks) for name, value in sums["checksums"].items()}


class SGLangServer(ForeignServer):
    """An SGLang server as an inference engine; made by `attach` or `start`."""

    protocol = SGLangProtocol

    @classmethod
    def command(cls, terms: StartTerms, port: int) -> tuple[list[str], dict[str, str]]:
        """Returns command and environment. On a CPU the kernels are torch's own."""
        settings = terms.settings
        words = [terms.python, str(IN_SERVER / "tandem_sglang.py"), "--model-path", str(terms.folder)]
        words += ["--dtype", terms.dtype]
        words += ["--host", "127.0.0.1", "--port", str(port), "--device", terms.device, "--skip-server-warmup"]
        words += ["--enable-metrics"]
        words += ["--random-seed", str(port)]
        if terms.media:  # torchvision would make other pixels than the trainer's
            words += ["--image-processor-backend", "pil"]
        if settings.max_running is not None:
            words += ["--max-running-requests", str(settings.max_running)]
        if settings.max_model_len is not None:
            words += ["--context-length", str(settings.max_model_len)]
        if terms.seat is not None:
            words += ["--tp-size", str(len(terms.seat.devices)), MEMORY_SHARE, str(terms.seat.memory_share)]
        if terms.sleeps:
            words += ["--enable-memory-saver"]
        environment = {"HF_HUB_OFFLINE": "1"}
        if terms.device == "cpu":
            words += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
            words += ["--sleep-on-idle"]
            words += ["--disable-radix-cache", "--mem-fraction-static", "0.1", "--max-total-tokens", "32768"]
            bound = ",".join(str(cpu) for cpu in terms.cpus)
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": bound}
        return words, environment


class _OnTheGpu:
    """A tensor in GPU memory. Whoever unpickles it opens the same memory, without a copy."""

    def __init__(self, handle: Sequence[Any], shape: Sequence[int], dtype: torch.dtype, offset: int):
        """``handle``: handle of the tensor's bucket, as encoded for JSON. ``offset``: of the tensor in the bucket, in
        bytes."""
        _, *others = (base64.b64decode(part) if isinstance(part, str) else part for part in handle)
        memory, num_bytes, start, counter, count, event, wait = others
        stride = tuple(torch.empty(tuple(shape), device="meta").stride())
        layout = (torch.Tensor, torch.Size(shape), stride, offset // dtype.itemsize, torch.storage.TypedStorage, dtype)
        # 0: the only GPU that the server sees
        self._terms = (*layout, 0, memory, num_bytes, start, False, counter, count, event, wait)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_cuda_tensor, self._terms


def handle_payloads(handles: Sequence[Sequence[Any]], tensors: Iterable[Sequence[Any]]) -> list[str]:
    """Returns one payload per bucket; see `WeightSource.place` for the arguments."""
    payloads = []
    for bucket, entries in itertools.groupby(tensors, key=lambda entry: entry[3]):
        named = [
            (name, _OnTheGpu(handles[bucket], shape, getattr(torch, dtype), offset))
            for name, shape, dtype, _, offset in entries
        ]
        written = io.BytesIO()
        pickle.dump(named, written)
        payloads.append(base64.b64encode(written.getvalue()).decode())
    return payloads
