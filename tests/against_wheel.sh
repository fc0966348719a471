#!/bin/sh
# Build the wheel, install it alone into a clean environment, and run the tests against it.
# usage: against_wheel.sh PYTHON DEV_PYTHON    (DEV_PYTHON has the package `build`)
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$2" -m build --quiet --wheel --outdir "$work/dist" .
"$1" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --upgrade "pip>=25.1"
"$work/venv/bin/pip" install --quiet --constraint constraints.txt "$work"/dist/*.whl --group pyproject.toml:test
# What the tests read beside the package; the package itself stays behind, so that only the wheel can be imported.
mkdir "$work/tree"
cp -r tests examples docs README.md pyproject.toml constraints*.txt "$work/tree"
# The first test run has installed a real S3 server; it need not be installed twice.
if [ -x .venv-swift/bin/swift-proxy-server ]; then export TIERSTATE_SWIFT_PYTHON="$PWD/.venv-swift/bin/python"; fi
cd "$work/tree"
HYPOTHESIS_PROFILE=again "$work/venv/bin/pytest" -q -m "not soak"
