"""Threads of an engine that touch the GPU have the engine's as their current one, and not the first."""

import os
import pickle
import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import torch

from tandem.engines.inference.callers import Callers
from tandem.engines.inference.child import Child
from tandem.engines.inference.embedded import drive
from tandem.engines.inference.link import MethodCall


def test_each_thread_that_serves_an_engine_takes_the_engines_gpu(monkeypatch):
    current = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.update({threading.get_ident(): str(device)}))
    ours, theirs = Pipe()
    child, seen = Child(theirs, os.getppid()), []
    child.device = "cuda:3"

    def look(*arguments):
        seen.append(current.get(threading.get_ident()))

    ours.send_bytes(pickle.dumps([pickle.dumps(MethodCall(1, "pause")), pickle.dumps(MethodCall(None, "stop"))]))
    child.listen(SimpleNamespace(call=look, stop=lambda: None))
    driver = SimpleNamespace(core=SimpleNamespace(device=torch.device("cuda:2")), run=look)
    thread = threading.Thread(target=drive, args=(driver, Callers()))
    thread.start()
    thread.join()
    assert seen == ["cuda:3", "cuda:2"]
