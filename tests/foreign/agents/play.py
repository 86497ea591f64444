"""One episode of an agent of this folder, as the program of `workflow=program`: ``play.py AGENT.py QUESTION``."""

import json
import os
import subprocess
import sys

agent, question = sys.argv[1:]
session = {"base_url": os.environ["OPENAI_BASE_URL"], "key": os.environ["OPENAI_API_KEY"], "question": question}
there = os.path.join(os.path.dirname(__file__), agent)
sys.exit(subprocess.run([sys.executable, there], input=json.dumps([session]).encode()).returncode)
