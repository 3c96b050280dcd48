#!/usr/bin/env bash
# Trains and judges a suite on a CUDA machine, in the repository's root; pack.py made PACK.
#   benchmarks/adapt_text/cuda.sh text|vision PACK OUT STAGE…      stages: train, judge, changed
# Seconds that a stage may take: TRAIN=400 JUDGE=400 CHANGED=100. Judging stops in time with the episodes it has.
set -eu
suite=$1 pack=$2/$1 out=$3
shift 3
export PYTHONPATH=src:$pack/lib APPORTION_DATA=$PWD/$pack/data PYTHONUNBUFFERED=1
options=(--suite "$suite" --out "$out")
learn=()
others=,ours-no-ort,ours-no-openvino
if [ "$suite" = text ]; then
    [ -d "$pack/minilm" ] || tar -xzf "$pack/minilm.tgz" -C "$pack"
    options+=(--model "$pack/minilm")
else
    learn=(--hold 1 --vary 0.5) others=
fi
trained=ours,ours-settled,ours-cvar,ours-two$others,global,template,unconditional,uniform,cost,sensitivity,slimmable
trained=$trained,shallow,smat,pruned

# With the multi-process service the processes share the device at the same time, not in turns.
export CUDA_MPS_PIPE_DIRECTORY=${TMPDIR:-/tmp}/mps CUDA_MPS_LOG_DIRECTORY=${TMPDIR:-/tmp}/mps
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
if nvidia-cuda-mps-control -d && timeout 30 python3 -c 'import torch; torch.ones(1, device="cuda")'; then
    trap 'echo quit | nvidia-cuda-mps-control' EXIT # else the next call finds it running and goes without
else
    echo "without the multi-process service"
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
fi
for stage in "$@"; do
    began=$SECONDS
    case $stage in
    train)
        timeout "${TRAIN:-400}" python3 benchmarks/adapt_text/train.py "${options[@]}" "${learn[@]}" --methods "$trained"
        ;;
    judge)
        rm -f "$out/results.jsonl"
        python3 benchmarks/adapt_text/judge.py "${options[@]}" --wall "${JUDGE:-400}" \
            --methods "$trained,ours-float,pruned-int8,template-int8,unconditional-int8"
        ;;
    changed)
        python3 benchmarks/adapt_text/judge.py "${options[@]}" --wall "${CHANGED:-100}" --changed ours
        ;;
    esac
    echo "$stage: $((SECONDS - began)) s"
done
