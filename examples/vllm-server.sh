#!/bin/sh
# A stock vLLM server on a CPU whose weights follow a run. Start it beside `anabranch learn` (see two-regions.toml):
#
#     sh examples/vllm-server.sh MODEL 8000
#     anabranch follow --config examples/two-regions.toml --set model.path=MODEL --region east --server http://127.0.0.1:8000
#     curl -s http://127.0.0.1:8000/weight_info        # {"weight_version":"e1.v42"}
#
# MODEL is the checkpoint folder the learner starts from. docs/vllm-plugin.md explains every setting; on a GPU leave out
# the four lines that say CPU, and write `vllm serve "$1"` in place of `python -m ... --model "$1"`.
set -eu

export VLLM_SERVER_DEV_MODE=1              # the endpoints that pause, update and resume; keep them on loopback
export VLLM_PLUGINS=anabranch              # of the installed plugins this one alone
export VLLM_HOST_IP=127.0.0.1
export TORCHDYNAMO_DISABLE=1               # CPU: no compilation at every new batch shape
export VLLM_CPU_OMP_THREADS_BIND=nobind    # CPU: the server shares its cores
export OMP_NUM_THREADS=1                   # CPU

python=$(dirname "$0")/../.venv/bin/python  # of this checkout, as `make setup` built it; else that of the shell
[ -x "$python" ] || python=python

exec "$python" -m vllm.entrypoints.openai.api_server --model "$1" --host 127.0.0.1 --port "$2" \
    --weight-transfer-config '{"backend": "anabranch"}' \
    --dtype float32 --max-model-len 512 --max-num-seqs 16 --enforce-eager \
    --kv-cache-memory-bytes 67108864 \
    --generation-config vllm --logprobs-mode processed_logprobs \
    --max-num-batched-tokens 8192          # CPU: max-num-seqs times max-model-len, so that no prompt is computed in parts
