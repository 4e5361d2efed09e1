#!/usr/bin/env bash
# benchmarks.sh DATA FOLDER: the part of conf/suite/mission.yaml that two cores without bfloat16 can do in an evening,
# chosen before any of its answers was seen: HumanEval+ through fourteen settings, then GSM8K through five, whose answers
# are twice as long. DATA holds the benchmarks' files, FOLDER takes the runs. Programs of HumanEval+ are run. A part that
# was killed goes on when the same command is given again.
set -euo pipefail
data="$1" folder="$2"
workers="$(getconf _NPROCESSORS_ONLN)"
export OMP_NUM_THREADS=1

part() { # part TASK METHODS OVERRIDE...: one process per core, then what joins them
  local suite=(python -m kvbench suite=mission "tasks=[$1]" "methods=$2" "data_dir=$data" allow_code_execution=true
    "results_dir=$folder" "${@:3}")
  local items="$folder/items/$1"
  mkdir -p "$folder/items"
  "${suite[@]}" "manifest=$items"
  rm -f "$items".part.*
  split -n "l/$workers" "$items" "$items.part."
  printf '%s\n' "$items".part.* | xargs "-P$workers" -I{} "${suite[@]}" "selection={}"
  "${suite[@]}"
}

part humaneval_plus "[\"method=full\",\"method=h2o,snapkv,pyramidkv,ada_snapkv,kv_compress,minikv,streaming_llm,random method.budget=0.25\",\"method=kivi method.bits=4,2\",\"method=diffkv\",\"method=fp8,int4\"]"
part gsm8k '["method=full","method=snapkv,streaming_llm method.budget=0.25","method=kivi method.bits=2","method=diffkv"]' limit=first:64
