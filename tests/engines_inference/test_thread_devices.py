"""Threads of an engine that touch the GPU have the engine's as their current one, and not the first."""

import pickle
import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch

from tandem.engines.inference.child import PipeEnd
from tandem.engines.inference.embedded import drive
from tandem.engines.inference.engine_calls import Callers


def listen(child, driver):
    with pytest.raises(EOFError):
        child.listen(driver)


def test_each_thread_that_serves_an_engine_takes_the_engines_gpu(monkeypatch):
    current = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.update({threading.get_ident(): str(device)}))
    ours, theirs = Pipe()
    child, seen = PipeEnd(theirs), []
    child.device = "cuda:3"

    def look(*arguments):
        seen.append(current.get(threading.get_ident()))

    ours.send_bytes(pickle.dumps([pickle.dumps((1, "pause", ()))]))
    reader = threading.Thread(target=listen, args=(child, SimpleNamespace(call=look)))
    reader.start()
    assert ours.poll(10) and pickle.loads(ours.recv_bytes()) == ("answer", (1, None, None))
    ours.close()
    reader.join(10)
    driver = SimpleNamespace(core=SimpleNamespace(device=torch.device("cuda:2")), run=look)
    thread = threading.Thread(target=drive, args=(driver, Callers()))
    thread.start()
    thread.join()
    assert seen == ["cuda:3", "cuda:2"]
