#!/bin/sh
# Makes .venv-peers: the libraries the benchmarks compare with, in an environment of their own, beside kinfolk itself.
# torchvision comes without its dependencies, so that it can't replace torch; where its compiled operators don't fit the torch that is
# installed, benchmarks/torchvision_stub.py lets it be imported all the same. A peer that can't be had is named and left out: the
# benchmarks skip it. Run it again after deleting .venv-peers to start afresh.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
env=.venv-peers

[ -x "$env/bin/python" ] || "$python" -m venv "$env"
pip() { "$env/bin/python" -m pip --quiet --disable-pip-version-check install --constraint constraints.txt "$@"; }

pip --editable .
pip --no-deps torchvision==0.28.0 || echo "peers: torchvision could not be installed; lightly, timm and open_clip will be skipped" >&2
for peer in kornia pytorch-metric-learning lightly timm open_clip_torch webdataset; do
    pip "$peer" || echo "peers: $peer could not be installed and will be skipped" >&2
done
