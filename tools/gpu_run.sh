#!/usr/bin/env bash
# One command on a machine with a GPU, from the repository root: builds the binding for the torch there, then runs what is
# named, in this order, each with its own time limit, and ends with a short summary.
#
#   tools/gpu_run.sh [--tests "PATH ..."] [--bench "SCRIPT ..."] [--cmd "COMMAND"]... [--limit SECONDS]
#
#   --tests   pytest paths, one pytest run for all
#   --bench   benchmark scripts; each is given --out $OUT
#   --cmd     shell commands, e.g. --cmd "python3 tools/ptxas_gate.py"; may be repeated
#   --limit   seconds for each step (default 240)
#
# libflashsdpa.so is expected in torch_flashsdpa/lib/, built elsewhere. Logs, JSON and tables are left in $OUT (default
# ./out). The exit status is 0 if every step passed. FLASHSDPA_COMMIT names the commit where there is no .git.
set -u -o pipefail

tests="" benches="" limit=240 commands=()
while (($#)); do
  case "$1" in
    --tests) tests="$2" ;;
    --bench) benches="$2" ;;
    --cmd) commands+=("$2") ;;
    --limit) limit="$2" ;;
    *) echo "gpu_run: unknown option $1 (see the head of $0)" >&2; exit 2 ;;
  esac
  shift 2 || { echo "gpu_run: the last option has no value" >&2; exit 2; }
done

mkdir -p "${OUT:-out}"
out="$(realpath "${OUT:-out}")"
rm -f "$out"/{machine,build,tests,bench,commands,summary}.log
export OUT="$out" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
summary=() failed=0

# step LOG COMMAND...: runs the command under the limit, appends its output to $out/LOG.log, notes the outcome.
step() {
  local log="$out/$1.log" started=$SECONDS status
  shift
  echo "== $*" | tee -a "$log"
  timeout -k 10 "$limit" "$@" 2>&1 | tee -a "$log"
  status=${PIPESTATUS[0]}
  case $status in
    0) status=ok ;;
    124 | 137) status="over $limit s"; failed=1 ;;
    *) status="failed ($status)"; failed=1 ;;
  esac
  summary+=("$(printf '%-16s %4d s  %s' "$status" $((SECONDS - started)) "$*")")
  [[ $status == ok ]]
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw,memory.total --format=csv,noheader |
  tee "$out/machine.log"
python3 -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__)' | tee -a "$out/machine.log"

if step build python3 -m torch_flashsdpa build; then
  # shellcheck disable=SC2086  # the options hold lists of words
  [[ -n $tests ]] && step tests python3 -m pytest -q -rfE -p no:cacheprovider --durations=5 $tests
  for script in $benches; do step bench python3 "$script" --out "$out"; done
fi
for command in ${commands[@]+"${commands[@]}"}; do step commands bash -c "$command"; done

{
  echo
  echo "== summary"
  printf '%s\n' "${summary[@]}"
} | tee "$out/summary.log"
exit $failed
