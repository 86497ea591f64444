#!/bin/sh
# Makes the environments of tests/foreign: agents that nobody here wrote, apart from Tandem's own environment.
#
#     sh scripts/foreign_agents.sh [FOLDER]      # default: envs; about 3 GB. TANDEM_FOREIGN names another folder to the tests
#
# envs/agents and envs/agents2 have the Python frameworks, envs/npm the coding agents (where npm is there), envs/verifiers verifiers and uv,
# envs/games TextArena, SkyRL-gym and reasoning-gym, envs/openenv a server of environments, envs/renderers
# the library with whose parsers ours is compared, envs/datasets Hugging Face's datasets, which loads the records of runs,
# envs/lm_eval lm-evaluation-harness with its own back end.
set -eu
folder=${1:-envs}
python=${PYTHON:-python3}
mkdir -p "$folder/npm"

"$python" -m venv "$folder/verifiers"
"$folder/verifiers/bin/python" -m pip install -q uv  # which verifiers needs, too
uv=$folder/verifiers/bin/uv

environment() {
    [ -d "$folder/$1" ] || "$python" -m venv "$folder/$1"
    name=$1
    shift
    "$uv" pip install -q --python "$folder/$name/bin/python" "$@"
}

environment agents openai-agents==0.24.0 'pydantic-ai-slim[openai]==2.68.0' langgraph==1.2.22 langchain-openai==1.7.3 \
    smolagents==1.26.0 inspect-ai==0.3.285 'click<8.2.2' anthropic==2.12.0
environment agents2 dspy==3.4.1 agno==3.1.10 llama-index-core==0.14.25 llama-index-llms-openai-like==0.8.1 \
    strands-agents==1.62.0 autogen-agentchat==0.7.5 'autogen-ext[openai]==0.7.5' openai==2.54.0
environment verifiers verifiers==0.4.0
environment games textarena==0.7.4 skyrl-gym==0.4.0 reasoning-gym==0.1.25 psutil
environment openenv openenv-core==0.3.0
environment renderers renderers==0.1.12 httpx
environment datasets datasets==5.2.0
environment lm_eval 'lm-eval[api,hf]==0.4.13' datasets==5.2.0 transformers==5.23.0 "torch==2.13.0"

if command -v npm >/dev/null; then
    cd "$folder/npm"
    npm install --no-audit --no-fund @openai/codex@0.169.0 @mariozechner/pi-coding-agent@0.73.1 opencode-ai@1.18.33
fi
