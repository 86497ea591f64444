"""Run schemathesis against `tandem serve`, bounded: python scripts/schemathesis_serve.py [--examples 30] [--model FOLDER]

Schemathesis gets an environment of its own in a temporary folder, since it brings many packages that Tandem does not need.
The server gets small bounds, so that every answer is short. Takes minutes, most of them for starting and installing.
Ends with schemathesis' exit status. What is checked: no server error, the documented statuses, content types and bodies,
refusal of what the schema forbids, and of requests without the token.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT_S = 300.0
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,ignored_auth"


@contextlib.contextmanager
def serving(model: str, folder: Path) -> Iterator[tuple[str, str, str]]:
    """URL, token and admin token of a server that ends with the block."""
    address, token, admin = (folder / name for name in ("address.json", "token", "admin"))
    files = ["--address-file", str(address), "--token-file", str(token), "--admin-token-file", str(admin)]
    bounds = ["--max-model-len", "64", "--max-completions", "2", "--default-chat-tokens", "4", "--weights-root", str(folder)]
    command = [sys.executable, "-m", "tandem", "serve", model, "--port", "0", "--kv-cache-gib", "0.2", *files, *bounds]
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not address.is_file():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"tandem serve did not start within {START_TIMEOUT_S:g} s")
            time.sleep(0.2)
        yield json.loads(address.read_text())["url"], token.read_text().strip(), admin.read_text().strip()
    finally:
        process.terminate()
        process.wait(60)


def main() -> int:
    """Installs, serves, runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--examples", type=int, default=30, help="requests an operation and phase")
    parser.add_argument("--version", default="", help="of schemathesis, such as ==4.1 (default: the newest)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        venv.create(folder / "venv", with_pip=True)
        bin_folder = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        install = [bin_folder / "python", "-m", "pip", "install", "-q", f"schemathesis{arguments.version}"]
        subprocess.run(install, check=True)
        with serving(arguments.model, folder) as (url, token, admin):
            asked = urllib.request.Request(f"{url}/openapi.json", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(asked, timeout=30) as answer:
                (folder / "openapi.json").write_bytes(answer.read())
            status = 0
            # the control routes last: they put the weights to sleep
            for paths, secret in (("/(health|ready|openapi|v1|generate|inference)", token), ("/control/", admin)):
                status |= subprocess.run(
                    [
                        *(bin_folder / "schemathesis", "run", folder / "openapi.json", "--url", url),
                        *("-H", f"Authorization: Bearer {secret}", "--include-path-regex", f"^{paths}"),
                        *("--checks", CHECKS, "--max-examples", str(arguments.examples), "--workers", "1"),
                    ],
                    cwd=folder,  # it writes its notes there
                ).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
