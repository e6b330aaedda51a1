#!/usr/bin/env bash
# Where there is an accelerator: that state on it is saved and restored to the bit, and what an asynchronous save of it
# costs the loop. Under three minutes. Needs a torch for the accelerator, which `make install` does not bring.
#
#     bash benchmarks/device.sh [PYTHON] [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
folder=${2:-$(mktemp -d)}
export PYTHONPATH="$PWD:$PWD/plugins:$PWD/drills"
device=$("$python" -c 'import torch; print(torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "")')
if [ -z "$device" ]; then
  echo "no accelerator here, or a torch that knows none" >&2
  exit 1
fi
"$python" -m pytest -q tests/manager/test_devices.py tests/state/test_fingerprint.py
"$python" -m benchmarks.run --device "$device" --rounds 5 --mb 1490 --dir "$folder" \
  --only hold_overlap,hold_block,hold_block_vs_memcpy,step_during_save,step_during_dcp_save
