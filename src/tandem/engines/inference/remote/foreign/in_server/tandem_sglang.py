"""Starts SGLang with a lock on every route: ``python tandem_sglang.py OPTION…``, the options of `sglang.launch_server`.

It runs in SGLang's environment, where there is no Tandem. SGLang's processes find `sglang.launch_server` as their main
module, as if it had been started itself.
"""

import runpy

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import app
    from tandem_key import RequireKey

    app.add_middleware(RequireKey)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
