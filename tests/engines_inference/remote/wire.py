"""Servers that speak what vLLM 0.32.0 and SGLang 0.5.23 were seen to speak, over a "model" that is one line of arithmetic.

For the client's logic only: that the real servers speak so is checked by `scripts/check_servers.py`.
"""

import asyncio
import hashlib
import math
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from aiohttp import web
from safetensors import safe_open

from tandem.engines.inference.remote.foreign.in_server.tandem_vllm_worker import TandemWorker

VOCAB = 300
END = 2


class StandIn:
    """One server in a thread: ``with VllmStandIn(folder) as server: server.url``. A token takes ``token_s``; requests beyond
    ``slots`` wait.
    """

    def __init__(self, folder, *, token_s=0.0, slots=1000, ignores_temperature=False, dtype="float32", spoils=()):
        self.folder, self.token_s, self.ignores_temperature, self.dtype = Path(folder), token_s, ignores_temperature, dtype
        self.spoils = set(spoils)
        self.label, self.paused, self.requests, self.aborted, self.running = "default", False, [], set(), set()
        self.flushed = self.forgotten = 0
        self.changes, self.hung = 0, False
        self.made, self._slots = 0, asyncio.Semaphore(slots)
        self.garbage = None
        self.sleeps, self.asleep, self.calls = False, set(), []
        self.load(self.folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(60)
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _open(self):
        app = web.Application(middlewares=[self.count])
        for path, (method, handler) in self.routes().items():
            app.router.add_route(method, path, handler)
        app.router.add_get("/openapi.json", self.openapi)
        if "/metrics" not in self.spoils:
            app.router.add_get("/metrics", self.metrics)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    @web.middleware
    async def count(self, request, handler):
        """Whatever is posted changes the server, but requests, their ends and questions for checksums."""
        if request.method == "POST" and not any(word in request.path for word in ("generate", "abort", "checker")):
            self.changes += 1
        return await handler(request)

    def sleep_well(self, parts):
        """Idle and told to give back what is there. What the weights were is lost."""
        assert self.sleeps and not self.running and parts and not parts & self.asleep, (parts, self.asleep)
        self.asleep |= parts
        if "weights" in parts:
            self.held, self.seed = dict.fromkeys(self.held, "lost"), 0

    async def hang(self):
        if "hang" in self.spoils:
            self.hung = True
            await asyncio.sleep(60)

    async def metrics(self, _):
        names = [name.partition("{")[0].removesuffix("_total") for name in self.counters]
        lines = [f"# TYPE {name} counter" for name in names]
        lines += [f"{name} {self.made if i == 0 else 0}.0" for i, name in enumerate(self.counters)]
        return web.Response(text="\n".join([*lines, "process_cpu_seconds_total 7.0", ""]))

    async def openapi(self, _):
        return web.json_response({"paths": {path: {} for path in self.routes() if path not in self.spoils}})

    # ------------------------------------------------------------------ the model

    def load(self, folder):
        """Weights are what their bytes add up to, and their digests in the server's layout: q, k, v are one tensor, and what
        has a row for each token is filled up with zeros."""
        found = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name).contiguous() for name in opened.keys()}
        self.take(found)

    def take(self, found):
        """Named tensors; the model holds them in its own precision."""
        found = {name: tensor.to(getattr(torch, self.dtype)) for name, tensor in found.items()}
        for name in [name for name in found if name.endswith(("embed_tokens.weight", "lm_head.weight"))]:
            found[name] = torch.nn.functional.pad(found[name], (0, 0, 0, -len(found[name]) % 64))
        raw = {name: bytes(tensor.reshape(-1).view(torch.uint8).numpy().data) for name, tensor in found.items()}
        self.seed = int(hashlib.sha256(raw["model.embed_tokens.weight"]).hexdigest()[:6], 16)
        self.held = {name: hashlib.sha256(data).hexdigest() for name, data in raw.items() if "_proj" not in name}
        for name in [name for name in raw if "q_proj" in name]:
            parts = b"".join(raw[name.replace("q_proj", f"{one}_proj")] for one in "qkv")
            self.held[name.replace("q_proj", "qkv_proj")] = hashlib.sha256(parts).hexdigest()

    def next_token(self, ids):
        """The token that follows these: always the same one, and another one under other weights."""
        return 3 + (ids[-1] * 31 + len(ids) * 7 + self.seed) % (VOCAB - 3)

    def logprob(self, token, temperature):
        return -(token % 50 + 1) / 100 / (1.0 if self.ignores_temperature else temperature)

    processor = None
    """Makes the prompt that it computes of the tokens and the files beside them, as data URLs."""

    tells_prompt = True

    def seen(self, ids, files):
        """The tokens that it computes."""
        return self.processor(list(ids), files) if files else ids

    cuts = frozenset()
    """What its log-probabilities are normalised anew for: ``truncated`` by top-p or top-k, ``suppressed`` stop tokens."""

    def top(self, temperature, top_k, suppressed):
        """Five most probable tokens, whatever the prompt."""
        scale = 1.0 if self.ignores_temperature else temperature
        found = {10 + i: -1.0 - i * 0.4 / scale for i in range(5)}
        shares = {"suppressed": 1.0 - sum(math.exp(found.pop(token)) for token in {*suppressed} & found.keys())}
        found = dict(list(found.items())[: top_k if top_k > 0 else None])
        shares["truncated"] = sum(map(math.exp, found.values())) if top_k > 0 else 1.0
        shift = sum(math.log(shares[kind]) for kind in self.cuts)
        return [(token, value - shift) for token, value in found.items()]

    async def generate(self, number, ids, limit, stop, temperature, *, minimum, top_p, top_k):
        """Tokens with log-probabilities, spans of labels, and how it ended."""
        self.running.add(number)
        truncated = top_p < 1.0 or top_k > 0
        narrowed = ("truncated" in self.cuts and truncated) or ("suppressed" in self.cuts and minimum > 0)
        try:
            async with self._slots:
                tokens, logprobs, spans, why = await self._generate(number, ids, limit, stop, temperature, minimum)
                return tokens, [value / 2 if narrowed else value for value in logprobs], spans, why
        finally:
            self.running.discard(number)

    async def _generate(self, number, ids, limit, stop, temperature, minimum):
        self.requests.append({"ids": list(ids), "limit": limit, "temperature": temperature, "minimum": minimum})
        tokens, logprobs, spans, why = [], [], [], "length"
        while len(tokens) < limit:
            while self.paused and number not in self.aborted:
                await asyncio.sleep(0.002)
            if self.token_s:
                await asyncio.sleep(self.token_s)
            if number in self.aborted:
                why = "abort"
                break
            if self.paused:
                continue
            assert not self.asleep, f"a token while {self.asleep} sleeps"
            token = self.next_token([*ids, *tokens])
            while token in stop and len(tokens) < minimum:
                token = 3 + token % (VOCAB - 3)
            tokens.append(token)
            self.made += 1
            logprobs.append(self.logprob(token, temperature))
            if not spans or spans[-1]["version"] != self.label:
                spans.append({"version": self.label, "start": len(tokens) - 1, "end": len(tokens)})
            spans[-1]["end"] = len(tokens)
            if token in stop:
                why = "stop"
                break
        return tokens, logprobs, spans, why


def answer(value):
    return web.json_response(value)


class Worker(TandemWorker):
    """Tandem's extension, on a worker that loads nothing."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, server):
        self._server, self.model_runner = server, self

    def get_model(self):
        return torch.nn.Module()

    def reload_weights(self, weights_iterator=(), weights_path=None):
        if weights_path is None:
            self._server.take(dict(weights_iterator))
        else:
            self._server.load(weights_path)


class VllmStandIn(StandIn):
    """The routes of vLLM."""

    worker = None
    gpu = "cpu"

    extension = ""
    device = "cuda"
    cuts = frozenset({"truncated", "suppressed"})
    counters = ('vllm:generation_tokens_total{engine="0",model_name="policy"}', 'vllm:prompt_tokens_total{engine="0"}')

    def routes(self):
        return {
            "/inference/v1/generate": ("POST", self.inference),
            "/inference/v1/abort_requests": ("POST", self.abort),
            "/abort_requests": ("POST", self.abort_all),
            "/pause": ("POST", self.pause),
            "/resume": ("POST", self.resume),
            "/is_paused": ("GET", self.is_paused),
            "/collective_rpc": ("POST", self.rpc),
            "/reset_prefix_cache": ("POST", self.flush),
            "/reset_encoder_cache": ("POST", self.forget),
            "/update_weight_version": ("POST", self.relabel),
            "/weight_info": ("GET", self.info),
            "/weight_checker": ("POST", self.checker),
            "/server_info": ("GET", self.server_info),
            "/version": ("GET", self.version),
            "/v1/models": ("GET", self.models),
            "/sleep": ("POST", self.sleep),
            "/release_kv_cache_memory": ("POST", self.release_cache),
            "/wake_up": ("POST", self.wake_up),
        }

    async def sleep(self, request):
        """Both parts always; it computes nothing until all is awake."""
        self.calls.append(request.path_qs)
        assert request.query["level"] == "2" and "weights" not in self.asleep
        self.paused = True
        self.sleep_well({"weights", "kv_cache"} - self.asleep)
        return answer({"status": "sleeping"})

    async def release_cache(self, request):
        self.calls.append(request.path_qs)
        if not self.paused or self.asleep:
            return web.json_response({"error": {"message": "requires a completed pause first"}}, status=500)
        self.sleep_well({"kv_cache"})
        return answer({"status": "kv_cache_released"})

    async def wake_up(self, request):
        self.calls.append(request.path_qs)
        self.asleep.remove(request.query["tags"])
        self.paused = self.paused and bool(self.asleep)
        return answer({"status": "sleeping" if self.asleep else "awake"})

    async def inference(self, request):
        if self.garbage is not None:
            return answer(self.garbage)
        body = await request.json()
        params = body["sampling_params"]
        assert params["ignore_eos"] and params["max_tokens"] >= 1
        temperature = params["temperature"] or 1.0
        files = [part["url"] for part in body.get("content_parts", ())]
        assert all(part["type"] in ("image_url", "audio_url") for part in body.get("content_parts", ()))
        ids = self.seen(body["token_ids"], files)
        tokens, logprobs, spans, why = await self.generate(
            f"generate-tokens-{body['request_id']}",
            ids,
            params["max_tokens"],
            params["stop_token_ids"],
            temperature,
            minimum=params["min_tokens"],
            top_p=params["top_p"],
            top_k=params["top_k"],
        )
        self.requests[-1]["seed"] = params.get("seed")
        self.requests[-1]["alone"] = params.get("skip_reading_prefix_cache", False)
        content = [{"token_id": t, "logprob": p, "top_logprobs": []} for t, p in zip(tokens, logprobs, strict=True)]
        if params["logprobs"]:
            content[0]["top_logprobs"] = [{"token_id": t, "logprob": p} for t, p in self.tops(params, temperature)]
        choice = {"index": 0, "finish_reason": why, "token_ids": tokens, "weight_versions": spans}
        told = {"prompt_token_ids": ids} if body.get("return_token_ids") and self.tells_prompt else {}
        return answer({"choices": [choice | {"logprobs": {"content": content}}], **told})

    def tops(self, params, temperature):
        suppressed = params["stop_token_ids"] if params["min_tokens"] else ()
        return self.top(temperature, params["top_k"], suppressed)

    async def abort(self, request):
        self.aborted |= set((await request.json())["request_ids"])
        return web.Response()

    async def abort_all(self, request):
        assert await request.json() == {}
        self.aborted |= self.running
        return answer({"status": "aborted", "aborted": len(self.running)})

    async def pause(self, request):
        assert request.query["mode"] == "keep"
        self.paused = True
        return answer({"status": "paused"})

    async def resume(self, _):
        self.paused = False
        return answer({"status": "resumed"})

    async def is_paused(self, _):
        return answer({"is_paused": self.paused})

    async def rpc(self, request):
        body = await request.json()
        if body["method"] == "tandem_whole_logprobs":
            assert self.extension
            self.cuts = self.cuts if "whole" in self.spoils else frozenset()
            return answer({"results": [None]})
        if body["method"] == "tandem_gpu":
            return answer({"results": [self.gpu]})
        paused = self.paused and "weights" not in self.asleep
        assert paused or body["method"] in ("tandem_join", "tandem_leave")
        await self.hang()
        if "reload" in self.spoils:
            return web.json_response({"error": {"message": "no such folder"}}, status=500)
        if body["method"].startswith("tandem_"):
            self.worker = self.worker or Worker(self)
            await asyncio.to_thread(getattr(self.worker, body["method"]), **body["kwargs"])
        elif "load" not in self.spoils:
            self.load(body["kwargs"]["weights_path"])
        return answer({"results": [None]})

    async def flush(self, request):
        assert request.query["reset_running_requests"] == "true"
        self.flushed += 1
        return answer({"success": True})

    async def forget(self, _):
        """Of what was shown; only once no running request counts on it."""
        assert self.paused and self.flushed > self.forgotten
        self.forgotten = self.flushed
        return web.Response()

    async def relabel(self, request):
        self.label = (await request.json())["new_version"]
        return answer({"success": True, "new_version": self.label})

    async def info(self, _):
        return answer({"weight_version": self.label})

    async def checker(self, _):
        return answer({"checksums": {f"dp0:pp0:pcp0:tp0:{name}": digest for name, digest in self.held.items()}})

    async def server_info(self, _):
        parallel = {"worker_extension_cls": self.extension}
        model = {"dtype": f"torch.{self.dtype}", "enable_sleep_mode": self.sleeps}
        device = {"device": self.device}
        return answer({"vllm_config": {"model_config": model, "parallel_config": parallel, "device_config": device}})

    async def version(self, _):
        return answer({"version": "0.32.0"})

    async def models(self, _):
        return answer({"data": [{"id": "policy", "max_model_len": 64}]})


class SGLangStandIn(StandIn):
    """The routes of SGLang."""

    device, opened = "cpu", ()
    cuts = frozenset({"suppressed"})
    counters = (
        'sglang:realtime_tokens_total{mode="decode",tp_rank="0"}',
        'sglang:realtime_tokens_total{mode="prefill_cache",tp_rank="0"}',
    )

    def routes(self):
        return {
            "/generate": ("POST", self.native),
            "/abort_request": ("POST", self.abort),
            "/pause_generation": ("POST", self.pause),
            "/continue_generation": ("POST", self.resume),
            "/update_weights_from_disk": ("POST", self.update),
            "/update_weight_version": ("POST", self.relabel),
            "/init_weights_update_group": ("POST", self.join),
            "/begin_weight_update": ("POST", self.begin),
            "/update_weights_from_distributed": ("POST", self.receive),
            "/update_weights_from_tensor": ("POST", self.open),
            "/end_weight_update": ("POST", self.end),
            "/destroy_weights_update_group": ("POST", self.leave),
            "/weights_checker": ("POST", self.checker),
            "/model_info": ("GET", self.info),
            "/server_info": ("GET", self.server_info),
            "/release_memory_occupation": ("POST", self.release),
            "/resume_memory_occupation": ("POST", self.take_again),
        }

    async def release(self, request):
        tags = (await request.json())["tags"]
        self.calls.append(f"{request.path} {' '.join(tags)}")
        self.sleep_well(set(tags))
        return answer(None)

    async def take_again(self, request):
        tags = (await request.json())["tags"]
        self.calls.append(f"{request.path} {' '.join(tags)}")
        assert set(tags) <= self.asleep
        self.asleep -= set(tags)
        return answer(None)

    async def native(self, request):
        if self.garbage is not None:
            return answer(self.garbage)
        body = await request.json()
        params = body["sampling_params"]
        temperature = params["temperature"] or 1.0
        stop = {*params["stop_token_ids"], 9}  # 9: its tokenizer's own end token
        ids = self.seen(body["input_ids"], [*body.get("image_data", ()), *body.get("audio_data", ())])
        tokens, logprobs, spans, why = await self.generate(
            body["rid"],
            ids,
            params["max_new_tokens"],
            stop,
            temperature,
            minimum=params["min_new_tokens"],
            top_p=params["top_p"],
            top_k=params["top_k"],
        )
        self.requests[-1]["seed"] = params.get("sampling_seed")
        facts = {
            "finish_reason": {"type": why},
            "weight_version": self.label,
            "weight_versions": spans,
            "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, tokens, strict=True)],
        }
        if body.get("top_logprobs_num"):
            suppressed = params["stop_token_ids"] if params["min_new_tokens"] else ()
            found = self.top(temperature, params["top_k"], suppressed)
            facts["output_top_logprobs"] = [[[p, t, None] for t, p in found]]
        told = {"prompt_token_ids": ids} if body.get("return_prompt_token_ids") and self.tells_prompt else {}
        return answer({"output_ids": tokens, "meta_info": facts, **told})

    async def abort(self, request):
        body = await request.json()
        self.aborted |= self.running if body.get("abort_all") else {body["rid"]}
        return web.Response()

    async def pause(self, request):
        assert (await request.json())["mode"] == "retract"
        self.paused = True
        return answer({"status": "ok"})

    async def resume(self, _):
        self.paused = False
        return answer({"status": "ok"})

    async def update(self, request):
        body = await request.json()
        assert self.paused and body["flush_cache"] and "weights" not in self.asleep
        await self.hang()
        if "reload" in self.spoils:
            return web.json_response({"success": False, "message": "no such folder"}, status=400)
        if "load" not in self.spoils:
            self.load(body["model_path"])
        self.label, self.flushed = body["weight_version"], self.flushed + 1
        return answer({"success": True, "message": "", "num_paused_requests": 0})

    async def join(self, request):
        body = await request.json()

        def meet():
            store = dist.TCPStore(body["master_address"], body["master_port"], 2, False, timedelta(seconds=20))
            for prefix in (body["group_name"], f"{body['group_name']}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            self.group = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=20))

        await asyncio.to_thread(meet)
        return answer({"success": True, "message": ""})

    async def begin(self, _):
        assert self.paused
        self.received = {}
        return answer({"success": True, "message": ""})

    async def receive(self, request):
        body = await request.json()

        def take():
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
                self.received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                self.group.broadcast([self.received[name]], dist.BroadcastOptions()).wait()

        await asyncio.to_thread(take)
        if body["flush_cache"]:
            self.label, self.flushed = body["weight_version"], self.flushed + 1
        return answer({"success": True, "message": ""})

    async def open(self, request):
        assert self.paused and self.received == {}
        self.opened = [*self.opened, await request.json()]
        return answer({"success": True, "message": ""})

    async def end(self, _):
        if not self.received:
            return answer({"success": bool(self.opened), "message": ""})
        self.take(self.received)
        return answer({"success": True, "message": ""})

    async def leave(self, _):
        self.group = None
        return answer({"success": True, "message": ""})

    async def relabel(self, request):
        self.label = (await request.json())["new_version"]
        return answer({"success": True})

    async def checker(self, _):
        held = {name: digest if self.device == "cpu" else digest[::-1] for name, digest in self.held.items()}
        return answer({"success": True, "ranks": [{"checksums": {name: digest[:16] for name, digest in held.items()}}]})

    async def info(self, _):
        return answer({"weight_version": self.label})

    async def server_info(self, _):
        facts = {"version": "0.5.23", "device": self.device, "dtype": self.dtype, "max_req_input_len": 64}
        facts["enable_memory_saver"] = self.sleeps
        return answer(facts)
