#!/bin/sh
# Makes .venv-peers: kinfolk and the libraries that the benchmarks compare with.
# torchvision comes without its dependencies, so that it cannot replace torch; where its compiled
# operators do not fit the torch that is installed, benchmarks/torchvision_stub.py lets it be imported
# all the same. A library that cannot be installed is named and skipped by the benchmarks. To start
# afresh, delete .venv-peers and run this again.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
env=.venv-peers

[ -x "$env/bin/python" ] || "$python" -m venv "$env"
pip() {
    "$env/bin/python" -m pip --quiet --disable-pip-version-check install -c constraints.txt "$@"
}

pip --editable .
pip --no-deps torchvision==0.28.0 ||
    echo "peers: torchvision could not be installed; lightly, timm and open_clip are skipped" >&2
for peer in kornia pytorch-metric-learning lightly timm open_clip_torch webdataset; do
    pip "$peer" || echo "peers: $peer could not be installed and is skipped" >&2
done
