"""torch's profiler over all threads of one process, with the spans of `tandem.api.activity`."""

import contextlib
import os
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import orjson
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from tandem.api.activity import ACTIVITY

Trace = dict[str, Any]
"""A trace in the format of chrome://tracing: its ``traceEvents`` have microseconds after ``baseTimeNanoseconds``."""


class ProcessProfile:
    """Records operators, kernels of GPUs and spans from its construction until `stop`; one at a time in a process."""

    def __init__(self) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        # without it only the thread that starts the profile is seen, and generation has a thread of its own
        self._profile = profile(activities=kinds, experimental_config=_ExperimentalConfig(profile_all_threads=True))
        self._profile.start()
        # the library replaces a name with any other character as a whole
        ACTIVITY.span = lambda name: record_function(re.sub(r"[^ -~]|[\"\\]", "?", name))

    def stop(self, process: str) -> Trace:
        """Ends it; gives the trace, in which threads have their names, and this process the given one."""
        ACTIVITY.span = contextlib.nullcontext
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels that are still on their way belong to it
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(file))
            trace: Trace = orjson.loads(file.read_bytes())
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        for event in trace["traceEvents"]:
            if event["name"] == "thread_name" and event["tid"] in names:
                event["args"]["name"] = names[event["tid"]]
            if event["name"] == "process_name" and event["pid"] == os.getpid():
                event["args"]["name"] = process
        return trace
