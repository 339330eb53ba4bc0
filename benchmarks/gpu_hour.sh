#!/bin/sh
# First run on a GPU: runs five checks and writes one Markdown file to paste into an issue.
#
#   sh benchmarks/gpu_hour.sh                      # all, on two GPUs; about an hour
#   ONLY="ranks compile" sh benchmarks/gpu_hour.sh # some of: suite ranks compile table resume
#   QUICK=1 sh benchmarks/gpu_hour.sh              # small sizes, without the suite, on a CPU too
#
# PYTHON: the interpreter (default .venv/bin/python). OUT: the file (default gpu-hour.md).
# A check that fails is marked in the file; the others still run. Exit code 1 if one failed.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-.venv/bin/python}
out=${OUT:-gpu-hour.md}
work=${WORK:-runs/gpu-hour}
quick=${QUICK:-}
only=${ONLY:-"suite ranks compile table resume"}
[ -n "$quick" ] && [ -z "${ONLY:-}" ] && only="ranks compile table resume"
failed=0
mkdir -p "$work"
rm -rf "$work/whole" "$work/killed" "$work/whole.log" "$work/killed.log" # of an earlier run

measure() { "$python" benchmarks/gpu_hour.py "$@"; }
sizes() { if [ -n "$quick" ]; then echo "$1"; else echo "$2"; fi; }

suite() {
  OMP_NUM_THREADS=1 "$python" -m pytest -n 4 --dist worksteal -q >"$work/suite.log" 2>&1
  status=$?
  echo '```'
  tail -15 "$work/suite.log"
  echo '```'
  return $status
}
ranks() {
  # shellcheck disable=SC2046
  "$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    benchmarks/gpu_hour.py ranks $(sizes "--batch 32" "--batch 1024")
}
# shellcheck disable=SC2046
compile() { measure compile $(sizes "--batch 16" "--batch 1024"); }
# shellcheck disable=SC2046
table() { measure table $(sizes "--batches 16 --repeats 1" "--batches 1024,4096,16384"); }
# shellcheck disable=SC2046
resume() {
  small="--set model.width=4 --set views.size=8 --set knn.every=0"
  measure resume "$work" $(sizes "--epochs 2 $small" "--epochs 20")
}

titles="suite:The test suite
ranks:Two ranks and one process
compile:Compiled and eager
table:Time and peak memory of a loss
resume:Killed and resumed"

page() { # written anew after each check, so that it is complete whenever the script is ended
  cat "$work/head.md" "$work/summary.md" "$work/checks.md" >"$out"
}
run() { # name, title
  begun=$(date +%s)
  verdict="passed"
  "$1" >"$work/$1.md" 2>"$work/$1.err" || { verdict="**FAILED**"; failed=1; }
  printf '| %s | %s | %s |\n' "$2" "$verdict" "$(($(date +%s) - begun))" >>"$work/summary.md"
  {
    printf '\n## %s\n\n' "$2"
    cat "$work/$1.md"
    if [ "$verdict" != passed ]; then printf '\n```\n%s\n```\n' "$(tail -30 "$work/$1.err")"; fi
  } >>"$work/checks.md"
  echo "$1: $verdict" >&2
}

{
  printf '# First run on a GPU\n\n%s, commit %s%s\n\n' "$(date -u +%Y-%m-%d)" \
    "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" "${quick:+, small sizes}"
  measure machine
} >"$work/head.md"
printf '\n| check | result | seconds |\n| --- | --- | --- |\n' >"$work/summary.md"
: >"$work/checks.md"
for name in $only; do
  run "$name" "$(echo "$titles" | sed -n "s/^$name://p")"
  page
done
echo "wrote $out" >&2
exit $failed
