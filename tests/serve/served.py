"""A server in this process, on an event loop of its own, for tests: real sockets, a tiny model."""

import asyncio
import contextlib
import http.client
import json
import threading

import torch

from tandem.api.requests import LLMRequest, LLMResponse, NewTokens, StopReason
from tandem.api.weights import FolderSource, WeightUpdate, WeightVersion, tensor_digest, version_digest
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.embedded import EmbeddedEngine
from tandem.engines.inference.serve.routes import ServedEngine
from tandem.engines.inference.serve.service import EngineService
from tandem.engines.inference.serve.text import Tokenizers
from tandem.protocol.access import Access, ServiceLimits
from tandem.protocol.media_intake import MediaIntake
from tandem.protocol.server import Server
from tests.tiny import VOCAB_SIZE

ADMIN = "the-admin-token-of-tests"
TOKEN = "the-token-of-tests-00000"
CONTEXT = 512


def tiny_engine(folder, **settings):
    """An embedded engine of this process, float32, one thread."""
    config = EmbeddedEngineConfig(**{"max_running": 16, "threads": 1, "kv_cache_gib": 0.05} | settings)
    version = WeightVersion(0)
    return EmbeddedEngine(EngineCore(folder, config, torch.float32, "cpu", version), version=version, threads=1)


class Served:
    """A running server: ``with Served(folder) as served: served.json("GET", "/health")``."""

    def __init__(self, folder, *, token=None, run=None, roots=(), vocab_size=VOCAB_SIZE, bound=None, **limits):
        self.folder, self.token, self._vocab_size = folder, token, vocab_size
        self._run, self._roots, self._limits = run, tuple(root.resolve() for root in roots), limits
        self._bound, self.limits = bound, ServiceLimits(**{"max_tokens": CONTEXT, "shutdown_s": 5.0} | limits)
        self._ready, self._failure = threading.Event(), None
        self._thread = threading.Thread(target=self._main, name="served", daemon=True)

    def __enter__(self):
        self.engine = tiny_engine(self.folder)
        self._tokenizers = Tokenizers(
            self.folder,
            max_long=self._limits.get("max_long_prompts", 16),
            intake=MediaIntake(self.limits, bound=self._bound),
        )
        self._thread.start()
        assert self._ready.wait(30)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *error):
        self.end()

    def end(self):
        """Tells it to end and waits for that."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._tokenizers.close()
        self.engine.close()

    def _main(self):
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()

    async def _serve(self):
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.service = EngineService(
            self.engine,
            self._tokenizers,
            "tiny",
            self.folder,
            self._vocab_size,
            self.limits,
            initial=WeightVersion(0),
            dtype="float32",
            run=self._run,
            weights_roots=self._roots,
        )
        access = Access.of("127.0.0.1", token=self.token, admin_token=ADMIN)
        self.application = ServedEngine(self.service)
        self.server = Server(self.application, access)
        async with self.server.listening("127.0.0.1", 0) as self.port:
            self.url = f"http://127.0.0.1:{self.port}"
            self._ready.set()
            await self._stop.wait()

    def request(self, method, path, body=None, *, headers=None, token=None, timeout=30):
        """(status, bytes of the body) of one plain request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        sent = {} if token is None else {"Authorization": f"Bearer {token}"}
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        try:
            connection.request(method, path, data, sent | (headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def json(self, method, path, body=None, *, status=200, **options):
        """The parsed body of an answer with this status; control routes get the admin token, others the server's."""
        options.setdefault("token", ADMIN if path.startswith("/control/") else self.token)
        got, raw = self.request(method, path, body, **options)
        assert got == status, raw
        return json.loads(raw)


class Saying:
    """An engine that says one text, and is asked as the embedded one is."""

    version, capabilities, alive = WeightVersion(0), frozenset(), True

    def __init__(self, tokenizer, text, reason=StopReason.STOP, eos=True):
        self.ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        self.ids += [tokenizer.eos_token_id] if eos and reason == StopReason.STOP else []
        self.reason = reason

    async def agenerate(self, request):
        count = len(self.ids)
        return LLMResponse(request.input_ids, tuple(self.ids), (-0.5,) * count, (0,) * count, self.reason, 1.0)

    async def stream(self, request):
        for token in self.ids[:-1]:
            yield NewTokens((token,), (-0.5,))
        yield await self.agenerate(request)


def request_of(ids, key=None, deadline_s=None, media=(), **sampling):
    """A request for one completion."""
    gconfig = GenerationConfig(**{"n_samples": 1, "max_new_tokens": 12} | sampling)
    return LLMRequest(tuple(ids), gconfig, key, deadline_s=deadline_s, media=tuple(media))


def one_by_one(engine, requests):
    """The responses, each request after the answer to the one before."""

    async def ask():
        return [await engine.agenerate(request) for request in requests]

    return asyncio.run(ask())


def update_of(folder, number, run="r"):
    """The weights of a folder as version ``number``."""
    source = FolderSource(folder)
    digests = {name: tensor_digest(tensor) for name, tensor in source.tensors()}
    return WeightUpdate(WeightVersion(number, version_digest(digests), run), source, digests)


def as_body(update):
    """What `/control/prepare` takes."""
    version = update.version
    return {
        "version": {"number": version.number, "digest": version.digest, "run": version.run, "model": version.model},
        "folder": str(update.source.folder),
        "digests": dict(update.digests),
    }
