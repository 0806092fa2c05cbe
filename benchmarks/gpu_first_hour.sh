#!/usr/bin/env bash
# What is worth knowing first on a machine with a GPU, in that order, each step with a limit of its own; results as they come.
#
#   benchmarks/gpu_first_hour.sh OUT [STEP...]
#
# Steps: look tests curves sensitivity bench training (all, by default); a+b runs a and b side by side, for what is not timed.
# A step leaves OUT/STEP.txt, and OUT/STEP.done when it ends well: it is not run again then. Ctrl-C ends the step; the same
# command goes on. PYTHON names the interpreter, LIMIT=300 sets the seconds of each step.
set -uo pipefail
trap 'trap "" INT TERM; kill -- $(jobs -p) 2>/dev/null; exit 130' INT TERM
[ $# -ge 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
cd "$(dirname "$0")/.." || exit 1
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 1
shift
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-1}   # many processes compile the same few functions
cli="$python -m nemo_ext.cli"

step() { # name, seconds, command
  [ -e "$out/$1.done" ] && { echo "== $1: done before"; return 0; }
  local began status
  began=$(date +%s)
  timeout --signal=INT --kill-after=15 "${LIMIT:-$2}" bash -c "$3" >"$out/$1.txt" 2>&1 &
  trap 'kill -INT $! 2>/dev/null; exit 130' INT TERM  # timeout tells all processes of the step
  wait $!
  status=$?
  [ $status -eq 0 ] && touch "$out/$1.done"
  echo "== $1: exit status $status after $(($(date +%s) - began)) s" | tee -a "$out/$1.txt"
  return 0
}

one() {
  case $1 in
  look) step look 120 "nvidia-smi; $cli doctor; $python -m torch.utils.collect_env" ;;
  tests) step tests 600 "$python -m pytest -m gpu -q -n ${WORKERS:-10} --dist load -p no:cacheprovider tests/puzzle tests/blockwise tests/megatron" ;;
  curves) step curves 600 "$python benchmarks/gpu_curves.py $out/curves" ;;
  sensitivity) step sensitivity 300 "$cli train run_dir=$out/parent precision=bf16 && $cli sensitivity sensitivity.model=$out/parent run_dir=$out/plan && $cli train run_dir=$out/planned precision=proposed --config-dir $out/plan" ;;
  bench) step bench 600 "$python benchmarks/gpu.py --output $out/bench.md" ;;
  training) step training 1800 "$python benchmarks/gpu_train.py $out/training --rehearse && $python benchmarks/gpu_train.py $out/training" ;;
  *) echo "unknown step $1: look, tests, curves, sensitivity, bench, training"; exit 2 ;;
  esac
}

for words in "${@:-look tests+curves sensitivity bench training}"; do
  for word in $words; do
    for name in ${word//+/ }; do one "$name" & done
    wait
  done
done
