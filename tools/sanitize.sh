#!/usr/bin/env bash
# compute-sanitizer over the CUDA forward and backward: memcheck, racecheck and synccheck, on a handful of small calls. Needs a Hopper
# GPU, compute-sanitizer and a built package. One line for each tool; exit status 1 if one of them found anything.
#
#   tools/sanitize.sh [TOOL ...]      default: memcheck racecheck synccheck; SANITIZE_LIMIT: seconds for each (300)
#
# The inputs are made on the CPU and the results compared there, so no kernel runs but ours. racecheck does not see all
# that the copy engine does: tests/gpu/test_delays_sm90.py is the other half of that check.
set -u -o pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # memcheck sees the bounds of an allocation, not those of a tensor inside it

sanitizer="$(PATH="$PATH:/usr/local/cuda/bin" command -v compute-sanitizer)"
if [[ -z $sanitizer ]]; then
  echo "sanitize: compute-sanitizer not found, nothing was checked"
  exit 0
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

cat > "$work/calls.py" << 'PYTHON'
import itertools

import torch

from torch_flashsdpa._loader import binding

binding()
SHAPES = ((64, 65, 300, 0), (72, 200, 130, 0), (128, 300, 300, 0), (256, 130, 200, 0), (64, 130, 200, 1), (128, 65, 65, 1),
          (64, 3, 4000, 0), (128, 40, 3000, 0), (70, 3, 2000, 0), (70, 130, 200, 0))  # packed and split; words, not TMA


def place(shape, offset):  # elements past the start of an allocation that ends with the tensor
    return torch.cat((torch.zeros(offset), torch.randn(shape).flatten())).bfloat16().cuda()[offset:].view(shape)


for (dim, seq_q, seq_k, offset), is_causal in itertools.product(SHAPES, (False, True)):
    heads = (2, seq_q), (1, seq_k), (1, seq_k)
    inputs = [place((1, *sizes, dim), offset).requires_grad_() for sizes in heads]
    out, _ = torch.ops.flashsdpa.forward(*inputs, is_causal=is_causal, deterministic=is_causal)
    grad_out = place(out.shape, 0)
    grads = torch.autograd.grad(out, inputs, grad_out)
    wide = [t.detach().cpu().float().requires_grad_() for t in inputs]
    want = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=is_causal, enable_gqa=True)
    exact = [want, *torch.autograd.grad(want, wide, grad_out.cpu().float())]
    error = max((a.cpu().float() - b).abs().max().item() / b.abs().max().item() for a, b in zip((out, *grads), exact))
    assert error < 0.05, f"D{dim} {seq_q}x{seq_k} offset {offset} is_causal {is_causal}: error {error}"
print("calls done")
PYTHON

failed=0
(($#)) || set -- memcheck racecheck synccheck
for name in "$@"; do
  log="$work/$name.log" started=$SECONDS
  timeout -k 10 "${SANITIZE_LIMIT:-300}" "$sanitizer" --tool "$name" --report-api-errors no --print-limit 20 \
    --error-exitcode 9 python3 "$work/calls.py" > "$log" 2>&1
  status=$?
  summary="$(grep -aE '(ERROR|RACECHECK) SUMMARY' "$log" | tail -n 1 | sed 's/^=* *//')"
  if grep -aq "Device not supported" "$log"; then
    echo "sanitize: $name cannot run on this machine (device not supported), nothing was checked"
  elif ((status == 0)) && grep -aq "^calls done" "$log" && [[ $summary =~ ": 0 "(errors|hazards) ]]; then
    echo "sanitize: $name ok in $((SECONDS - started)) s ($summary)"
  else
    failed=1
    head -n 60 "$log"
    echo "sanitize: $name FAILED with status $status in $((SECONDS - started)) s (${summary:-no summary}), log above"
  fi
done
exit $failed
